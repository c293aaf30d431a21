"""
Train a GPT-2 on one machine or many; the whole run, top to bottom.

one process   python train.py config/train_shakespeare_char.py
on a CPU      python train.py config/train_shakespeare_char_cpu.py
DDP           torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
FSDP          torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --use_fsdp=True
HSDP          ... --use_fsdp=True --fsdp_replicate=2
ghost         ... --use_ghost=True        every sample's gradient dot product with the validation gradient, in any mode
gradients     ... --grad_dump=True        the gradients of chosen steps, in any mode
go on         ... --init_from=resume      or auto: resume if there is a checkpoint in out_dir, else start

Every global of the next section is set by a config file of `name = value` lines or by --name=value; --help lists them.
All modes compute the same up to rounding: for one global batch they give the same losses and weights, but for dropout,
whose masks differ from rank to rank.
"""
import math
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from checkpoint import (SHAPE, begin_out_dir, catch_signals, check_out_dir, connect, excepthook, exit_codes, find_start,
                        finish_saving, load_start, log_record, on_rank0, save_checkpoint, save_gradients)
from configurator import check_numbers, configure, fail, one_line, tell, under_torchrun
from data.bins import check_tokens, find_data, hash64, read_tokens, sample_offsets
from kernels import peak_flops
from model import GPT, GPTConfig
from muon import Muon
from profiles import profile_step, record_memory
from weights import OPENAI

# ---- run -------------------------------------------------------------------------------------------------------------
out_dir = 'out'                     # everything the run writes goes here
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' (resume if there is a checkpoint, else scratch) |
                                    # 'gpt2' | 'gpt2-medium' | 'gpt2-large' | 'gpt2-xl' | the weights in a folder, in
                                    # Hugging Face form or with a checkpoint, or in a .pt file
new_tokenizer = False               # let weights be trained on a dataset of other tokens than they know
overwrite = False                   # let a new run delete an earlier run's files in out_dir; 'auto' does so unasked if
                                    # there is no checkpoint, since the run may have died before its first
seed = 1337                         # of weights, data order and dropout
eval_interval = 2000                # steps between evaluations
eval_iters = 200                    # batches per split and evaluation
eval_only = False                   # evaluate once and exit; writes nothing
log_interval = 1                    # steps between log lines
check_sync_interval = 0             # steps between bitwise comparisons of the replicas' weights; 0 never
on_nonfinite = 'stop'               # 'stop' | 'skip': what to do with a step whose loss or gradient norm is not finite,
                                    # and after an evaluation that is not: then nothing is saved
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
rope = False                        # rotary positions in place of learned ones
qk_norm = False                     # queries and keys of length sqrt(n_embd / n_head)
# ---- optimizer -------------------------------------------------------------------------------------------------------
optimizer = 'adamw'                 # 'adamw' | 'muon' for the blocks' matrices and AdamW for the rest; muon.py
learning_rate = 6e-4                # maximum
max_iters = 600000                  # optimizer steps in all
weight_decay = 1e-1                 # of matrices and embeddings; 0 disables
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0                     # largest global gradient norm; 0 disables
decay_lr = True                     # False: learning_rate throughout
decay = 'cosine'                    # after warm-up: 'cosine' | 'wsd' (stable, decay): 60% constant, 40% a line
warmup_iters = 2000                 # steps of linear warm-up
lr_decay_iters = 600000             # step at which it has come down to min_lr; about max_iters
min_lr = 6e-5                       # about learning_rate / 10
scale_lr = False                    # multiply learning_rate and min_lr by world size x micro-batches per rank
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' | 'cpu' | 'cuda' | 'cuda:1' | 'mps'
dtype = 'auto'                      # 'auto' (bfloat16 on a GPU that has it) | 'float32' | 'bfloat16' | 'float16'
compile = 'auto'                    # 'auto' (on a GPU) | True | False: torch.compile, a minute at the start | 'blocks':
                                    # one by one: 1% slower, and soon done if there are many
backend = 'auto'                    # 'auto' | 'nccl' | 'gloo'
profile_steps = 0                   # of this run, from its third step on: each rank's trace and table go into profile/
profile_memory = False              # record a GPU's allocations: into profile/ after those steps, or at out of memory
timeout_minutes = 60                # after which a rank that waits for another gives up; rank 0 may download, or save
# ---- FSDP ------------------------------------------------------------------------------------------------------------
use_fsdp = False                    # shard parameters, gradients and optimizer state over the ranks; compile: 'blocks'
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
sys.excepthook = excepthook(out_dir)    # a full disk, for example, is one line

# ---- ranks and device ------------------------------------------------------------------------------------------------
distributed = under_torchrun()
rank, local_rank, world_size = 0, 0, 1
if distributed:
    rank, local_rank, world_size = (int(os.environ[name]) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
master_process = rank == 0          # prints, and writes what is not sharded
use_ddp = distributed and not use_fsdp

def require(condition, message):
    """Every check of the settings: if the condition does not hold, the run ends with this line."""
    if not condition:
        fail(message)

def say(message, passing=False):
    """Rank 0 prints a line. On a terminal, a passing one is overwritten by the next."""
    if master_process:
        tell(message, sys.stdout, passing)

has = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
if device == 'auto':
    device = next(kind for kind in has if has[kind])
device_type = device.split(':')[0]
require(re.fullmatch(r'cpu|mps|cuda(:\d+)?', device) and has[device_type],
        f'device={device}: expected auto, cpu, cuda, cuda:N or mps, and this machine has {[d for d in has if has[d]]}')
gpus = torch.cuda.device_count() if device_type == 'cuda' else 0
has_bfloat16 = device_type == 'cpu' or (gpus > 0 and torch.cuda.is_bf16_supported(including_emulation=False))
if dtype == 'auto' and not gpus:
    dtype = 'float32'
elif dtype == 'auto':
    dtype = 'bfloat16' if has_bfloat16 else 'float16'
if compile == 'auto':
    compile = gpus > 0
config.update(device=device, dtype=dtype, compile=compile)

# ---- checks: all come before the first write -------------------------------------------------------------------------
check_numbers(config, counts='''eval_interval eval_iters log_interval gradient_accumulation_steps batch_size block_size
    n_layer n_head n_embd timeout_minutes
    fsdp_replicate
    ghost_val_batch_size ghost_interval ghost_save_interval
    grad_dump_step_interval grad_dump_save_first_n
    ''')
choices = dict(on_nonfinite=('stop', 'skip'), checkpoint_format=('full', 'sharded'), backend=('auto', 'nccl', 'gloo'),
               data_order=('random', 'epoch'), dtype=('auto', 'float32', 'bfloat16', 'float16'),
               compile=('auto', True, False, 'blocks'), optimizer=('adamw', 'muon'),
               decay=('cosine', 'wsd'))
for name, values in choices.items():
    require(config[name] in values, f'{name}={config[name]!r}: expected {" or ".join(map(repr, values))}')
require(out_dir, 'out_dir is empty: name a folder')
require(dataset, 'dataset is empty: name a folder')
require(init_from in ('scratch', 'resume', 'auto', *OPENAI) or os.path.exists(init_from),
        f'init_from={init_from}: expected scratch, resume, auto, {", ".join(OPENAI)}, a folder or a .pt file')
require(not wandb_log or find_spec('wandb'), 'wandb_log=True needs the package: pip install wandb')
require(not decay_lr or min_lr <= learning_rate, f'min_lr={min_lr} is above learning_rate={learning_rate}: '
        f'--min_lr={learning_rate / 10:g}, or --decay_lr=False')
require(n_embd % n_head == 0, f'n_embd={n_embd} is not divisible by n_head={n_head}: '
        f'--n_embd={math.ceil(n_embd / n_head) * n_head}')
require(not rope or n_embd // n_head % 2 == 0,
        f'rope=True turns pairs, and n_embd / n_head = {n_embd // n_head} is odd: --n_embd={n_embd + n_head}')
rounded_up = math.ceil(gradient_accumulation_steps / world_size) * world_size
require(gradient_accumulation_steps % world_size == 0,
        f'gradient_accumulation_steps={gradient_accumulation_steps} counts micro-batches of all {world_size} ranks '
        f'and must be a multiple of that: --gradient_accumulation_steps={rounded_up}')
require(device_type != 'mps' or not distributed, 'mps takes one process; use --device=cpu for several')
require(not distributed or not gpus or int(os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)) <= gpus,
        f'more processes than GPUs: --nproc_per_node={gpus}')
require(backend != 'nccl' or gpus, f'backend=nccl needs GPUs and device is {device}: --backend=gloo')
require(dtype != 'bfloat16' or has_bfloat16, f'{device} has no bfloat16: --dtype=float16 or float32')
require(dtype != 'float16' or device_type != 'mps', 'dtype=float16 does not train on mps: --dtype=float32')
require(gpus or not profile_memory, f"profile_memory=True records a GPU's allocations, and device is {device}")
require(not checkpoint_async or checkpoint_format == 'sharded',
        'checkpoint_async=True needs --checkpoint_format=sharded')
if use_fsdp:
    require(distributed, 'use_fsdp=True: start by torchrun --standalone --nproc_per_node=N train.py ...')
    require(world_size % fsdp_replicate == 0, f'HSDP: world size {world_size} is not a multiple of '
            f'fsdp_replicate={fsdp_replicate}; world size = fsdp_replicate x shards')
    require(optimizer == 'adamw' or not fsdp_cpu_offload,
            'fsdp_cpu_offload=True would make Muon multiply matrices on the CPU: --optimizer=adamw')
else:
    require(fsdp_replicate == 1, f'fsdp_replicate={fsdp_replicate} needs --use_fsdp=True')
    require(not fsdp_cpu_offload, 'fsdp_cpu_offload=True needs --use_fsdp=True')
if grad_dump:
    require(grad_dump_end_step is None or grad_dump_end_step >= grad_dump_start_step,
            f'grad_dump_end_step={grad_dump_end_step} comes before grad_dump_start_step={grad_dump_start_step}')
    require(max_iters == 0 or grad_dump_start_step < max_iters,
            f'grad_dump_start_step={grad_dump_start_step}: the last step of max_iters={max_iters} is {max_iters - 1}')

# ---- the dataset -----------------------------------------------------------------------------------------------------
with one_line():        # a ValueError inside, which is about the user's input, ends the run with its line
    bins, metas, meta = find_data(config)
if use_ghost:
    from data.bins import find_bin, fingerprint, lasting_name
    with one_line():
        bins['ghost'], metas['ghost'] = find_bin(ghost_val_dataset or dataset, 'val')
    config['ghost_val_dataset'] = lasting_name(ghost_val_dataset)
    ghost_bins = dict(train_bin=meta['fingerprint'], val_bin=fingerprint(bins['ghost'][0], metas['ghost']))
    ghost_tokenizer = metas['ghost'].get('tokenizer')   # nanoGPT's folders may not record it
    require(ghost_tokenizer == meta.get('tokenizer', ghost_tokenizer) or ghost_tokenizer is None,
            f'ghost_val_dataset={ghost_val_dataset} needs the tokenizer of {dataset}: the same ids mean other text')
    ghost_per_rank = math.ceil(ghost_val_batch_size / world_size)       # validation samples of a rank
    if ghost_per_rank > batch_size:
        ghost_per_rank = math.ceil(ghost_per_rank / batch_size) * batch_size    # in whole micro-batches
    fits = ghost_per_rank * world_size
    if fits != ghost_val_batch_size and 'ghost_val_batch_size' not in given:
        say(f'ghost_val_batch_size is {fits} here, the next above {ghost_val_batch_size} that fits')
        ghost_val_batch_size = config['ghost_val_batch_size'] = fits
    require(ghost_val_batch_size == fits, f'ghost_val_batch_size={ghost_val_batch_size} must be a multiple of the '
            f'{world_size} ranks, above {world_size * batch_size} one of {world_size * batch_size}: '
            f'--ghost_val_batch_size={fits}')

# ---- connect the ranks -----------------------------------------------------------------------------------------------
if deterministic:
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True)
if gpus:
    if distributed or device == 'cuda':
        device = f'cuda:{local_rank}'
    torch.cuda.set_device(device)
if distributed:
    if backend == 'auto':       # nccl carries tensors on GPUs, gloo those in host memory: checkpoints', offloaded ones
        backend = 'cpu:gloo,cuda:nccl' if gpus else 'gloo'
    timeout = connect(backend, timeout_minutes, torch.device(device) if gpus else None)

def mean_over_ranks(tensor):
    """A new tensor, the same on every rank; all ranks participate."""
    total = tensor.clone()
    if distributed:
        dist.all_reduce(total)      # the sum
    return total / world_size

def my_shard(tensor):
    """What this rank holds of a tensor: its shard of a DTensor, all of an ordinary one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()

def full(tensor):
    """The whole of a tensor: a DTensor is gathered, and all ranks participate; an ordinary one is whole as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

# ---- where to start --------------------------------------------------------------------------------------------------
with one_line(f'init_from={init_from}: '):      # rank 0 alone looks at the disk, and reads or makes weights
    start = find_start(config, given, meta)
for line in start['told']:
    say(line)
model_args, iter_num, best_val_loss = start['model_args'], start['iter_num'], start['best_val_loss']
shape = {name: model_args[name] for name in SHAPE}
config.update(shape)
globals().update(shape)     # a checkpoint prescribes these; find_start has refused a command that says otherwise
vocab_size, start_iter, wandb_id = model_args['vocab_size'], iter_num, start['wandb_id']
with one_line():
    for split in bins:
        check_tokens(bins[split], metas[split], block_size, vocab_size)
micro_batches = gradient_accumulation_steps // world_size       # per rank and step
samples_per_step = gradient_accumulation_steps * batch_size     # over all ranks
tokens_per_step = samples_per_step * block_size

def samples_before(step):
    """How many samples training has seen before a step; a run that was resumed may have had other steps before."""
    return start['samples_seen'] + (step - start_iter) * samples_per_step

def train_offsets(step, j):
    """Token offsets, int64 (n,), of samples j (n,) of an optimizer step over all ranks."""
    return sample_offsets(data_order, seed, step, j, samples_before(step), bins['train'][2], block_size)

def read_windows(split, offsets):
    """Inputs and targets on the device, int64 (len(offsets), block_size) each, the targets one token later."""
    with one_line(every_rank=True):     # what one rank alone has read, it reports itself
        tokens = torch.from_numpy(read_tokens(bins[split], offsets, block_size + 1, vocab_size))
    if gpus:
        tokens = tokens.pin_memory()    # so that the copy below overlaps with the GPU's work
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]

def train_batch(step, micro):
    """This rank's inputs and targets of a micro-batch."""
    return read_windows('train', train_offsets(step, (micro * world_size + rank) * batch_size + np.arange(batch_size)))

# ---- model: compiled, sharded, filled, wrapped -----------------------------------------------------------------------
if profile_memory and not eval_only:
    record_memory(out_dir, rank)
with torch.device('meta'):      # shapes without memory: if it is sharded, no rank ever holds all of it
    model = raw_model = GPT(GPTConfig(**model_args, dropout=dropout))   # DDP wraps `model`; else they are the same
if use_ghost:
    with one_line('use_ghost=True: '):
        ghost_names = raw_model.add_ghost()     # of the parameters that are scored, in the order of the dots
num_params = raw_model.num_params()
flops_per_step = raw_model.flops_per_token() * tokens_per_step
mode = 'DDP' if use_ddp else 'plain'
replicas, replica_group = world_size, None      # how many ranks hold the same numbers, and which (None: all)
weights_device = device

if fsdp_activation_checkpointing:       # forget most of the forward pass and compute it again in the backward pass
    raw_model.recompute(selective=fsdp_activation_checkpointing == 'selective')
if use_fsdp and compile:
    compile = 'blocks'                  # FSDP gathers parameters between them
if compile == 'blocks':
    for block in raw_model.transformer.h:
        block.compile(dynamic=False)
    raw_model.loss = torch.compile(raw_model.loss, dynamic=False)       # a method: final norm, head and cross-entropy
elif compile:
    raw_model.compile(dynamic=False)    # in place, so that names in checkpoints stay
if use_fsdp:
    # A unit is one or more blocks. Its parameters are gathered just before it computes and freed afterwards, in the
    # forward and again in the backward pass. Its gradients are averaged and scattered: each rank keeps its shard. HSDP:
    # the ranks of a row of the mesh share one copy of the model, and rows then average their shards of the gradients.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from checkpoint import make_mesh
    shards = world_size // fsdp_replicate
    mesh = make_mesh(device_type, timeout, replicate=fsdp_replicate, shard=shards)
    replicas, replica_group = fsdp_replicate, mesh['replicate'].get_group()
    policy = dict(mesh=mesh['shard'], reshard_after_forward=fsdp_reshard_after_forward, offload_policy=OffloadPolicy())
    mode = 'FSDP'
    if fsdp_replicate > 1:
        policy['mesh'] = mesh
        mode = f'HSDP {fsdp_replicate} x {shards}'
    if fsdp_cpu_offload:
        policy['offload_policy'] = CPUOffloadPolicy(pin_memory=gpus > 0)
        weights_device = 'cpu'
    forward_dtype = None if dtype == 'float32' else getattr(torch, dtype)       # the policy casts; autocast is off
    policy['mp_policy'] = MixedPrecisionPolicy(forward_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    unit, unit_params = [], 0
    for block in raw_model.transformer.h:
        unit.append(block)
        unit_params += sum(p.numel() for p in block.parameters() if p.requires_grad)
        if unit_params >= fsdp_min_num_params or block is raw_model.transformer.h[-1]:
            fully_shard(unit, **policy)
            unit, unit_params = [], 0
    fully_shard(raw_model, **policy)    # the last unit: embeddings, final norm and head
raw_model.to_empty(device=weights_device)
raw_model.tie()                         # to_empty has made two tensors of the embedding and the head
if rope:
    raw_model.turns = raw_model.turns.to(device)    # also where parameters stay in host memory
params = {name: p for name, p in raw_model.named_parameters() if p.requires_grad}     # tied ones once

fused = device_type in ('cuda', 'cpu')
if optimizer == 'muon':
    opt = Muon(raw_model.param_groups(weight_decay, muon=True), lr=learning_rate, betas=(beta1, beta2), fused=fused)
else:
    opt = torch.optim.AdamW(raw_model.param_groups(weight_decay), lr=learning_rate, betas=(beta1, beta2), fused=fused)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == 'float16')
with one_line():        # fills all of them: rank 0's weights and state, or of a sharded checkpoint every rank its part
    load_start(start, raw_model, opt, scaler)
assert raw_model.lm_head.weight is raw_model.transformer.wte.weight, 'wrapping or loading has untied the embeddings'
if use_ddp:
    # Each rank holds the whole model. DDP collects gradients in buckets, and averages a bucket over the ranks as soon
    # as the backward pass has filled it.
    raw_model._ddp_params_and_buffers_to_ignore = ['turns']     # rotary tables: every rank has made them
    model = torch.nn.parallel.DistributedDataParallel(raw_model, device_ids=[local_rank] if gpus else None,
                                                      gradient_as_bucket_view=True)
autocast = nullcontext()
if dtype != 'float32' and not use_fsdp:
    autocast = torch.autocast(device_type, getattr(torch, dtype))

def sync_gradients(last):
    """
    Before a backward pass. The ranks average their gradients in the step's last one only; before, each adds up its own.
    Where the model is sharded, these are whole gradients, larger than a shard.
    """
    if use_ddp:
        model.require_backward_grad_sync = last
    if use_fsdp:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or fsdp_reshard_after_forward)

def compare_replicas():
    """End the run if a parameter, or a shard, has bits of another sum on a rank that holds a copy of it."""
    sums = [my_shard(p).view(torch.int32).sum(dtype=torch.int64) for p in params.values()]
    sums = torch.stack(sums).to(device)                                 # (parameters,)
    high_low = torch.stack((sums, -sums))       # the largest of -sums is the smallest of sums: one exchange for both
    dist.all_reduce(high_low, dist.ReduceOp.MAX, replica_group)
    differ = mean_over_ranks((high_low[0] != -high_low[1]).float())
    names = [name for name, d in zip(params, differ.tolist()) if d > 0]
    if names:
        say(f'step {iter_num}: replicas differ in {names[0]}: a faulty device, or code that runs on some ranks only')
        finish_writing()
        sys.exit(1)

# ---- learning rate ---------------------------------------------------------------------------------------------------
if scale_lr:
    learning_rate *= gradient_accumulation_steps
    min_lr *= gradient_accumulation_steps

def lr_at(step):
    """Learning rate of a step: linear from above 0 to the maximum in warmup_iters steps, then by decay to min_lr."""
    if not decay_lr:
        return learning_rate
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    if step >= lr_decay_iters:
        return min_lr
    way = (step - warmup_iters) / (lr_decay_iters - warmup_iters)       # 0 to 1
    if decay == 'cosine':
        height = (1 + math.cos(math.pi * way)) / 2                      # 1 to 0
    else:
        height = min(1, (1 - way) / 0.4)
    return min_lr + (learning_rate - min_lr) * height

# ---- ghost -----------------------------------------------------------------------------------------------------------
# What is <g_i, G>, with g_i the gradient of sample i's loss and G that of the validation loss? Let sample i have the
# parameters W + s_i G, where s_i is 0: nothing changes, but d l_i / d s_i, of its loss l_i, is <g_i, G>. So in a
# scored step: one pass over the validation batch, whose gradient becomes the model's ghost_* parameters (G); then the
# ordinary passes of training, with zeros s going into the model, whose gradients are the dot products. model.py shows
# it layer by layer.
if use_ghost:
    from checkpoint import gather_samples, write_scored, write_valset
    ghost_windows = bins['ghost'][2] - block_size
    require(ghost_val_batch_size <= ghost_windows,
            f'ghost_val_batch_size={ghost_val_batch_size}: {bins["ghost"][0]} has only {ghost_windows:,} windows')
    ghost_of = {name.replace('ghost_', ''): p for name, p in raw_model.named_parameters() if 'ghost_' in name}
    ghost_pairs = [(params[name], ghost_of[name]) for name in ghost_names]      # (a parameter W, its G)
    ghost_scoring = True        # whether this step is scored
    ghost_columns = []          # of each micro-batch of this step: its dots and losses
    ghost_unwritten = []        # scored steps: a dict each
    NO_STEP = 2**64 - 1         # in the hash, in the place of training's step

def ghost_offsets(step):
    """Token offsets of the validation samples of all ranks: the same at every step unless they are resampled."""
    draw = hash64(seed, NO_STEP, step if ghost_val_resample else 0, np.arange(ghost_val_batch_size))
    return (draw % np.uint64(ghost_windows)).astype(np.int64)

def ghost_begin_step():
    """If this step is scored, ghost_* <- the gradient of the mean validation loss; all ranks participate."""
    global ghost_scoring, ghost_val_loss
    if iter_num == start_iter and master_process and not ghost_val_resample:
        write_valset(out_dir, ghost_offsets(0), *read_windows('ghost', ghost_offsets(0)), iter_num)
    ghost_scoring = iter_num % ghost_interval == 0
    ghost_columns.clear()
    if not ghost_scoring:
        return
    scale = 1
    if scaler.is_enabled():     # float16's scale sits near overflow: each sample's loss gets an eighth of it
        scale = loss_scale * ghost_val_batch_size / samples_per_step / 8
    ghost_val_loss = torch.zeros((), device=device)
    offsets = ghost_offsets(iter_num)[rank * ghost_per_rank:(rank + 1) * ghost_per_rank]
    model.eval()
    for i in range(0, ghost_per_rank, batch_size):
        sync_gradients(last=i + batch_size >= ghost_per_rank)
        with autocast:          # not through DDP, whose buckets are laid out for training's passes: averaged below
            loss = raw_model(*read_windows('ghost', offsets[i:i + batch_size])).sum() / ghost_per_rank
        (loss * scale).backward()
        ghost_val_loss += loss.detach()
    with torch.no_grad():
        for p, ghost in ghost_pairs:
            gradient = mean_over_ranks(p.grad) if use_ddp else my_shard(p.grad)
            torch.div(gradient, scale, out=my_shard(ghost))     # as DTensors each would cost the host 0.15 ms
    opt.zero_grad(set_to_none=not use_ddp)
    model.train()

def ghost_s():
    """What goes into the model beside a micro-batch: zeros (parameters, batch_size), or None if it is not scored."""
    global ghost_zeros
    ghost_zeros = None
    if use_ghost and ghost_scoring:
        ghost_zeros = torch.zeros(len(ghost_names), batch_size, device=device, requires_grad=True)
    return ghost_zeros

def ghost_end_micro_batch(losses):
    """After the backward pass of a micro-batch with these losses (batch_size,): keeps its dots, if it is scored."""
    if ghost_scoring:   # the gradients are of a scaled mean of losses: back to each sample's own loss
        dots = ghost_zeros.grad * (micro_batches * batch_size / loss_scale)     # (parameters, batch_size)
        if not ghost_per_param:
            dots = dots.sum(0, keepdim=True)                                    # (1, batch_size)
        ghost_columns.append(torch.cat((dots, losses.detach()[None])))

def ghost_end_step(finite):
    """After a step: if it was scored and finite, all ranks' dots become a record to write; all ranks participate."""
    if ghost_scoring and finite:
        found = gather_samples(ghost_columns)                   # (parameters or 1, and 1 for the losses; global batch)
        val_loss = mean_over_ranks(ghost_val_loss).item()
        if found.isfinite().all():
            clip_coef = min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip else 1.0      # as clip_grad_norm_ has it
            record = dict(iter=iter_num, lr=lr, clip_coef=clip_coef, val_loss=val_loss, grad_norm=grad_norm,
                          dot_product=found[:-1].sum(0), loss=found[-1],
                          offset=train_offsets(iter_num, np.arange(samples_per_step)))
            if ghost_per_param:
                record['dot_product_per_param'] = found[:-1]
            if ghost_val_resample:
                record['val_offset'] = ghost_offsets(iter_num)
            ghost_unwritten.append(record)
        else:
            say(f'step {iter_num}: not scored, since the validation gradient is not finite in {dtype}')
    if (iter_num + 1) % ghost_save_interval == 0:
        write_scored(out_dir, ghost_unwritten, ghost_names, ghost_bins, iter_num + 1)

# ---- gradient dumps --------------------------------------------------------------------------------------------------
def dump_gradients():
    """This step's gradients -> gradient_dumper/stepN, if it is one to dump and not there yet; all ranks participate."""
    last_step = max_iters - 1 if grad_dump_end_step is None else grad_dump_end_step
    if iter_num in range(grad_dump_start_step, last_step + 1, grad_dump_step_interval):
        began = time.perf_counter()
        gradients = {name: p.grad for name, p in params.items()}
        if save_gradients(Path(out_dir, 'gradient_dumper', f'step{iter_num}'), gradients, grad_dump_save_first_n):
            say(f'dumped the gradients of step {iter_num} in {time.perf_counter() - began:.2f} s')

# ---- evaluation ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate():
    """Mean loss of each split, nats, over eval_iters batches of evenly spread windows; None if a signal came."""
    model.eval()
    means = {}
    for split in ('train', 'val'):
        windows = bins[split][2] - block_size
        total = torch.zeros((), device=device)
        for k in range(0, eval_iters, world_size):
            batch = (k + rank) % eval_iters
            j = batch * batch_size + np.arange(batch_size)
            X, Y = read_windows(split, j * windows // (eval_iters * batch_size))
            with autocast:
                loss = model(X, Y).mean()
            if k + rank < eval_iters:       # a rank with no batch left still computes one, since it may hold shards
                total += loss
            signals = mean_over_ranks(torch.full((), float(len(stop_signals)), device=device))
            if signals.item() > 0:          # all ranks leave at the same batch
                return None
        means[split] = mean_over_ranks(total).item() * world_size / eval_iters      # the sum over all batches / number
    model.train()
    return means

@torch.no_grad()
def loss_is_finite():
    """Whether the weights give a finite loss, on the batch that comes next; all ranks participate."""
    model.eval()
    with autocast:
        loss = mean_over_ranks(model(X, Y).mean())
    model.train()
    return math.isfinite(loss.item())

# ---- saving ----------------------------------------------------------------------------------------------------------
def finish_writing():
    """Write what is pending, and wait for a checkpoint that is written in the background; all ranks participate."""
    if use_ghost:
        write_scored(out_dir, ghost_unwritten, ghost_names, ghost_bins, iter_num)
    finish_saving(keep_checkpoints)

def save(last, best):
    """ckpt.pt and/or best.pt, or ckpt_dcp/step_N: all that going on in any mode needs; all ranks participate."""
    began = time.perf_counter()
    finish_writing()            # two checkpoints at once would deadlock
    progress = dict(model_args=model_args, iter_num=iter_num, samples_seen=samples_before(iter_num),
                    best_val_loss=best_val_loss, config=config, meta=meta, scaler=scaler.state_dict(),
                    wandb_id=wandb_id)
    sharded = checkpoint_format == 'sharded'
    save_checkpoint(out_dir, raw_model, opt, progress, last, best, sharded, checkpoint_async)
    if not checkpoint_async:
        finish_saving(keep_checkpoints)
    what = ' and '.join(name for name, wanted in (('checkpoint', last), ('best', best)) if wanted)
    say(f'{"saving" if checkpoint_async else "saved"} step {iter_num} as {what}; '
        f'training waited {time.perf_counter() - began:.2f} s')

# ---- the first writes: everything has been checked -------------------------------------------------------------------
def start_wandb():
    global wandb, wandb_id
    try:
        import wandb
        wandb_id = wandb.init(project=wandb_project, name=wandb_run_name, config=config, dir=out_dir, id=wandb_id,
                              resume='allow').id
    except Exception as error:
        raise ValueError(f'wandb_log=True: {error}: run `wandb login`, or set WANDB_MODE=offline') from None

if not eval_only:
    with one_line():
        check_out_dir(out_dir, start['leftovers'])      # makes it; all ranks participate
        if wandb_log:
            on_rank0(start_wandb)
    if start['leftovers']:          # by overwrite=True, or after a run that died before its first checkpoint
        say(f'starts anew, and deletes {", ".join(start["leftovers"])} in {out_dir}')
    if master_process:
        begin_out_dir(out_dir, start, config, evaluates=iter_num % eval_interval == 0 or iter_num >= max_iters)
log_file = Path(out_dir, 'log.jsonl')

def log(record):
    """A line of log.jsonl, and wandb."""
    if not master_process or eval_only:
        return
    record = log_record(log_file, record)
    if wandb_log:
        wandb.log({k: v for k, v in record.items() if k != 'iter' and v is not None}, step=record['iter'])

card = torch.cuda.get_device_name(device) if gpus else device
peak = peak_flops(card)                     # None for a card it does not know
compiled = {True: 'on', False: 'off'}.get(compile, compile)     # or 'blocks'
say(f'{mode}, {world_size} x {card}, {dtype}, compile {compiled}, {optimizer}, fused {"yes" if fused else "no"}')
held = sum(my_shard(p).numel() for p in params.values()) * 4 / 2**20      # MiB of float32 parameters
whole = num_params * 4 / 2**20
moments = 2         # numbers of optimizer state per parameter
if optimizer == 'muon':     # one for the blocks' matrices
    moments -= sum(p.numel() for p in opt.param_groups[0]['params']) / num_params
say(f'{num_params:,} parameters; rank 0 holds MiB of parameters + gradients + optimizer state: '
    f'{held:.1f} + {held:.1f} + {moments * held:.1f}; with DDP: {whole:.1f} + {whole:.1f} + {moments * whole:.1f}')
say(f'tokens per step: micro-batch {batch_size} x block {block_size} x {micro_batches} micro-batches '
    f'x {world_size} ranks = {tokens_per_step:,}')
tokens_in_all = samples_before(max_iters) * block_size
say(f'{max_iters:,} steps see {tokens_in_all:,} tokens, {tokens_in_all / bins["train"][2]:.2f} epochs of {dataset}')
if decay_lr and not eval_only and iter_num < max_iters < warmup_iters:
    say(f'learning_rate is never reached: max_iters={max_iters} ends before warmup_iters={warmup_iters}')
if iter_num >= max_iters:
    say(f'step {iter_num:,} is reached already, so there is nothing to train')

# ---- the loop --------------------------------------------------------------------------------------------------------
stop_signals = catch_signals()      # those that have come
model.train()
X, Y = train_batch(iter_num, 0)
if use_ddp and not eval_only:
    # After its first backward pass DDP lays out its buckets anew, and sums over ranks in another order from then on. So
    # one is thrown away here, or a resumed run would differ from an unbroken one in the last bits.
    with autocast:
        loss = model(X, Y, ghost_s())
    loss.mean().backward()
    opt.zero_grad(set_to_none=False)
saved_at = start_iter       # the step of the newest ckpt.pt
if start['resumed_from'] and start['resumed_from'].endswith('best.pt'):
    saved_at = 0            # it is older, or missing
stopping = False            # by a signal
sound = True                # whether the last evaluation was finite
timed_from, clock = start_iter, time.perf_counter()
while True:
    lr = lr_at(iter_num)
    for group in opt.param_groups:
        group['lr'] = lr

    done, improved = iter_num >= max_iters, False
    evaluating = eval_only or (not stopping and (done or iter_num % eval_interval == 0))
    if evaluating:
        means = evaluate()
        if means is None:
            stopping, evaluating = True, False
        else:
            improved = means['val'] < best_val_loss
            if improved:
                best_val_loss = means['val']
            say(f'evaluated after {iter_num} steps: train loss {means["train"]:.4f}, val loss {means["val"]:.4f}')
            log(dict(iter=iter_num, tokens=samples_before(iter_num) * block_size, train_loss=means['train'],
                     val_loss=means['val']))
            sound = math.isfinite(means['train']) and math.isfinite(means['val'])
            if not sound and (done or eval_only or on_nonfinite == 'stop'):
                say(f'step {iter_num}: the evaluation is not finite: stopped, and these weights are not saved; '
                    'try a lower learning_rate')
                finish_writing()
                sys.exit(1)
    if eval_only:
        break
    # ckpt.pt is saved when due, at the end and before a stop; best.pt whenever the validation loss has improved
    if checkpoint_interval:
        due = iter_num % checkpoint_interval == 0
    else:
        due = improved or (evaluating and always_save_checkpoint)
    save_last = (due or done or stopping) and iter_num > saved_at
    if save_last and not evaluating and not loss_is_finite():
        say(f'step {iter_num}: the loss is not finite: these weights are not saved')
        save_last = False
    if iter_num > 0 and sound and (save_last or improved):
        save(save_last, improved)
        saved_at = iter_num
    if done or stopping:
        break
    if evaluating or saved_at == iter_num:
        timed_from, clock = iter_num, time.perf_counter()

    if dropout > 0:     # masks depend on (seed, step, rank) alone: a resumed run draws the same
        torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))
    loss_scale = scaler.get_scale()         # 1 unless float16
    if use_ghost:
        ghost_begin_step()
    train_loss = torch.zeros((), device=device)
    for micro in range(micro_batches):
        sync_gradients(last=micro == micro_batches - 1)
        with autocast:
            losses = model(X, Y, ghost_s())     # (batch_size,): on a GPU only their mean or sum has a gradient
            loss = losses.mean() / micro_batches
        following = micro + 1               # after the last one: the next step's first
        X, Y = train_batch(iter_num + following // micro_batches, following % micro_batches)    # while the GPU works
        scaler.scale(loss).backward()
        train_loss += loss.detach()
        if use_ghost:
            ghost_end_micro_batch(losses)

    scaler.unscale_(opt)                    # nothing unless float16
    if grad_dump:
        dump_gradients()
    grad_norm = torch.nn.utils.clip_grad_norm_(params.values(), grad_clip or math.inf)      # inf only measures it
    grad_norm = full(grad_norm).to(device)
    # here the host waits for the GPU; all ranks get the same numbers, and so decide alike
    stop = torch.full((), float(len(stop_signals)), device=device)
    rank_losses = torch.zeros(world_size, device=device)
    rank_losses[rank] = train_loss          # each rank's in its own place, so that the largest can be logged
    numbers = torch.cat((torch.stack([n.float() for n in (train_loss, grad_norm, stop)]), rank_losses))
    train_loss, grad_norm, stop, *rank_losses = mean_over_ranks(numbers).tolist()
    stopping = stop > 0
    finite = math.isfinite(train_loss) and math.isfinite(grad_norm)
    if finite:
        scaler.step(opt)                    # opt.step(), and in float16 the scale may grow
        scaler.update()
    else:
        overflow = scaler.is_enabled() and math.isfinite(train_loss) and loss_scale > 1     # normal in float16
        if scaler.is_enabled():             # by hand, since the scaler would look at this rank's own gradients
            scaler.update(loss_scale * scaler.get_backoff_factor())
            scaler.load_state_dict({**scaler.state_dict(), '_growth_tracker': 0})
        if not overflow and on_nonfinite == 'skip':
            say(f'step {iter_num}: loss {train_loss}, gradient norm {grad_norm}: skipped')
        elif not overflow:
            say(f'step {iter_num}: loss {train_loss}, gradient norm {grad_norm}: stopped before the update; '
                'try a lower learning_rate, or on_nonfinite=skip to leave such steps out')
            finish_writing()
            sys.exit(1)
    opt.zero_grad(set_to_none=not use_ddp)  # DDP's gradients are views into its buckets, and have to stay
    if use_ghost:
        ghost_end_step(finite)
    iter_num += 1

    if check_sync_interval and replicas > 1 and iter_num % check_sync_interval == 0:
        compare_replicas()
    if (iter_num - 1) % log_interval == 0 or iter_num == max_iters:
        seconds = (time.perf_counter() - clock) / (iter_num - timed_from)
        timed_from, clock = iter_num, time.perf_counter()
        mfu = flops_per_step / seconds / (peak * world_size) if peak else None
        memory = torch.cuda.max_memory_allocated() / 2**30 if gpus else None
        retries = torch.cuda.memory_stats()['num_alloc_retries'] if gpus else None
        left = int(seconds * (max_iters - iter_num))
        say(f'step {iter_num - 1}: loss {train_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.3f}, {seconds * 1000:.1f} ms, '
            f'{tokens_per_step / seconds:,.0f} tokens/s, MFU {f"{mfu:.1%}" if mfu else "n/a"}, '
            f'{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left', passing=True)
        log(dict(iter=iter_num - 1, tokens=samples_before(iter_num) * block_size, loss=train_loss, lr=lr,
                 grad_norm=grad_norm, ms=seconds * 1000, tokens_per_s=tokens_per_step / seconds, mfu=mfu,
                 memory_gib=memory, loss_max=max(rank_losses) * world_size, alloc_retries=retries))
    if iter_num == start_iter + 1 and gpus:
        now, highest = torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
        say(f'rank 0 after the first step: {now:,.1f} MiB allocated, peak {highest:,.1f}')
    finish_saving(keep_checkpoints, wait=False)
    wrote_profile = profile_step(say, out_dir, rank, iter_num - start_iter, profile_steps, profile_memory,
                                 last=stopping or iter_num >= max_iters)
    if wrote_profile:
        timed_from, clock = iter_num, time.perf_counter()       # writing is no part of a step's time

finish_writing()
if wandb_log and master_process and not eval_only:
    wandb.finish()
exit_code = 0
if stopping:
    exit_code = 128 + (stop_signals[-1] if stop_signals else signal.SIGTERM)
if distributed:
    dist.barrier()      # no rank leaves while another still needs its connections
    dist.destroy_process_group()
    exit_codes.append(exit_code)
if stopping:
    where = 'there' if saved_at == iter_num else f'step {saved_at}'
    then = f'--init_from=auto goes on from {where}' if saved_at > 0 else 'nothing is saved yet'
    say(f'stopped by a signal after {iter_num} steps; {then}')
    sys.exit(exit_code)
