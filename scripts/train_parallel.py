"""
Train a GPT-2 that is cut along five dimensions at once; the whole run, top to bottom. What each is for: docs/parallel.md.

torchrun --standalone --nproc_per_node=8 scripts/train_parallel.py config/train_gpt2_xl.py --tensor_parallel=2

tensor      each rank has a part of every matrix, of the heads and of the vocabulary   --tensor_parallel=2
context     each rank has a part of every sample's tokens                              --context_parallel=2
pipeline    each rank has some of the blocks                                           --pipeline_parallel=2
shard       FSDP over the ranks that these leave, and over context's: samples and shards of the weights
replicate   HSDP: copies of the sharded model                                          --fsdp_replicate=2
The product of all is the world size.

Data, settings, log and checkpoints are train.py's, and each goes on from the other's checkpoints, whatever the mesh.
Every mesh computes the same up to rounding, but for dropout, whose masks differ from rank to rank.
"""
import atexit
import json
import logging
import math
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)
from torch.nn.attention.bias import causal_lower_right

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from checkpoint import begin_out_dir, check_out_dir, excepthook, find_start, finish_saving, write_checkpoint  # noqa: E402
from configurator import configure, fail, one_line, under_torchrun  # noqa: E402
from data.bins import check_tokens, fingerprint, find_bin, hash64, read_tokens, shuffled  # noqa: E402
from kernels import peak_flops  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from weights import OPENAI, SafeReader, why  # noqa: E402

# ---- mesh ------------------------------------------------------------------------------------------------------------
tensor_parallel = 1                 # ranks that share every matrix; they talk in every layer, so: within one machine
context_parallel = 1                # ranks that share every sample's tokens
pipeline_parallel = 1               # ranks that share the blocks
pipeline_schedule = '1f1b'          # '1f1b' | 'interleaved': two stages per rank; ranks wait less, and send more
fsdp_replicate = 1                  # HSDP: copies of the sharded model
fsdp_reshard_after_forward = True   # False: keep weights gathered through the micro-batches, as pipeline always does
fsdp_activation_checkpointing = False  # False | 'full' | 'selective' (matmuls and attention are kept)
use_fsdp = True                     # always, over the ranks that the others leave
# ---- run -------------------------------------------------------------------------------------------------------------
out_dir = 'out'                     # everything the run writes goes here
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' | 'gpt2' | ... | a folder or .pt file; as in train.py
new_tokenizer = False               # let weights be trained on a dataset of other tokens than they know
overwrite = False                   # let a new run delete an earlier run's files in out_dir
seed = 1337                         # of weights, data order and dropout
eval_interval = 2000                # steps between evaluations
eval_iters = 200                    # batches per split and evaluation
eval_only = False                   # evaluate once and exit; writes nothing
log_interval = 1                    # steps between log lines
on_nonfinite = 'stop'               # 'stop' | 'skip': what to do with a step whose loss or gradient norm is not finite
# ---- checkpoints -----------------------------------------------------------------------------------------------------
always_save_checkpoint = True       # after every evaluation; False: only after one that improved, and at the end
checkpoint_interval = 0             # steps between checkpoints; 0: at evaluations
checkpoint_format = 'full'          # 'full': one file, ckpt.pt | 'sharded': each rank its part, ckpt_dcp/step_N
checkpoint_async = False            # sharded only: write in the background
keep_checkpoints = 0                # sharded only: how many to keep, the best one besides; 0 keeps all
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
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' (GPUs if there are any) | 'cpu' | 'cuda'
dtype = 'auto'                      # 'auto' (bfloat16 on a GPU, else float32) | 'float32' | 'bfloat16'
compile = 'auto'                    # 'auto' (on a GPU) | True | False: torch.compile, block by block
backend = 'auto'                    # 'auto' | 'nccl' | 'gloo'
timeout_minutes = 60                # after which a rank that waits for another gives up
# ---- train.py's alone: known here, so that its config files can be read, and refused if they ask for something ---------
use_ghost = ghost_val_resample = ghost_per_param = grad_dump = False
wandb_log = scale_lr = deterministic = fsdp_cpu_offload = False
ghost_val_batch_size = ghost_interval = ghost_save_interval = check_sync_interval = fsdp_min_num_params = 0
ghost_val_dataset = wandb_project = wandb_run_name = ''
# ----------------------------------------------------------------------------------------------------------------------
config, given = configure(globals())
sys.excepthook = excepthook(out_dir)
logging.getLogger('torch.distributed.tensor').setLevel(logging.ERROR)    # not that whole tensors take two gathers

# ---- checks: all come before the first write -------------------------------------------------------------------------
def require(condition, message):
    """Every check of the settings: if the condition does not hold, the run ends with this line."""
    if not condition:
        fail(message)

def say(message):
    """Rank 0 prints a line."""
    if rank == 0:
        try:
            print(message, flush=True)
        except OSError:     # a closed pipe, a lost terminal, a full disk: from now on nothing is printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

require(under_torchrun(), 'start by torchrun --standalone --nproc_per_node=N scripts/train_parallel.py ...')
rank, local_rank, world_size = (int(os.environ[name]) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
gpus = torch.cuda.device_count() if device in ('auto', 'cuda') else 0
if device == 'auto':
    device = 'cuda' if gpus else 'cpu'
device_type = device
if dtype == 'auto':
    dtype = 'bfloat16' if gpus else 'float32'
if compile == 'auto':
    compile = gpus > 0
config.update(device=device, dtype=dtype, compile=compile)
for name in ('use_ghost', 'grad_dump', 'wandb_log', 'scale_lr', 'deterministic', 'fsdp_cpu_offload',
             'check_sync_interval', 'fsdp_min_num_params'):
    require(not config[name], f'{name}={config[name]}: train.py has it, this script has not')
require(use_fsdp, 'use_fsdp=False: here what the other dimensions leave is always sharded: leave that out')
counts = '''tensor_parallel context_parallel pipeline_parallel fsdp_replicate eval_interval eval_iters log_interval
    gradient_accumulation_steps batch_size block_size n_layer n_head n_embd timeout_minutes'''.split()
for name, value in config.items():
    low, high = (1, 2**31) if name in counts else (0, 2**63)
    if isinstance(value, (int, float)):
        require(low <= value < high, f'{name}={value}: must be at least {low} and below {high}')
for name in ('dropout', 'beta1', 'beta2'):
    require(config[name] < 1, f'{name}={config[name]}: must be at least 0 and below 1')
choices = dict(pipeline_schedule=('1f1b', 'interleaved'), on_nonfinite=('stop', 'skip'), device=('cpu', 'cuda'),
               checkpoint_format=('full', 'sharded'), backend=('auto', 'nccl', 'gloo'), compile=(True, False),
               data_order=('random', 'epoch'), dtype=('float32', 'bfloat16'))
for name, values in choices.items():
    require(config[name] in values, f'{name}={config[name]!r}: expected {" or ".join(map(repr, values))}')
require(device == 'cpu' or int(os.environ.get('LOCAL_WORLD_SIZE', 1)) <= gpus,
        f'device=cuda: this machine has {gpus} GPUs: --nproc_per_node={gpus}, or --device=cpu')
require(backend != 'nccl' or gpus, f'backend=nccl needs GPUs and device is {device}: --backend=gloo')
require(out_dir, 'out_dir is empty: name a folder')
require(init_from in ('scratch', 'resume', 'auto', *OPENAI) or os.path.exists(init_from),
        f'init_from={init_from}: expected scratch, resume, auto, {", ".join(OPENAI)}, a folder or a .pt file')
require(not decay_lr or min_lr <= learning_rate, f'min_lr={min_lr} is above learning_rate={learning_rate}: '
        f'--min_lr={learning_rate / 10:g}, or --decay_lr=False')
require(n_embd % n_head == 0, f'n_embd={n_embd} is not divisible by n_head={n_head}')
require(not checkpoint_async or checkpoint_format == 'sharded',
        'checkpoint_async=True needs --checkpoint_format=sharded')
taken = tensor_parallel * context_parallel * pipeline_parallel * fsdp_replicate
require(world_size % taken == 0, f'world size {world_size} is not a multiple of tensor_parallel x context_parallel x '
        f'pipeline_parallel x fsdp_replicate = {taken}')
shards = world_size // taken
data_ranks = fsdp_replicate * shards            # of them each reads other samples
micro_batches = gradient_accumulation_steps // data_ranks       # per rank and step
require(gradient_accumulation_steps % data_ranks == 0, f'gradient_accumulation_steps={gradient_accumulation_steps} '
        f'counts micro-batches of all {data_ranks} replicate x shard ranks and must be a multiple of that: '
        f'--gradient_accumulation_steps={math.ceil(gradient_accumulation_steps / data_ranks) * data_ranks}')
stages_per_rank = 2 if pipeline_schedule == 'interleaved' and pipeline_parallel > 1 else 1
num_stages = pipeline_parallel * stages_per_rank
require(pipeline_parallel > 1 or pipeline_schedule == '1f1b', 'pipeline_schedule=interleaved needs pipeline_parallel=2 '
        'or more')
require(micro_batches % pipeline_parallel == 0, f'pipeline_parallel={pipeline_parallel} takes a multiple of so many '
        f'micro-batches per rank, not {micro_batches}: --gradient_accumulation_steps='
        f'{math.ceil(micro_batches / pipeline_parallel) * pipeline_parallel * data_ranks}')

# ---- connect the ranks: as train.py does -----------------------------------------------------------------------------
if gpus:
    device = f'cuda:{local_rank}'
    torch.cuda.set_device(device)
if backend == 'auto':       # nccl carries tensors on GPUs, gloo those in host memory: checkpoints'
    backend = 'cpu:gloo,cuda:nccl' if gpus else 'gloo'
one_node = os.environ.get('GROUP_WORLD_SIZE') == '1'
attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '') if one_node else ''
store = dist.PrefixStore(f'start{attempt}', next(dist.rendezvous('env://'))[0])
dist.init_process_group(backend, store=store, rank=rank, world_size=world_size,
                        timeout=timedelta(minutes=timeout_minutes), device_id=torch.device(device) if gpus else None)
atexit.register(time.sleep, 0.5)    # gloo's threads need Python's lock for some time yet
# Ranks that follow one another share matrices, then tokens, then samples, then blocks: what talks most is nearest.
mesh = dist.init_device_mesh(device_type, (pipeline_parallel, fsdp_replicate, shards * context_parallel,
                                           tensor_parallel), mesh_dim_names=('pipeline', 'replicate', 'shard', 'tensor'))
by_context = dist.init_device_mesh(device_type, (world_size // (context_parallel * tensor_parallel), context_parallel,
                                                 tensor_parallel), mesh_dim_names=('others', 'context', 'tensor'))
pipeline_rank, tensor_rank = mesh.get_local_rank('pipeline'), mesh.get_local_rank('tensor')
context_rank, context_group = by_context.get_local_rank('context'), by_context.get_group('context')
data_rank = (rank // (tensor_parallel * context_parallel)) % data_ranks

def sum_over_ranks(tensor):
    """A new tensor, the same on every rank; all ranks participate."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total

# ---- data and where to start: as in train.py -------------------------------------------------------------------------
bins, metas = {}, {}    # {split: (path, dtype, tokens)}, {split: what prepare.py recorded}
with one_line():        # a ValueError inside, which is about the user's input, ends the run with its line
    for split in ('train', 'val'):
        bins[split], metas[split] = find_bin(dataset, split)
meta = {**metas['train'], 'fingerprint': fingerprint(bins['train'][0], metas['train'])}
if bins['train'][0].parent == Path(dataset):
    config['dataset'] = os.path.abspath(dataset)
shape_names = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias')
with one_line(f'init_from={init_from}: '):      # rank 0 alone looks at the disk, and reads or makes weights
    start = find_start(config, given, meta, shape_names)
for line in start['told']:
    say(line)
model_args, iter_num, best_val_loss = start['model_args'], start['iter_num'], start['best_val_loss']
shape = {name: model_args[name] for name in shape_names}
config.update(shape)
globals().update(shape)     # a checkpoint prescribes these; find_start has refused a command that says otherwise
vocab_size, start_iter = model_args['vocab_size'], iter_num
with one_line():
    for split in bins:
        check_tokens(bins[split], metas[split], block_size, vocab_size)
require(n_head % tensor_parallel == 0, f'n_head={n_head} is not divisible by tensor_parallel={tensor_parallel}')
if tensor_parallel > 1:
    pieces = tensor_parallel * shards * context_parallel
    for name, size in (('n_embd', n_embd), ('the vocabulary', vocab_size)):
        require(size % pieces == 0, f'{name}={size} is not divisible by tensor_parallel x shard x context_parallel ranks '
                f'= {pieces}')
cuts = tensor_parallel * (1 if context_parallel == 1 else 2 * context_parallel)
require(block_size % cuts == 0, f'block_size={block_size} is not divisible by tensor_parallel x 2 context_parallel = '
        f'{cuts} (the 2: with context_parallel)')
require(n_layer >= num_stages, f'n_layer={n_layer} is less than the {num_stages} stages of the pipeline')
samples_per_step = gradient_accumulation_steps * batch_size     # over all ranks
tokens_per_step = samples_per_step * block_size

def samples_before(step):
    """How many samples training has seen before a step."""
    return start['samples_seen'] + (step - start_iter) * samples_per_step

def train_offsets(step, j):
    """Token offsets, int64 (n,), of samples j (n,) of a step: train.py's, so that every mesh trains on the same."""
    _, _, tokens = bins['train']
    if data_order == 'random':
        return (hash64(seed, step, j) % np.uint64(tokens - block_size)).astype(np.int64)
    windows = (tokens - 1) // block_size
    epoch, k = np.divmod(samples_before(step) + j, windows)
    return shuffled(k, windows, seed, epoch) * block_size

# Of every sample a rank has two pieces, the r-th from the start and the r-th from the end: a token looks at all before
# it, so the ranks of a context would otherwise have unlike work.
positions = torch.arange(block_size)
if context_parallel > 1:
    pieces = positions.chunk(2 * context_parallel)
    positions = torch.cat((pieces[context_rank], pieces[-1 - context_rank]))    # (T,), T = block_size / context_parallel

def read_windows(split, offsets):
    """This rank's tokens of samples, and for each the one that follows: on the device, int64 (len(offsets), T) each."""
    with one_line(every_rank=True):     # what one rank alone has read, it reports itself
        tokens = torch.from_numpy(read_tokens(bins[split], offsets, block_size + 1, vocab_size))
    if gpus:
        tokens = tokens.pin_memory()
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1][:, where], tokens[:, 1:][:, where]

where = positions.to(device)

def train_batches(step):
    """This rank's micro-batches of a step: a list of (inputs, targets)."""
    first = [(micro * data_ranks + data_rank) * batch_size for micro in range(micro_batches)]
    return [read_windows('train', train_offsets(step, j + np.arange(batch_size))) for j in first]

# ---- context: every rank computes its tokens' queries, and gathers all tokens' keys and values -----------------------
class GatherContext(torch.autograd.Function):
    """x (...) of each rank of a context -> all of them (ranks, ...). Backward: each rank gets the sum for its own."""

    @staticmethod
    def forward(ctx, x):
        every = funcol.all_gather_tensor(x.contiguous(), 0, context_group)
        return funcol.wait_tensor(every).unflatten(0, (context_parallel, -1))

    @staticmethod
    def backward(ctx, g):
        mine = funcol.reduce_scatter_tensor(g.contiguous().flatten(0, 1), 'sum', 0, context_group)
        return funcol.wait_tensor(mine)

def attend(attention, x, rows=None, cache=None):
    """
    What Attention.forward does, for this rank's heads and tokens: x (B,T,C), or with tensor its tokens' part. The rows
    of c_attn lie head by head here, q, k and v of each, so that a contiguous part of them is whole heads.
    """
    qkv = attention.c_attn(x)                                                       # (B,T,3C/tensor)
    q, k, v = qkv.unflatten(-1, (-1, 3, n_embd // n_head)).permute(3, 0, 2, 1, 4)   # (B,H,T,D) each
    dropout_p = dropout if attention.training else 0.0
    if context_parallel == 1:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    else:
        early, late = GatherContext.apply(torch.stack((k, v))).chunk(2, 4)          # (ranks,2,B,H,T/2,D) each
        pieces = torch.cat((early, late.flip(0)))                                   # (2 ranks,2,B,H,T/2,D), in order
        k, v = pieces.movedim(0, 3).flatten(3, 4)                                   # (B,H,block_size,D) each
        parts = []
        for part, piece in zip(q.chunk(2, 2), (context_rank, 2 * context_parallel - 1 - context_rank)):
            seen = (piece + 1) * part.size(2)       # tokens up to the end of this piece; the mask's last rows end there
            mask = causal_lower_right(part.size(2), seen)
            parts.append(F.scaled_dot_product_attention(part, k[:, :, :seen], v[:, :, :seen], mask, dropout_p))
        y = torch.cat(parts, 2)                                                     # (B,H,T,D)
    y = attention.c_proj(y.transpose(1, 2).flatten(2))
    return F.dropout(y, dropout, attention.training)

# ---- pipeline: a stage is a GPT with some of its blocks --------------------------------------------------------------
class Stage(GPT):
    """Some consecutive blocks; the first stage has the embeddings too, the last the final norm and the head. The names
    of parameters are those of the whole GPT."""

    def __init__(self, number):
        super().__init__(GPTConfig(**model_args, dropout=dropout))
        self.first, self.last = number == 0, number == num_stages - 1
        if fsdp_activation_checkpointing:
            self.recompute(selective=fsdp_activation_checkpointing == 'selective')
        self.blocks = []
        for i, block in enumerate(self.transformer.h):
            if i * num_stages // n_layer == number:
                self.blocks.append(block)
            else:
                self.transformer.h[i] = None
            block.attn.forward = partial(attend, block.attn)
        if not self.first:
            self.transformer.wpe = None
        if not self.last:
            self.transformer.ln_f = self.lm_head = None
        if not self.first and not self.last:
            self.transformer.wte = None     # the last has it as its head

    def forward(self, x, targets=None):
        """x: the first stage's are token ids (B,T), all others' what the one before has made. Returns that, (B,T,C) or
        with tensor (B,T/tensor,C); of the last stage the mean loss, (1,)."""
        if self.first:
            here = where.chunk(tensor_parallel)[tensor_rank]        # tensor's ranks share the tokens, too
            x = self.transformer.wte(x) + F.embedding(here, local(self.transformer.wpe.weight))
            x = F.dropout(x, dropout, self.training)
        for block in self.blocks:
            x = block(x)
        if not self.last:
            return x
        if tensor_parallel == 1:
            return self.loss(x, targets).mean(0, keepdim=True)
        # Each rank has the logits of its part of the vocabulary; loss_parallel exchanges the largest, the sums and the
        # target's, one number per token each. The whole logits exist nowhere.
        logits = self.lm_head(self.transformer.ln_f(x)).float().flatten(0, 1)       # (B*T,V), this rank's columns
        return F.cross_entropy(logits, targets.flatten(), reduction='none').to_local().mean(0, keepdim=True)

def local(weight):
    """A weight that tensor's ranks all have whole, as an ordinary tensor: each adds to its gradient."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight

def split_matrices(stage):
    """
    Tensor parallel with sequence parallel. c_attn and c_fc are cut by rows and c_proj by columns, so that a rank
    computes some heads and some of the MLP's features with no exchange in between. All else works on a part of the
    tokens: they are gathered before c_attn and c_fc, and c_proj's sums are scattered to them.
    """
    by_rows, by_columns = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    for block in stage.blocks:
        parallelize_module(block, mesh['tensor'], {
            'ln_1': SequenceParallel(), 'attn.c_attn': by_rows, 'attn.c_proj': by_columns,
            'ln_2': SequenceParallel(), 'mlp.c_fc': by_rows, 'mlp.c_proj': by_columns})
    if stage.first:
        distribute_module(stage.transformer.wpe, mesh['tensor'])        # every rank has all of it
    if stage.first or stage.last:       # by vocabulary
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(stage.transformer.wte, mesh['tensor'], embed)
    if stage.last:
        parallelize_module(stage.transformer.ln_f, mesh['tensor'], SequenceParallel())
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(stage.lm_head, mesh['tensor'], head)
        stage.tie()                     # the two calls have made two tensors

# ---- model: cut, compiled, sharded -----------------------------------------------------------------------------------
stages = []
with torch.device('meta'):      # shapes without memory
    whole = GPT(GPTConfig(**model_args))
    for k in range(stages_per_rank):
        stages.append(Stage(k * pipeline_parallel + pipeline_rank))
num_params, flops_per_step = whole.num_params(), whole.flops_per_token() * tokens_per_step
forward_dtype = None if dtype == 'float32' else getattr(torch, dtype)
policy = dict(mesh=mesh['shard'] if fsdp_replicate == 1 else mesh['replicate', 'shard'],
              reshard_after_forward=fsdp_reshard_after_forward and pipeline_parallel == 1,
              mp_policy=MixedPrecisionPolicy(forward_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False))
for stage in stages:
    if tensor_parallel > 1:
        split_matrices(stage)
    if compile:
        for block in stage.blocks:
            block.compile(dynamic=False)
        if stage.last and tensor_parallel == 1:
            stage.loss = torch.compile(stage.loss, dynamic=False)
    for block in stage.blocks:
        fully_shard(block, **policy)
    fully_shard(stage, **policy)
    stage.to_empty(device=device)
    if stage.last:
        stage.tie()             # to_empty has made two tensors of the embedding and the head
params = {name: p for stage in stages for name, p in stage.named_parameters()}      # tied ones once
groups = [stage.param_groups(weight_decay) for stage in stages]
groups = [{**group, 'params': [p for g in groups for p in g[i]['params']]} for i, group in enumerate(groups[0])]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=True)
for p in params.values():       # now, so that the state of a checkpoint has a place to go to
    optimizer.state[p] = dict(step=torch.zeros((), device=device), exp_avg=torch.zeros_like(p),
                              exp_avg_sq=torch.zeros_like(p))
TIED = 'transformer.wte.weight'
tied_group = None               # of the first and last stage's ranks that have the same part of it
if pipeline_parallel > 1:
    lines = mesh.mesh.flatten(1).T.tolist()         # of each pipeline the ranks
    tied_groups = {(line[0], line[-1]): dist.new_group([line[0], line[-1]]) for line in lines}
    tied_group = next((group for ends, group in tied_groups.items() if rank in ends), None)

def copies_of(name):
    """How many ranks hold the very numbers that this one holds of a parameter."""
    p = params[name]
    n = math.prod(p.device_mesh.size(i) for i, placement in enumerate(p.placements) if placement.is_replicate())
    return n * 2 if name == TIED and pipeline_parallel > 1 else n

copies = torch.tensor([copies_of(name) for name in params], device=device)

# ---- weights and optimizer state: in files as GPT-2 and train.py have them ------------------------------------------
def cut(tensor, like):
    """This rank's part of a whole tensor, as `like`, a DTensor, is laid out: tensor's part first, of that the shard."""
    for i in reversed(range(like.device_mesh.ndim)):
        if not like.placements[i].is_replicate():
            dim, size, mine = like.placements[i].dim, like.device_mesh.size(i), like.device_mesh.get_local_rank(i)
            chunks = tensor.chunk(size, dim)
            tensor = chunks[mine] if mine < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor

def rearrange(first, second):
    """
    The rows of every c_attn, and of its optimizer state, from the order (first, second, D) to (second, first, D). Files
    have (3, heads, D), all of q before all of k; here it is (heads, 3, D). All ranks participate.
    """
    for name, p in params.items():
        if '.c_attn.' in name:
            for tensor in (p.detach(), optimizer.state[p]['exp_avg'], optimizer.state[p]['exp_avg_sq']):
                rows = tensor.full_tensor()
                rows = rows.unflatten(0, (first, second, -1)).transpose(0, 1).reshape(rows.shape)
                tensor.to_local().copy_(cut(rows, tensor))

def tensors_of_run():
    """{'model': weights, 'optimizer': state by parameter name}: this rank's part."""
    state = {name: optimizer.state[p] for name, p in params.items()}
    matrices, rest = [], []
    for name, p in whole.named_parameters():
        (matrices if p.dim() >= 2 else rest).append(name)
    names = [{**group, 'params': members} for group, members in zip(optimizer.param_groups, (matrices, rest))]
    return {'model': {name: p.detach() for name, p in params.items()},
            'optimizer': {'state': state, 'param_groups': names}}

def load():
    """Fill weights and optimizer state with what find_start has found; all ranks participate."""
    mine = tensors_of_run()
    if start['sharded']:
        try:
            del mine['optimizer']['param_groups']
            dcp.load(mine, storage_reader=SafeReader(start['resumed_from']))
        except (Exception, dcp.CheckpointException) as error:
            raise ValueError(f'{start["resumed_from"]} does not load: {why(error)}') from None
    else:
        whole_state = start['optimizer'].get('state', {})
        for name, p in whole.named_parameters():    # one whole tensor at a time: rank 0 sends it, each keeps its part
            kinds = ('exp_avg', 'exp_avg_sq') if start['has_optimizer'] else ()
            for kind in (None, *kinds):
                tensor = torch.empty(p.shape, device=device)
                if rank == 0:
                    tensor.copy_(whole_state[name][kind] if kind else start['model'][name])
                dist.broadcast(tensor, 0)
                if name in params:
                    here = mine['optimizer']['state'][name][kind] if kind else mine['model'][name]
                    here.to_local().copy_(cut(tensor, here))
            if start['has_optimizer']:
                step = torch.zeros((), device=device)
                if rank == 0:
                    step.copy_(whole_state[name]['step'])
                dist.broadcast(step, 0)
                if name in params:
                    mine['optimizer']['state'][name]['step'].copy_(step)
    start['model'] = start['optimizer'] = None
    rearrange(3, n_head)

def whole_tensors(tree):
    """tensors_of_run() whole, in rank 0's memory; {} elsewhere. All ranks participate."""
    found = {'model': {}, 'optimizer': {'state': {}, 'param_groups': tree['optimizer']['param_groups']}}
    for name, p in whole.named_parameters():
        owner = owners[name]
        mine = {}
        if name in params and (mesh.mesh[pipeline_rank] == owner).any():
            mine = {kind: t.full_tensor().cpu() for kind, t in
                    (('weight', tree['model'][name]), *optimizer.state[params[name]].items()) if kind != 'step'}
        for kind in ('weight', 'exp_avg', 'exp_avg_sq'):
            if rank == 0 and owner != 0:
                mine[kind] = torch.empty(p.shape)
                dist.recv(mine[kind], owner)
            elif rank == owner and owner != 0:
                dist.send(mine[kind], 0)
        if rank == 0:
            found['model'][name] = mine.pop('weight')
            found['optimizer']['state'][name] = {'step': next(iter(optimizer.state.values()))['step'].cpu(), **mine}
    return found

held = [None] * world_size
dist.all_gather_object(held, list(params))
owners = {name: next(r for r in range(world_size) if name in held[r]) for name, _ in whole.named_parameters()}
with one_line():
    load()

# ---- one step's passes -----------------------------------------------------------------------------------------------
contexts = ExitStack()
if tensor_parallel > 1:
    contexts.enter_context(loss_parallel())     # for the whole run: it changes DTensor's cross-entropy alone
if pipeline_parallel > 1:
    carried = torch.empty(batch_size, len(positions) // tensor_parallel, n_embd, device='meta',
                          dtype=forward_dtype or torch.float32, requires_grad=True)     # between stages
    ids, mean = torch.empty(batch_size, len(positions), dtype=torch.long, device='meta'), torch.empty(1, device='meta')
    pipeline = [PipelineStage(stage, k * pipeline_parallel + pipeline_rank, num_stages, torch.device(device),
                              input_args=ids if stage.first else carried, output_args=mean if stage.last else carried,
                              group=mesh.get_group('pipeline')) for k, stage in enumerate(stages)]
    options = dict(n_microbatches=micro_batches, loss_fn=lambda loss, targets: loss.sum() / micro_batches,
                   scale_grads=False)
    if pipeline_schedule == '1f1b':
        schedule = Schedule1F1B(pipeline[0], **options)
    else:
        schedule = ScheduleInterleaved1F1B(pipeline, **options)

def passes(batches, training):
    """
    The mean losses of batches, a list of (inputs, targets): a list on the ranks of the last stage, empty on the others.
    training: with gradients. A pipeline takes as many batches as a step has micro-batches.
    """
    losses = []
    if pipeline_parallel > 1:
        inputs, targets = (torch.cat(part) for part in zip(*batches))
        args = [inputs] if stages[0].first else []
        kwargs = dict(targets=targets, target=targets, losses=losses) if stages[-1].last else {}
        (schedule.step if training else schedule.eval)(*args, **kwargs)
        return [loss.detach() * micro_batches for loss in losses]
    for i, (inputs, targets) in enumerate(batches):
        last = i == len(batches) - 1
        stages[0].set_requires_gradient_sync(last)      # average over the ranks after the last micro-batch only
        stages[0].set_is_last_backward(last)
        stages[0].set_reshard_after_backward(last or fsdp_reshard_after_forward)
        with torch.set_grad_enabled(training):
            loss = stages[0](inputs, targets).sum()
        if training:
            (loss / micro_batches).backward()
        losses.append(loss.detach())
    return losses

def mean_loss(losses, count):
    """This rank's share of the mean over `count` batches of all ranks: summed over the ranks it is the mean."""
    share = torch.zeros((), device=device)
    for loss in losses:
        share += loss / (count * context_parallel * tensor_parallel)
    return share

def evaluate():
    """Mean loss of each split, nats, over eval_iters batches of evenly spread windows; None if a signal came."""
    means, at_once = {}, micro_batches if pipeline_parallel > 1 else 1      # batches per rank
    for stage in stages:
        stage.eval()
    for split in ('train', 'val'):
        windows, total = bins[split][2] - block_size, torch.zeros(2, device=device)     # loss, and whether a signal came
        for k in range(data_rank, eval_iters + data_rank, data_ranks * at_once):
            numbers = [k + i * data_ranks for i in range(at_once)]
            j = [number % eval_iters * batch_size + np.arange(batch_size) for number in numbers]
            losses = passes([read_windows(split, i * windows // (eval_iters * batch_size)) for i in j], training=False)
            wanted = [loss for loss, number in zip(losses, numbers) if number < eval_iters]
            share = mean_loss(wanted, eval_iters)
            total += sum_over_ranks(torch.stack((share, torch.full_like(share, float(stop_signal)))))
            if total[1] > 0:        # all ranks leave at the same batch
                return None
        means[split] = total[0].item()
    for stage in stages:
        stage.train()
    return means

def save(last, best):
    """As train.py saves; all ranks participate."""
    began = time.perf_counter()
    finish_saving(keep_checkpoints)     # two checkpoints at once would deadlock
    rearrange(n_head, 3)
    tensors = tensors_of_run()
    sharded = checkpoint_format == 'sharded'
    progress = dict(model_args=model_args, iter_num=iter_num, samples_seen=samples_before(iter_num), scaler={},
                    best_val_loss=best_val_loss, config=config, meta=meta, wandb_id=start['wandb_id'])
    write_checkpoint(out_dir, tensors if sharded else whole_tensors(tensors), progress, last, best, sharded,
                     checkpoint_async)
    rearrange(3, n_head)
    if not checkpoint_async:
        finish_saving(keep_checkpoints)
    say(f'saved step {iter_num}; training waited {time.perf_counter() - began:.2f} s')

# ---- the first writes: everything has been checked -------------------------------------------------------------------
if not eval_only:
    with one_line():
        check_out_dir(out_dir)      # makes it; all ranks participate
    if rank == 0:
        begin_out_dir(out_dir, start, config, evaluates=iter_num % eval_interval == 0 or iter_num >= max_iters)
log_file = Path(out_dir, 'log.jsonl')

def log(entry):
    """A line of log.jsonl."""
    if rank == 0 and not eval_only:
        entry = {k: v if v is None or math.isfinite(v) else None for k, v in entry.items()}     # JSON has no NaN
        try:
            with open(log_file, 'a') as f:
                f.write(json.dumps(entry) + '\n')
        except OSError as error:
            say(f'warning: {log_file} is not written: {error.strerror}')

card = torch.cuda.get_device_name() if gpus else device
peak = peak_flops(card)
say(f'pipeline {pipeline_parallel} ({num_stages} stages, {pipeline_schedule}) x replicate {fsdp_replicate} x shard {shards} '
    f'x context {context_parallel} x tensor {tensor_parallel}: {world_size} x {card}, {dtype}, compile '
    f'{"blocks" if compile else "off"}')
mine = sum(p.to_local().numel() for p in params.values()) * 16 / 2**20
say(f'{num_params:,} parameters; rank 0 holds {mine:.1f} MiB of parameters, gradients and optimizer state, of '
    f'{num_params * 16 / 2**20:.1f}')
say(f'tokens per step: micro-batch {batch_size} x block {block_size} x {micro_batches} micro-batches x {data_ranks} '
    f'replicate x shard ranks = {tokens_per_step:,}')

# ---- the loop: train.py's --------------------------------------------------------------------------------------------
def lr_at(step):
    """Learning rate of a step: linear from above 0 to the maximum in warmup_iters steps, then a cosine to min_lr."""
    if not decay_lr:
        return learning_rate
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    if step >= lr_decay_iters:
        return min_lr
    way = (step - warmup_iters) / (lr_decay_iters - warmup_iters)       # 0 to 1
    return min_lr + (learning_rate - min_lr) * (1 + math.cos(math.pi * way)) / 2

def on_signal(number, frame):
    """Finish the step, save, exit; the same signal again kills as usual."""
    global stop_signal
    stop_signal = number
    signal.signal(number, signal.SIG_DFL)
    if rank == 0:
        with suppress(OSError):
            os.write(2, b'stopping after this step; the same signal again kills at once\n')

stop_signal = 0     # of SIGTERM or Ctrl-C, once it has come
for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
    if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
        signal.signal(getattr(signal, name), on_signal)
saved_at, stopping, sound = start_iter, False, True     # the newest ckpt.pt; by a signal; the last evaluation was finite
if start['resumed_from'] and start['resumed_from'].endswith('best.pt'):
    saved_at = 0
timed_from, clock = start_iter, time.perf_counter()
while True:
    lr = lr_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr
    done, improved = iter_num >= max_iters, False
    evaluating = eval_only or (not stopping and (done or iter_num % eval_interval == 0))
    if evaluating:
        means = evaluate()
        if means is None:
            stopping = True
        else:
            improved = means['val'] < best_val_loss
            if improved:
                best_val_loss = means['val']
            say(f'evaluated after {iter_num} steps: train loss {means["train"]:.4f}, val loss {means["val"]:.4f}')
            log(dict(iter=iter_num, tokens=samples_before(iter_num) * block_size, train_loss=means['train'],
                     val_loss=means['val']))
            sound = math.isfinite(means['train']) and math.isfinite(means['val'])
            if not sound and (done or eval_only or on_nonfinite == 'stop'):
                say(f'step {iter_num}: the evaluation is not finite: stopped, and these weights are not saved')
                finish_saving(keep_checkpoints)
                sys.exit(1)
    if eval_only:
        break
    if checkpoint_interval:
        due = iter_num % checkpoint_interval == 0
    else:
        due = improved or (evaluating and always_save_checkpoint)
    save_last = (due or done or stopping) and iter_num > saved_at
    if iter_num > 0 and sound and (save_last or improved):
        save(save_last, improved)
        saved_at = iter_num
    if done or stopping:
        break
    if evaluating or saved_at == iter_num:
        timed_from, clock = iter_num, time.perf_counter()

    if dropout > 0:     # no two ranks compute the same activations, so each has masks of its own
        torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))
    train_loss = mean_loss(passes(train_batches(iter_num), training=True), gradient_accumulation_steps)
    if tied_group and TIED in params:       # the first stage's gradient and the last's belong to one matrix
        dist.all_reduce(params[TIED].grad.to_local(), group=tied_group)
    gradients = [p.grad.to_local() for p in params.values()]
    squares = torch.stack(torch._foreach_norm(gradients)).square()
    # here the host waits for the GPU; all ranks get the same numbers, and so decide alike
    numbers = torch.stack((train_loss, (squares / copies).sum(), torch.full((), float(stop_signal), device=device)))
    train_loss, square, stop = sum_over_ranks(numbers).tolist()
    grad_norm, stopping = math.sqrt(square) if square >= 0 else math.nan, stop > 0
    if math.isfinite(train_loss) and math.isfinite(grad_norm):
        if grad_clip:
            torch._foreach_mul_(gradients, min(1.0, grad_clip / (grad_norm + 1e-6)))     # as clip_grad_norm_ has it
        optimizer.step()
    elif on_nonfinite == 'skip':
        say(f'step {iter_num}: loss {train_loss}, gradient norm {grad_norm}: skipped')
    else:
        say(f'step {iter_num}: loss {train_loss}, gradient norm {grad_norm}: stopped before the update; '
            'try a lower learning_rate, or on_nonfinite=skip to leave such steps out')
        finish_saving(keep_checkpoints)
        sys.exit(1)
    optimizer.zero_grad()
    iter_num += 1
    if (iter_num - 1) % log_interval == 0 or iter_num == max_iters:
        seconds = (time.perf_counter() - clock) / (iter_num - timed_from)
        timed_from, clock = iter_num, time.perf_counter()
        mfu = flops_per_step / seconds / (peak * world_size) if peak else None
        memory = torch.cuda.max_memory_allocated() / 2**30 if gpus else None
        say(f'step {iter_num - 1}: loss {train_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.3f}, {seconds * 1000:.1f} ms, '
            f'{tokens_per_step / seconds:,.0f} tokens/s, MFU {f"{mfu:.1%}" if mfu else "n/a"}')
        log(dict(iter=iter_num - 1, tokens=samples_before(iter_num) * block_size, loss=train_loss, lr=lr,
                 grad_norm=grad_norm, ms=seconds * 1000, tokens_per_s=tokens_per_step / seconds, mfu=mfu,
                 memory_gib=memory))
    finish_saving(keep_checkpoints, wait=False)

finish_saving(keep_checkpoints)
contexts.close()
dist.barrier()      # no rank leaves while another still needs its connections
dist.destroy_process_group()
if stopping:
    say(f'stopped by a signal after {iter_num} steps; --init_from=auto goes on from there')
    sys.exit(128 + (stop_signal or signal.SIGTERM))
