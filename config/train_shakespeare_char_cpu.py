# Characters of tiny Shakespeare on two CPU cores, some minutes: python train.py config/train_shakespeare_char_cpu.py
out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
device = 'cpu'

eval_interval = 250
eval_iters = 20
log_interval = 10

batch_size = 12
block_size = 64
gradient_accumulation_steps = 1
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0                           # too few steps to overfit

learning_rate = 4e-3                    # a small model bears a large one
min_lr = 1e-4
max_iters = 2000
lr_decay_iters = 2000
warmup_iters = 100
beta2 = 0.99
