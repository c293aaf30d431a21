"""
A run's files: where it starts, loading and saving under every mode, what is forgotten; its ranks, log and signals.
Reading alone is in weights.py.

ckpt.pt, best.pt     the last and the best checkpoint of the format 'full', one file each
ckpt_dcp/step_N/     a 'sharded' checkpoint: each rank's part, and state.json; named step_N.tmp until it is complete
"""
import atexit
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer

try:
    import fcntl
except ImportError:     # on Windows
    fcntl = None

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as to_safetensors
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

from configurator import report_error, tell
from data.bins import FULL, GPT2_VOCAB, append_rows, made_folder, said, write_file
from model import GPT, GPTConfig
from weights import SafeReader, complete, is_utf8, newest_that_loads, one_process_too, read_checkpoint, read_json, why

torch.serialization.set_crc32_options(False)    # checksums take half of a save's time, and torch.load ignores them

SHAPE = 'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'rope', 'qk_norm'     # settings that it prescribes
OF_A_RUN = ('ckpt.pt', 'best.pt', 'ckpt_dcp', 'log.jsonl', 'grad_dotprods', 'gradient_dumper', 'profile')


# ---- ranks -----------------------------------------------------------------------------------------------------------
def connect(backend, timeout_minutes, device=None):
    """Join the ranks that torchrun has started; a rank that still waits for others after 20 s says so. backend: 'gloo',
    'nccl' or 'cpu:gloo,cuda:nccl'; device: this rank's torch.device, for nccl. Returns the timeout as a timedelta, for
    groups that are made later."""
    rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    timeout = timedelta(minutes=timeout_minutes)
    where = f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}'
    told = f'rank {rank} waits at {where} for all {world_size} ranks (WORLD_SIZE) to come'
    waiting = Timer(20, tell, [told, sys.stdout])
    waiting.daemon = True
    waiting.start()
    # The ranks find each other by a store of addresses, which torchrun keeps when it restarts them. Each start has its
    # own prefix there, so that no rank meets the address of a dead one. Several nodes count their restarts each for
    # itself: scripts/slurm.sh makes torchrun take a new store there.
    one_node = os.environ.get('GROUP_WORLD_SIZE') == '1'
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '') if one_node else ''
    store = dist.PrefixStore(f'start{attempt}', next(dist.rendezvous('env://', timeout=timeout))[0])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    waiting.cancel()
    atexit.register(leave)
    return timeout


def make_mesh(device_type, timeout, **sizes):
    """A torch DeviceMesh of all ranks with these named dimensions, the ranks of the last one next to each other.
    device_type: 'cpu' or 'cuda'; timeout: a timedelta. All ranks participate."""
    mesh = dist.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:      # torch gives their groups its own timeout
        dist.distributed_c10d._set_pg_timeout(timeout, mesh[name].get_group())
    return mesh


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
    """Call a function on rank 0 alone; returns what it returns there, None elsewhere. A ValueError or OSError in it
    becomes a ValueError (one line) on every rank."""
    result, problem = None, None
    if is_rank0():
        try:
            result = function(*args)
        except (ValueError, OSError) as error:
            problem = said(error)
            if getattr(error, 'filename', None):
                problem = f'{error.filename}: {problem}'
    problem = from_rank0(problem)
    if problem is not None:
        raise ValueError(problem)
    return result


# ---- what a run says, and how it is stopped --------------------------------------------------------------------------
def log_record(path, record):
    """Append {name: number or None} to a log.jsonl. What is not finite becomes None, since JSON has no NaN; returns the
    record with that."""
    record = {name: value if value is None or math.isfinite(value) else None for name, value in record.items()}
    try:
        append_rows(path, [record])
    except OSError as error:    # a full disk: the next checkpoint will tell whether that can be written
        tell(f'warning: {path} is not written: {error.strerror}', sys.stdout)
    return record


def catch_signals():
    """A list to which SIGINT, SIGTERM and SIGHUP add their number when they come, so that a run can end after its step;
    the same signal again kills as usual. To be called by the main thread."""
    came, rank0 = [], is_rank0()

    def on_signal(number, frame):
        came.append(number)
        signal.signal(number, signal.SIG_DFL)
        if rank0:
            with suppress(OSError):     # the terminal may be gone; print is not reentrant
                os.write(2, b'stopping after this step; the same signal again kills at once\n')
    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):        # the last: the terminal is gone; nohup has it ignored
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
            signal.signal(getattr(signal, name), on_signal)
    return came


# ---- where a run starts ----------------------------------------------------------------------------------------------
def find_start(config, given, meta):
    """
    Where a run starts; all ranks participate, rank 0 alone looks at the disk.

    config: train.py's settings; given: the names of those that the user has set; meta: the record of the training data.
    Returns a dict: what a checkpoint holds, and
    resumed_from    the path of the checkpoint in out_dir that the run goes on from, or None
    sharded         whether each rank is to read its part of that; otherwise model and optimizer are whole, on rank 0
    leftovers       names of an earlier run's files that a new run deletes
    passed_over     {path: what is wrong with it} of newer checkpoints, which do not load
    told            lines for the user
    Raises ValueError (one line) if there is none to resume, it does not fit the settings, or a new run would come upon
    an earlier one's files.
    """
    found = on_rank0(choose_start, config, given, meta) or {}
    whole = {name: found.pop(name, {}) for name in ('model', 'optimizer')}      # stay on rank 0 for now
    start = from_rank0(found)
    start['has_optimizer'] = from_rank0(bool(whole['optimizer']))
    return {**start, **whole}


def choose_start(config, given, meta):
    """find_start's work on rank 0."""
    init_from, out_dir = config['init_from'], config['out_dir']
    shape_given = given.intersection(SHAPE)
    leftovers = [name for name in OF_A_RUN if os.path.exists(Path(out_dir, name))]
    start = {'iter_num': 0, 'samples_seen': 0, 'best_val_loss': math.inf, 'scaler': {}, 'wandb_id': None}
    facts = {'resumed_from': None, 'sharded': False, 'leftovers': [], 'passed_over': {}, 'told': []}
    if init_from in ('resume', 'auto'):
        facts['resumed_from'], start_there, facts['passed_over'] = newest_that_loads(out_dir)
    if facts['resumed_from'] is not None:
        start.update(start_there, model_args=shape_of(complete(start_there['model_args'])))
        if 'samples_seen' not in start_there:       # an older checkpoint, or nanoGPT's: all its steps were alike
            step = {**config, **start['config']}
            start['samples_seen'] = start['iter_num'] * step['batch_size'] * step['gradient_accumulation_steps']
        then, now = (((record or {}).get('splits') or {}).get('val') for record in (start['meta'], meta))
        if then and then != now:        # losses on other text do not compare
            start['best_val_loss'] = math.inf
        facts['sharded'] = os.path.isdir(facts['resumed_from'])
        must_fit(facts['resumed_from'], start, config, shape_given, meta)
        trained_by = start['config'].get('optimizer', 'adamw')
        if trained_by != config['optimizer'] and (facts['sharded'] or start['optimizer']):
            raise ValueError(f'{facts["resumed_from"]} holds the state of another optimizer: train.py goes on from it '
                             f'with --optimizer={trained_by}; or begin a new run with its weights: '
                             f'--init_from={out_dir} --out_dir=ANOTHER')
        facts['told'] = [f'passed over, since it does not load: {fault}' for fault in facts['passed_over'].values()]
        told = [f'resuming from {facts["resumed_from"]} at step {start["iter_num"]}']
        facts['told'].append('; '.join(told + changes(start, config, meta)))
        return {**start, **facts}
    if init_from == 'resume':
        raise ValueError(f'no complete checkpoint in {out_dir}: name the folder of a run by --out_dir, or leave out '
                         '--init_from=resume to start one')
    foreign = Path(out_dir, 'config.json')
    if os.path.isfile(foreign) and not config['eval_only'] and 'out_dir' not in read_json(foreign):
        raise ValueError(f"{foreign} is no run's, perhaps a model's, and a run would replace it: another --out_dir")
    facts['leftovers'] = leftovers
    if leftovers and init_from != 'auto' and not config['overwrite'] and not config['eval_only']:
        raise ValueError(f'{out_dir} holds an earlier run ({", ".join(leftovers)}): another --out_dir, or go on '
                         'by --init_from=auto, or delete it by --overwrite=True')
    if init_from in ('scratch', 'auto'):
        start['model_args'], start['model'] = new_model(config, meta)
    else:
        start['model_args'], start['model'] = pretrained(init_from, config, shape_given, meta)
        facts['told'] = [f'weights from {init_from}']
    return {**start, **facts}


def new_model(config, meta):
    """(model_args, weights) of a model that knows nothing, for the data whose record is meta."""
    vocab_size = meta.get('vocab_size', GPT2_VOCAB)
    if vocab_size >= 1024:
        vocab_size = math.ceil(vocab_size / 64) * 64        # GPUs prefer a multiple of 64
    on_gpu = config['device'].startswith('cuda')
    gelu = 'tanh' if on_gpu else 'none'     # GPT-2's own; the exact form is a tenth quicker on a CPU
    model_args = {**{name: config[name] for name in SHAPE}, 'vocab_size': vocab_size, 'gelu': gelu}
    torch.manual_seed(config['seed'])
    return model_args, GPT(GPTConfig(**model_args)).state_dict()


def pretrained(source, config, shape_given, meta):
    """(model_args, weights) of OpenAI's GPT-2 by name, of a Hugging Face folder or of a checkpoint."""
    ckpt = read_checkpoint(source)
    must_fit(source, ckpt, config, shape_given - {'block_size'}, meta)
    place, out_dir = Path(source).resolve(), Path(config['out_dir']).resolve()
    if config['overwrite'] and not config['eval_only'] and place.exists() and out_dir in (place, *place.parents):
        raise ValueError(f'it lies in {config["out_dir"]}, which --overwrite=True would empty: another --out_dir')
    model_args, weights = shape_of(ckpt['model_args']), ckpt['model']
    block_size = config['block_size']
    positions = model_args['block_size']
    if block_size > positions:
        raise ValueError(f'it has {positions} positions, so --block_size={positions} or less')
    model_args['block_size'] = block_size
    if not model_args['rope']:
        weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size]
    return model_args, weights


def shape_of(model_args):
    """What a checkpoint prescribes of its model_args. Others, such as dropout, every run sets for itself."""
    return {name: model_args[name] for name in (*SHAPE, 'vocab_size', 'gelu')}


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
        raise ValueError(f'{source} has another tokenizer than dataset={dataset}: the same ids mean other '
                         f'text; {allow}')
    known, ids = then.get('vocab_size', args['vocab_size']), meta.get('vocab_size', GPT2_VOCAB)
    padded = math.ceil(ids / 64) * 64       # as new_model and nanoGPT round up
    if known not in (ids, padded):
        raise ValueError(f'{source} knows {known:,} token ids, dataset={dataset} has {ids:,}: other tokens; {allow}')


def changes(ckpt, config, meta):
    """What has changed since a checkpoint, whose dict is ckpt, was written: a list of phrases."""
    then, told = ckpt.get('config') or {}, []
    for name, value in then.items():
        if name in config and config[name] != value and name not in ('init_from', 'overwrite', *SHAPE):
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
        try:
            set_optimizer_state_dict(model, optimizer, start.pop('optimizer', {}), options=whole)
        except Exception as error:      # of a state that is not AdamW's, which fails in many ways
            raise ValueError(f'{start["resumed_from"]}: its optimizer state does not fit ({why(error)})') from None
    for group, values in zip(optimizer.param_groups, hyperparameters):
        group.update(values)                # weight decay and betas of today, not the checkpoint's
    if start['scaler']:
        try:
            scaler.load_state_dict(start['scaler'])
        except (LookupError, TypeError) as error:
            raise ValueError(f'{start["resumed_from"]}: its scaler does not load ({error})') from None


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
def check_out_dir(out_dir, leftovers):
    """Make the folder, and try to write in it; all ranks participate. ValueError (one line) if that fails, or there is
    a folder in the place of a file, or the other way round, which is not among the leftovers to be deleted."""
    def attempt():
        if not is_utf8(out_dir):
            raise ValueError(f'out_dir={out_dir}: torch could not open a checkpoint there: name a folder in UTF-8')
        for path in (Path(out_dir, name) for name in (*OF_A_RUN, 'config.json', 'lock') if name not in leftovers):
            is_folder = path.name not in ('ckpt.pt', 'best.pt', 'log.jsonl', 'config.json', 'lock')
            right = os.path.isdir(path) if is_folder else os.path.isfile(path)      # not a pipe either
            if os.path.lexists(path) and not right:     # nor a link that leads nowhere
                raise ValueError(f'{path}: a run writes a {"folder" if is_folder else "file"} of this name: move what '
                                 'is there away')
        try:
            with made_folder(out_dir):
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
    locks.append(file)      # open until the end


def begin_out_dir(out_dir, start, config, evaluates):
    """Rank 0's first writes: a new run deletes an earlier one's files, one that goes on what came after its checkpoint;
    and config.json. evaluates: whether the run begins with an evaluation."""
    for file in locks:
        file.truncate(0)
        file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
        file.flush()
    for name in start['leftovers']:
        remove(Path(out_dir, name))
    for path in start['passed_over']:       # out of the way of what comes, but not lost
        remove(Path(f'{path}.torn'))
        os.replace(path, f'{path}.torn')
    if start['resumed_from'] is not None:
        for path in Path(out_dir, 'ckpt_dcp').glob('step_*'):
            if path.suffix == '.tmp' or (path.suffix == '.torn' and not (path / '.metadata').is_file()):
                remove(path)                # a save that died left it
    write_file(Path(out_dir, 'config.json'), json.dumps({**config, **origin()}, indent=1).encode())
    if start['resumed_from'] is not None:
        forget_later(Path(out_dir), start['iter_num'], evaluates)


def origin():
    """What config.json holds beside the settings: which code ran, and how it was called."""
    return dict(git_commit=git_commit(Path(__file__).parent), torch_version=torch.__version__,
                command_line=shlex.join(sys.argv), world_size=dist.get_world_size() if dist.is_initialized() else 1)


def git_commit(folder):
    """The commit that a git checkout is at, or None if the folder is none. Its files are read, and git is not run: that
    takes longer, and in a folder that another has made it may run their commands."""
    try:
        git = Path(folder, '.git')
        if git.is_file():       # a worktree's, or a submodule's: `gitdir: PATH`
            git = Path(folder, git.read_text().partition(': ')[2].strip())
        commit = (git / 'HEAD').read_text().strip()
        if commit.startswith('ref: '):
            branch, shared = commit.removeprefix('ref: '), git
            if (git / 'commondir').is_file():       # a worktree has its branches with the others
                shared = git / (git / 'commondir').read_text().strip()
            if (shared / branch).is_file():
                commit = (shared / branch).read_text().strip()
            else:
                lines = (shared / 'packed-refs').read_text().splitlines()
                commit = next((line.partition(' ')[0] for line in lines if line.endswith(f' {branch}')), '')
    except (OSError, ValueError):
        return None
    return commit if re.fullmatch('[0-9a-f]{40}|[0-9a-f]{64}', commit) else None


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
        except (ValueError, LookupError, TypeError, RecursionError):
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
            timeout = timedelta(minutes=rest['config']['timeout_minutes'])
            saver_group.append(dist.new_group(backend='gloo', timeout=timeout))
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')  # comes from a thread, later
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
        with suppress(OSError, ValueError, AttributeError, RecursionError):     # it is none to resume from
            if json.loads((path / 'state.json').read_text()).get('best'):
                best = path
    for old in complete[:-keep] if keep else []:
        try:
            if old != best:
                half = old.with_name(f'{old.name}.tmp')     # what a kill leaves of it counts as no checkpoint
                os.replace(old, half)
                remove(half)
        except OSError as error:
            tell(f'warning: {old} is not needed any more, and can not be deleted: {error.strerror}', sys.stdout)


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


def write_valset(out_dir, offsets, X, Y, step):
    """Ghost's fixed validation batch from a step on, X, Y (samples, block_size) at offsets -> grad_dotprods/valset.
    safetensors. If the run had another before, as with another seed, that stays as valset_before_NNNNNN.safetensors."""
    tokens = torch.cat((X, Y[:, -1:]), 1).cpu()     # (samples, block_size + 1)
    content = to_safetensors({'offset': torch.from_numpy(offsets), 'tokens': tokens})
    path = Path(out_dir, 'grad_dotprods', 'valset.safetensors')
    path.parent.mkdir(exist_ok=True)
    if path.is_file() and path.read_bytes() != content:
        os.replace(path, path.with_name(f'valset_before_{step:06d}.safetensors'))
    write_file(path, content)


def write_scored(out_dir, rows, names, bins, steps_done):
    """Scored steps, a dict of numbers and arrays each, -> grad_dotprods/iter_NNNNNN.safetensors, by rank 0; names: of
    the parameters; bins: the fingerprints of the tokens, train_bin (which the offsets are of) and val_bin. Empties
    rows."""
    if rows and is_rank0():
        columns = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
        folder = Path(out_dir, 'grad_dotprods')
        folder.mkdir(exist_ok=True)
        content = to_safetensors(columns, {'parameters': json.dumps(names), **bins})
        write_file(folder / f'iter_{steps_done:06d}.safetensors', content)
    rows.clear()


exit_codes = []     # of a run that has come to its end


def leave():
    """
    For atexit, in a rank of several. On a busy machine a thread of gloo's (ProcessGroupGloo::runLoop) may drop an
    exchange's tensors long after it, and asks for Python's lock to do so. While Python is ending, Python answers by
    ending that thread, in the middle of a C++ destructor, and C++ then aborts the process: "terminate called without an
    active exception". So a rank that has come to its end leaves without Python's ending; after an error, which has been
    told, the thread is given time. tests/chaos.py --exits=N shows it.
    """
    if not exit_codes or hasattr(sys, 'last_value'):
        time.sleep(0.5)
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):     # a closed pipe; None if it was closed at the start
            stream.flush()
    os._exit(exit_codes[-1])


def excepthook(out_dir):
    """For sys.excepthook: what the system refuses, such as room on a disk or memory, is one line, told by the rank that
    it happened to: a traceback would not help."""
    def report(kind, error, trace):
        cause, path = why(error), getattr(error, 'filename', None)
        if getattr(error, 'failures', None) and not is_rank0():
            return      # torch.distributed.checkpoint's: every rank gets those of all
        words = str(error).lower()
        if 'unexpected pos' in cause:       # of the ranks' errors only the words of torch's zip writer get through
            cause = os.strerror(FULL[0]) + ', it seems'
        if cause.startswith(tuple(map(os.strerror, FULL))):
            line = f'{path or out_dir}: {cause}: make room; --init_from=auto then goes on'
        elif isinstance(error, OSError) and path is not None:
            line = f'{path}: {cause}'
        elif isinstance(error, (MemoryError, torch.OutOfMemoryError)) or 'allocate memory' in words:
            line = f'out of memory ({cause.splitlines()[0]}): a smaller --batch_size, --block_size or model'
            if isinstance(error, torch.OutOfMemoryError):
                line += '; --profile_memory=True writes down what holds it'
        elif isinstance(error, RuntimeError) and ('connection closed' in words or 'connection reset' in words):
            line = 'another rank has ended; its own line says why'      # which may come later: let it out first
            time.sleep(2)
            if not is_rank0():
                return
        else:
            return report_error(kind, error, trace)
        tell(f'{os.path.basename(sys.argv[0])}: {line}', sys.stderr)
    return report
