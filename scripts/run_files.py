"""The files in a run's out_dir, for train.py's rank 0: where to go on, what fits no longer, what is to be deleted."""
import json
import os
import re
import shutil
import sys
from pathlib import Path

from data.tokenbins import FULL, write_file
from scripts.export import newest_checkpoint, read_checkpoint
from scripts.load_grads import get_checkpoint_metadata, why


def find_start(init_from, out_dir, even_if_used):
    """(checkpoint, state, leftovers): the path of out_dir's newest checkpoint, None if there is none or init_from asks
    for something else; what it holds, or the pretrained weights that init_from names, or {}; names of a run's files.

    state is read_checkpoint's dict, of a sharded checkpoint without the tensors: every rank reads its part of those.
    Raises ValueError (one line) if a checkpoint is torn, there is none to resume, or a new run, unless even_if_used,
    would come upon an earlier one's files.
    """
    names = 'ckpt.pt', 'best.pt', 'ckpt_dcp', 'log.jsonl', 'grad_dotprods', 'gradient_dumper'
    leftovers = [name for name in names if Path(out_dir, name).exists()]
    checkpoint, state = newest_checkpoint(out_dir) if init_from in ('resume', 'auto') else None, {}
    if checkpoint is not None and os.path.isdir(checkpoint):
        try:
            state = json.loads(Path(checkpoint, 'state.json').read_text())
            get_checkpoint_metadata(checkpoint)
        except ValueError:
            raise ValueError(f'{checkpoint} is torn: delete that folder, and the one before is taken') from None
    elif checkpoint is not None or init_from not in ('scratch', 'resume', 'auto'):
        state = read_checkpoint(checkpoint or init_from)
    elif init_from == 'resume':
        raise ValueError(f'no complete checkpoint in {out_dir}')
    if checkpoint is None and leftovers and not (even_if_used or init_from == 'auto'):
        raise ValueError(f'{out_dir} holds an earlier run ({", ".join(leftovers)}): another --out_dir, or go on '
                         'by --init_from=auto, or delete it by --overwrite=True')
    return checkpoint, state, leftovers


def must_fit(source, state, config, names, meta):
    """Raises ValueError (one line) if a checkpoint or pretrained model, whose dict is `state`, has another value of one
    of these settings than config, or another tokenizer than today's training data, whose record is `meta`."""
    args, then = state['model_args'], (state.get('meta') or {}).get('tokenizer')
    wrong = [f'{k}={config[k]} (there {args[k]})' for k in sorted(names) if config[k] != args[k]]
    if wrong:
        raise ValueError(f'{source} has another {", ".join(wrong)}: leave that out, or start from another, '
                         'or from scratch in another out_dir')
    if then and meta.get('tokenizer', then) != then:
        raise ValueError(f'{source} has another tokenizer than dataset={config["dataset"]}: same ids, other text')


def changes(state, config, meta, shape_names):
    """What has changed since a checkpoint, whose dict is `state`, was written: a list of phrases."""
    changed = [f'{k} {v!r} -> {config[k]!r}' for k, v in (state.get('config') or {}).items() if k in config
               and config[k] != v and k not in ('init_from', 'overwrite', *shape_names)]
    return changed + ['the tokens of the dataset'] * ((state.get('meta') or meta).get('splits') != meta.get('splits'))


def forget_later(out, step, evaluates):
    """Drop what a killed run logged and scored after its last checkpoint, of `step`, since it will happen again; also
    that step's evaluation, if the run that goes on begins with it."""
    log = out / 'log.jsonl'
    lines = log.read_text().splitlines() if log.is_file() else []
    lines = [line + '\n' for line in lines if line.endswith('}')        # a kill may have cut the last one
             and json.loads(line)['iter'] < step + ('val_loss' in line and not evaluates)]
    write_file(log, ''.join(lines).encode())
    for path in (out / 'grad_dotprods').glob('iter_*.safetensors'):
        if int(path.stem[5:]) > step:
            path.unlink()


def keep_newest(folder, keep):
    """Delete all complete step_N in ckpt_dcp but the newest `keep` and the best; 0 deletes none."""
    complete = [f.parent for f in folder.glob('step_*/.metadata') if re.fullmatch(r'step_\d+', f.parent.name)]
    complete.sort(key=lambda p: int(p.name[5:]))
    best = [p for p in complete if json.loads((p / 'state.json').read_text()).get('best')] if keep else []
    for old in complete[:-keep] if keep else []:
        if old not in best[-1:]:
            (old / '.metadata').unlink()        # first: a half-deleted checkpoint must not count as one
            shutil.rmtree(old)


def excepthook(out_dir):
    """For sys.excepthook: a full disk is one line, for it is no fault that a traceback would help to find."""
    def report(kind, error, trace):
        cause = why(error)
        if 'unexpected pos' in cause:       # of the ranks' errors only the words of torch's zip writer get through
            cause = 'a file could not be written to its end'
        elif cause not in map(os.strerror, FULL):
            return sys.__excepthook__(kind, error, trace)
        print(f'train.py: {out_dir}: {cause}: make room; --init_from=auto then goes on', file=sys.stderr, flush=True)
    return report
