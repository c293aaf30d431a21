"""
Train a GPT-2 on one machine or many; the whole run, top to bottom.

one process   python train.py config/train_shakespeare_char.py
on a CPU      python train.py config/train_shakespeare_char_cpu.py
DDP           torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
FSDP          torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --use_fsdp=True
HSDP          ... --use_fsdp=True --fsdp_replicate=2
two nodes     torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0|1 --master_addr=HOST --master_port=29500 train.py ...
ghost         ... --use_ghost=True      every sample's gradient dot product with the validation gradient, in any mode
gradients     ... --grad_dump=True      writes the gradients of chosen steps, in any mode
go on         ... --init_from=resume    (or auto: resume if there is a checkpoint in out_dir, else start)

Any global below is set by a config file of `name = value` lines or by --name=value; `--help` lists them.
Every mode computes the same thing: with the same global batch, plain, DDP, FSDP and HSDP give the same losses and weights.
"""
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as save_safetensors
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

from configurator import configure
from model import GPT, GPTConfig, load_hf, peak_flops


def load_meta(folder):
    path = folder / 'meta.json'
    return json.loads(path.read_text()) if path.is_file() else {}



# ---- run -------------------------------------------------------------------------------------------------------------
out_dir = 'out'                     # everything the run writes goes here
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' (resume if there is a checkpoint) | 'gpt2' | 'gpt2-medium' | 'gpt2-large' | 'gpt2-xl' | a folder in Hugging Face form
overwrite = False                   # lets a new run delete an earlier run's files in out_dir
seed = 1337                         # of weights, data order and dropout
eval_interval = 2000                # steps between evaluations
eval_iters = 200                    # batches per split and evaluation
eval_only = False                   # evaluate once and exit; writes nothing
log_interval = 1                    # steps between log lines
check_sync_interval = 0             # steps between bitwise comparisons of the replicas' weights; 0 never
on_nonfinite = 'stop'               # 'stop' | 'skip': what to do with a step whose loss or gradient norm is not finite
deterministic = False               # only deterministic kernels: slower, and bit-identical reruns on a GPU
# ---- checkpoints -----------------------------------------------------------------------------------------------------
always_save_checkpoint = True       # after every evaluation; False: only when the validation loss improved, and at the end
checkpoint_interval = 0             # steps between checkpoints; 0: at evaluations
checkpoint_format = 'full'          # 'full': one file ckpt.pt | 'sharded': every rank writes its part into ckpt_dcp/step_N
checkpoint_async = False            # sharded only: write in the background
keep_checkpoints = 0                # sharded only: newest ones to keep, the best one besides; 0 keeps all
# ---- wandb -----------------------------------------------------------------------------------------------------------
wandb_log = False                   # log to Weights & Biases too
wandb_project = 'flatgpt'
wandb_run_name = 'gpt2'
# ---- data ------------------------------------------------------------------------------------------------------------
dataset = 'openwebtext'             # a folder in data/ (or a path) with train.bin and val.bin
data_order = 'random'               # 'random': windows with replacement | 'epoch': every window once per epoch, shuffled
gradient_accumulation_steps = 40    # micro-batches per step, over all ranks together
batch_size = 12                     # samples per micro-batch
block_size = 1024                   # tokens per sample
# ---- model -----------------------------------------------------------------------------------------------------------
n_layer = 12
n_head = 12
n_embd = 768                        # divisible by n_head
dropout = 0.0                       # probability; 0 for pretraining, 0.1 or more for finetuning
bias = False                        # in Linears and LayerNorms
# ---- optimizer: AdamW --------------------------------------------------------------------------------------------------
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
scale_lr = False                    # multiply both rates by world size x micro-batches per rank
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' | 'cpu' | 'cuda' | 'cuda:1' | 'mps'
dtype = 'auto'                      # 'auto' (bfloat16 where the GPU has it) | 'float32' | 'bfloat16' | 'float16' (with loss scaling)
compile = 'auto'                    # 'auto' (on a GPU) | True | False: torch.compile takes about a minute at the start
backend = 'auto'                    # 'auto' | 'nccl' | 'gloo'
# ---- FSDP ------------------------------------------------------------------------------------------------------------
use_fsdp = False                    # shard parameters, gradients and optimizer state over the ranks; needs torchrun
fsdp_min_num_params = 0             # consecutive blocks are grouped until a unit has this many; 0: each block is a unit
fsdp_activation_checkpointing = False  # False | 'full' | 'selective' (keeps matmuls and attention); in plain and DDP runs too
fsdp_cpu_offload = False            # keep shards and optimizer in host memory
fsdp_replicate = 1                  # HSDP: copies of the sharded model; world size = fsdp_replicate x shards
fsdp_reshard_after_forward = True   # False: keep a unit's parameters gathered through the whole step; faster, more memory
# ---- ghost -----------------------------------------------------------------------------------------------------------
use_ghost = False                   # dot product of each sample's gradient with the validation gradient -> grad_dotprods/
ghost_val_batch_size = 4            # validation samples per step, over all ranks together
ghost_val_dataset = ''              # whose val.bin to value the training data for; '' is this dataset's
ghost_val_resample = False          # True: other validation samples in every scored step
ghost_interval = 1                  # steps between scored steps
ghost_save_interval = 10            # steps per file
ghost_per_param = False             # also store each parameter's share
# ---- gradient dumps --------------------------------------------------------------------------------------------------
grad_dump = False                   # write gradients (global mean, before clipping) -> gradient_dumper/
grad_dump_start_step = 0            # first step to dump
grad_dump_step_interval = 1         # steps between dumps
grad_dump_end_step = None           # last step to dump; None: no end
grad_dump_save_first_n = None       # None: all gradients, sharded; an int: the first n rows of each parameter
# ----------------------------------------------------------------------------------------------------------------------
config, given = configure(globals())

# ---- ranks and device --------------------------------------------------------------------------------------------------
distributed = 'RANK' in os.environ and 'WORLD_SIZE' in os.environ       # set by torchrun
rank, world_size = (int(os.environ[k]) if distributed else d for k, d in (('RANK', 0), ('WORLD_SIZE', 1)))
local_rank = int(os.environ.get('LOCAL_RANK', 0))
master_process = rank == 0          # logs and writes files


def fail(message):
    """One line, exit code 2; every rank finds the same fault, so one of them reports it."""
    if master_process:
        print(f'train.py: {message}', file=sys.stderr)
    sys.exit(2)


if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
device_type = device.split(':')[0]
if device_type == 'cuda' and not torch.cuda.is_available() or device_type == 'mps' and not torch.backends.mps.is_available():
    fail(f'device={device}: this torch ({torch.__version__}) sees no such device; use --device=cpu')
if device_type not in ('cpu', 'cuda', 'mps'):
    fail(f"device={device}: expected 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'")
if dtype == 'auto':
    dtype = 'float32' if device_type != 'cuda' else 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
if compile == 'auto':
    compile = device_type == 'cuda'
config.update(device=device, dtype=dtype, compile=compile)
gpus = torch.cuda.device_count() if device_type == 'cuda' else 0

# ---- checks: all of them come before the first write -------------------------------------------------------------------
for name, least in dict(eval_interval=1, eval_iters=1, log_interval=1, check_sync_interval=0, checkpoint_interval=0, keep_checkpoints=0,
                        gradient_accumulation_steps=1, batch_size=1, block_size=1, n_layer=1, n_head=1, n_embd=1, max_iters=0,
                        warmup_iters=0, lr_decay_iters=0, fsdp_min_num_params=0, fsdp_replicate=1, ghost_val_batch_size=1,
                        ghost_interval=1, ghost_save_interval=1, grad_dump_start_step=0, grad_dump_step_interval=1,
                        learning_rate=0, min_lr=0, weight_decay=0, grad_clip=0, dropout=0, beta1=0, beta2=0, seed=0).items():
    if not config[name] >= least:   # so written that NaN fails too
        fail(f'{name}={config[name]}: must be at least {least}')
for name, values in dict(on_nonfinite=('stop', 'skip'), checkpoint_format=('full', 'sharded'), data_order=('random', 'epoch'),
                         dtype=('auto', 'float32', 'bfloat16', 'float16'), compile=('auto', True, False), backend=('auto', 'nccl', 'gloo'),
                         fsdp_activation_checkpointing=(False, 'full', 'selective')).items():
    if config[name] not in values:
        fail(f'{name}={config[name]!r}: expected one of {", ".join(map(repr, values))}')
ghost_rows = ghost_val_batch_size // world_size      # per rank
checks = [   # (what is wrong, what to do)
    (max(dropout, beta1, beta2) >= 1, f'dropout={dropout}, beta1={beta1}, beta2={beta2}: must be below 1'),
    (n_embd % n_head, f'n_embd={n_embd} is not divisible by n_head={n_head}'),
    (gradient_accumulation_steps % world_size, f'gradient_accumulation_steps={gradient_accumulation_steps} is shared by all ranks and not '
     f'divisible by the world size {world_size}; use --gradient_accumulation_steps={math.ceil(gradient_accumulation_steps / world_size) * world_size}'),
    (device_type == 'mps' and distributed, 'torchrun works with cuda and cpu; run one process on mps, or use --device=cpu'),
    (distributed and gpus and local_rank >= gpus, f'{local_rank + 1} processes on this node but {gpus} GPUs; use --nproc_per_node={gpus}, or --device=cpu'),
    (backend == 'nccl' and device_type != 'cuda', f'backend=nccl needs GPUs, and device is {device}; use --backend=gloo'),
    (dtype == 'bfloat16' and device_type == 'cuda' and not torch.cuda.is_bf16_supported(), 'this GPU has no bfloat16; use --dtype=float16'),
    (dtype != 'float32' and device_type == 'mps', f'dtype={dtype} is not supported on mps here; use --dtype=float32'),
    (use_fsdp and not distributed, 'use_fsdp=True needs torchrun: torchrun --standalone --nproc_per_node=N train.py ... (N may be 1)'),
    (fsdp_replicate > 1 and not use_fsdp, f'fsdp_replicate={fsdp_replicate} needs --use_fsdp=True'),
    (fsdp_cpu_offload and not use_fsdp, 'fsdp_cpu_offload=True needs --use_fsdp=True'),
    (world_size % fsdp_replicate, f'HSDP: world size {world_size} = fsdp_replicate x shards, but {world_size} is not divisible by fsdp_replicate={fsdp_replicate}'),
    (checkpoint_async and checkpoint_format != 'sharded', 'checkpoint_async=True needs --checkpoint_format=sharded'),
    (use_ghost and ghost_val_batch_size % world_size, f'ghost_val_batch_size={ghost_val_batch_size} is not divisible by the world size {world_size}'),
    (use_ghost and ghost_rows > batch_size and ghost_rows % batch_size, f'ghost_val_batch_size={ghost_val_batch_size}: '
     f'{ghost_rows} samples per rank are more than batch_size={batch_size} and not a multiple of it'),
    (grad_dump_end_step is not None and grad_dump_end_step < grad_dump_start_step, f'grad_dump_end_step={grad_dump_end_step} is before grad_dump_start_step={grad_dump_start_step}'),
    (grad_dump_save_first_n is not None and grad_dump_save_first_n < 1, f'grad_dump_save_first_n={grad_dump_save_first_n}: must be at least 1, or None'),
]
for wrong, message in checks:
    if wrong:
        fail(message)

# ---- data --------------------------------------------------------------------------------------------------------------
# Sample j of step s is a pure function of (seed, s, j). Which rank reads it in which micro-batch changes nothing, resuming
# needs no stored position, and a sample has a name that stays: its offset in train.bin.
data = Path(__file__).resolve().parent / 'data'
bins, metas = {}, {}    # {split: (path, dtype, tokens)}, {split: what is known of its tokens}
for split, name, file in (('train', dataset, 'train.bin'), ('val', dataset, 'val.bin'), ('ghost', ghost_val_dataset or dataset, 'val.bin')):
    path = data / name / file           # a name that is an absolute path stays as it is
    try:
        meta = metas[split] = load_meta(path.parent)
    except ValueError as error:
        fail(str(error))
    if not path.is_file():
        fail(f'{path} not found; run python data/{name}/prepare.py, or name another dataset')
    itemtype = np.dtype(meta.get('dtype', 'uint16')).newbyteorder('<')
    tokens, rest = divmod(path.stat().st_size, itemtype.itemsize)
    recorded = meta.get('splits', {}).get(path.stem, {}).get('tokens', tokens)
    if rest or tokens != recorded:
        fail(f'{path} has {path.stat().st_size:,} bytes, which are not the {recorded:,} {itemtype.name} of its meta.json: run prepare.py again')
    bins[split] = path, itemtype, tokens
meta = metas['train']
if use_ghost and metas['ghost'].get('tokenizer') != meta.get('tokenizer'):
    fail(f'ghost_val_dataset={ghost_val_dataset} was made with another tokenizer than {dataset}: same ids, other words')
micro_batches = gradient_accumulation_steps // world_size                # per rank and step
samples_per_step = gradient_accumulation_steps * batch_size


def hash64(*parts):
    """Ints or int arrays -> uint64 array, as good as random: splitmix64's finaliser (Steele et al. 2014), chained."""
    h = np.zeros(1, np.uint64)
    for part in parts:
        h = h + np.asarray(part, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


def train_offsets(step, j):
    """Token offsets, int64 (n,), of samples j (n,) of an optimizer step."""
    tokens = bins['train'][2]
    if data_order == 'random':
        return (hash64(seed, step, j) % np.uint64(tokens - block_size)).astype(np.int64)
    windows = (tokens - 1) // block_size
    epoch, k = np.divmod(step * samples_per_step + j, windows)
    # a Feistel network shuffles 0 .. 4^half - 1 without a table; what it sends beyond the last window goes through again
    half = max(1, (windows - 1).bit_length() + 1 >> 1)
    todo = np.ones(len(k), bool)
    while todo.any():
        left, right = k[todo] >> half, k[todo] & (1 << half) - 1
        for i in range(4):
            left, right = right, left ^ (hash64(seed, epoch[todo], i, right) & np.uint64((1 << half) - 1)).astype(np.int64)
        k[todo] = left << half | right
        todo = k >= windows
    return k * block_size


def read_windows(split, offsets):
    """Inputs and targets, int64 (len(offsets), block_size) each on the device, the targets one token later."""
    path, itemtype, _ = bins[split]   # read, not mapped: pages of a memory map would count as ours and pile up
    tokens = np.stack([np.fromfile(path, itemtype, block_size + 1, offset=int(o) * itemtype.itemsize) for o in offsets])
    if tokens.max() >= vocab_size:
        fail(f'{path} has token id {tokens.max()} near token {offsets[tokens.max(1).argmax()]}, and the vocabulary {vocab_size} ids: wrong dataset?')
    tokens = torch.from_numpy(tokens.astype(np.int64))
    if device_type == 'cuda':
        tokens = tokens.pin_memory().to(device, non_blocking=True)   # the copy runs while the GPU works on the last batch
    tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:]


def train_batch(step, micro):
    """This rank's micro-batch of a step: inputs, targets, token offsets (numpy)."""
    offsets = train_offsets(step, (micro * world_size + rank) * batch_size + np.arange(batch_size))
    return *read_windows('train', offsets), offsets


# ---- where to start: scratch, pretrained or a checkpoint -----------------------------------------------------------------
if distributed:
    backends = {'auto': 'cpu:gloo,cuda:nccl' if device_type == 'cuda' else 'gloo'}
    if device_type == 'cuda':
        device = f'cuda:{local_rank}'
        torch.cuda.set_device(device)
    dist.init_process_group(backends.get(backend, backend), device_id=torch.device(device) if device_type == 'cuda' else None)
out = Path(out_dir)
NOTHING_DONE = dict(iter_num=0, best_val_loss=math.inf, wandb_id=None, scaler={})
shape_names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias')


def newest_checkpoint():
    """(path, everything in it but the tensors of a sharded one) of the newest complete checkpoint in out_dir; (None, {}) if none."""
    found = [(None, {'iter_num': -1})]
    try:
        if (out / 'ckpt.pt').is_file():
            found.append((out / 'ckpt.pt', torch.load(out / 'ckpt.pt', map_location='cpu', weights_only=True, mmap=True)))
        for done in (out / 'ckpt_dcp').glob('step_*/.metadata'):     # written last
            found.append((done.parent, json.loads((done.parent / 'state.json').read_text())))
    except Exception as error:
        fail(f'{out_dir}: unreadable checkpoint: {error}'.splitlines()[0])
    return max(found, key=lambda f: f[1]['iter_num'])


checkpoint, state, weights, optimizer_state = None, dict(NOTHING_DONE), {}, {}
if master_process:      # it alone reads and makes weights; the others get them below
    if init_from in ('resume', 'auto'):
        checkpoint, state = newest_checkpoint()
        if checkpoint is None and init_from == 'resume':
            fail(f'init_from=resume: no complete checkpoint in {out_dir}')
    leftovers = [p for p in ('ckpt.pt', 'best.pt', 'ckpt_dcp', 'log.jsonl', 'grad_dotprods', 'gradient_dumper') if (out / p).exists()]
    if checkpoint is None:
        if leftovers and not overwrite and not eval_only and init_from != 'auto':
            fail(f'{out_dir} holds an earlier run ({", ".join(leftovers)}); choose another --out_dir, --init_from=resume to go on, or --overwrite=True')
        state = dict(NOTHING_DONE)
        if init_from in ('scratch', 'auto'):
            vocab = meta.get('vocab_size', 50257)     # large ones padded to a multiple of 64, which GPUs prefer
            state['model_args'] = {**{k: config[k] for k in shape_names}, 'gelu': 'tanh',
                                   'vocab_size': vocab if vocab < 1024 else math.ceil(vocab / 64) * 64}
        else:
            try:
                state['model_args'], weights = load_hf(init_from)
            except (ValueError, OSError) as error:
                fail(f'init_from={init_from}: {error}')
            positions = state['model_args']['block_size']
            if block_size > positions:
                fail(f'block_size={block_size}, but {init_from} has {positions} positions; use --block_size={positions} or less')
            state['model_args']['block_size'] = block_size
            weights['transformer.wpe.weight'] = weights['transformer.wpe.weight'][:block_size]
    else:
        args = state['model_args']
        args.setdefault('gelu', 'none')      # a checkpoint of nanoGPT, whose GELU is the exact one
        wrong = [f'{k}={config[k]} (there {args[k]})' for k in shape_names if k in given and config[k] != args[k]]
        if wrong:
            fail(f'{checkpoint} was trained with another {", ".join(wrong)}; leave that out, or start anew in another out_dir')
        saved_tokenizer = (state.get('meta') or {}).get('tokenizer')
        if saved_tokenizer and meta.get('tokenizer', saved_tokenizer) != saved_tokenizer:
            fail(f'{checkpoint} was trained with another tokenizer than dataset={dataset}: same ids, other characters')
        if checkpoint.is_file():
            # nanoGPT left torch.compile's prefix and its causal masks among the weights
            weights = {k.removeprefix('_orig_mod.'): v for k, v in state.pop('model').items() if not k.endswith('.attn.bias')}
            optimizer_state = state.pop('optimizer')
        changed = [f'{k} {v!r} -> {config[k]!r}' for k, v in (state.get('config') or {}).items()
                   if k in config and config[k] != v and k not in ('init_from', 'overwrite', *shape_names)]
        print(f'resuming from {checkpoint} at step {state["iter_num"]}' + (f'; changed since: {", ".join(changed)}' if changed else ''))
dumped = {int(p.name[4:]) for p in (out / 'gradient_dumper').glob('step*') if p.name[4:].isdigit()} if checkpoint else set()
if distributed:
    shared = [checkpoint, state, dumped]
    dist.broadcast_object_list(shared)
    checkpoint, state, dumped = shared
shape = {k: v for k, v in state['model_args'].items() if k in shape_names}
globals().update(shape)
config.update(shape)
vocab_size = state['model_args']['vocab_size']
iter_num, best_val_loss, wandb_id = state['iter_num'], state['best_val_loss'], state.get('wandb_id')
start_iter, tokens_per_step = iter_num, samples_per_step * block_size
for path, itemtype, tokens in bins.values():    # what lies further on is checked batch by batch
    largest = np.fromfile(path, itemtype, 2**26).max()
    if tokens <= block_size:
        fail(f'{path} has {tokens:,} tokens, and a sample of block_size={block_size} takes {block_size + 1}: more text or a smaller block_size')
    if largest >= vocab_size:
        fail(f'{path} has token id {largest}, and the model {vocab_size} ids: wrong dataset?')

# ---- model: built without memory, then compiled and sharded, then filled with rank 0's weights ------------------------------
gptconf = GPTConfig(**{k: v for k, v in state['model_args'].items() if k != 'dropout'}, dropout=dropout)
if not weights and checkpoint is None and master_process:
    torch.manual_seed(seed)
    weights = GPT(gptconf).state_dict()
with torch.device('meta'):
    model = raw_model = GPT(gptconf)
if use_ghost:
    try:
        ghost_names = raw_model.add_ghost()
    except ValueError as error:
        fail(f'use_ghost=True: {error}')
num_params = raw_model.num_params()
flops_per_step = raw_model.flops_per_token() * tokens_per_step

if fsdp_activation_checkpointing:   # keep less of the forward pass and compute it again in the backward pass
    from torch.utils.checkpoint import checkpoint as recompute, create_selective_checkpoint_contexts
    aten, kwargs = torch.ops.aten, {}
    if fsdp_activation_checkpointing == 'selective':
        kept = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
                aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
                aten._scaled_dot_product_flash_attention_for_cpu.default]
        kwargs = dict(context_fn=partial(create_selective_checkpoint_contexts, kept))
    for block in raw_model.transformer.h:
        block.forward = partial(recompute, block.forward, use_reentrant=False, **kwargs)
if compile and use_fsdp:            # by parts, since gathering parameters between them can't be compiled
    for block in raw_model.transformer.h:
        block.compile()
    raw_model.loss = torch.compile(raw_model.loss)
elif compile:
    raw_model.compile()             # in place, so that names in checkpoints stay
if use_fsdp:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    mesh = dist.init_device_mesh(device_type, (fsdp_replicate, world_size // fsdp_replicate), mesh_dim_names=('replicate', 'shard'))
    low = None if dtype == 'float32' else getattr(torch, dtype)
    unit = dict(mesh=mesh if fsdp_replicate > 1 else mesh['shard'], reshard_after_forward=fsdp_reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False),
                offload_policy=CPUOffloadPolicy(pin_memory=device_type == 'cuda') if fsdp_cpu_offload else OffloadPolicy())
    group, size = [], 0
    for block in raw_model.transformer.h:
        group, size = group + [block], size + sum(p.numel() for p in block.parameters() if p.requires_grad)
        if size >= fsdp_min_num_params or block is raw_model.transformer.h[-1]:
            fully_shard(group, **unit)
            group, size = [], 0
    fully_shard(raw_model, **unit)  # embeddings, final norm and head
raw_model.to_empty(device='cpu' if fsdp_cpu_offload else device)
raw_model.tie()
expected = {k for k in raw_model.state_dict() if 'ghost_' not in k}
if master_process and weights and weights.keys() != expected:
    fail(f'{checkpoint or init_from}: parameters missing or unknown: {", ".join(sorted(weights.keys() ^ expected)[:3])}')
everything = StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed, strict=False)   # not strict: ghost_*
if checkpoint is None or checkpoint.suffix == '.pt':
    set_model_state_dict(raw_model, weights, options=everything)
if distributed and not use_fsdp:
    model = torch.nn.parallel.DistributedDataParallel(raw_model, device_ids=[local_rank] if device_type == 'cuda' else None)

# ---- optimizer -------------------------------------------------------------------------------------------------------------
groups = raw_model.param_groups(weight_decay)
fused = device_type in ('cuda', 'cpu')
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=fused)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == 'float16')
params = {name: p for name, p in raw_model.named_parameters() if p.requires_grad}      # tied ones once
ours = StateDictOptions(ignore_frozen_params=True)                                     # what this rank holds, without ghost_*
hyperparameters = [{k: v for k, v in g.items() if k != 'params'} for g in optimizer.param_groups]
if checkpoint is not None and checkpoint.suffix != '.pt':      # sharded: every rank reads its part
    sharded = {'model': {k: v for k, v in get_model_state_dict(raw_model, options=ours).items() if 'ghost_' not in k},
               'optimizer': get_optimizer_state_dict(raw_model, optimizer, options=ours)}
    sharded['model'].pop('lm_head.weight')                     # tied, stored once
    groups = sharded['optimizer'].pop('param_groups')
    dcp.load(sharded, checkpoint_id=checkpoint, no_dist=not distributed)
    set_model_state_dict(raw_model, sharded['model'], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(raw_model, optimizer, {**sharded['optimizer'], 'param_groups': groups})
elif checkpoint is not None:
    if optimizer_state and 0 in optimizer_state['state']:      # nanoGPT counts parameters, in the order of the groups
        names = [n for decays in (True, False) for n, p in params.items() if (p.dim() >= 2) == decays]
        optimizer_state = {'state': {names[i]: s for i, s in optimizer_state['state'].items()}, 'param_groups': [
            {**g, 'params': [names[i] for i in g['params']]} for g in optimizer_state['param_groups']]}
    set_optimizer_state_dict(raw_model, optimizer, optimizer_state, options=everything)
for group, values in zip(optimizer.param_groups, hyperparameters):
    group.update(values)             # today's settings, not the checkpoint's
if state.get('scaler'):
    scaler.load_state_dict(state['scaler'])
if use_ghost:
    everyone = dict(raw_model.named_parameters())
    ghosts = [(params[n], everyone[f'{n.rpartition(".")[0]}.ghost_{n.rpartition(".")[2]}']) for n in ghost_names]
del weights, optimizer_state
scale = samples_per_step // batch_size if scale_lr else 1   # world size x micro-batches per rank: the same at every world size


def lr_at(step):
    """Learning rate of a step: linear from above 0 to the maximum in warmup_iters steps, then a cosine down to min_lr."""
    if not decay_lr:
        return learning_rate * scale
    if step < warmup_iters:
        return learning_rate * scale * (step + 1) / warmup_iters
    if step >= lr_decay_iters:
        return min_lr * scale
    done = (step - warmup_iters) / (lr_decay_iters - warmup_iters)
    return scale * (min_lr + (learning_rate - min_lr) * (1 + math.cos(math.pi * done)) / 2)


# FSDP casts by its own policy; everywhere else autocast does
autocast = nullcontext() if dtype == 'float32' or use_fsdp else torch.autocast(device_type, getattr(torch, dtype))


def sync_gradients(last):
    """Ranks exchange gradients in the last backward pass of a step only; FSDP keeps them unsharded until then."""
    if use_fsdp:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or fsdp_reshard_after_forward)
    elif distributed:
        model.require_backward_grad_sync = last


def all_reduce(tensor, op='sum'):
    if distributed:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
    return tensor


@torch.no_grad()
def evaluate():
    """Mean loss, nats, over eval_iters batches of windows spread evenly over each split; all ranks participate."""
    model.eval()
    losses = {}
    for split in ('train', 'val'):
        windows, total = bins[split][2] - block_size, torch.zeros((), device=device)
        for k in range(rank, math.ceil(eval_iters / world_size) * world_size, world_size):
            j = k % eval_iters * batch_size + np.arange(batch_size)
            X, Y = read_windows(split, j * windows // (eval_iters * batch_size))
            with autocast:
                loss = model(X, Y).mean()
            total += loss * (k < eval_iters)    # beyond: ranks without a batch left still take part, for FSDP's sake
        losses[split] = all_reduce(total).item() / eval_iters
    model.train()
    return losses


# ---- saving: everything appears under its name only when complete ------------------------------------------------------------
def write_file(path, write):
    """write(file) goes to a temporary file, reaches the disk and then takes the name."""
    temporary = path.with_name(path.name + '.tmp')
    with open(temporary, 'wb') as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


pending = None      # a sharded checkpoint being written in the background, its folder and whether it is the best
saver_group = dist.new_group(backend='gloo') if distributed and checkpoint_async else None  # training uses the other one


def finish_checkpoint():
    """After a sharded checkpoint is complete: say which is best, delete those past keep_checkpoints."""
    global pending
    if pending is None:
        return
    future, folder, best = pending
    pending = None
    if future is not None:
        future.result()             # an error of the background thread shows here
    if master_process:
        if best:
            write_file(out / 'ckpt_dcp' / 'best.json', lambda f: f.write(json.dumps({'step': folder.name}).encode()))
        done = sorted((p.parent for p in (out / 'ckpt_dcp').glob('step_*/.metadata')), key=lambda p: int(p.name[5:]))
        best = out / 'ckpt_dcp' / 'best.json'
        best = json.loads(best.read_text())['step'] if best.is_file() else ''
        for old in done[:-keep_checkpoints] if keep_checkpoints else []:
            if old.name != best:
                (old / '.metadata').unlink()    # first, so that a half-deleted one does not count
                shutil.rmtree(old)


def save_checkpoint(last, best):
    """ckpt.pt and/or best.pt, or ckpt_dcp/step_N, with everything that continuing needs; all ranks participate."""
    global pending
    start = time.perf_counter()
    if use_ghost:
        write_dots()
    full = checkpoint_format == 'full'
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, ignore_frozen_params=True)
    tensors = {'model': {k: v for k, v in get_model_state_dict(raw_model, options=options).items() if 'ghost_' not in k},
               'optimizer': get_optimizer_state_dict(raw_model, optimizer, options=options)}
    rest = dict(model_args=state['model_args'], iter_num=iter_num, best_val_loss=best_val_loss, config=config, meta=meta,
                scaler=scaler.state_dict(), wandb_id=wandb_id)
    if full and master_process:
        tensors['model']['lm_head.weight'] = tensors['model']['transformer.wte.weight']     # one tensor, stored once
        files = [out / 'ckpt.pt'] * last + [out / 'best.pt'] * best
        write_file(files[0], lambda f: torch.save({**tensors, **rest}, f))
        if len(files) > 1:
            with open(files[0], 'rb') as written:
                write_file(files[1], lambda f: shutil.copyfileobj(written, f))
    elif not full:
        finish_checkpoint()             # two at once would deadlock
        folder = out / 'ckpt_dcp' / f'step_{iter_num}'
        tensors['model'].pop('lm_head.weight')
        rest['param_groups'] = tensors['optimizer'].pop('param_groups')
        if master_process and not (folder / '.metadata').is_file():
            shutil.rmtree(folder, ignore_errors=True)       # of a save that died
            folder.mkdir(parents=True)
            write_file(folder / 'state.json', lambda f: f.write(json.dumps(rest).encode()))
        if distributed:
            dist.barrier()
        if checkpoint_async:
            pending = dcp.async_save(tensors, checkpoint_id=folder, process_group=saver_group, no_dist=not distributed), folder, best
        else:
            dcp.save(tensors, checkpoint_id=folder, no_dist=not distributed)
            pending = None, folder, best
            finish_checkpoint()
    say(f'saved {"best and " if best and last else "best " if best else ""}checkpoint of step {iter_num}: '
        f'training waited {time.perf_counter() - start:.2f} s')


# ---- ghost files and gradient dumps ----------------------------------------------------------------------------------------
dots_dir, dots_rows = out / 'grad_dotprods', []     # rows: one dict of tensors per scored step, on rank 0


def write_dots():
    """The scored steps since the last call -> grad_dotprods/iter_NNNNNN.safetensors, N = steps done."""
    if master_process and dots_rows:
        columns = {k: torch.stack([row[k] for row in dots_rows]) for k in dots_rows[0]}
        content = save_safetensors(columns, {'parameters': json.dumps(ghost_names)})
        write_file(dots_dir / f'iter_{iter_num:06d}.safetensors', lambda f: f.write(content))
        dots_rows.clear()


def gather(tensors):
    """List over micro-batches of (..., batch_size) on every rank -> (..., samples of the global batch), in order, on the CPU."""
    mine = torch.stack(tensors)
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine) if distributed else parts[0].copy_(mine)
    return torch.stack(parts, 1).flatten(0, 1).movedim(0, -2).flatten(-2).cpu()


def val_offsets(step):
    """Token offsets of this rank's ghost validation samples: the same at every step unless they are resampled."""
    n = ghost_val_batch_size // world_size
    j = rank * n + np.arange(n)
    windows = np.uint64(bins['ghost'][2] - block_size)
    return (hash64(seed + 1, step if ghost_val_resample else 0, j) % windows).astype(np.int64)


def dump_gradients():
    """Gradients of this step -> gradient_dumper/stepN, which takes its name when complete; all ranks participate."""
    folder = out / 'gradient_dumper' / f'step{iter_num}'
    temporary = folder.with_name(folder.name + '.tmp')
    if master_process:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / ('sharded' if grad_dump_save_first_n is None else 'sampled')).mkdir(parents=True)
    if distributed:
        dist.barrier()
    if grad_dump_save_first_n is None:
        dcp.save({name: p.grad for name, p in params.items()}, checkpoint_id=temporary / 'sharded', no_dist=not distributed)
    else:
        for name, p in params.items():      # one full gradient at a time
            g = p.grad.full_tensor() if use_fsdp else p.grad
            if master_process:
                n = min(grad_dump_save_first_n, len(g))
                content = save_safetensors({'gradient': g[:n].cpu().contiguous()})
                write_file(temporary / 'sampled' / f'{name}_first{n}.safetensors', lambda f: f.write(content))
    if distributed:
        dist.barrier()
    if master_process:
        os.replace(temporary, folder)


# ---- the first writes: everything has been checked -----------------------------------------------------------------------------
if master_process and not eval_only:
    if checkpoint is None:
        for name in leftovers:      # overwrite=True, or a restart before the first checkpoint
            (shutil.rmtree if (out / name).is_dir() else os.remove)(out / name)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / 'config.json', lambda f: f.write(json.dumps(config, indent=1).encode()))
    if checkpoint is not None:      # drop what a killed run wrote after its last checkpoint: it is about to happen again
        log = out / 'log.jsonl'
        lines = log.read_text().splitlines() if log.is_file() else []
        kept = [line for line in lines if line.endswith('}') and json.loads(line)['iter'] < iter_num]
        write_file(log, lambda f: f.write(''.join(line + '\n' for line in kept).encode()))
        for path in dots_dir.glob('iter_*.safetensors'):
            if int(path.stem[5:]) > iter_num:
                path.unlink()
    for wanted, folder in ((use_ghost, dots_dir), (grad_dump, out / 'gradient_dumper')):
        if wanted:
            folder.mkdir(exist_ok=True)
    if wandb_log:
        try:
            import wandb
            run = wandb.init(project=wandb_project, name=wandb_run_name, config=config, dir=out_dir, id=wandb_id,
                             resume='allow' if wandb_id else None)
            wandb_id = run.id
        except ImportError:
            fail('wandb_log=True needs a package: pip install wandb')
        except Exception as error:
            fail(f'wandb_log=True: {error}; run `wandb login`, or set WANDB_MODE=offline'.replace('\n', ' '))

live = master_process and sys.stdout.isatty()


def say(message, passing=False):
    """Rank 0 prints a line; a passing one is replaced by the next on a terminal."""
    if master_process:
        print(('\r\033[K' if live else '') + message, end='' if live and passing else '\n', flush=True)


def log(record):
    """One object per line in log.jsonl, and to wandb."""
    if master_process and not eval_only:
        with open(out / 'log.jsonl', 'a') as f:
            f.write(json.dumps(record) + '\n')
        if wandb_log:
            wandb.log({k: v for k, v in record.items() if v is not None and k != 'iter'}, step=record['iter'])


peak = peak_flops(torch.cuda.get_device_name(device)) if device_type == 'cuda' else None
mode = 'plain' if not distributed else 'DDP' if not use_fsdp else 'FSDP' if fsdp_replicate == 1 else f'HSDP {fsdp_replicate} x {world_size // fsdp_replicate}'
held = sum((p.to_local() if use_fsdp else p).numel() for p in params.values()) * 4 / 2**30
say(f'{mode}, {world_size} x {torch.cuda.get_device_name(device) if device_type == "cuda" else device}, {dtype}, '
    f'compile {"on" if compile else "off"}, fused AdamW {"yes" if fused else "no"}')
say(f'{num_params:,} parameters; rank 0 holds {held:.3f} GiB of them, {held:.3f} of gradients, {2 * held:.3f} of optimizer state '
    f'(DDP: {num_params * 4 / 2**30:.3f}, {num_params * 4 / 2**30:.3f}, {num_params * 8 / 2**30:.3f})')
say(f'tokens per step: micro-batch {batch_size} x block {block_size} x {micro_batches} micro-batches x {world_size} ranks = {tokens_per_step:,}')
say(f'{max_iters:,} steps see {max_iters * tokens_per_step:,} tokens, {max_iters * tokens_per_step / bins["train"][2]:.2f} epochs of {dataset}')

# ---- the loop -------------------------------------------------------------------------------------------------------------------
stop_signal = 0


def on_signal(number, frame):   # finish the step, save, exit; a second signal kills as usual
    global stop_signal
    stop_signal = number
    signal.signal(number, signal.SIG_DFL)


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)

model.train()
X, Y, offsets = train_batch(iter_num, 0)
stopping, saved_at, timed_from, clock = 0, start_iter, iter_num, time.perf_counter()
while True:
    lr = lr_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr

    done, improved = iter_num >= max_iters, False
    evaluating = iter_num % eval_interval == 0 or done or eval_only
    if evaluating and not stopping:
        losses = evaluate()
        improved, best_val_loss = losses['val'] < best_val_loss, min(losses['val'], best_val_loss)
        say(f'step {iter_num}: train loss {losses["train"]:.4f}, val loss {losses["val"]:.4f}')
        log({'iter': iter_num, 'tokens': iter_num * tokens_per_step, 'train_loss': losses['train'], 'val_loss': losses['val']})
    if eval_only:
        break
    last = (iter_num % checkpoint_interval == 0 if checkpoint_interval else evaluating and (always_save_checkpoint or improved)) or done or stopping
    if iter_num > saved_at and (last or improved):
        save_checkpoint(bool(last), improved)
    if evaluating or last:
        saved_at = iter_num if last else saved_at
        timed_from, clock = iter_num, time.perf_counter()
    if done or stopping:
        break

    if dropout > 0:     # masks depend on (seed, step, rank) alone: a resumed run draws the same
        torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))
    loss_scale = scaler.get_scale()     # 1 unless float16
    scored = use_ghost and iter_num % ghost_interval == 0
    if scored:          # the gradient of the validation loss, over all ranks, into ghost_*
        model.eval()
        mine, val_loss = val_offsets(iter_num), torch.zeros((), device=device)
        chunk = min(batch_size, len(mine))
        for i in range(0, len(mine), chunk):
            sync_gradients(i + chunk >= len(mine))
            with autocast:
                loss = model(*read_windows('ghost', mine[i:i + chunk])).mean() * chunk / len(mine)
            scaler.scale(loss).backward()
            val_loss += loss.detach()
        with torch.no_grad():
            for p, ghost in ghosts:
                ghost.copy_(p.grad / loss_scale if loss_scale != 1 else p.grad)
                p.grad = None
        model.train()

    loss_sum, rows = torch.zeros((), device=device), []
    for micro in range(micro_batches):
        sync_gradients(micro == micro_batches - 1)
        zeros = torch.zeros(len(ghost_names), batch_size, device=device, requires_grad=True) if scored else None
        with autocast:
            losses = model(X, Y, zeros)                 # (batch_size,)
            loss = losses.mean() / micro_batches
        this = offsets
        X, Y, offsets = train_batch(*divmod(iter_num * micro_batches + micro + 1, micro_batches))  # while the GPU works
        scaler.scale(loss).backward()
        loss_sum += loss.detach()
        if scored:
            rows.append((zeros.grad, losses.detach(), torch.from_numpy(this).to(device)))

    scaler.unscale_(optimizer) if scaler.is_enabled() else None
    if grad_dump and iter_num >= grad_dump_start_step and (iter_num - grad_dump_start_step) % grad_dump_step_interval == 0 \
            and (grad_dump_end_step is None or iter_num <= grad_dump_end_step) and iter_num not in dumped:
        dump_gradients()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), grad_clip or math.inf)
    norm = (norm.full_tensor() if use_fsdp else norm).to(device)
    # the step's only wait for the GPU; every rank gets the same numbers, hence takes the same decisions
    loss, norm, stopping = (all_reduce(torch.stack([loss_sum, norm.float(), torch.tensor(float(stop_signal), device=device)])) / world_size).tolist()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if not finite and on_nonfinite == 'stop' and not (scaler.is_enabled() and math.isfinite(loss)):
        say(f'step {iter_num}: loss {loss}, gradient norm {norm}: stopped before the update. Lower learning_rate, or --on_nonfinite=skip')
        sys.exit(1)
    if finite:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scored and finite:
        dots = gather([g if ghost_per_param else g.sum(0) for g, _, _ in rows]) * (micro_batches * batch_size / loss_scale)
        row = dict(dot_product=dots.sum(0) if ghost_per_param else dots, offset=gather([o for _, _, o in rows]), loss=gather([l for _, l, _ in rows]),
                   val_loss=(all_reduce(val_loss) / world_size).cpu(), iter=torch.tensor(iter_num), lr=torch.tensor(lr), grad_norm=torch.tensor(norm),
                   clip_coef=torch.tensor(min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0))
        if ghost_per_param:
            row['dot_product_per_param'] = dots
        if ghost_val_resample:
            row['val_offset'] = gather([torch.from_numpy(mine).to(device)])
        dots_rows.append(row) if master_process else None
    iter_num += 1
    if use_ghost and iter_num % ghost_save_interval == 0:
        write_dots()
    if check_sync_interval and iter_num % check_sync_interval == 0 and distributed and (not use_fsdp or fsdp_replicate > 1):
        bits = torch.stack([(p.to_local() if use_fsdp else p.detach()).view(torch.int32).sum(dtype=torch.int64) for p in params.values()])
        low, high = bits.clone(), bits
        replicas = mesh['replicate'].get_group() if use_fsdp else None
        dist.all_reduce(low, dist.ReduceOp.MIN, replicas)
        dist.all_reduce(high, dist.ReduceOp.MAX, replicas)
        differ = all_reduce((low != high).to(device, torch.int32), 'max').tolist()
        if any(differ):
            say(f'step {iter_num}: the replicas differ in {list(params)[differ.index(1)]}: a faulty GPU or a change that runs on some ranks only')
            sys.exit(1)
    if (iter_num - 1) % log_interval == 0 or iter_num == max_iters:
        seconds = (time.perf_counter() - clock) / (iter_num - timed_from)
        timed_from, clock = iter_num, time.perf_counter()
        mfu = flops_per_step / seconds / (peak * world_size) if peak else None
        memory = torch.cuda.max_memory_allocated() / 2**30 if device_type == 'cuda' else None
        left = int(seconds * (max_iters - iter_num))
        say(f'step {iter_num - 1}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.3f}, {seconds * 1000:.1f} ms, {tokens_per_step / seconds:,.0f} tokens/s, '
            f'MFU {f"{mfu:.1%}" if mfu else "n/a"}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left', passing=True)
        log(dict(iter=iter_num - 1, tokens=iter_num * tokens_per_step, loss=loss, lr=lr, grad_norm=norm, ms=seconds * 1000,
                 tokens_per_s=tokens_per_step / seconds, mfu=mfu, memory_gib=memory))
    if iter_num == start_iter + 1 and device_type == 'cuda':
        say(f'peak memory of the first step: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB')
    if pending and pending[0].done():
        finish_checkpoint()

finish_checkpoint()
if wandb_log and master_process and not eval_only:
    wandb.finish()
if distributed:
    dist.destroy_process_group()
if stopping:
    say(f'stopped by a signal after step {iter_num}; --init_from=resume goes on from there')
    sys.exit(128 + (stop_signal or signal.SIGTERM))
