"""
Train a small GPT-2 by FSDP2: each rank holds its shard.
plain.py, ddp.py, fsdp.py and ghost.py are one text but for what each mode needs:

python data/shakespeare_char/prepare.py
CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc_per_node=2 docs/side_by_side/fsdp.py
diff docs/side_by_side/plain.py docs/side_by_side/fsdp.py

On a CPU (hence CUDA_VISIBLE_DEVICES=; without it each rank takes a GPU) they print the losses of train.py, alone or by
torchrun, with --use_fsdp=True or --use_ghost=True; it does the same with all that a real run needs besides:

M="--device=cpu --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4"
python train.py $M --dataset=shakespeare_char --max_iters=20 --learning_rate=1e-3 --decay_lr=False --out_dir=out-short
"""
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from model import GPT, GPTConfig  # noqa: E402

seed, steps, learning_rate, weight_decay, grad_clip = 1337, 20, 1e-3, 0.1, 1.0
batch_size = 4                      # samples per micro-batch
gradient_accumulation_steps = 4     # micro-batches per step, over all ranks together
block_size = 32                     # tokens per sample
folder = ROOT / 'data' / 'shakespeare_char'
if len(sys.argv) > 1:
    folder = Path(sys.argv[1])

# ---- ranks and device ------------------------------------------------------------------------------------------------
rank, local_rank, world_size = (int(os.environ[name]) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
device = f'cuda:{local_rank}' if torch.cuda.is_available() else 'cpu'
if torch.cuda.is_available():
    torch.cuda.set_device(device)       # before anything else touches a GPU: all would go to the first
assert gradient_accumulation_steps % world_size == 0, 'the number of ranks must divide gradient_accumulation_steps'
dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
micro_batches = gradient_accumulation_steps // world_size       # per rank and step

# ---- data ------------------------------------------------------------------------------------------------------------
meta = json.loads((folder / 'meta.json').read_text())

def hash64(*parts):
    """Ints or int arrays -> uint64 array, as good as random: splitmix64, chained."""
    h = np.zeros(1, np.uint64)
    for part in parts:
        h = h + np.asarray(part, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h

def read_windows(split, *draw):
    """Inputs and targets, (samples, block_size) each, of windows drawn by the hash of these ints."""
    tokens = np.memmap(folder / f'{split}.bin', meta['dtype'], 'r')
    offsets = hash64(seed, *draw) % np.uint64(len(tokens) - block_size)
    windows = np.stack([tokens[o:o + block_size + 1] for o in offsets.tolist()]).astype(np.int64)
    windows = torch.from_numpy(windows).to(device)
    return windows[:, :-1], windows[:, 1:]

def train_batch(step, micro):
    """This rank's samples of a micro-batch: which samples a step has does not depend on the number of ranks."""
    return read_windows('train', step, (micro * world_size + rank) * batch_size + np.arange(batch_size))

# ---- model -----------------------------------------------------------------------------------------------------------
torch.manual_seed(seed)
model = GPT(GPTConfig(block_size, meta['vocab_size'], n_layer=2, n_head=2, n_embd=64, bias=False, gelu='none'))
mesh = dist.init_device_mesh(device.partition(':')[0], (world_size,))
for block in model.transformer.h:
    fully_shard(block, mesh=mesh)       # a unit: gathered to compute, and freed
fully_shard(model, mesh=mesh)           # the last unit: embeddings, final norm and head
optimizer = torch.optim.AdamW(model.param_groups(weight_decay), lr=learning_rate, betas=(0.9, 0.95), fused=True)

# ---- the loop --------------------------------------------------------------------------------------------------------
for step in range(steps):
    train_loss = torch.zeros((), device=device)
    for micro in range(micro_batches):
        X, Y = train_batch(step, micro)
        # the ranks average and scatter gradients in the last micro-batch only; before, each adds up its own, whole ones
        model.set_requires_gradient_sync(micro == micro_batches - 1)
        model.set_is_last_backward(micro == micro_batches - 1)
        losses = model(X, Y)                    # (batch_size,)
        loss = losses.mean() / micro_batches    # so that the sum over micro-batches is the mean over the step
        loss.backward()
        train_loss += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip).full_tensor()     # of all shards
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(train_loss)         # the sum over ranks, for printing only: each has seen other samples
    train_loss /= world_size
    if rank == 0:
        print(f'step {step}: loss {train_loss.item():.8f}, norm {norm.item():.8f}')
dist.barrier()          # no rank leaves while another still needs its connections
dist.destroy_process_group()
