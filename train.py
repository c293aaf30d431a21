"""
Train a GPT-2 on one machine or many; the whole run, top to bottom.

one process   python train.py config/train_shakespeare_char.py
on a CPU      python train.py config/train_shakespeare_char_cpu.py
DDP           torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
FSDP          torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --use_fsdp=True
HSDP          torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --use_fsdp=True --fsdp_replicate=2
two nodes     torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=HOST --master_port=29500 train.py ...
ghost         ... --use_ghost=True        every sample's gradient dot product with the validation gradient, in any mode
gradients     ... --grad_dump=True        the gradients of chosen steps, in any mode
go on         ... --init_from=resume      or auto: resume if there is a checkpoint in out_dir, else start

Every global of the next section is set by a config file of `name = value` lines or by --name=value; --help lists them.
All modes compute the same up to rounding: for one global batch they give the same losses and weights, but for dropout,
whose masks differ from rank to rank.
"""
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as to_safetensors
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

from checkpoint import OPENAI, changes, excepthook, find_start, forget_later, keep_newest, must_fit
from configurator import configure
from data.bins import find_bin, hash64, shuffled, write_file
from kernels import peak_flops
from model import GPT, GPTConfig

warnings.filterwarnings('ignore', message='torch.distributed is disabled')  # one process may save checkpoints too
torch.serialization.set_crc32_options(False)    # checksums take half of a save's time, and torch.load ignores them

# ---- run -------------------------------------------------------------------------------------------------------------
out_dir = 'out'                     # everything the run writes goes here
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' (resume if there is a checkpoint, else scratch) |
                                    # 'gpt2' | 'gpt2-medium' | 'gpt2-large' | 'gpt2-xl' | the weights in a folder, in
                                    # Hugging Face form or with a checkpoint, or in a .pt file
overwrite = False                   # let a new run delete an earlier run's files in out_dir; 'auto' does so unasked if
                                    # there is no checkpoint, since the run may have died before its first
seed = 1337                         # of weights, data order and dropout
eval_interval = 2000                # steps between evaluations
eval_iters = 200                    # batches per split and evaluation
eval_only = False                   # evaluate once and exit; writes nothing
log_interval = 1                    # steps between log lines
check_sync_interval = 0             # steps between bitwise comparisons of the replicas' weights; 0 never
on_nonfinite = 'stop'               # 'stop' | 'skip': what to do with a step whose loss or gradient norm is not finite
deterministic = False               # deterministic kernels only: slower, and bit-identical reruns on a GPU
# ---- checkpoints -----------------------------------------------------------------------------------------------------
always_save_checkpoint = True       # after every evaluation; False: only after one that improved, and at the end
checkpoint_interval = 0             # steps between checkpoints; 0: at evaluations
checkpoint_format = 'full'          # 'full': one file, ckpt.pt | 'sharded': each rank its part, ckpt_dcp/step_N
checkpoint_async = False            # sharded only: write in the background
keep_checkpoints = 0                # sharded only: how many to keep, the best one besides; 0 keeps all
# ---- wandb -----------------------------------------------------------------------------------------------------------
wandb_log = False                   # log to Weights & Biases too
wandb_project = 'flatgpt'
wandb_run_name = 'gpt2'
# ---- data ------------------------------------------------------------------------------------------------------------
dataset = 'openwebtext'             # a folder in data/, or a path, with train.bin and val.bin
data_order = 'random'               # 'random': windows with replacement | 'epoch': each once per epoch, shuffled
gradient_accumulation_steps = 40    # micro-batches per step, over all ranks together
batch_size = 12                     # samples per micro-batch
block_size = 1024                   # tokens per sample
# ---- model -----------------------------------------------------------------------------------------------------------
n_layer = 12
n_head = 12
n_embd = 768                        # divisible by n_head
dropout = 0.0                       # probability; 0 for pretraining, 0.1 or more for finetuning
bias = False                        # in Linears and LayerNorms
# ---- optimizer: AdamW ------------------------------------------------------------------------------------------------
learning_rate = 6e-4                # maximum
max_iters = 600000                  # optimizer steps in all
weight_decay = 1e-1                 # of matrices and embeddings; 0 disables
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0                     # largest global gradient norm; 0 disables
decay_lr = True                     # False: learning_rate throughout
warmup_iters = 2000                 # steps of linear warm-up
lr_decay_iters = 600000             # step at which the cosine reaches min_lr; about max_iters
min_lr = 6e-5                       # about learning_rate / 10
scale_lr = False                    # multiply learning_rate and min_lr by world size x micro-batches per rank
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' | 'cpu' | 'cuda' | 'cuda:1' | 'mps'
dtype = 'auto'                      # 'auto' (bfloat16 on a GPU that has it) | 'float32' | 'bfloat16' | 'float16'
compile = 'auto'                    # 'auto' (on a GPU) | True | False: torch.compile, a minute at the start | 'blocks':
                                    # one by one, as always with FSDP: 1% slower, and soon done if there are many
backend = 'auto'                    # 'auto' | 'nccl' | 'gloo'
# ---- FSDP ------------------------------------------------------------------------------------------------------------
use_fsdp = False                    # shard parameters, gradients and optimizer state over the ranks
fsdp_min_num_params = 0             # consecutive blocks are grouped until a unit has this many; 0: one unit per block
fsdp_activation_checkpointing = False  # False | 'full' | 'selective' (matmuls and attention are kept); in any mode
fsdp_cpu_offload = False            # keep shards and optimizer state in host memory
fsdp_replicate = 1                  # HSDP: copies of the sharded model; world size = fsdp_replicate x shards
fsdp_reshard_after_forward = True   # False: keep parameters gathered through the micro-batches; faster, more memory
# ---- ghost -----------------------------------------------------------------------------------------------------------
use_ghost = False                   # dot product of each sample's gradient with the validation gradient
ghost_val_batch_size = 4            # validation samples per step, over all ranks together
ghost_val_dataset = ''              # whose val.bin to value the training data for; '' is this dataset's
ghost_val_resample = False          # True: other validation samples in every scored step
ghost_interval = 1                  # steps between scored steps
ghost_save_interval = 10            # steps per file in grad_dotprods/
ghost_per_param = False             # also store each parameter's share
# ---- gradient dumps --------------------------------------------------------------------------------------------------
grad_dump = False                   # write gradients (global mean, before clipping) into gradient_dumper/
grad_dump_start_step = 0            # first step to dump
grad_dump_step_interval = 1         # steps between dumps
grad_dump_end_step = None           # last step to dump; None: no end
grad_dump_save_first_n = None       # None: all of every gradient, sharded; an int: its first n rows
# ----------------------------------------------------------------------------------------------------------------------
config, given = configure(globals())
sys.excepthook = excepthook(out_dir)    # a full disk and the like are one line

# ---- ranks and device ------------------------------------------------------------------------------------------------
distributed = 'RANK' in os.environ  # set by torchrun
use_ddp = distributed and not use_fsdp
rank, local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
world_size = int(os.environ.get('WORLD_SIZE', 1)) if distributed else 1
master_process = rank == 0          # prints, and writes what is not sharded


def fail(message, reports=local_rank == 0):
    """End with one line and exit code 2. All ranks find the same fault, as a rule: one on each machine reports it."""
    if reports:
        print(f'train.py: {message}', file=sys.stderr, flush=True)
    else:
        time.sleep(2)       # torchrun ends all ranks as soon as one has ended: let the line out first
    sys.exit(2)


def fail_if(problem):
    """What rank 0 alone has found, a line or None, ends all ranks; once they are connected."""
    box = [problem]
    if distributed:
        dist.broadcast_object_list(box)
    if box[0]:
        fail(box[0])


def say(message, passing=False):
    """Rank 0 prints a line; on a terminal the next one takes a passing one's place."""
    live = sys.stdout.isatty()
    if master_process:
        print('\r\033[K' * live + message, end='' if live and passing else '\n', flush=True)


has = {'cpu': True, 'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
if device == 'auto':
    device = 'cuda' if has['cuda'] else 'mps' if has['mps'] else 'cpu'
device_type = device.split(':')[0]
if not has.get(device_type):
    fail(f'device={device}: expected auto, cpu, cuda, cuda:N or mps, and this machine has {[d for d in has if has[d]]}')
gpus = torch.cuda.device_count() if device_type == 'cuda' else 0
has_bfloat16 = device_type == 'cpu' or gpus and torch.cuda.is_bf16_supported(including_emulation=False)
if dtype == 'auto':
    dtype = 'float32' if not gpus else 'bfloat16' if has_bfloat16 else 'float16'
if compile == 'auto':
    compile = gpus > 0
config.update(device=device, dtype=dtype, compile=compile)

# ---- checks: all come before the first write -------------------------------------------------------------------------
at_least_1 = '''eval_interval eval_iters log_interval gradient_accumulation_steps batch_size block_size n_layer n_head
    n_embd fsdp_replicate ghost_val_batch_size ghost_interval ghost_save_interval grad_dump_step_interval
    grad_dump_save_first_n'''.split()
for name, value in config.items():
    low, high = (1, 2**31) if name in at_least_1 else (0, 1 if name in ('dropout', 'beta1', 'beta2') else 2**63)
    if isinstance(value, (int, float)) and not low <= value < high:
        fail(f'{name}={value}: must be at least {low} and below {high}')
for name, values in dict(on_nonfinite=('stop', 'skip'), checkpoint_format=('full', 'sharded'),
                         backend=('auto', 'nccl', 'gloo'),
                         data_order=('random', 'epoch'), dtype=('auto', 'float32', 'bfloat16', 'float16'),
                         compile=('auto', True, False, 'blocks')).items():
    if config[name] not in values:
        fail(f'{name}={config[name]!r}: expected {" or ".join(map(repr, values))}')
ghost_rows = ghost_val_batch_size // world_size     # per rank
rounded_up = math.ceil(gradient_accumulation_steps / world_size) * world_size
for wrong, message in (
        (not out_dir, 'out_dir is empty: name a folder'),
        (not dataset, 'dataset is empty: name a folder'),
        (not (init_from in ('scratch', 'resume', 'auto', *OPENAI) or os.path.exists(init_from)),
         f'init_from={init_from}: expected scratch, resume, auto, {", ".join(OPENAI)}, a folder or a .pt file'),
        (wandb_log and find_spec('wandb') is None, 'wandb_log=True needs the package: pip install wandb'),
        (decay_lr and min_lr > learning_rate, f'min_lr={min_lr} is above learning_rate={learning_rate}: '
         f'--min_lr={learning_rate / 10:g}, or --decay_lr=False'),
        (n_embd % n_head, f'n_embd={n_embd} is not divisible by n_head={n_head}'),
        (gradient_accumulation_steps % world_size,
         f'gradient_accumulation_steps={gradient_accumulation_steps} counts micro-batches of all {world_size} ranks '
         f'and must be a multiple of that: --gradient_accumulation_steps={rounded_up}'),
        (distributed and device_type == 'mps', 'mps takes one process; use --device=cpu for several'),
        (gpus and int(os.environ.get('LOCAL_WORLD_SIZE', 1)) > gpus,
         f'more processes than GPUs: --nproc_per_node={gpus}'),
        (backend == 'nccl' and not gpus, f'backend=nccl needs GPUs and device is {device}: --backend=gloo'),
        (dtype == 'bfloat16' and not has_bfloat16, f'{device} has no bfloat16: --dtype=float16 or float32'),
        (dtype == 'float16' and device_type == 'mps', 'dtype=float16 does not train on mps: --dtype=float32'),
        (use_fsdp and not distributed, 'use_fsdp=True: start by torchrun --standalone --nproc_per_node=N train.py ...'),
        (not use_fsdp and fsdp_replicate > 1, f'fsdp_replicate={fsdp_replicate} needs --use_fsdp=True'),
        (not use_fsdp and fsdp_cpu_offload, 'fsdp_cpu_offload=True needs --use_fsdp=True'),
        (world_size % fsdp_replicate, f'HSDP: world size {world_size} is not a multiple of '
         f'fsdp_replicate={fsdp_replicate}; world size = fsdp_replicate x shards'),
        (checkpoint_async and checkpoint_format == 'full', 'checkpoint_async=True needs --checkpoint_format=sharded'),
        (use_ghost and ghost_val_batch_size % world_size,
         f'ghost_val_batch_size={ghost_val_batch_size} must be a multiple of the world size {world_size}'),
        (use_ghost and ghost_rows > batch_size and ghost_rows % batch_size,
         f'ghost_val_batch_size={ghost_val_batch_size} is {ghost_rows} per rank, more than batch_size={batch_size} '
         'and not a multiple of it'),
        (grad_dump_end_step is not None and grad_dump_end_step < grad_dump_start_step,
         f'grad_dump_end_step={grad_dump_end_step} comes before grad_dump_start_step={grad_dump_start_step}'),
        (grad_dump and grad_dump_start_step >= max_iters > 0,
         f'grad_dump_start_step={grad_dump_start_step}: the last step of max_iters={max_iters} is {max_iters - 1}')):
    if wrong:
        fail(message)

# ---- data ------------------------------------------------------------------------------------------------------------
# Sample j of step s is a pure function of (seed, s, j). Which rank reads it in which micro-batch changes nothing,
# resuming needs no stored position, and a sample has a name that lasts: its offset in train.bin.
bins, metas = {}, {}    # {split: (path, dtype, tokens)}, {split: what prepare.py recorded}
for split, name in ('train', dataset), ('val', dataset), ('ghost', ghost_val_dataset or dataset):
    try:
        bins[split], metas[split] = find_bin(name, 'train' if split == 'train' else 'val')
    except ValueError as error:
        fail(str(error))
if bins['train'][0].parent == Path(dataset):
    config['dataset'] = os.path.abspath(dataset)    # not data/NAME but a path: for scripts that run elsewhere
meta = metas['train']
tokenizer = meta.get('tokenizer', metas['ghost'].get('tokenizer'))      # nanoGPT's folders may not record it
if use_ghost and metas['ghost'].get('tokenizer', tokenizer) != tokenizer:
    fail(f'ghost_val_dataset={ghost_val_dataset} was made with another tokenizer than {dataset}: same ids, other words')
micro_batches = gradient_accumulation_steps // world_size       # per rank and step
samples_per_step = gradient_accumulation_steps * batch_size     # over all ranks


def train_offsets(step, j):
    """Token offsets, int64 (n,), of samples j (n,) of an optimizer step."""
    _, _, tokens = bins['train']
    if data_order == 'random':
        return (hash64(seed, step, j) % np.uint64(tokens - block_size)).astype(np.int64)
    windows = (tokens - 1) // block_size
    epoch, k = np.divmod(step * samples_per_step + j, windows)
    return shuffled(k, windows, seed, epoch) * block_size


def val_offsets(step):
    """Token offsets of the ghost validation samples of all ranks: the same at every step unless they are resampled."""
    _, _, tokens = bins['ghost']
    draw = hash64(seed, -1 % 2**64, step if ghost_val_resample else 0, np.arange(ghost_val_batch_size))
    return (draw % np.uint64(tokens - block_size)).astype(np.int64)


def read_windows(split, offsets):
    """Inputs and targets on the device, int64 (len(offsets), block_size) each, the targets one token later."""
    path, itemtype, _ = bins[split]     # read, not mapped: a memory map's pages would count as ours and pile up
    tokens = np.empty((len(offsets), block_size + 1), itemtype)
    with open(path, 'rb') as f:
        for row, offset in zip(tokens, offsets.tolist()):
            f.seek(offset * itemtype.itemsize)
            row[:] = np.fromfile(f, itemtype, block_size + 1)
    if tokens.max() >= vocab_size:
        where = offsets[tokens.max(1).argmax()]
        fail(f'{path} has token id {tokens.max()} near token {where}, the model only {vocab_size} ids', reports=True)
    tokens = torch.from_numpy(tokens.astype(np.int64))
    if gpus:
        tokens = tokens.pin_memory()    # so that the copy below overlaps with the GPU's work
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]


def train_batch(step, micro):
    """This rank's inputs and targets of a micro-batch."""
    return read_windows('train', train_offsets(step, (micro * world_size + rank) * batch_size + np.arange(batch_size)))


# ---- where to start: scratch, pretrained or a checkpoint -------------------------------------------------------------
if deterministic:
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True)
if gpus:
    device = f'cuda:{local_rank}' if distributed or ':' not in device else device
    torch.cuda.set_device(device)
if distributed:     # gloo beside nccl: offloaded tensors and checkpoints are exchanged in host memory
    auto = 'cpu:gloo,cuda:nccl' if gpus else 'gloo'
    # torchrun keeps its store over restarts, with dead ranks' addresses in it: so each start has its own prefix. Nodes
    # count restarts each for itself, so for several scripts/slurm.sh makes torchrun take a new store instead.
    start = os.environ.get('TORCHELASTIC_RESTART_COUNT', '') if os.environ.get('GROUP_WORLD_SIZE') == '1' else ''
    store = dist.PrefixStore(f'start{start}', next(dist.rendezvous('env://'))[0])
    dist.init_process_group(auto if backend == 'auto' else backend, store=store, rank=rank, world_size=world_size,
                            device_id=torch.device(device) if gpus else None)
out = Path(out_dir)
shape_names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias')
checkpoint, state, leftovers, dumped, problem = None, {}, [], set(), None
try:
    if master_process:      # it alone looks at the disk, and reads or makes weights; the others receive them below
        checkpoint, state, leftovers = find_start(init_from, out_dir, overwrite, eval_only)
        if checkpoint is not None:      # of a sharded one the tensors follow below
            must_fit(checkpoint, state, config, given.intersection(shape_names), meta)
            dumped = {int(p.name[4:]) for p in (out / 'gradient_dumper').glob('step*') if p.name[4:].isdigit()}
            changed = changes(state, config, meta, shape_names)
            print(f'resuming from {checkpoint} at step {state["iter_num"]}', *changed, sep='; ')
        elif state:                     # pretrained: of a checkpoint of ours the weights only
            must_fit(init_from, state, config, given.intersection(shape_names) - {'block_size'}, meta)
            state = {k: state[k] for k in ('model', 'model_args')}
            positions = state['model_args']['block_size']
            if block_size > positions:
                raise ValueError(f'it has {positions} positions, so --block_size={positions} or less')
            state['model_args']['block_size'] = block_size
            state['model']['transformer.wpe.weight'] = state['model']['transformer.wpe.weight'][:block_size]
        else:
            vocab = meta.get('vocab_size', 50257)   # a large one is padded to a multiple of 64, which GPUs prefer
            vocab = vocab if vocab < 1024 else math.ceil(vocab / 64) * 64
            gelu = 'tanh' if gpus else 'none'       # GPT-2's own; the exact form is a tenth quicker on a CPU
            state = {'model_args': {**{k: config[k] for k in shape_names}, 'vocab_size': vocab, 'gelu': gelu}}
            torch.manual_seed(seed)
            state['model'] = GPT(GPTConfig(**state['model_args'])).state_dict()
except (ValueError, OSError) as error:
    problem = f'init_from={init_from}: {error}'
fail_if(problem)
weights, optimizer_state = state.pop('model', {}), state.pop('optimizer', {})       # whole, on rank 0; {} elsewhere
everyones = [checkpoint, state, dumped, bool(weights), bool(optimizer_state)]
if distributed:
    dist.broadcast_object_list(everyones)
checkpoint, state, dumped, have_weights, have_optimizer_state = everyones
model_args = {k: v for k, v in state['model_args'].items() if k != 'dropout'}
shape = {k: model_args[k] for k in shape_names}
config.update(shape)
globals().update(shape)
vocab_size = model_args['vocab_size']
iter_num, best_val_loss = state.get('iter_num', 0), state.get('best_val_loss', math.inf)
start_iter, wandb_id, tokens_per_step = iter_num, state.get('wandb_id'), samples_per_step * block_size
for split, (path, itemtype, tokens) in bins.items():
    if tokens <= block_size:
        fail(f'{path} has {tokens:,} tokens, one sample of block_size={block_size} takes {block_size + 1}: '
             'use more text or a smaller --block_size')
    if split == 'ghost' and use_ghost and ghost_val_batch_size > tokens - block_size:
        fail(f'ghost_val_batch_size={ghost_val_batch_size}: {path} has only {tokens - block_size:,} windows')
    largest = np.fromfile(path, itemtype, 2**26).max()      # what lies further on is checked batch by batch
    ids = min(vocab_size, metas[split].get('vocab_size', vocab_size))       # not the ones that only pad the embedding
    if largest >= ids:
        fail(f'{path} has token id {largest}, the vocabulary only {ids} ids: wrong dataset?')

# ---- model: built without memory, then compiled, then sharded, then filled with rank 0's weights ---------------------
with torch.device('meta'):
    model = raw_model = GPT(GPTConfig(**model_args, dropout=dropout))
try:
    ghost_names = raw_model.add_ghost() if use_ghost else []
except ValueError as error:
    fail(f'use_ghost=True: {error}')
num_params = raw_model.num_params()
flops_per_step = raw_model.flops_per_token() * tokens_per_step

if fsdp_activation_checkpointing:       # forget most of the forward pass and compute it again in the backward pass
    raw_model.recompute(selective=fsdp_activation_checkpointing == 'selective')
if compile == 'blocks' or compile and use_fsdp:     # FSDP gathers parameters between them
    for block in raw_model.transformer.h:
        block.compile(dynamic=False)
    raw_model.loss = torch.compile(raw_model.loss, dynamic=False)
elif compile:
    raw_model.compile(dynamic=False)    # in place, so that names in checkpoints stay; fast for the shapes it meets
if use_fsdp:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    mesh = dist.init_device_mesh(device_type, (fsdp_replicate, world_size // fsdp_replicate),
                                 mesh_dim_names=('replicate', 'shard'))
    policy = dict(mesh=mesh if fsdp_replicate > 1 else mesh['shard'], reshard_after_forward=fsdp_reshard_after_forward,
                  mp_policy=MixedPrecisionPolicy(param_dtype=None if dtype == 'float32' else getattr(torch, dtype),
                                                 reduce_dtype=torch.float32, cast_forward_inputs=False),
                  offload_policy=CPUOffloadPolicy(pin_memory=gpus > 0) if fsdp_cpu_offload else OffloadPolicy())
    unit, size = [], 0
    for block in raw_model.transformer.h:
        unit, size = unit + [block], size + sum(p.numel() for p in block.parameters() if p.requires_grad)
        if size >= fsdp_min_num_params or block is raw_model.transformer.h[-1]:
            fully_shard(unit, **policy)
            unit, size = [], 0
    fully_shard(raw_model, **policy)    # what is left: embeddings, final norm and head
raw_model.to_empty(device='cpu' if fsdp_cpu_offload else device)
raw_model.tie()
params = {name: p for name, p in raw_model.named_parameters() if p.requires_grad}     # tied ones once, without ghost_*
from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed, strict=False)
if have_weights:
    set_model_state_dict(raw_model, weights, options=from_rank0)
assert raw_model.lm_head.weight is raw_model.transformer.wte.weight, 'wrapping or loading has untied the embeddings'
if use_ddp:
    model = torch.nn.parallel.DistributedDataParallel(raw_model, device_ids=[local_rank] if gpus else None,
                                                      gradient_as_bucket_view=True)

# ---- optimizer -------------------------------------------------------------------------------------------------------
fused = device_type in ('cuda', 'cpu')
optimizer = torch.optim.AdamW(raw_model.param_groups(weight_decay), lr=learning_rate, betas=(beta1, beta2), fused=fused)
# FSDP casts by its own policy, the other modes by autocast
autocast = nullcontext() if dtype == 'float32' or use_fsdp else torch.autocast(device_type, getattr(torch, dtype))
scaler = torch.amp.GradScaler(device_type, enabled=dtype == 'float16')
scaler.load_state_dict(state.get('scaler') or scaler.state_dict())
hyperparameters = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
if checkpoint is not None and not have_weights:         # sharded: every rank reads its part
    tensors = {'model': {k: w for k, w in get_model_state_dict(raw_model).items() if k in params},
               'optimizer': get_optimizer_state_dict(raw_model, optimizer)}
    groups = tensors['optimizer'].pop('param_groups')
    try:
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=not distributed)
    except (Exception, dcp.CheckpointException) as error:       # on all ranks alike
        fail(f'{checkpoint} is torn ({type(error).__name__}): delete that folder, and the one before is taken')
    set_model_state_dict(raw_model, tensors['model'], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(raw_model, optimizer, {**tensors['optimizer'], 'param_groups': groups})
elif have_optimizer_state:
    set_optimizer_state_dict(raw_model, optimizer, optimizer_state, options=from_rank0)
for group, values in zip(optimizer.param_groups, hyperparameters):
    group.update(values)                # weight decay and betas of today, not the checkpoint's
del weights, optimizer_state
frozen = {name.replace('ghost_', ''): p for name, p in raw_model.named_parameters() if not p.requires_grad}
ghosts = [(params[name], frozen[name]) for name in ghost_names]     # (parameter, its ghost_*); none without use_ghost
if scale_lr:
    learning_rate, min_lr = (r * gradient_accumulation_steps for r in (learning_rate, min_lr))


def lr_at(step):
    """Learning rate of a step: linear from above 0 to the maximum in warmup_iters steps, then a cosine to min_lr."""
    if not decay_lr:
        return learning_rate
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    if step >= lr_decay_iters:
        return min_lr
    done = (step - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + (learning_rate - min_lr) * (1 + math.cos(math.pi * done)) / 2


def sync_gradients(last):
    """Before a backward pass: the ranks exchange gradients in the last one only."""
    if use_fsdp:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or fsdp_reshard_after_forward)
    elif use_ddp:
        model.require_backward_grad_sync = last


def mean_over_ranks(tensor):
    if distributed:
        dist.all_reduce(tensor)
    return tensor / world_size


def compare_replicas():
    """Ends the run if copies of a parameter, or of its shards, are not the same bit by bit; all ranks participate."""
    local = [p.to_local() if use_fsdp else p.detach() for p in params.values()]
    sums = torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in local]).to(device)
    high_low = torch.stack((sums, -sums))       # the largest of -sums is the smallest of sums: one exchange for both
    dist.all_reduce(high_low, dist.ReduceOp.MAX, mesh['replicate'].get_group() if use_fsdp else None)
    differ = mean_over_ranks((high_low[0] != -high_low[1]).float())
    if names := [name for name, d in zip(params, differ.tolist()) if d]:
        say(f'step {iter_num}: replicas differ in {names[0]}: a faulty device, or code that runs on some ranks only')
        finish_checkpoint()
        sys.exit(1)


stop_signal = 0     # of SIGTERM or Ctrl-C, once it has come


@torch.no_grad()
def evaluate():
    """Mean loss of each split, nats, over eval_iters batches of evenly spread windows; None if a signal came."""
    model.eval()
    means = {}
    for split in ('train', 'val'):
        windows, total = bins[split][2] - block_size, torch.zeros((), device=device)
        for k in range(rank, rank + eval_iters, world_size):
            j = k % eval_iters * batch_size + np.arange(batch_size)
            X, Y = read_windows(split, j * windows // (eval_iters * batch_size))
            with autocast:
                loss = model(X, Y).mean()
            total += loss * (k < eval_iters)    # a rank without a batch left still takes part, for FSDP's sake
            if mean_over_ranks(torch.full((), float(stop_signal), device=device)).item():   # all leave at one batch
                return None
        means[split] = mean_over_ranks(total).item() * world_size / eval_iters
    model.train()
    return means


# ---- saving: everything takes its name only when complete ------------------------------------------------------------
pending = None      # a sharded checkpoint being written: (future or None, folder)
saver_group = dist.new_group(backend='gloo') if distributed and checkpoint_async else None      # apart from training's
dots_dir, dots_rows = out / 'grad_dotprods', []     # rows: a dict of tensors per scored step, on rank 0
dump_steps = range(grad_dump_start_step, max_iters if grad_dump_end_step is None else grad_dump_end_step + 1,
                   grad_dump_step_interval)
barrier = dist.barrier if distributed else lambda: None     # no rank goes on before all are here


def finish_checkpoint():
    """Wait for a pending checkpoint; delete those past keep_checkpoints."""
    global pending
    if pending is None:
        return
    (future, folder), pending = pending, None
    if future is not None:
        future.result()             # an error of the background thread shows here
    if master_process:
        keep_newest(folder.parent, keep_checkpoints)


def save_checkpoint(last, best):
    """ckpt.pt and/or best.pt, or ckpt_dcp/step_N: all that continuing in any mode needs; all ranks participate."""
    global pending
    start = time.perf_counter()
    write_dots()
    full = checkpoint_format == 'full'
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)      # full: gathered tensor by tensor on rank 0
    tensors = {'model': {k: w for k, w in get_model_state_dict(raw_model, options=options).items() if k in params},
               'optimizer': get_optimizer_state_dict(raw_model, optimizer, options=options)}
    rest = dict(model_args=model_args, iter_num=iter_num, best_val_loss=best_val_loss, config=config, meta=meta,
                scaler=scaler.state_dict(), wandb_id=wandb_id)
    if full and master_process:
        tensors['model']['lm_head.weight'] = tensors['model']['transformer.wte.weight']     # one tensor, stored once
        # best.pt first: after a kill in between it is the newest, and the resumed run writes ckpt.pt at once
        names = ['best.pt'] * best + ['ckpt.pt'] * last
        write_file(out / names[0], lambda f: torch.save({**tensors, **rest}, f))
        if last and best:
            with open(out / 'best.pt', 'rb') as written:
                write_file(out / 'ckpt.pt', lambda f: shutil.copyfileobj(written, f))
    elif not full:
        finish_checkpoint()         # two at once would deadlock
        folder = out / 'ckpt_dcp' / f'step_{iter_num}'
        rest.update(param_groups=tensors['optimizer'].pop('param_groups'), best=best)
        resumed = checkpoint is not None and folder == Path(checkpoint)     # which turns out to be the best
        if master_process:
            if not resumed:
                shutil.rmtree(folder, ignore_errors=True)   # what a save that died left
                folder.mkdir(parents=True)
            write_file(folder / 'state.json', json.dumps(rest).encode())
        barrier()
        save, group = (dcp.async_save, {'process_group': saver_group}) if checkpoint_async else (dcp.save, {})
        future = None if resumed else save(tensors, checkpoint_id=folder, no_dist=not distributed, **group)
        pending = future if checkpoint_async else None, folder
        if not checkpoint_async:
            finish_checkpoint()
    what = ' and '.join(['checkpoint'] * last + ['best'] * best)
    say(f'{"saving" if pending else "saved"} step {iter_num} as {what}; '
        f'training waited {time.perf_counter() - start:.2f} s')


def collect_dots(columns, lr, val_loss, grad_norm):
    """A scored step becomes a row; columns: a (rows, batch_size) of each micro-batch. All ranks participate."""
    mine = torch.stack(columns)                                     # (micro_batches, rows, batch_size)
    ranks = [mine.clone() for _ in range(world_size)]
    if distributed:
        dist.all_gather(ranks, mine)
    table = torch.stack(ranks, 2).movedim(0, 1).flatten(1).cpu()    # (rows, samples of the global batch)
    if not table.isfinite().all():
        say(f'step {iter_num}: not scored, since the validation gradient is not finite in {dtype}')
    elif master_process:
        offsets = torch.from_numpy(train_offsets(iter_num, np.arange(samples_per_step)))
        coef = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip else 1.0
        row = dict(iter=iter_num, lr=lr, clip_coef=coef, val_loss=val_loss, grad_norm=grad_norm)
        row = {name: torch.tensor(value) for name, value in row.items()}
        row.update(offset=offsets, dot_product=table[:-1].sum(0), loss=table[-1])
        if ghost_per_param:
            row['dot_product_per_param'] = table[:-1]
        if ghost_val_resample:
            row['val_offset'] = torch.from_numpy(val_offsets(iter_num))
        dots_rows.append(row)


def write_dots():
    """The scored steps since the last call -> grad_dotprods/iter_NNNNNN.safetensors, N steps being done."""
    if dots_rows:
        columns = {name: torch.stack([row[name] for row in dots_rows]) for name in dots_rows[0]}
        content = to_safetensors(columns, {'parameters': json.dumps(ghost_names)})
        write_file(dots_dir / f'iter_{iter_num:06d}.safetensors', content)
        dots_rows.clear()


def dump_gradients(folder):
    """This step's gradients -> gradient_dumper/stepN/{sharded,sampled}; all ranks participate."""
    start, temporary = time.perf_counter(), folder.with_name(folder.name + '.tmp')
    if master_process:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / ('sharded' if grad_dump_save_first_n is None else 'sampled')).mkdir(parents=True)
    barrier()
    if grad_dump_save_first_n is None:
        gradients = {name: p.grad for name, p in params.items()}
        dcp.save(gradients, checkpoint_id=temporary / 'sharded', no_dist=not distributed)
    else:
        for name, p in params.items():      # one full gradient at a time
            full = p.grad.full_tensor() if use_fsdp else p.grad
            n = min(grad_dump_save_first_n, len(full))
            if master_process:
                content = to_safetensors({'gradient': full[:n].contiguous().cpu()})
                write_file(temporary / 'sampled' / f'{name}_first{n}.safetensors', content)
    barrier()
    if master_process:
        os.replace(temporary, folder)
    say(f'dumped the gradients of step {iter_num} in {time.perf_counter() - start:.2f} s')


# ---- the first writes: everything has been checked -------------------------------------------------------------------
if master_process and not eval_only:
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()     # one that is there may be another's
    except OSError as error:
        problem = f'out_dir={out_dir}: {error.strerror}: name a folder that can be written'
    if wandb_log and not problem:
        try:
            import wandb
            wandb_id = wandb.init(project=wandb_project, name=wandb_run_name, config=config, dir=out_dir, id=wandb_id,
                                  resume='allow').id
        except Exception as error:
            problem = f'wandb_log=True: {" ".join(str(error).split())}: run `wandb login`, or set WANDB_MODE=offline'
fail_if(problem)
if master_process and not eval_only:
    if leftovers:       # overwrite=True, or a restart before the first checkpoint
        say(f'starts anew, and deletes {", ".join(leftovers)} in {out_dir}')
    for name in leftovers:
        (os.remove if (out / name).is_symlink() or (out / name).is_file() else shutil.rmtree)(out / name)
    for folder in [dots_dir] * use_ghost + [out / 'gradient_dumper'] * grad_dump:
        folder.mkdir(exist_ok=True)
    write_file(out / 'config.json', json.dumps(config, indent=1).encode())
    if checkpoint is not None:
        forget_later(out, iter_num, evaluates=iter_num % eval_interval == 0 or iter_num >= max_iters)
    if use_ghost and not ghost_val_resample:
        offsets = val_offsets(0)
        X, Y = read_windows('ghost', offsets)
        content = to_safetensors({'offset': torch.from_numpy(offsets), 'tokens': torch.cat((X, Y[:, -1:]), 1).cpu()})
        write_file(dots_dir / 'valset.safetensors', content)


def log(record):
    """A line of log.jsonl, and wandb."""
    if master_process and not eval_only:
        with open(out / 'log.jsonl', 'a') as f:
            f.write(json.dumps({k: v if v is None or math.isfinite(v) else None for k, v in record.items()}) + '\n')
        if wandb_log:
            wandb.log({k: v for k, v in record.items() if k != 'iter' and v is not None}, step=record['iter'])


card = torch.cuda.get_device_name(device) if gpus else device
peak = peak_flops(card)
replicas = fsdp_replicate if use_fsdp else world_size
hsdp = f'HSDP {fsdp_replicate} x {world_size // fsdp_replicate}'
mode = 'plain' if not distributed else 'DDP' if use_ddp else 'FSDP' if fsdp_replicate == 1 else hsdp
held, whole = sum((p.to_local() if use_fsdp else p).numel() for p in params.values()) / 2**18, num_params / 2**18
compiled = compile if compile == 'blocks' else 'on' if compile else 'off'
say(f'{mode}, {world_size} x {card}, {dtype}, compile {compiled}, fused AdamW {"yes" if fused else "no"}')
say(f'{num_params:,} parameters; rank 0 holds MiB of parameters + gradients + optimizer state: '
    f'{held:.1f} + {held:.1f} + {2 * held:.1f}; with DDP: {whole:.1f} + {whole:.1f} + {2 * whole:.1f}')
say(f'tokens per step: micro-batch {batch_size} x block {block_size} x {micro_batches} micro-batches '
    f'x {world_size} ranks = {tokens_per_step:,}')
say(f'{max_iters:,} steps see {max_iters * tokens_per_step:,} tokens, '
    f'{max_iters * tokens_per_step / bins["train"][2]:.2f} epochs of {dataset}'
    + f'; step {iter_num:,} is reached already, so there is nothing to train' * (iter_num >= max_iters))

# ---- the loop --------------------------------------------------------------------------------------------------------
def on_signal(number, frame):   # finish the step, save, exit; the same signal again kills as usual
    global stop_signal
    stop_signal = number
    signal.signal(number, signal.SIG_DFL)
    if master_process:
        os.write(2, b'stopping after this step; the same signal again kills at once\n')    # print is not reentrant


signal.signal(signal.SIGINT, on_signal)
signal.signal(signal.SIGTERM, on_signal)
model.train()
X, Y = train_batch(iter_num, 0)
if use_ddp and not eval_only:
    # DDP lays out its buckets anew after its first backward pass, and sums over ranks in another order from then on;
    # so that comes before the first step, or a resumed run would differ from an unbroken one in the last bits
    zeros = torch.zeros(len(ghosts), batch_size, device=device, requires_grad=True) if use_ghost else None
    with autocast:
        loss = model(X, Y, zeros)
    loss.mean().backward()
    optimizer.zero_grad(set_to_none=False)
saved_at = 0 if str(checkpoint).endswith('best.pt') else start_iter     # from best.pt: ckpt.pt is older, or missing
stopping, timed_from, clock = False, start_iter, time.perf_counter()
while True:
    lr = lr_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr

    done, improved = iter_num >= max_iters, False
    evaluating = (iter_num % eval_interval == 0 or done or eval_only) and not stopping
    if evaluating and (means := evaluate()) is None:
        stopping = True
    elif evaluating:
        improved, best_val_loss = means['val'] < best_val_loss, min(best_val_loss, means['val'])
        say(f'evaluated after {iter_num} steps: train loss {means["train"]:.4f}, val loss {means["val"]:.4f}')
        log(dict(iter=iter_num, tokens=iter_num * tokens_per_step, train_loss=means['train'], val_loss=means['val']))
    if eval_only:
        break
    due = iter_num % checkpoint_interval == 0 if checkpoint_interval else evaluating and always_save_checkpoint
    save_last = (due or done or stopping or improved and not checkpoint_interval) and iter_num > saved_at
    if iter_num > 0 and (save_last or improved):
        save_checkpoint(save_last, improved)
        saved_at = iter_num
    if done or stopping:
        break
    if evaluating or saved_at == iter_num:
        timed_from, clock = iter_num, time.perf_counter()

    if dropout > 0:     # masks depend on (seed, step, rank) alone: a resumed run draws the same
        torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))
    loss_scale = scaler.get_scale()     # 1 unless float16; there it is as large as training bears, hence the eighth
    val_scale = loss_scale * ghost_val_batch_size / samples_per_step / 8 if scaler.is_enabled() else 1
    scored, val_loss = use_ghost and iter_num % ghost_interval == 0, torch.zeros((), device=device)
    if scored:          # ghost_* <- the gradient of the validation loss over all ranks' rows
        model.eval()
        scorer = model if use_fsdp else raw_model       # DDP would lay out its buckets by this pass
        offsets = val_offsets(iter_num)[rank * ghost_rows:(rank + 1) * ghost_rows]
        for i in range(0, ghost_rows, batch_size):
            sync_gradients(last=i + batch_size >= ghost_rows)
            with autocast:
                loss = scorer(*read_windows('ghost', offsets[i:i + batch_size])).sum() / ghost_rows
            (loss * val_scale).backward()
            val_loss += loss.detach()
        with torch.no_grad():
            for p, ghost in ghosts:
                ghost.copy_((p.grad if use_fsdp else mean_over_ranks(p.grad)) / val_scale)
        optimizer.zero_grad(set_to_none=not use_ddp)
        model.train()

    train_loss, columns = torch.zeros((), device=device), []
    for micro in range(micro_batches):
        sync_gradients(last=micro == micro_batches - 1)
        zeros = torch.zeros(len(ghosts), batch_size, device=device, requires_grad=True) if scored else None
        with autocast:
            losses = model(X, Y, zeros)                                 # (batch_size,)
            loss = losses.mean() / micro_batches
        following = micro + 1   # fetched while the GPU works
        X, Y = train_batch(iter_num + following // micro_batches, following % micro_batches)
        scaler.scale(loss).backward()
        train_loss += loss.detach()
        if scored:      # zeros.grad is of the scaled mean loss: undo that, so that values depend on neither
            dots = zeros.grad * (micro_batches * batch_size / loss_scale)
            columns.append(torch.cat((dots if ghost_per_param else dots.sum(0, keepdim=True), losses.detach()[None])))

    scaler.unscale_(optimizer)      # nothing unless float16
    if grad_dump and iter_num in dump_steps and iter_num not in dumped:
        dump_gradients(out / 'gradient_dumper' / f'step{iter_num}')
    grad_norm = torch.nn.utils.clip_grad_norm_(params.values(), grad_clip or math.inf)
    grad_norm = (grad_norm.full_tensor() if use_fsdp else grad_norm).to(device)
    # the step's only wait for the GPU, but for a loss scale; all ranks get the same numbers and so decide alike
    stop = torch.full((), stop_signal, device=device)
    numbers = mean_over_ranks(torch.stack([n.float() for n in (train_loss, val_loss, grad_norm, stop)]))
    train_loss, val_loss, grad_norm, stop = numbers.tolist()
    stopping, finite = stop > 0, math.isfinite(train_loss) and math.isfinite(grad_norm)
    overflow = scaler.is_enabled() and math.isfinite(train_loss) and loss_scale > 1     # everyday life of a loss scale
    if not (finite or overflow):
        say(f'step {iter_num}: loss {train_loss}, gradient norm {grad_norm}: ' + (
            'skipped' if on_nonfinite == 'skip' else 'stopped before the update; '
            'try a lower learning_rate, or on_nonfinite=skip to leave such steps out'))
        if on_nonfinite == 'stop':
            write_dots()
            finish_checkpoint()
            sys.exit(1)
    if finite:
        scaler.step(optimizer)
        scaler.update()
    elif scaler.is_enabled():   # not by what this rank's own gradients held: the scale is the same on all
        scaler.update(loss_scale * scaler.get_backoff_factor())
        scaler.load_state_dict({**scaler.state_dict(), '_growth_tracker': 0})
    optimizer.zero_grad(set_to_none=not use_ddp)    # DDP's stay in its buckets: freed, the next would be a second copy

    if scored and finite:
        collect_dots(columns, lr, val_loss, grad_norm)
    iter_num += 1
    if iter_num % ghost_save_interval == 0:
        write_dots()
    if replicas > 1 and check_sync_interval and iter_num % check_sync_interval == 0:
        compare_replicas()
    if (iter_num - 1) % log_interval == 0 or iter_num == max_iters:
        seconds = (time.perf_counter() - clock) / (iter_num - timed_from)
        timed_from, clock = iter_num, time.perf_counter()
        mfu = flops_per_step / seconds / (peak * world_size) if peak else None
        memory = torch.cuda.max_memory_allocated() / 2**30 if gpus else None
        left = int(seconds * (max_iters - iter_num))
        say(f'step {iter_num - 1}: loss {train_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.3f}, {seconds * 1000:.1f} ms, '
            f'{tokens_per_step / seconds:,.0f} tokens/s, MFU {f"{mfu:.1%}" if mfu else "n/a"}, '
            f'{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left', passing=True)
        log(dict(iter=iter_num - 1, tokens=iter_num * tokens_per_step, loss=train_loss, lr=lr, grad_norm=grad_norm,
                 ms=seconds * 1000, tokens_per_s=tokens_per_step / seconds, mfu=mfu, memory_gib=memory))
    if iter_num == start_iter + 1 and gpus:
        stays, peak_memory = (n / 2**20 for n in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        say(f'rank 0 after the first step: {stays:,.1f} MiB allocated, peak {peak_memory:,.1f}')
    if pending and (pending[0] is None or pending[0].done()):
        finish_checkpoint()

finish_checkpoint()
if wandb_log and master_process and not eval_only:
    wandb.finish()
if distributed:
    dist.barrier()      # lets gloo's threads drop their last tensors: in an interpreter that is ending that would abort
    dist.destroy_process_group()
if stopping:
    say(f'stopped by a signal after {iter_num} steps' + '; --init_from=auto goes on from there' * (not eval_only))
    sys.exit(128 + (stop_signal or signal.SIGTERM))
