"""
Finetune a GPT-2 to name the class of a text.

python data/shakespeare_genre/prepare.py                        passages of plays: comedy, history or tragedy
python scripts/classify.py --init_from=gpt2                     OpenAI's weights on these; out-classify holds the run
torchrun --standalone --nproc_per_node=2 scripts/classify.py    DDP
python scripts/classify.py --predict=FILE                       a text a line -> its label and probability

A dataset is a folder with train, val and perhaps test, each .csv, .tsv or .jsonl; docs/classify.md tells more.
"""
import math
import os
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import check_numbers, configure, fail, one_line, tell, under_torchrun    # before torch: for Ctrl-C

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint import (barrier, begin_out_dir, check_out_dir, excepthook, exit_codes, load_start, log_record, on_rank0,
                        save_checkpoint)
from data.bins import find_folder, hash64, shuffled
from data.corpus import get_tokenizer
from data.labelled import encode_rows, read_dataset, read_texts
from model import GPT, GPTConfig, Linear
from scripts.common import choose_device, confusion, draw_confusion, find_classifier, join_ranks, printing
from weights import read_full

# ---- run -------------------------------------------------------------------------------------------------------------
out_dir = 'out-classify'            # everything the run writes goes here
init_from = 'scratch'               # 'scratch' | 'resume' | 'auto' (resume if out_dir has a ckpt.pt, else scratch) |
                                    # 'gpt2', ... 'gpt2-xl' | a Hugging Face folder, or train.py's, or a .pt file
overwrite = False                   # let a new run delete an earlier run's files in out_dir
seed = 1337                         # of weights, data order and dropout
eval_interval = 0                   # steps between evaluations, which save; 0: after each epoch
eval_only = False                   # evaluate best.pt and exit; writes nothing
predict = ''                        # a file with a text a line, or '-' for stdin: print best.pt's labels and exit
log_interval = 10                   # steps between log lines
# ---- data ------------------------------------------------------------------------------------------------------------
dataset = 'shakespeare_genre'       # a folder in data/, or a path
label_column = ''                   # its name, or key in .jsonl; '' is label
text_column = ''                    # '' is text; several, with commas between, are joined
epochs = 3                          # in each, every row of train comes once
max_iters = 0                       # stop after so many steps; 0: at the last epoch's end
gradient_accumulation_steps = 8     # micro-batches per step, over all ranks together
batch_size = 4                      # texts per micro-batch
block_size = 256                    # tokens per text, the rest is cut off; weights may have fewer positions
# ---- model: of one from scratch; weights prescribe their own ---------------------------------------------------------
tokenizer = 'gpt2'                  # 'gpt2' | 'byte' | 'char': the characters of train
n_layer = 12
n_head = 12
n_embd = 768                        # divisible by n_head
bias = rope = qk_norm = False       # as in train.py
dropout = 0.1                       # probability; with any weights
# ---- optimizer: AdamW ------------------------------------------------------------------------------------------------
learning_rate = 5e-5                # maximum; a small model from scratch bears 1e-3
weight_decay = 1e-2                 # of matrices and embeddings; 0 disables
grad_clip = 1.0                     # largest global gradient norm; 0 disables
warmup_iters = 20                   # steps of linear warm-up, before a cosine to 0 at the last epoch's end
scale_lr = False                    # multiply learning_rate by world size x micro-batches per rank
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'                     # 'auto' | 'cpu' | 'cuda' | 'mps'
dtype = 'auto'                      # 'auto' (bfloat16 on a GPU that has it) | 'float32' | 'bfloat16' | 'float16'
compile = False                     # torch.compile: a minute or more at the start
timeout_minutes = 60                # after which a rank that waits for another gives up
# ----------------------------------------------------------------------------------------------------------------------
config, given = configure(globals())
sys.excepthook = excepthook(out_dir)
distributed, rank, world_size = under_torchrun(), 0, 1
if distributed:
    rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])

def require(condition, message):
    """Every check of the settings: if the condition does not hold, the run ends with this line."""
    if not condition:
        fail(message)

def say(message):
    if rank == 0:
        tell(message, sys.stderr if predict else sys.stdout)

# ---- checks, ranks, rows, where to start: before the first write -----------------------------------------------------
device, dtype = config['device'], config['dtype'] = choose_device(device, dtype)
check_numbers(config, counts="""log_interval epochs gradient_accumulation_steps batch_size block_size n_layer n_head
    n_embd timeout_minutes""")
require(not (distributed and predict), 'predict takes one process: start it without torchrun')
require(gradient_accumulation_steps % world_size == 0, f'gradient_accumulation_steps={gradient_accumulation_steps} '
        f'counts micro-batches of all {world_size} ranks and must be a multiple of that')
if distributed:
    join_ranks(device, timeout_minutes)
tokens, targets = {}, {}    # {split: [int64 (length,)]}, {split: index of each row's label (rows,)}
with one_line():
    columns = find_folder(dataset), label_column, text_column
    rows = {'predict': read_texts(predict)} if predict else read_dataset(*columns)
    start = find_classifier(config, given, None if predict or eval_only else rows)
    labels, model_args, meta, iter_num = (start[name] for name in ('labels', 'model_args', 'meta', 'iter_num'))
    encoder, block_size = get_tokenizer(meta['tokenizer']), model_args['block_size']
    for split in rows:
        tokens[split], indices, cut = encode_rows(rows[split], encoder, labels, block_size)
        targets[split] = torch.tensor(indices, device=device)
        say(f'{split}: {len(tokens[split]):,} rows, {cut:,} of them cut at block_size={block_size} tokens')
    if not (predict or eval_only):
        check_out_dir(out_dir, start['leftovers'])

# ---- model -----------------------------------------------------------------------------------------------------------
class Classifier(GPT):
    """GPT-2 with a head on each text's last token: model(idx (B,T), last (B,)) gives logits (B,classes). The padding is
    on the right, and attention looks to the left alone: no token of a text sees it, and its outputs go unused."""
    def __init__(self, config, classes):
        super().__init__(config)
        self.head = Linear(config.n_embd, classes)

    def loss(self, x, last, rows=None):     # what GPT.forward ends with; x (B,T,C)
        x = self.transformer.ln_f(x[torch.arange(len(x), device=x.device), last])           # (B,C)
        return self.head(x).float()

torch.manual_seed(seed)
model = raw_model = Classifier(GPTConfig(**model_args, dropout=dropout), len(labels)).to(device)
optimizer = torch.optim.AdamW(raw_model.param_groups(weight_decay), lr=learning_rate, fused=device != 'mps')
scaler = torch.amp.GradScaler(device, enabled=dtype == 'float16')
with one_line():
    load_start(start, raw_model, optimizer, scaler)     # from rank 0 to all
if compile:
    raw_model.compile(dynamic=True)
if distributed:
    raw_model._ddp_params_and_buffers_to_ignore = ['turns']     # as in train.py
    model = torch.nn.parallel.DistributedDataParallel(raw_model, gradient_as_bucket_view=True)
autocast = torch.autocast(device, getattr(torch, dtype), enabled=dtype != 'float32')

def logits_of(net, split, numbers):
    """Logits (B,classes) of the rows of these numbers."""
    ids = [torch.from_numpy(tokens[split][i]) for i in numbers]
    idx = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)                 # (B,T), filled up with 0
    with autocast:
        return net(idx, torch.tensor([len(row) - 1 for row in ids], device=device))

def sum_over_ranks(tensor):
    if distributed:
        dist.all_reduce(tensor)
    return tensor

@torch.no_grad()
def evaluate(split):
    """(mean loss in nats, accuracy, int64 (classes,classes): how many rows of a label, down, were given which, across).
    Rank r takes every world_size-th row from r on, so that each counts once; all ranks participate."""
    raw_model.eval()
    by_length = np.argsort([len(ids) for ids in tokens[split]], kind='stable')      # then a batch has little padding
    mine, total = by_length[rank::world_size], torch.zeros((), dtype=torch.float64)
    table = torch.zeros(len(labels)**2, dtype=torch.int64)
    for first in range(0, len(mine), batch_size):
        numbers = mine[first:first + batch_size]
        logits, y = logits_of(raw_model, split, numbers), targets[split][numbers]
        total += F.cross_entropy(logits, y, reduction='sum').cpu()
        table += torch.bincount(y * len(labels) + logits.argmax(-1), minlength=len(table)).cpu()
    raw_model.train()
    loss, table = sum_over_ranks(total).item() / len(tokens[split]), sum_over_ranks(table).view(len(labels), -1)
    return loss, (table.trace() / table.sum()).item(), table.numpy()

if predict:
    raw_model.eval()
    with printing(), torch.no_grad():
        for i in range(len(tokens['predict'])):
            probability, index = logits_of(raw_model, 'predict', [i])[0].softmax(-1).max(-1)
            print(f'{labels[index]}\t{probability:.4f}')
    sys.exit()
# ---- the loop --------------------------------------------------------------------------------------------------------
num_rows, rows_per_step = len(rows['train'][1]), gradient_accumulation_steps * batch_size
steps_per_epoch = math.ceil(num_rows / rows_per_step)       # an epoch's last step takes what is left
all_steps = epochs * steps_per_epoch
last_step = 0 if eval_only else min(max_iters or all_steps, all_steps)
peak_lr = learning_rate * gradient_accumulation_steps if scale_lr else learning_rate

def log(**record):
    if rank == 0:
        log_record(Path(out_dir, 'log.jsonl'), record)

say('; '.join(start['told']))
if rank == 0 and not eval_only:
    begin_out_dir(out_dir, start, config, False)
say(f'{len(labels)} labels, {raw_model.num_params():,} parameters, {world_size} x {device}, {dtype}; {epochs} epochs '
    f'of {steps_per_epoch:,} steps of {rows_per_step} rows')
if iter_num < last_step < warmup_iters:
    say(f'learning_rate is never reached: the last step is {last_step}, before warmup_iters={warmup_iters}')
best_val_loss = start['best_val_loss']
if distributed:     # as in train.py: after its first backward pass DDP sums over ranks in another order
    logits_of(model, 'train', [0]).sum().backward()
    optimizer.zero_grad(set_to_none=False)
while iter_num < last_step:
    # A step's rows are a pure function of (seed, epoch, step). Rank r takes every world_size-th from r on, as torch's
    # DistributedSampler does, but no row is repeated to make the ranks' shares equal.
    epoch, k = divmod(iter_num, steps_per_epoch)
    step_rows = shuffled(np.arange(k * rows_per_step, min((k + 1) * rows_per_step, num_rows)), num_rows, seed, epoch)
    mine, step_loss = step_rows[rank::world_size], torch.zeros((), device=device)
    way = max(0, iter_num - warmup_iters) / max(1, all_steps - warmup_iters)       # 0 to 1 after the warm-up
    lr = peak_lr * min((iter_num + 1) / max(1, warmup_iters), (1 + math.cos(math.pi * way)) / 2)
    for group in optimizer.param_groups:
        group['lr'] = lr
    torch.manual_seed(int(hash64(seed, iter_num, rank)[0] >> np.uint64(1)))     # of dropout
    for first in range(0, rows_per_step // world_size, batch_size):
        numbers, weight = mine[first:first + batch_size], world_size / len(step_rows)
        if len(numbers) == 0:       # in an epoch's last step: this rank takes part with a row that counts 0
            numbers, weight = step_rows[:1], 0.0
        if distributed:
            model.require_backward_grad_sync = first + batch_size == rows_per_step // world_size
        # The gradient is the mean over all rows of the step: weight undoes that DDP divides the ranks' sum.
        loss = F.cross_entropy(logits_of(model, 'train', numbers), targets['train'][numbers], reduction='sum') * weight
        scaler.scale(loss).backward()
        step_loss += loss.detach() / world_size
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
    step_loss = sum_over_ranks(step_loss).item()
    if not math.isfinite(step_loss):
        fail(f'step {iter_num}: the loss is {step_loss}: stopped; try a lower learning_rate', code=1)
    scaler.step(optimizer)          # nothing where float16 has overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=not distributed)
    if iter_num % log_interval == 0:
        log(iter=iter_num, loss=step_loss, lr=lr, grad_norm=grad_norm)
        say(f'step {iter_num}: loss {step_loss:.4f}, lr {lr:.2e}, norm {grad_norm:.3f}')
    iter_num += 1
    if iter_num % (eval_interval or steps_per_epoch) == 0 or iter_num == last_step:
        val_loss, accuracy, _ = evaluate('val')
        say(f'[eval] loss {val_loss:.3f} | acc {accuracy:.2%} | epoch {iter_num / steps_per_epoch:.2f}')
        log(iter=iter_num, val_loss=val_loss, accuracy=accuracy)
        if not math.isfinite(val_loss):
            fail(f'step {iter_num}: the evaluation is not finite: stopped, these weights are not saved', code=1)
        improved, best_val_loss = val_loss < best_val_loss, min(val_loss, best_val_loss)
        progress = dict(model_args=model_args, iter_num=iter_num, best_val_loss=best_val_loss, labels=labels,
                        meta=meta, config=config, scaler=scaler.state_dict())
        save_checkpoint(out_dir, raw_model, optimizer, progress, True, improved, sharded=False, in_background=False)
with one_line():
    best = on_rank0(read_full, Path(out_dir, 'best.pt')) or {'model': {}}
    load_start(dict(sharded=False, has_optimizer=False, scaler={}, model=best['model']), raw_model, optimizer, scaler)
split = 'test' if 'test' in rows else 'val'
loss, accuracy, table = evaluate(split)
say(f'[{split}] loss {loss:.3f} | acc {accuracy:.2%}')
say(confusion(table, labels))
if rank == 0 and not eval_only:
    draw_confusion(table, labels, Path(out_dir, 'confusion.png'), f'{split}: rows')
barrier()       # no rank leaves while another still needs its connections
exit_codes.append(0)
