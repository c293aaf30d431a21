"""
Train a GPT-2 that is cut along five dimensions at once; the whole run, top to bottom. See docs/parallel.md.

torchrun --standalone --nproc_per_node=8 scripts/train_parallel.py config/train_gpt2.py --tensor_parallel=2

tensor      each rank has a part of every matrix, of the heads and of the vocabulary   --tensor_parallel=2
context     each rank has a part of every sample's tokens                              --context_parallel=2
pipeline    each rank has some of the blocks                                           --pipeline_parallel=2
shard       FSDP over the ranks that are left, which have other samples each, and over context's too
replicate   HSDP: copies of the sharded model                                          --fsdp_replicate=2

Data, settings and log are train.py's, and each script goes on from the other's checkpoints, whatever the mesh. Every
mesh computes the same up to rounding, but for dropout, whose masks differ from rank to rank.
"""
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import check_numbers, configure, fail, one_line, tell, under_torchrun    # before torch: for Ctrl-C

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)
from torch.nn.attention.bias import causal_lower_right

from checkpoint import (SHAPE, begin_out_dir, catch_signals, check_out_dir, excepthook, exit_codes, find_start,
                        finish_saving, load_start, log_record, make_mesh, save_sharded, state_of)
from data.bins import check_tokens, find_data, hash64, read_tokens, sample_offsets
from kernels import peak_flops
from model import GPT, Attention, GPTConfig
from scripts.common import choose_device, join_ranks, log_step, lr_at, peak_memory

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
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' | weights, as in train.py
new_tokenizer = False               # let weights be trained on a dataset of other tokens than they know
overwrite = False                   # let a new run delete an earlier run's files in out_dir
seed = 1337                         # of weights, data order and dropout
eval_interval = 2000                # steps between evaluations
eval_iters = 200                    # batches per split and evaluation
log_interval = 1                    # steps between log lines
always_save_checkpoint = True       # after every evaluation; False: only after one that improved, and at the end
checkpoint_interval = 0             # steps between checkpoints; 0: at evaluations
checkpoint_format = 'sharded'       # always: each rank writes its part, ckpt_dcp/step_N
checkpoint_async = False            # write in the background
keep_checkpoints = 0                # how many to keep, the best one besides; 0 keeps all
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
decay = 'cosine'                    # after warm-up: 'cosine' | 'wsd' (stable, decay): 60% constant, 40% a line
warmup_iters = 2000                 # steps of linear warm-up
lr_decay_iters = 600000             # step at which it has come down to min_lr; about max_iters
min_lr = 6e-5                       # about learning_rate / 10
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' (GPUs if there are any) | 'cpu' | 'cuda'
dtype = 'auto'                      # 'auto' (bfloat16 on a GPU, else float32) | 'float32' | 'bfloat16'
compile = 'auto'                    # 'auto' (on a GPU) | True | False: torch.compile, block by block
timeout_minutes = 60                # after which a rank that waits for another gives up
# ---- train.py's, known here so that its config files can be read; another value is refused --------------------------
use_ghost = grad_dump = eval_only = wandb_log = scale_lr = deterministic = fsdp_cpu_offload = False
rope = qk_norm = profile_memory = ghost_val_resample = ghost_per_param = False
ghost_val_batch_size = ghost_interval = ghost_save_interval = check_sync_interval = fsdp_min_num_params = 0
profile_steps = 0
ghost_val_dataset = wandb_project = wandb_run_name = ''
on_nonfinite = 'stop'
backend = 'auto'
optimizer = 'adamw'
# ----------------------------------------------------------------------------------------------------------------------
one_value = """use_fsdp checkpoint_format use_ghost grad_dump eval_only wandb_log scale_lr deterministic
    fsdp_cpu_offload fsdp_min_num_params check_sync_interval rope qk_norm profile_steps profile_memory on_nonfinite
    backend optimizer""".split()
choices = {name: (globals()[name],) for name in one_value}      # what each setting may be
config, given = configure(globals())
sys.excepthook = excepthook(out_dir)
logging.getLogger('torch.distributed.tensor').setLevel(logging.ERROR)   # not that some tensors take two gathers

# ---- checks: all come before the first write -------------------------------------------------------------------------
def require(condition, message):
    """Every check of the settings: if the condition does not hold, the run ends with this line."""
    if not condition:
        fail(message)

def require_multiple(size, name, parts, of):
    require(size % parts == 0, f'{name}={size} is not a multiple of {of} = {parts}; the next is '
            f'{math.ceil(size / parts) * parts}')

require(under_torchrun(), 'start by torchrun --standalone --nproc_per_node=N scripts/train_parallel.py ...')
device, dtype = choose_device(device, dtype)
device_type, on_gpu = device, device == 'cuda'
if compile == 'auto':
    compile = on_gpu
config.update(device=device, dtype=dtype, compile=compile)
check_numbers(config, counts="""tensor_parallel context_parallel pipeline_parallel fsdp_replicate eval_interval
    eval_iters log_interval gradient_accumulation_steps batch_size block_size n_layer n_head n_embd timeout_minutes""")
choices.update(pipeline_schedule=('1f1b', 'interleaved'), data_order=('random', 'epoch'), device=('cpu', 'cuda'),
               dtype=('float32', 'bfloat16'), compile=(True, False), decay=('cosine', 'wsd'))
for name, values in choices.items():
    others = '; train.py takes others' if name in one_value else ''
    require(config[name] in values,
            f'{name}={config[name]!r}: this script takes only {" or ".join(map(repr, values))}{others}')
require(out_dir, 'out_dir is empty: name a folder')
require(not decay_lr or min_lr <= learning_rate, f'min_lr={min_lr} is above learning_rate={learning_rate}')
require_multiple(n_embd, 'n_embd', n_head, 'n_head')
world_size = int(os.environ['WORLD_SIZE'])
require_multiple(world_size, 'the world size', tensor_parallel * context_parallel * pipeline_parallel * fsdp_replicate,
                 'tensor_parallel x context_parallel x pipeline_parallel x fsdp_replicate')
data_ranks = world_size // (tensor_parallel * context_parallel * pipeline_parallel)     # each reads other samples
shards = data_ranks // fsdp_replicate * context_parallel        # how many ranks share a weight, beside tensor's
require_multiple(gradient_accumulation_steps, 'gradient_accumulation_steps', data_ranks * pipeline_parallel,
                 'ranks that read other samples x pipeline_parallel')
micro_batches = gradient_accumulation_steps // data_ranks       # per rank and step
interleaved = pipeline_schedule == 'interleaved'
require(pipeline_parallel > 1 or not interleaved, 'pipeline_schedule=interleaved needs --pipeline_parallel=2 or more')
num_stages = pipeline_parallel * 2 if interleaved else pipeline_parallel

# ---- connect the ranks: the mesh -------------------------------------------------------------------------------------
rank, device, timeout = join_ranks(device, timeout_minutes)     # 'cpu', or this rank's GPU: 'cuda:0'
# Neighbouring ranks share matrices, farther ones tokens, then samples, then blocks: what talks most is nearest.
mesh = make_mesh(device_type, timeout, pipeline=pipeline_parallel, replicate=fsdp_replicate, shard=shards,
                 tensor=tensor_parallel)
by_context = make_mesh(device_type, timeout, others=data_ranks * pipeline_parallel, context=context_parallel,
                       tensor=tensor_parallel)
pipeline_rank, tensor_rank = mesh.get_local_rank('pipeline'), mesh.get_local_rank('tensor')
context_mesh, data_rank = by_context['context'], by_context.get_local_rank('others') % data_ranks
context_rank = context_mesh.get_local_rank()

def say(message):
    """Rank 0 prints a line."""
    if rank == 0:
        tell(message, sys.stdout)

def sum_over_ranks(*numbers):
    """The sums of numbers or scalar tensors, the same on every rank, as a list; all ranks participate."""
    total = torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])
    dist.all_reduce(total)
    return total.tolist()

# ---- data and where to start: as in train.py -------------------------------------------------------------------------
with one_line():        # a ValueError inside, which is about the user's input, ends the run with its line
    bins, metas, meta = find_data(config)
with one_line(f'init_from={init_from}: '):      # rank 0 alone looks at the disk, and reads or makes weights
    start = find_start(config, given, meta)
for line in start['told']:
    say(line)
model_args, iter_num, best_val_loss = start['model_args'], start['iter_num'], start['best_val_loss']
shape = {name: model_args[name] for name in SHAPE}
config.update(shape)
globals().update(shape)     # a checkpoint prescribes these; find_start has refused a command that says otherwise
vocab_size, start_iter = model_args['vocab_size'], iter_num
require(not rope and not qk_norm, f'{start["resumed_from"] or init_from} has rope or qk_norm: this script '
        'trains GPT-2 as it is')
with one_line():
    for split in bins:
        check_tokens(bins[split], metas[split], block_size, vocab_size)
require_multiple(n_head, 'n_head', tensor_parallel, 'tensor_parallel')
pieces = tensor_parallel if context_parallel == 1 else 2 * tensor_parallel * context_parallel
require_multiple(block_size, 'block_size', pieces, 'tensor_parallel x context_parallel (x 2 if that is above 1)')
if tensor_parallel > 1:
    require_multiple(n_embd, 'n_embd', tensor_parallel * shards, 'tensor_parallel x ranks that shard')
    require_multiple(vocab_size, 'the vocabulary', tensor_parallel * shards, 'tensor_parallel x ranks that shard')
require(n_layer >= num_stages, f'n_layer={n_layer} is less than the {num_stages} stages of the pipeline')
samples_per_step = gradient_accumulation_steps * batch_size     # over all ranks
tokens_per_step = samples_per_step * block_size

def samples_before(step):
    """How many samples training has seen before a step."""
    return start['samples_seen'] + (step - start_iter) * samples_per_step

# Of every sample a rank has two pieces, one from the start and one from the end: a token looks at all tokens before it,
# and so the ranks have equal work.
positions = torch.arange(block_size, device=device)
if context_parallel > 1:
    pieces = positions.chunk(2 * context_parallel)
    pieces = pieces[context_rank], pieces[-1 - context_rank]
    # not in attend_to_all_ranks: within selective recomputation torch can not make them
    causal_masks = [causal_lower_right(len(piece), int(piece[-1]) + 1) for piece in pieces]
    positions = torch.cat(pieces)                                               # (T,), T = block_size / context

def read_windows(split, offsets):
    """This rank's tokens of samples, and the ones that follow each: on the device, int64 (len(offsets), T) both."""
    with one_line(every_rank=True):     # what one rank alone has read, it reports itself
        tokens = torch.from_numpy(read_tokens(bins[split], offsets, block_size + 1, vocab_size)).to(device)
    return tokens[:, positions], tokens[:, positions + 1]

# ---- attention -------------------------------------------------------------------------------------------------------
def attend(attention, x, rows=None, cache=None, turns=None):
    """
    In place of Attention.forward: x (B,T,C), with tensor a part of the tokens (B,T/tensor,C). The rows of c_attn lie
    head by head here, q, k and v of each, so that contiguous rows are whole heads.
    """
    qkv = attention.c_attn(x)                                                       # (B,T,3C/tensor)
    q, k, v = qkv.unflatten(-1, (-1, 3, n_embd // n_head)).permute(3, 0, 2, 1, 4)   # (B,H,T,D) each, H heads of a rank
    dropout_p = dropout if attention.training else 0.0
    if context_parallel > 1:
        y = attend_to_all_ranks(q, k, v, dropout_p)
    else:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    y = attention.c_proj(y.transpose(1, 2).flatten(2))
    return F.dropout(y, dropout, attention.training)

@torch.compiler.disable     # it can not trace the exchange and the mask, and would leave out all of attend
def attend_to_all_ranks(q, k, v, dropout_p):
    """Attention of this rank's own queries to the keys and values of all ranks, which are gathered: (B,H,T,D) each."""
    mine = DTensor.from_local(torch.stack((k, v))[None], context_mesh, [Shard(0)])
    # forward: gathered; backward: the gradients of all ranks are summed, and each rank gets those of its own
    every = mine.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    early, late = every.chunk(2, 4)                                                 # (context,2,B,H,T/2,D) each
    # a later rank has a later early piece, but an earlier late one
    in_order = torch.cat((early, late.flip(0)))                                     # (2 context,2,B,H,T/2,D)
    k, v = in_order.movedim(0, 3).flatten(3, 4)                                     # (B,H,block_size,D) each
    parts = []
    for part, mask in zip(q.chunk(2, 2), causal_masks):
        seen = mask.seq_len_kv      # tokens up to the end of this piece, which its last one sees all
        parts.append(F.scaled_dot_product_attention(part, k[:, :, :seen], v[:, :, :seen], mask, dropout_p))
    return torch.cat(parts, 2)

Attention.forward = attend      # of the class: with one function per block torch.compile would compile each anew

# ---- model: this rank's parts ----------------------------------------------------------------------------------------
with torch.device('meta'):      # shapes without memory
    whole, model = GPT(GPTConfig(**model_args)), GPT(GPTConfig(**model_args, dropout=dropout))
if fsdp_activation_checkpointing:
    model.recompute(selective=fsdp_activation_checkpointing == 'selective')
first_rank, last_rank = pipeline_rank == 0, pipeline_rank == pipeline_parallel - 1
stage_of = [i * num_stages // n_layer for i in range(n_layer)]      # of each block
blocks = {}                     # {number: block} of this rank
for i, block in enumerate(list(model.transformer.h)):
    if stage_of[i] % pipeline_parallel == pipeline_rank:
        blocks[i] = block
    else:
        model.transformer.h[i] = None
if not first_rank:
    model.transformer.wpe = None
if not last_rank:
    model.transformer.ln_f = model.lm_head = None
if not first_rank and not last_rank:
    model.transformer.wte = None        # the last has it too: it is the head

class Stage(nn.Module):
    """Consecutive blocks; the first stage has the embeddings too, the last the final norm and the head."""

    def __init__(self, number):
        super().__init__()
        self.first, self.last = number == 0, number == num_stages - 1
        self.blocks = nn.ModuleList(block for i, block in blocks.items() if stage_of[i] == number)
        if self.first:
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        if self.last:
            self.wte, self.ln_f, self.lm_head = model.transformer.wte, model.transformer.ln_f, model.lm_head

    def forward(self, x, targets=None):
        """x: token ids (B,T) for the first stage, for others what the one before returns: (B,T,C), with tensor
        (B,T/tensor,C). The last returns the mean loss, (1,)."""
        if self.first:
            wpe = self.wpe.weight
            if tensor_parallel > 1:     # all have it whole, and each adds its tokens' part to the gradient
                wpe = wpe.to_local(grad_placements=[Partial()])
            x = self.wte(x) + F.embedding(positions.chunk(tensor_parallel)[tensor_rank], wpe)
            x = F.dropout(x, dropout, model.training)
        for block in self.blocks:
            x = block(x)
        if not self.last:
            return x
        if tensor_parallel == 1:
            return model.loss(x, targets).mean(0, keepdim=True)
        # Each rank has the logits of its part of the vocabulary. Of these loss_parallel exchanges three numbers per
        # token, the largest, the sum and the target's: the whole logits exist nowhere.
        logits = self.lm_head(self.ln_f(x)).float().flatten(0, 1)                   # (B*T,V), of which V/tensor here
        losses = F.cross_entropy(logits, targets.flatten(), reduction='none')
        return losses.to_local().mean(0, keepdim=True)

if tensor_parallel > 1:
    # With sequence parallel. c_attn and c_fc are cut by rows and c_proj by columns, so that a rank computes some heads,
    # or some of the MLP's features, with no exchange in between. All else works on a part of the tokens: they are
    # gathered before c_attn and c_fc, and c_proj's sums are scattered to them. (PyTorch names its styles for y = x W; a
    # Linear's weight is W transposed, so Colwise cuts its rows. Of an Embedding Rowwise cuts the rows.)
    rows, columns = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    norm = SequenceParallel()
    for block in blocks.values():
        parallelize_module(block, mesh['tensor'], {'ln_1': norm, 'attn.c_attn': rows, 'attn.c_proj': columns,
                                                   'ln_2': norm, 'mlp.c_fc': rows, 'mlp.c_proj': columns})
    if first_rank:
        distribute_module(model.transformer.wpe, mesh['tensor'])        # each has all of it
    if first_rank or last_rank:
        embedding_rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model.transformer.wte, mesh['tensor'], embedding_rows)
    if last_rank:
        parallelize_module(model.transformer.ln_f, mesh['tensor'], norm)
        head_rows = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.lm_head, mesh['tensor'], head_rows)
        model.tie()             # the two calls have made two tensors
    by_vocabulary = loss_parallel()     # changes the cross-entropy of DTensors alone
    by_vocabulary.__enter__()           # for the whole run
if compile:
    # Without torch's cache of autograd's part, since it takes one rank's process group for another's (tensor), and
    # restores views with a senseless shape (context). The generated code is cached as always.
    torch._functorch.config.enable_autograd_cache = False
    for block in blocks.values():
        if fsdp_activation_checkpointing == 'full':     # torch 2.13 can not trace checkpoint() around DTensors
            block.compute = torch.compile(block.compute, dynamic=False)
        else:
            block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
stages = [Stage(number) for number in range(pipeline_rank, num_stages, pipeline_parallel)]
low = None if dtype == 'float32' else getattr(torch, dtype)
policy = dict(mesh=mesh['shard'], reshard_after_forward=fsdp_reshard_after_forward and pipeline_parallel == 1,
              mp_policy=MixedPrecisionPolicy(low, reduce_dtype=torch.float32, cast_forward_inputs=False))
if fsdp_replicate > 1:
    policy['mesh'] = mesh['replicate', 'shard']
for stage in stages:
    for block in stage.blocks:
        fully_shard(block, **policy)
    fully_shard(stage, **policy)
    stage.to_empty(device=device)
if last_rank:
    model.tie()                 # to_empty has made two tensors of the embedding and the head
params = dict(model.named_parameters())     # tied ones once
opt = torch.optim.AdamW(model.param_groups(weight_decay), lr=learning_rate, betas=(beta1, beta2), fused=True)

# The embedding of the first stage and the head of the last are one matrix: pairs of ranks have the same part of it.
TIED, tied_group = 'transformer.wte.weight', None
if pipeline_parallel > 1:
    for ranks in mesh.mesh.flatten(1).T.tolist():       # of one pipeline
        group = dist.new_group([ranks[0], ranks[-1]], timeout=timeout)      # all ranks make all groups
        if rank in (ranks[0], ranks[-1]):
            tied_group = group
copies = []     # of each parameter: how many ranks hold the same numbers as this one
for name, p in params.items():
    copies.append(2 if tied_group and name == TIED else 1)
    for size, placement in zip(p.device_mesh.shape, p.placements):
        if placement.is_replicate():
            copies[-1] *= size
copies = torch.tensor(copies, device=device)

# ---- checkpoints: as train.py's --------------------------------------------------------------------------------------
def keep_part(whole_tensor, mine):
    """Copy this rank's part of a whole tensor, which every rank has, to `mine`."""
    if isinstance(mine, DTensor):       # all but AdamW's count of steps
        whole_tensor = distribute_tensor(whole_tensor, mine.device_mesh, mine.placements, src_data_rank=None)
    mine.copy_(whole_tensor)

def reorder(first, second):
    """
    The rows of every c_attn, and of its optimizer state, from the order (first, second, D) to (second, first, D): files
    have all of q before all of k, (3, heads, D), and here it is (heads, 3, D). All ranks participate.
    """
    for name, p in params.items():
        for tensor in (p.detach(), *opt.state[p].values()):
            if '.c_attn.' in name and tensor.dim() > 0:
                rows = tensor.full_tensor().unflatten(0, (first, second, -1))
                keep_part(rows.transpose(0, 1).flatten(0, 2), tensor)

def load():
    """Fill the weights, and where there is one the optimizer state, from files; all ranks participate."""
    from_one_file, state = start['has_optimizer'], start.pop('optimizer').get('state', {})
    start['has_optimizer'] = False      # torch would send the first stage's alone: here one whole tensor at a time
    load_start(start, model, opt, torch.amp.GradScaler(enabled=False))
    if from_one_file:
        state_of(model, opt, whole=False)     # makes an empty one
        for name, p in whole.named_parameters():
            for kind in ('step', 'exp_avg', 'exp_avg_sq'):
                tensor = torch.empty(() if kind == 'step' else p.shape, device=device)
                if rank == 0:
                    require(kind in state[name], f'{start["resumed_from"]} is of another optimizer than AdamW')
                    tensor.copy_(state[name][kind])
                dist.broadcast(tensor, 0)
                if name in params:
                    keep_part(tensor, opt.state[params[name]][kind])
    reorder(3, n_head)

def save(last, best):
    """ckpt_dcp/step_N; all ranks participate."""
    began = time.perf_counter()
    finish_saving(keep_checkpoints)     # two checkpoints at once would deadlock
    reorder(n_head, 3)
    tensors = state_of(model, opt, whole=False)
    names = {p: name for name, p in whole.named_parameters()}
    for group, members in zip(tensors['optimizer']['param_groups'], whole.param_groups(0.0)):
        group['params'] = [names[p] for p in members['params']]        # those of all stages
    progress = dict(model_args=model_args, iter_num=iter_num, samples_seen=samples_before(iter_num), scaler={},
                    best_val_loss=best_val_loss, config=config, meta=meta, wandb_id=start['wandb_id'], best=best)
    save_sharded(Path(out_dir, 'ckpt_dcp', f'step_{iter_num}'), tensors, progress, checkpoint_async, on_disk=not last)
    reorder(3, n_head)
    if not checkpoint_async:
        finish_saving(keep_checkpoints)
    say(f'saved step {iter_num}; training waited {time.perf_counter() - began:.2f} s')

with one_line():
    load()

# ---- the passes of a step, and evaluation ----------------------------------------------------------------------------
def make_schedule():
    """A pipeline over the ranks' stages, which computes a step's micro-batches in turn."""
    ids = torch.empty(batch_size, len(positions), dtype=torch.long, device='meta')
    carried = torch.empty(batch_size, len(positions) // tensor_parallel, n_embd, dtype=low, device='meta',
                          requires_grad=True)       # from stage to stage
    pipeline = [PipelineStage(stage, pipeline_rank + k * pipeline_parallel, num_stages, torch.device(device),
                              input_args=ids if stage.first else carried, group=mesh.get_group('pipeline'),
                              output_args=torch.empty(1, device='meta') if stage.last else carried)
                for k, stage in enumerate(stages)]
    options = dict(loss_fn=lambda loss, targets: loss.sum() / micro_batches, scale_grads=False)
    if interleaved:
        return ScheduleInterleaved1F1B(pipeline, micro_batches, **options)
    return Schedule1F1B(pipeline[0], micro_batches, **options)

if pipeline_parallel > 1:       # a schedule prepares for what it does first: in torch 2.11 it can not train after that
    training_schedule, evaluation_schedule = make_schedule(), make_schedule()

def mean_losses(batches, training):
    """
    The mean loss of each of the batches, a list of (inputs, targets), on ranks with the last stage, [] on others.
    training: with gradients. A pipeline takes as many batches as a step has.
    """
    losses = []
    if pipeline_parallel > 1:
        run = training_schedule.step if training else evaluation_schedule.eval
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches))
        with torch.set_grad_enabled(training):
            if first_rank:
                run(inputs)
            elif last_rank:
                run(targets=targets, target=targets, losses=losses)     # for Stage.forward, and for loss_fn
            else:
                run()
        return [loss.detach() * micro_batches for loss in losses]
    for inputs, targets in batches:
        last = len(losses) == len(batches) - 1
        stages[0].set_requires_gradient_sync(last)      # average over the ranks after the last one only
        stages[0].set_is_last_backward(last)
        stages[0].set_reshard_after_backward(last or fsdp_reshard_after_forward)
        with torch.set_grad_enabled(training):
            loss = stages[0](inputs, targets).sum()
        if training:
            (loss / micro_batches).backward()
        losses.append(loss.detach())
    return losses

def train_batches(step):
    """This rank's micro-batches of a step, of which every mesh and train.py see the same samples."""
    batches = []
    for micro in range(micro_batches):
        j = (micro * data_ranks + data_rank) * batch_size + np.arange(batch_size)
        offsets = sample_offsets(data_order, seed, step, j, samples_before(step), bins['train'][2], block_size)
        batches.append(read_windows('train', offsets))
    return batches

def loss_is_finite():
    """Whether the weights give a finite loss, on the step that comes next; all ranks participate."""
    model.eval()
    losses = mean_losses(train_batches(iter_num), training=False)
    model.train()
    return math.isfinite(sum_over_ranks(sum(losses))[0])

def evaluate():
    """Mean loss of each split, nats, over eval_iters batches of evenly spread windows."""
    model.eval()
    means, at_once = {}, micro_batches if pipeline_parallel > 1 else 1      # batches per rank
    for split in ('train', 'val'):
        windows, means[split] = bins[split][2] - block_size, 0.0
        for k in range(0, eval_iters, data_ranks * at_once):
            numbers = [k + data_rank + i * data_ranks for i in range(at_once)]
            batches = []
            for number in numbers:
                j = number % eval_iters * batch_size + np.arange(batch_size)
                batches.append(read_windows(split, j * windows // (eval_iters * batch_size)))
            losses = mean_losses(batches, training=False)
            total = sum(loss for loss, number in zip(losses, numbers) if number < eval_iters)
            means[split] += sum_over_ranks(total)[0] / (eval_iters * context_parallel * tensor_parallel)
    model.train()
    return means

# ---- the first writes: everything has been checked -------------------------------------------------------------------
with one_line():
    check_out_dir(out_dir, start['leftovers'])      # makes it; all ranks participate
if rank == 0:
    begin_out_dir(out_dir, start, config, evaluates=iter_num % eval_interval == 0 or iter_num >= max_iters)

card = torch.cuda.get_device_name() if on_gpu else device
peak, flops_per_step = peak_flops(card), whole.flops_per_token() * tokens_per_step
say(f'pipeline {pipeline_parallel} ({num_stages} stages) x replicate {fsdp_replicate} x shard '
    f'{shards // context_parallel} x context {context_parallel} x tensor {tensor_parallel} = {world_size} x {card}, '
    f'{dtype}, compile {"blocks" if compile else "off"}')
mine = sum(p.to_local().numel() for p in params.values()) * 16 / 2**20
say(f'{whole.num_params():,} parameters; rank 0 holds {mine:.1f} MiB of them, their gradients and optimizer state')
say(f'tokens per step: micro-batch {batch_size} x block {block_size} x {micro_batches} micro-batches x {data_ranks} '
    f'data ranks = {tokens_per_step:,}')
if decay_lr and iter_num < max_iters < warmup_iters:
    say(f'learning_rate is never reached: max_iters={max_iters} ends before warmup_iters={warmup_iters}')

# ---- the loop --------------------------------------------------------------------------------------------------------
def stop_not_finite(what):
    finish_saving(keep_checkpoints)
    fail(f'step {iter_num}: {what}; try a lower learning_rate', code=1)

stop_signals = catch_signals()      # those that have come
model.train()
saved_at, stopping = start_iter, False      # the newest checkpoint; by a signal
timed_from, clock = start_iter, time.perf_counter()
log_file = Path(out_dir, 'log.jsonl')
while True:
    lr = lr_at(config, iter_num)
    for group in opt.param_groups:
        group['lr'] = lr
    done, improved = iter_num >= max_iters, False
    evaluating = not stopping and (done or iter_num % eval_interval == 0)
    if evaluating:
        means = evaluate()
        improved = means['val'] < best_val_loss
        best_val_loss = min(means['val'], best_val_loss)
        if not (math.isfinite(means['train']) and math.isfinite(means['val'])):
            stop_not_finite(f'losses {means}: these weights are not saved')
        say(f'evaluated after {iter_num} steps: train loss {means["train"]:.4f}, val loss {means["val"]:.4f}')
        if rank == 0:
            log_record(log_file, dict(iter=iter_num, tokens=samples_before(iter_num) * block_size,
                                      train_loss=means['train'], val_loss=means['val']))
    if checkpoint_interval:
        due = iter_num % checkpoint_interval == 0
    else:
        due = improved or (evaluating and always_save_checkpoint)
    save_last = (due or done or stopping) and iter_num > saved_at
    if save_last and not evaluating and not loss_is_finite():
        say(f'step {iter_num}: the loss is not finite: these weights are not saved')
        save_last = False
    if iter_num > 0 and (save_last or improved):
        save(save_last, improved)
        saved_at = iter_num
    if done or stopping:
        break
    if evaluating or saved_at == iter_num:
        timed_from, clock = iter_num, time.perf_counter()

    if dropout > 0:     # no two ranks compute the same activations, so each has masks of its own
        torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))
    losses = mean_losses(train_batches(iter_num), training=True)
    if tied_group and TIED in params:       # the first stage's gradient and the last's are of one matrix
        dist.all_reduce(params[TIED].grad.to_local(), group=tied_group)
    gradients = [p.grad.to_local() for p in params.values()]
    squares = torch.stack(torch._foreach_norm(gradients)).square()      # of this rank's parts
    # here the host waits for the GPU; all ranks get the same numbers, and so decide alike
    train_loss, square, stop = sum_over_ranks(sum(losses), (squares / copies).sum(), len(stop_signals))
    train_loss /= gradient_accumulation_steps * context_parallel * tensor_parallel
    grad_norm, stopping = math.sqrt(square), stop > 0
    if not (math.isfinite(train_loss) and math.isfinite(grad_norm)):
        stop_not_finite(f'loss {train_loss}, gradient norm {grad_norm}: stopped before the update')
    if grad_clip:
        torch._foreach_mul_(gradients, min(1.0, grad_clip / (grad_norm + 1e-6)))    # as clip_grad_norm_ has it
    opt.step()
    opt.zero_grad()
    iter_num += 1
    if (iter_num - 1) % log_interval == 0 or iter_num == max_iters:
        seconds = (time.perf_counter() - clock) / (iter_num - timed_from)
        timed_from, clock = iter_num, time.perf_counter()
        memory = peak_memory(device)
        if rank == 0:
            log_step(log_file, iter=iter_num - 1, tokens=samples_before(iter_num) * block_size,
                     loss=train_loss, lr=lr, grad_norm=grad_norm, ms=seconds * 1000,
                     tokens_per_s=tokens_per_step / seconds, memory_gib=memory,
                     mfu=flops_per_step / seconds / (peak * world_size) if peak else None)
    finish_saving(keep_checkpoints, wait=False)

finish_saving(keep_checkpoints)
dist.barrier()      # no rank leaves while another still needs its connections
dist.destroy_process_group()
exit_codes.append(0)
if stopping:
    where = 'there' if saved_at == iter_num else f'step {saved_at}'
    then = f'--init_from=auto goes on from {where}' if saved_at > 0 else 'nothing is saved yet'
    say(f'stopped by a signal after {iter_num} steps; {then}')
    exit_codes.append(128 + (stop_signals[-1] if stop_signals else signal.SIGTERM))
    sys.exit(exit_codes[-1])
