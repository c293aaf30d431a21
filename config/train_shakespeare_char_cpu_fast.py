# The model of train_shakespeare_char_cpu.py with Muon, rotary positions and RMS norm of queries and keys: a lower loss
# in the same time. Not GPT-2 any more, so Hugging Face form cannot hold it. On two CPU cores about three minutes:
#   python train.py config/train_shakespeare_char_cpu_fast.py
out_dir = 'out-shakespeare-char-fast'
dataset = 'shakespeare_char'
device = 'cpu'

optimizer = 'muon'
learning_rate = 8e-3
min_lr = 8e-4
rope = True
qk_norm = True

eval_interval = 200
eval_iters = 20
log_interval = 10

batch_size = 12
block_size = 64
gradient_accumulation_steps = 1
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0                           # too few steps to overfit

max_iters = 1200                        # in the time of 2,000 with AdamW
lr_decay_iters = 1200
warmup_iters = 100
beta2 = 0.99
