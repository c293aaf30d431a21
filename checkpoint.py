"""
A run's files: where it starts, loading and saving under every mode, what is forgotten; checkpoints of every form, read
in a plain process; GPT-2 folders in Hugging Face form. Nothing of a file is ever executed.

ckpt.pt, best.pt     the last and the best checkpoint of the format 'full', one file each
ckpt_dcp/step_N/     a 'sharded' checkpoint: each rank's part, and state.json; named step_N.tmp until it is complete
A checkpoint is a dict: model (weights under the names of GPT.state_dict()), optimizer (state by parameter name),
model_args (for GPTConfig), iter_num, best_val_loss, config, meta (the record of the data), scaler, wandb_id.
"""
import difflib
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
import warnings
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:     # on Windows
    fcntl = None

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

from data.bins import FULL, GPT2_VOCAB, write_file
from model import GPT, GPTConfig

torch.serialization.set_crc32_options(False)    # checksums take half of a save's time, and torch.load ignores them

CHECKPOINTS = ('ckpt.pt', 'best.pt', 'ckpt_dcp')
OF_A_RUN = (*CHECKPOINTS, 'log.jsonl', 'grad_dotprods', 'gradient_dumper')


# ---- ranks -----------------------------------------------------------------------------------------------------------
def is_rank0():
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank0(thing):
    """Rank 0's object, on every rank."""
    box = [thing]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def barrier():
    """No rank goes on before all are here."""
    if dist.is_initialized():
        dist.barrier()


def on_rank0(function, *args):
    """Call a function on rank 0 alone. A ValueError or OSError in it becomes a ValueError (one line) on every rank."""
    problem = None
    if is_rank0():
        try:
            function(*args)
        except (ValueError, OSError) as error:
            problem = str(error)
    problem = from_rank0(problem)
    if problem is not None:
        raise ValueError(problem)


@contextmanager
def one_process_too():
    """Around torch.distributed.checkpoint's calls, which otherwise warn where there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        yield


# ---- where a run starts ----------------------------------------------------------------------------------------------
def find_start(config, given, meta, shape_names):
    """
    Where a run starts; all ranks participate, rank 0 alone looks at the disk.

    config: train.py's settings; given: the names of those that the user has set; meta: the record of the training data;
    shape_names: the settings that a checkpoint prescribes. Returns a dict: what a checkpoint holds, and
    resumed_from    the path of the checkpoint in out_dir that the run goes on from, or None
    sharded         whether each rank is to read its part of that; otherwise model and optimizer are whole, on rank 0
    leftovers       names of an earlier run's files that a new run deletes
    passed_over     {path: what is wrong with it} of newer checkpoints, which do not load
    Raises ValueError (one line) if there is none to resume, it does not fit the settings, or a new run would come upon
    an earlier one's files.
    """
    found, whole = [], {}

    def choose():
        start = choose_start(config, given, meta, shape_names)
        whole.update(model=start.pop('model', {}), optimizer=start.pop('optimizer', {}))
        found.append(start)

    on_rank0(choose)
    start = from_rank0(found[0] if found else None)
    start['has_optimizer'] = from_rank0(bool(whole.get('optimizer')))
    return {**start, **whole}


def choose_start(config, given, meta, shape_names):
    """find_start's work on rank 0."""
    init_from, out_dir = config['init_from'], config['out_dir']
    shape_given = given.intersection(shape_names)
    leftovers = [name for name in OF_A_RUN if Path(out_dir, name).exists()]
    start = {'iter_num': 0, 'samples_seen': 0, 'best_val_loss': math.inf, 'scaler': {}, 'wandb_id': None}
    facts = {'resumed_from': None, 'sharded': False, 'leftovers': [], 'passed_over': {}}
    if init_from in ('resume', 'auto'):
        facts['resumed_from'], start_there, facts['passed_over'] = newest_that_loads(out_dir)
    if facts['resumed_from'] is not None:
        start.update(start_there)
        if 'samples_seen' not in start_there:       # an older checkpoint, or nanoGPT's: all its steps were alike
            step = {**config, **(start['config'] or {})}
            start['samples_seen'] = start['iter_num'] * step['batch_size'] * step['gradient_accumulation_steps']
        facts['sharded'] = os.path.isdir(facts['resumed_from'])
        must_fit(facts['resumed_from'], start, config, shape_given, meta)
        for problem in facts['passed_over'].values():
            print(f'passed over, since it does not load: {problem}', flush=True)
        told = [f'resuming from {facts["resumed_from"]} at step {start["iter_num"]}']
        print('; '.join(told + changes(start, config, meta, shape_names)), flush=True)
        return {**start, **facts, 'model_args': without_dropout(start['model_args'])}
    if init_from == 'resume':
        raise ValueError(f'no complete checkpoint in {out_dir}')
    facts['leftovers'] = leftovers
    if leftovers and init_from != 'auto' and not config['overwrite'] and not config['eval_only']:
        raise ValueError(f'{out_dir} holds an earlier run ({", ".join(leftovers)}): another --out_dir, or go on '
                         'by --init_from=auto, or delete it by --overwrite=True')
    if init_from in ('scratch', 'auto'):
        start['model_args'], start['model'] = new_model(config, meta, shape_names)
    else:
        start['model_args'], start['model'] = pretrained(init_from, config, shape_given, meta)
    return {**start, **facts}


def new_model(config, meta, shape_names):
    """(model_args, weights) of a model that knows nothing, for the data whose record is meta."""
    vocab_size = meta.get('vocab_size', GPT2_VOCAB)
    if vocab_size >= 1024:
        vocab_size = math.ceil(vocab_size / 64) * 64        # GPUs prefer a multiple of 64
    on_gpu = config['device'].startswith('cuda')
    gelu = 'tanh' if on_gpu else 'none'     # GPT-2's own; the exact form is a tenth quicker on a CPU
    model_args = {**{name: config[name] for name in shape_names}, 'vocab_size': vocab_size, 'gelu': gelu}
    torch.manual_seed(config['seed'])
    return model_args, GPT(GPTConfig(**model_args)).state_dict()


def pretrained(source, config, shape_given, meta):
    """(model_args, weights) of OpenAI's GPT-2 by name, of a Hugging Face folder or of a checkpoint."""
    ckpt = read_checkpoint(source)
    must_fit(source, ckpt, config, shape_given - {'block_size'}, meta)
    place, out_dir = Path(source).resolve(), Path(config['out_dir']).resolve()
    if config['overwrite'] and not config['eval_only'] and place.exists() and out_dir in (place, *place.parents):
        raise ValueError(f'it lies in {config["out_dir"]}, which --overwrite=True would empty: another --out_dir')
    model_args, weights, block_size = without_dropout(ckpt['model_args']), ckpt['model'], config['block_size']
    positions = model_args['block_size']
    if block_size > positions:
        raise ValueError(f'it has {positions} positions, so --block_size={positions} or less')
    model_args['block_size'] = block_size
    weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size]
    return model_args, weights


def without_dropout(model_args):
    """A checkpoint's dropout is its run's; every run sets its own."""
    return {name: value for name, value in model_args.items() if name != 'dropout'}


def must_fit(source, ckpt, config, names, meta):
    """Raises ValueError (one line) if a checkpoint or pretrained model, whose dict is ckpt, has another value of one of
    these settings than config, or another tokenizer than today's training data, whose record is meta."""
    args = ckpt['model_args']
    wrong = [f'{name}={config[name]} (there {args[name]})' for name in sorted(names) if config[name] != args[name]]
    if wrong:
        raise ValueError(f'{source} has another {", ".join(wrong)}: leave that out, or start from another, '
                         'or from scratch in another out_dir')
    if config['new_tokenizer']:
        return
    then, dataset = ckpt.get('meta') or {}, config['dataset']
    allow = 'to train these weights on other tokens all the same, --new_tokenizer=True'
    if then.get('tokenizer') and meta.get('tokenizer', then['tokenizer']) != then['tokenizer']:
        raise ValueError(f'{source} has another tokenizer than dataset={dataset}: same ids, other text; {allow}')
    known, ids = then.get('vocab_size', args['vocab_size']), meta.get('vocab_size', GPT2_VOCAB)
    padded = math.ceil(ids / 64) * 64       # as new_model and nanoGPT round up
    if known not in (ids, padded):
        raise ValueError(f'{source} knows {known:,} token ids, dataset={dataset} has {ids:,}: other tokens; {allow}')


def changes(ckpt, config, meta, shape_names):
    """What has changed since a checkpoint, whose dict is ckpt, was written: a list of phrases."""
    then, told = ckpt.get('config') or {}, []
    for name, value in then.items():
        if name in config and config[name] != value and name not in ('init_from', 'overwrite', *shape_names):
            told.append(f'{name} {value!r} -> {config[name]!r}')
    record = ckpt.get('meta') or {}
    known = [key for key in ('splits', 'fingerprint') if key in record]     # older checkpoints lack the second
    if any(record[key] != meta.get(key) for key in known):
        told.append('the tokens of the dataset')
    return told


def load_start(start, model, optimizer, scaler):
    """Fill the model, and where there is a state the optimizer and the scaler, with what find_start has found.
    ValueError (one line) on every rank if a sharded checkpoint is torn. All ranks participate."""
    hyperparameters = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=False)
    if start['sharded']:
        load_sharded(start['resumed_from'], model, optimizer)
    else:
        set_model_state_dict(model, start.pop('model', {}), options=whole)
    if start['has_optimizer']:
        set_optimizer_state_dict(model, optimizer, start.pop('optimizer', {}), options=whole)
    for group, values in zip(optimizer.param_groups, hyperparameters):
        group.update(values)                # weight decay and betas of today, not the checkpoint's
    if start['scaler']:
        scaler.load_state_dict(start['scaler'])


def load_sharded(folder, model, optimizer):
    """Each rank its part of a ckpt_dcp/step_N."""
    tensors = state_of(model, optimizer, whole=False)
    groups = tensors['optimizer'].pop('param_groups')
    try:
        with one_process_too():
            dcp.load(tensors, storage_reader=SafeReader(folder), no_dist=not dist.is_initialized())
    except (Exception, dcp.CheckpointException) as error:
        raise ValueError(f'{folder} does not load: {why(error)}') from None
    set_model_state_dict(model, tensors['model'], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(model, optimizer, {**tensors['optimizer'], 'param_groups': groups})


# ---- what a run writes -----------------------------------------------------------------------------------------------
def check_out_dir(out_dir):
    """Make the folder, and try to write in it; all ranks participate. ValueError (one line) if that fails."""
    def attempt():
        try:
            os.makedirs(out_dir, exist_ok=True)
            tempfile.TemporaryFile(dir=out_dir).close()     # a file of a fixed name may be another's
            lock(out_dir)
        except OSError as error:
            raise ValueError(f'out_dir={out_dir}: {error.strerror}: name a folder that can be written') from None
    on_rank0(attempt)


def lock(out_dir):
    """One run at a time writes into out_dir: the lock ends with its process, however that ends. Raises ValueError (one
    line) with the host and process that have it. Where a file system has no locks there is none."""
    if fcntl is None:
        return
    file = open(Path(out_dir, 'lock'), 'a+')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f'out_dir={out_dir}: another run writes there, {file.read().strip()}: end it, or name another '
                         '--out_dir') from None
    except OSError:
        return
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    locks.append(file)      # open until the end


def begin_out_dir(out_dir, start, config, evaluates):
    """Rank 0's first writes: a new run deletes an earlier one's files, one that goes on what came after its checkpoint;
    and config.json. evaluates: whether the run begins with an evaluation."""
    if start['leftovers']:      # overwrite=True, or a restart before the first checkpoint
        print(f'starts anew, and deletes {", ".join(start["leftovers"])} in {out_dir}', flush=True)
    for name in start['leftovers']:
        remove(Path(out_dir, name))
    for path in start['passed_over']:       # out of the way of what comes, but not lost
        remove(Path(f'{path}.torn'))
        os.replace(path, f'{path}.torn')
    if start['resumed_from'] is not None:
        for path in Path(out_dir, 'ckpt_dcp').glob('step_*'):
            if path.suffix == '.tmp' or (path.suffix == '.torn' and not (path / '.metadata').is_file()):
                remove(path)                # a save that died left it
    write_file(Path(out_dir, 'config.json'), json.dumps(config, indent=1).encode())
    if start['resumed_from'] is not None:
        forget_later(Path(out_dir), start['iter_num'], evaluates)


def remove(path):
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def forget_later(out, step, evaluates):
    """Drop what a killed run logged and scored after its last checkpoint, of `step`, since it will happen again; also
    that step's evaluation, if the run that goes on begins with it."""
    log, kept = out / 'log.jsonl', []
    for line in log.read_text(errors='replace').splitlines() if log.is_file() else []:
        try:
            record = json.loads(line)
            earlier_evaluation = 'val_loss' in record and record['iter'] == step and not evaluates
            if record['iter'] < step or earlier_evaluation:
                kept.append(line + '\n')
        except (ValueError, LookupError, TypeError):
            pass        # a kill may have cut the last one
    write_file(log, ''.join(kept).encode())
    for path in (out / 'grad_dotprods').glob('iter_*.safetensors'):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink()


def state_of(model, optimizer, whole):
    """{'model': weights, 'optimizer': state by parameter name}, without ghost_*, tied weights once. whole: gathered
    tensor by tensor into rank 0's host memory, {} elsewhere; otherwise each rank its part. All ranks participate."""
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    weights = get_model_state_dict(model, options=options)
    return {'model': {name: weight for name, weight in weights.items() if name in names},
            'optimizer': get_optimizer_state_dict(model, optimizer, options=options)}


locks = []
saving = {}     # a sharded checkpoint that is being written: its folder, and in the background its future
saver_group = []    # the background's own process group: training's would be in its way


def save_checkpoint(out_dir, model, optimizer, progress, last, best, sharded, in_background):
    """
    ckpt.pt (last) and/or best.pt (best), or ckpt_dcp/step_N. progress: all that a checkpoint holds beside tensors. A
    sharded one is complete after finish_saving. All ranks participate.
    """
    tensors = state_of(model, optimizer, whole=not sharded)
    if sharded:
        save_sharded(Path(out_dir, 'ckpt_dcp', f'step_{progress["iter_num"]}'), tensors, {**progress, 'best': best},
                     in_background, on_disk=not last)
    elif is_rank0():
        tensors['model']['lm_head.weight'] = tensors['model']['transformer.wte.weight']     # one tensor, stored once
        names = []
        if best:        # first: a kill in between leaves it the newest, and a run that goes on from it writes ckpt.pt
            names.append('best.pt')
        if last:
            names.append('ckpt.pt')
        write_file(Path(out_dir, names[0]), lambda file: torch.save({**tensors, **progress}, file))
        if len(names) == 2:
            with open(Path(out_dir, 'best.pt'), 'rb') as written:
                write_file(Path(out_dir, 'ckpt.pt'), lambda file: shutil.copyfileobj(written, file))


def save_sharded(folder, tensors, rest, in_background, on_disk):
    """on_disk: the run has just gone on from this very checkpoint, and it turns out to be the best."""
    rest['param_groups'] = tensors['optimizer'].pop('param_groups')
    if on_disk and from_rank0((folder / '.metadata').is_file()):
        if is_rank0():
            write_file(folder / 'state.json', json.dumps(rest).encode())
        return
    temporary = folder.with_name(folder.name + '.tmp')
    if is_rank0():
        remove(temporary)       # what a save that died left
        temporary.mkdir(parents=True)
        write_file(temporary / 'state.json', json.dumps(rest).encode())
    barrier()
    saving['folder'] = folder
    if in_background:
        if dist.is_initialized() and not saver_group:
            saver_group.append(dist.new_group(backend='gloo'))
        with one_process_too():
            saving['future'] = dcp.async_save(tensors, checkpoint_id=temporary, no_dist=not dist.is_initialized(),
                                              process_group=saver_group[0] if saver_group else None)
    else:
        with one_process_too():
            dcp.save(tensors, checkpoint_id=temporary, no_dist=not dist.is_initialized())


def finish_saving(keep, wait=True):
    """Give a sharded checkpoint that has been written its name, and delete those past the newest `keep` and the best; 0
    deletes none. wait: until the background has written it; otherwise one that it has not is left for a later call."""
    if not saving or not (wait or saving['future'].done()):
        return
    if 'future' in saving:
        saving['future'].result()       # an error of the background thread shows here
    folder = saving['folder']
    saving.clear()
    if is_rank0():
        remove(folder)                  # of a life before the one that was gone on from
        os.replace(folder.with_name(folder.name + '.tmp'), folder)
        keep_newest(folder.parent, keep)


def keep_newest(folder, keep):
    """Delete all complete step_N in ckpt_dcp but the newest `keep` and the best; 0 deletes none."""
    complete = [path.parent for path in folder.glob('step_*/.metadata') if re.fullmatch(r'step_\d+', path.parent.name)]
    complete.sort(key=lambda path: int(path.name[5:]))
    best = None
    for path in complete:
        with suppress(OSError, ValueError):     # without state.json it is none to resume from
            if json.loads((path / 'state.json').read_text()).get('best'):
                best = path
    for old in complete[:-keep] if keep else []:
        try:
            if old != best:
                (old / '.metadata').unlink()    # first: a half-deleted checkpoint must not count as one
                remove(old)
        except OSError as error:
            print(f'warning: {old} is not needed any more, and can not be deleted: {error.strerror}', flush=True)


def save_gradients(folder, gradients, first_n):
    """
    A step's gradients {name: tensor} -> folder/sharded, by all ranks at once, or with first_n the first rows of each,
    folder/sampled/NAME_first<n>.safetensors, by rank 0. The folder appears when it is complete; False: it was there
    already. All ranks participate.
    """
    if from_rank0(folder.exists()):
        return False
    temporary = folder.with_name(folder.name + '.tmp')
    inner = temporary / ('sharded' if first_n is None else 'sampled')
    if is_rank0():
        remove(temporary)       # what a kill left
        inner.mkdir(parents=True)
    barrier()
    if first_n is None:
        with one_process_too():
            dcp.save(gradients, checkpoint_id=inner, no_dist=not dist.is_initialized())
    else:
        for name, gradient in gradients.items():    # one full gradient at a time
            if hasattr(gradient, 'full_tensor'):    # FSDP's
                gradient = gradient.full_tensor()
            n = min(first_n, len(gradient))
            if is_rank0():
                content = to_safetensors({'gradient': gradient[:n].contiguous().cpu()})
                write_file(inner / f'{name}_first{n}.safetensors', content)
    barrier()
    if is_rank0():
        os.replace(temporary, folder)
    return True


def gather_samples(columns):
    """columns: of each micro-batch of this rank a tensor (rows, batch_size). Returns those of all ranks on the CPU,
    (rows, samples of the global batch), in the order of the samples; all ranks participate."""
    mine = torch.stack(columns)                     # (micro_batches, rows, batch_size)
    ranks = [mine]
    if dist.is_initialized():
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
    table = torch.stack(ranks, 2)                   # (micro_batches, rows, ranks, batch_size)
    table = table.movedim(0, 1)                     # (rows, micro_batches, ranks, batch_size)
    return table.flatten(1).cpu()                   # (rows, samples of the global batch)


def write_valset(out_dir, offsets, X, Y):
    """Ghost's fixed validation batch, X, Y (samples, block_size) at offsets -> grad_dotprods/valset.safetensors."""
    tokens = torch.cat((X, Y[:, -1:]), 1).cpu()     # (samples, block_size + 1)
    content = to_safetensors({'offset': torch.from_numpy(offsets), 'tokens': tokens})
    Path(out_dir, 'grad_dotprods').mkdir(exist_ok=True)
    write_file(Path(out_dir, 'grad_dotprods', 'valset.safetensors'), content)


def write_scored(out_dir, rows, names, train_bin, steps_done):
    """Scored steps, a dict of numbers and arrays each, -> grad_dotprods/iter_NNNNNN.safetensors, by rank 0; names: of
    the parameters; train_bin: the fingerprint of the tokens that the offsets are of. Empties rows."""
    if rows and is_rank0():
        columns = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
        folder = Path(out_dir, 'grad_dotprods')
        folder.mkdir(exist_ok=True)
        content = to_safetensors(columns, {'parameters': json.dumps(names), 'train_bin': train_bin})
        write_file(folder / f'iter_{steps_done:06d}.safetensors', content)
    rows.clear()


def excepthook(out_dir):
    """For sys.excepthook: what the system refuses, such as room on a disk or memory, is one line, told by the rank that
    it happened to: a traceback would not help."""
    def report(kind, error, trace):
        cause, path = why(error), getattr(error, 'filename', None)
        words = str(error).lower()
        if 'unexpected pos' in cause:       # of the ranks' errors only the words of torch's zip writer get through
            cause = os.strerror(FULL[0]) + ', it seems'
        if cause.startswith(tuple(map(os.strerror, FULL))):
            line = f'{path or out_dir}: {cause}: make room; --init_from=auto then goes on'
        elif isinstance(error, OSError) and path is not None:
            line = f'{path}: {cause}'
        elif isinstance(error, (MemoryError, torch.OutOfMemoryError)) or 'allocate memory' in words:
            line = f'out of memory ({cause.splitlines()[0]}): a smaller --batch_size, --block_size or model'
        elif isinstance(error, RuntimeError) and ('connection closed' in words or 'connection reset' in words):
            line = 'another rank has ended; its own line says why'      # which may come later: let it out first
            time.sleep(2)
            if not is_rank0():
                return
        else:
            return sys.__excepthook__(kind, error, trace)
        print(f'train.py: {line}', file=sys.stderr, flush=True)
    return report


def why(error):
    """What an error says without the path: the system's words, also where torch has put an error of its own around."""
    failures = getattr(error, 'failures', None)     # torch.distributed.checkpoint's, by rank
    if failures:
        error = next(iter(failures.values()))[0]
    inner = error
    while inner and not isinstance(inner, OSError):
        inner = inner.__context__
    return getattr(inner, 'strerror', None) or str(error)


# ---- checkpoints of any form, read in a plain process ----------------------------------------------------------------
def newest_that_loads(out_dir):
    """
    (path, dict, passed_over): out_dir's newest checkpoint that loads, of ckpt.pt, best.pt and ckpt_dcp/step_N; what it
    holds, of a sharded one without the tensors; {path: what is wrong with it} of newer ones that do not load.
    (None, {}, {}) if there is none. ValueError (one line) if none of several loads, or one may not be read: it may be
    sound.
    """
    paths = [path for path in (Path(out_dir, 'ckpt.pt'), Path(out_dir, 'best.pt')) if path.is_file()]
    steps = [path for path in Path(out_dir, 'ckpt_dcp').glob('step_*') if re.fullmatch(r'step_\d+', path.name)]
    steps.sort(key=lambda path: int(path.name[5:]), reverse=True)
    found, torn = [], {}
    for path in paths + steps:
        try:
            ckpt = read_progress(path) if path in steps else read_checkpoint(path)
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise
            torn[path] = str(error)
        else:
            found.append((ckpt['iter_num'], path, ckpt))
            if path in steps:
                break       # the older ones need no look
    if not found and torn:
        raise ValueError(f'no checkpoint in {out_dir} loads: {"; ".join(torn.values())}; '
                         '--init_from=scratch --overwrite=True starts anew and deletes them')
    if not found:
        return None, {}, {}
    _, path, ckpt = max(found, key=lambda entry: entry[0])      # of one step the first, which is ckpt.pt
    return str(path), ckpt, {str(path): problem for path, problem in torn.items()}


def newest_checkpoint(out_dir):
    """The path of the newest checkpoint in an out_dir that loads, or None; stderr says which it passes over."""
    path, _, passed_over = newest_that_loads(out_dir)
    for problem in passed_over.values():
        print(f'passed over, since it does not load: {problem}', file=sys.stderr, flush=True)
    return path


def read_checkpoint(src):
    """The checkpoint at `src`, of any form, as the dict of a ckpt.pt; tensors on CPU, a file's mapped, not read.

    Weights have the names and shapes of GPT.state_dict(), checked; optimizer state is by parameter name.
    src may be the name of OpenAI's weights, such as 'gpt2-xl', too.
    Raises ValueError (one line) if there is no complete checkpoint of ours, nanoGPT's or GPT-2 in Hugging Face form.
    """
    if src in OPENAI or is_hf_folder(src):
        model_args, weights = load_hf(src)
        ckpt = {'model': weights, 'optimizer': {}, 'model_args': model_args, 'meta': hf_record(src).get('meta')}
    elif os.path.isfile(os.path.join(src, '.metadata')):
        ckpt = read_sharded(src)
    elif os.path.isdir(src):
        newest = newest_checkpoint(src)
        if newest is None:
            raise ValueError(f'{src}: no ckpt.pt, no complete ckpt_dcp/step_N and no model.safetensors in it')
        return read_checkpoint(newest)
    else:
        ckpt = read_full(src)
    try:
        ckpt.update(tidy(src, ckpt['model_args'], ckpt['model'], ckpt['optimizer']))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{src}: torn, or not a checkpoint ({type(error).__name__}: {error})') from None
    defaults = {'iter_num': 0, 'best_val_loss': math.inf, 'config': {}, 'meta': None, 'scaler': {}, 'wandb_id': None}
    ckpt = {**defaults, **ckpt}
    ckpt['best_val_loss'] = float(ckpt['best_val_loss'])
    return ckpt


def read_full(path):
    """The dict of a .pt file, as it is. ValueError if it is missing, torn, or no checkpoint."""
    try:
        with open(path, 'rb') as file:      # torch.save's are zip files, whose directory comes last
            is_whole = zipfile.is_zipfile(file)
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    if not is_whole:
        raise ValueError(f'{path}: torn, or not a checkpoint')
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Exception as error:      # torch.load fails in many ways; a sentence of it says what is wrong
        text = str(error).partition('WeightsUnpickler error: ')[2] or str(error)    # before that comes advice
        what = text.partition('\n')[0].partition('. ')[0]
        raise ValueError(f'{path}: torn, or not a checkpoint ({what})') from None
    kinds = {'model': dict, 'optimizer': dict, 'model_args': dict, 'iter_num': int}
    if not isinstance(ckpt, dict):
        raise ValueError(f'{path}: not a checkpoint of train.py but a {type(ckpt).__name__}')
    missing = [name for name, kind in kinds.items() if not isinstance(ckpt.get(name), kind)]
    if missing:
        raise ValueError(f'{path}: not a checkpoint of train.py, it has no {", ".join(missing)}')
    return ckpt


def read_progress(folder):
    """The dict of a ckpt_dcp/step_N without its tensors: state.json. ValueError (one line) if a file of it is missing
    or too short."""
    try:
        ckpt = json.loads(Path(folder, 'state.json').read_text(encoding='utf-8'))
        for group in ckpt['param_groups']:
            group['betas'] = tuple(group['betas'])      # JSON has no tuple
        ckpt['model_args'], ckpt['iter_num']
    except (OSError, ValueError, LookupError, TypeError) as error:
        cause = error if isinstance(error, PermissionError) else None
        raise ValueError(f'{folder}/state.json: missing or torn ({why(error)})') from cause
    check_sizes(folder)
    return ckpt


def check_sizes(folder):
    """ValueError (one line) if a file that a torch.distributed.checkpoint folder speaks of is missing or too short."""
    ends = {}
    for part in get_checkpoint_metadata(folder).storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        path = Path(folder, name)
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            raise ValueError(f'{path}: missing or torn, it has {size} bytes of at least {end}')


def read_sharded(folder):
    """The dict of a ckpt_dcp/step_N folder: its tensors, and from state.json the rest."""
    ckpt = read_progress(folder)
    ckpt.update(model={}, optimizer={'state': {}, 'param_groups': ckpt.pop('param_groups')})
    for key, tensor in load_keys(folder):
        part, _, name = key.partition('.')
        if part == 'model':
            ckpt['model'][name] = tensor
        else:       # optimizer.state.<parameter>.<exp_avg ...>
            name, _, entry = name.removeprefix('state.').rpartition('.')
            ckpt['optimizer']['state'].setdefault(name, {})[entry] = tensor
    return ckpt


def tidy(src, model_args, weights, optimizer):
    """{'model', 'optimizer', 'model_args'} in our form: nanoGPT's prefix, masks and parameter numbers translated."""
    model_args = {'gelu': 'none', 'bias': True, 'dropout': 0.0, **model_args}  # nanoGPT's GELU is the exact one
    weights = {k.removeprefix('_orig_mod.'): v for k, v in weights.items() if not k.endswith('.attn.bias')}
    model_args = {k: v for k, v in model_args.items() if k in GPTConfig.__dataclass_fields__}
    with torch.device('meta'):
        expected = {name: tensor.shape for name, tensor in GPT(GPTConfig(**model_args)).state_dict().items()}
    head = weights.setdefault('lm_head.weight', weights.get('transformer.wte.weight'))
    wrong = [k for k in expected.keys() | weights.keys() if getattr(weights.get(k), 'shape', None) != expected.get(k)]
    if wrong:
        raise ValueError(f'{src}: missing, unknown or of another shape: {", ".join(sorted(wrong)[:3])}')
    if not torch.equal(head, weights['transformer.wte.weight']):
        raise ValueError(f'{src}: lm_head.weight differs from transformer.wte.weight; the two are one tensor in GPT-2')
    weights = {name: weights[name] for name in expected}
    weights['lm_head.weight'] = weights['transformer.wte.weight']  # one storage, so it is saved once
    state = optimizer.get('state', {})
    if 0 in state:  # numbers count the parameters in the order of AdamW's groups: matrices, then vectors
        order = [name for name in expected if name != 'lm_head.weight']
        order.sort(key=lambda name: len(expected[name]) < 2)  # a stable sort
        if len(state) != len(order):
            raise ValueError(f'{src}: optimizer state of {len(state)} parameters, the model has {len(order)}')
        optimizer = {'state': {order[i]: entry for i, entry in state.items()}, 'param_groups': [
            {**group, 'params': [order[i] for i in group['params']]} for group in optimizer['param_groups']]}
    for name, entry in optimizer.get('state', {}).items():
        if name not in expected or entry['exp_avg'].shape != expected[name]:
            raise ValueError(f'{src}: optimizer state of {name} does not fit the parameter')
    without = [name for name in expected if name not in optimizer.get('state', {}) and name != 'lm_head.weight']
    if optimizer.get('state') and without:
        raise ValueError(f'{src}: optimizer state of all parameters but {without[0]}')
    return {'model': weights, 'optimizer': optimizer, 'model_args': model_args}


# ---- torch.distributed.checkpoint folders, and sampled dumps ---------------------------------------------------------
SAMPLED = re.compile(r'(.+)_first(\d+)\.safetensors')  # <param>_first<n>.safetensors: rows 0..n-1 of its gradient
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
# all that torch.distributed.checkpoint writes into .metadata; OLMo-core's own writer has a name of its own for one
METADATA = {('torch.distributed.checkpoint.metadata', name): getattr(metadata, name) for name in (
    'BytesStorageMetadata', 'ChunkStorageMetadata', 'Metadata', 'MetadataIndex', 'StorageMeta', 'TensorProperties',
    'TensorStorageMetadata', '_MEM_FORMAT_ENCODING')}
METADATA.update({(module, '_StorageInfo'): filesystem._StorageInfo for module in (
    'torch.distributed.checkpoint.filesystem', 'olmo_core.distributed.checkpoint.filesystem')})
METADATA.update({(module, name): pathlib.PurePath for module in ('pathlib', 'pathlib._local') for name in (
    'Path', 'PosixPath', 'WindowsPath', 'PurePath', 'PurePosixPath', 'PureWindowsPath')})   # where it was once saved
METADATA['torch', 'Size'] = torch.Size
METADATA['torch.serialization', '_get_layout'] = torch.serialization._get_layout


class MetadataUnpickler(pickle.Unpickler):
    """Builds only these classes, and torch's dtypes, so that a file cannot run code."""

    def find_class(self, module, name):
        if (module, name) in METADATA:
            return METADATA[module, name]
        dtype = getattr(torch, name, None) if module == 'torch' and '.' not in name else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f'{module}.{name} does not belong there')


class SafeReader(dcp.FileSystemReader):
    """torch's own reader, which is handed the metadata that MetadataUnpickler has read, and of that the tensors alone:
    torch reads those by weights_only=True, other entries not."""

    def __init__(self, folder):
        super().__init__(folder)
        self.checked = get_checkpoint_metadata(folder)

    def read_metadata(self, *args, **kwargs):
        return self.checked


def find_dump(path):
    """The folder of a dump's files: `path` itself, or `sharded` or `sampled` in it. ValueError if there is none."""
    for folder in (path, os.path.join(path, 'sharded'), os.path.join(path, 'sampled')):
        if os.path.isdir(folder):
            names = os.listdir(folder)
            if '.metadata' in names or any(SAMPLED.fullmatch(name) for name in names):
                return folder
            if any(name.endswith('.distcp') for name in names):
                raise ValueError(f'{folder}: has no .metadata: writing it was not finished, or the file was lost')
    raise ValueError(f'{path}: no gradient dump (neither .metadata nor *_first<n>.safetensors); steps are in '
                     'out_dir/gradient_dumper/stepN')


def get_checkpoint_metadata(dir):
    """The torch.distributed.checkpoint Metadata of a dump or checkpoint, of its tensors alone; none of them is read.

    `.state_dict_metadata[name]` has `.size` and `.properties.dtype`; for a sampled dump those of the rows it holds.
    `dir`: stepN, or its sharded or sampled folder. Raises ValueError (one line) where .metadata is missing or torn, or
    holds what torch does not write there.
    """
    folder = find_dump(dir)
    if not os.path.exists(os.path.join(folder, '.metadata')):
        return sampled_metadata(folder)
    path = os.path.join(folder, '.metadata')
    try:
        with open(path, 'rb') as file:
            found = MetadataUnpickler(file).load()
        if type(found) is not metadata.Metadata:
            raise ValueError(f'it holds a {type(found).__name__}')
        for part in found.storage_data.values():
            if type(part) is not filesystem._StorageInfo or os.path.basename(part.relative_path) != part.relative_path:
                raise ValueError(f'it names a file elsewhere, {part!r:.80}')
            part.transform_descriptors = None       # older files lack it
        tensors = {name: entry for name, entry in found.state_dict_metadata.items()
                   if type(entry) is metadata.TensorStorageMetadata}
    except PermissionError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    except Exception as error:      # a torn pickle fails in many ways
        raise ValueError(f'{path}: torn or not a checkpoint ({error})') from None
    return metadata.Metadata(tensors, storage_data=found.storage_data, storage_meta=metadata.StorageMeta())


def sampled_metadata(folder):
    """get_checkpoint_metadata of a folder of sampled gradients; storage_data: {name: its file}."""
    tensors, files = {}, {}
    for file_name in sorted(os.listdir(folder)):
        match = SAMPLED.fullmatch(file_name)
        if match:
            with open_sampled(os.path.join(folder, file_name)) as file:
                part = file.get_slice('gradient')
                size, dtype = torch.Size(part.get_shape()), DTYPES.get(part.get_dtype())
            chunk = metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            tensors[match[1]] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), size, [chunk])
            files[match[1]] = file_name
    return metadata.Metadata(tensors, storage_data=files)


def find_keys(dir, names=None):
    """(folder, {name: its TensorStorageMetadata} for each of `names`, None: all) of a dump; reads no tensor.

    Raises ValueError (one line) for an unknown name.
    """
    folder, known = find_dump(dir), get_checkpoint_metadata(dir).state_dict_metadata
    names = list(known) if names is None else list(names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ValueError(f'{folder}: no tensor {name!r}; nearest name: {"".join(near)}')
    return folder, {name: known[name] for name in names}


def load_keys(dir, names=None):
    """Yield (name, gradient) for each of `names` (None: all), one tensor in memory at a time, on CPU, dtype as saved.

    `dir` as in get_checkpoint_metadata; a sampled dump yields the first rows it holds, (n, ...) instead of (rows, ...).
    Raises ValueError (one line) for an unknown name, before any is read, and for a missing or torn file.
    """
    folder, known = find_keys(dir, names)
    sharded = os.path.exists(os.path.join(folder, '.metadata'))
    reader = SafeReader(folder) if sharded else None
    if sharded:
        check_sizes(folder)
    for name in known:
        if sharded:
            tensor = torch.empty(known[name].size, dtype=known[name].properties.dtype)
            try:
                dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
            except (Exception, dcp.CheckpointException) as error:
                raise ValueError(f'{folder}: missing or torn file, {name} cannot be read ({why(error)})') from None
            yield name, tensor
        else:
            file_name = get_checkpoint_metadata(folder).storage_data[name]
            with open_sampled(os.path.join(folder, file_name)) as file:
                yield name, file.get_tensor('gradient')


def open_sampled(path):
    """A sampled gradient's file, opened lazily; ValueError if it is torn or holds no tensor named `gradient`."""
    try:
        file = safe_open(path, 'pt')
        file.get_slice('gradient')
        return file
    except (SafetensorError, OSError) as error:
        raise ValueError(f'{path}: missing or torn ({error})') from None


# ---- weights in Hugging Face form ------------------------------------------------------------------------------------

# kept as (in, out) there
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')


OPENAI = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')


def is_hf_folder(path):
    """Whether a folder holds weights in Hugging Face form."""
    names = 'model.safetensors', 'model.safetensors.index.json'
    return any(os.path.isfile(os.path.join(path, name)) for name in names)


def download_gpt2(name):
    """Fetch OpenAI's weights, 'gpt2' (0.5 GB) to 'gpt2-xl' (6 GB), once. Returns their folder. Raises OSError."""
    from data.download import fetch, hub_files
    try:
        folder = Path.home() / '.cache' / 'flatgpt' / name
    except RuntimeError:
        raise OSError('there is no home directory to keep GPT-2\'s weights in; set HOME') from None
    wanted = ('config.json', 'model.safetensors')
    if all((folder / file).is_file() for file in wanted):
        return folder
    try:
        for file in hub_files(f'openai-community/{name}', [('main', '')], wanted, 'model'):
            if file['name'] in wanted and not (folder / file['name']).is_file():
                fetch(file, folder / file['name'])
    except OSError as error:
        raise OSError(f'{error}; fetch it elsewhere and name its folder by --init_from') from None
    return folder


def read_json(path):
    """The object that a JSON file holds. ValueError (one line) if it is missing, torn, or holds something else."""
    try:
        found = json.loads(Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise ValueError(f'{path}: missing or torn ({why(error)})') from None
    if not isinstance(found, dict):
        raise ValueError(f'{path}: holds {str(found)[:40]}, not an object')
    return found


def hf_record(path):
    """What scripts/export.py adds to the config.json of a folder in Hugging Face form: 'bias', and 'meta' of the
    tokens; {} of another's folder or of OpenAI's weights."""
    record = {} if path in OPENAI else read_json(Path(path, 'config.json')).get('flatgpt')
    return record if isinstance(record, dict) else {}


def load_hf_tensors(path):
    """{name: tensor} of the model.safetensors in a folder, or of the files that its index names."""
    from safetensors.torch import load_file
    names = ['model.safetensors']
    if not (path / names[0]).is_file():
        index = path / 'model.safetensors.index.json'
        files = read_json(index).get('weight_map')
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f'{index}: has no weight_map of names')
        names = sorted({os.path.basename(name) for name in files.values()})
    tensors = {}
    for name in names:
        try:
            tensors.update(load_file(path / name))
        except Exception as error:      # safetensors has its own kinds
            raise ValueError(f'{path / name}: missing or torn ({why(error)})') from None
    return tensors


def load_hf(path):
    """
    Read a GPT-2 folder in Hugging Face form (config.json and model.safetensors, or the parts that
    model.safetensors.index.json names), or OpenAI's weights by name ('gpt2-xl').
    Returns (model_args for GPTConfig, state dict of GPT). Raises ValueError saying what is missing or unsupported, and
    OSError if a download fails.
    """
    bias = hf_record(path).get('bias', True)
    path = download_gpt2(path) if path in OPENAI else Path(path)
    c = read_json(path / 'config.json')
    gelus = {'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh', 'gelu': 'none'}
    gelu = gelus.get(str(c.get('activation_function', 'gelu_new')))
    wanted = {'model_type': 'gpt2', 'layer_norm_epsilon': 1e-5, 'tie_word_embeddings': True, 'scale_attn_weights': True,
              'scale_attn_by_inverse_layer_idx': False, 'n_inner': None}
    odd = {k: c[k] for k, v in wanted.items() if c.get(k, v) != v and (k, c[k]) != ('n_inner', 4 * c.get('n_embd', 0))}
    if gelu is None or odd:
        raise ValueError(f'{path}/config.json: not a plain GPT-2: {odd or c["activation_function"]}')
    model_args = {**{name: c.get(name) for name in ('n_layer', 'n_head', 'n_embd', 'vocab_size')},
                  'block_size': c.get('n_positions', 1024)}
    wrong = [f'{name}={value}' for name, value in model_args.items() if type(value) is not int or value < 1]
    if wrong:
        raise ValueError(f'{path}/config.json: {", ".join(wrong)}')
    state = {}
    for name, w in load_hf_tensors(path).items():
        name = name.removeprefix('transformer.')
        if name != 'lm_head.weight' and not name.endswith(('.attn.bias', '.attn.masked_bias')):     # old masks
            state['transformer.' + name] = (w.t() if name.endswith(TRANSPOSED) else w).contiguous().float()
    biases = [name for name in state if name.endswith('.bias')]
    if bias is False and not any(state[name].any() for name in biases):     # zeros that this form asks for
        for name in biases:
            del state[name]
    else:
        bias = True
    model_args.update(bias=bias, gelu=gelu)
    state['lm_head.weight'] = state.get('transformer.wte.weight')
    with torch.device('meta'):
        expected = {k: v.shape for k, v in GPT(GPTConfig(**model_args)).state_dict().items()}
    wrong = [k for k in expected.keys() | state.keys() if getattr(state.get(k), 'shape', None) != expected.get(k)]
    if wrong:
        raise ValueError(f'{path}: model.safetensors does not fit its config.json: {", ".join(sorted(wrong)[:3])}')
    return model_args, state
