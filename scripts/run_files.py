"""The files in a run's out_dir, for train.py's rank 0: where to go on, what fits no longer, what is to be deleted."""
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from data.tokenbins import FULL, write_file
from scripts.export import newest_checkpoint, read_checkpoint
from scripts.load_grads import get_checkpoint_metadata, why


def find_start(init_from, out_dir, overwrite, eval_only):
    """(checkpoint, state, leftovers): the path of out_dir's newest checkpoint, None if there is none or init_from asks
    for something else; what it holds, or the pretrained weights that init_from names, or {}; an earlier run's files,
    by name, that a new run has to delete.

    state is read_checkpoint's dict, of a sharded checkpoint without the tensors: every rank reads its part of those.
    Raises ValueError (one line) if a checkpoint is torn, there is none to resume, or a new run would come upon an
    earlier one's files, unless it only evaluates or may overwrite them; what it starts from it may not.
    """
    names = 'ckpt.pt', 'best.pt', 'ckpt_dcp', 'log.jsonl', 'grad_dotprods', 'gradient_dumper'
    leftovers = [name for name in names if Path(out_dir, name).exists()]
    checkpoint, state = newest_checkpoint(out_dir) if init_from in ('resume', 'auto') else None, {}
    if checkpoint is not None and os.path.isdir(checkpoint):
        try:
            state = json.loads(Path(checkpoint, 'state.json').read_text())
            get_checkpoint_metadata(checkpoint)
            state['model_args'], state['iter_num'], state['param_groups']
        except (OSError, ValueError, LookupError, TypeError):
            raise ValueError(f'{checkpoint} is torn: delete that folder, and the one before is taken') from None
    elif checkpoint is not None or init_from not in ('scratch', 'resume', 'auto'):
        state = read_checkpoint(checkpoint or init_from)
    elif init_from == 'resume':
        raise ValueError(f'no complete checkpoint in {out_dir}')
    source = Path(init_from).resolve() if state and checkpoint is None else Path()
    if overwrite and not eval_only and source.exists() and Path(out_dir).resolve() in (source, *source.parents):
        raise ValueError(f'it lies in {out_dir}, which --overwrite=True would empty: another --out_dir')
    if checkpoint is None and leftovers and not (overwrite or eval_only or init_from == 'auto'):
        raise ValueError(f'{out_dir} holds an earlier run ({", ".join(leftovers)}): another --out_dir, or go on '
                         'by --init_from=auto, or delete it by --overwrite=True')
    return checkpoint, state, leftovers if checkpoint is None else []


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
    lines = []
    for line in log.read_text(errors='replace').splitlines() if log.is_file() else []:
        try:
            lines += [line + '\n'] * (json.loads(line)['iter'] < step + ('val_loss' in line and not evaluates))
        except (ValueError, LookupError, TypeError):
            pass        # a kill may have cut the last one
    write_file(log, ''.join(lines).encode())
    for path in (out / 'grad_dotprods').glob('iter_*.safetensors'):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink()


def keep_newest(folder, keep):
    """Delete all complete step_N in ckpt_dcp but the newest `keep` and the best; 0 deletes none."""
    complete = [f.parent for f in folder.glob('step_*/.metadata') if re.fullmatch(r'step_\d+', f.parent.name)]
    complete.sort(key=lambda p: int(p.name[5:]))
    best = None
    for path in complete if keep else []:
        with suppress(OSError, ValueError):     # without state.json it is none to resume from
            best = path if json.loads((path / 'state.json').read_text()).get('best') else best
    for old in complete[:-keep] if keep else []:
        if old != best:
            (old / '.metadata').unlink()        # first: a half-deleted checkpoint must not count as one
            shutil.rmtree(old)


def excepthook(out_dir):
    """For sys.excepthook: what the system refuses, such as room on a disk, is one line: a traceback would not help."""
    def report(kind, error, trace):
        cause, path = why(error), getattr(error, 'filename', None)
        if 'unexpected pos' in cause:       # of the ranks' errors only the words of torch's zip writer get through
            cause = os.strerror(FULL[0]) + ', it seems'
        if cause.startswith(tuple(map(os.strerror, FULL))):
            path, cause = out_dir, f'{cause}: make room; --init_from=auto then goes on'
        elif not isinstance(error, OSError) or path is None:
            return sys.__excepthook__(kind, error, trace)
        print(f'train.py: {path}: {cause}', file=sys.stderr, flush=True)
    return report
