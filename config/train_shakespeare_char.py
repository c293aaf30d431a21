# Characters of tiny Shakespeare on one GPU, some minutes: python train.py config/train_shakespeare_char.py
out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'

eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False          # it will overfit: keep what validates best

batch_size = 64
block_size = 256
gradient_accumulation_steps = 1
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
min_lr = 1e-4
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
beta2 = 0.99                            # few tokens per step: average over more of them
