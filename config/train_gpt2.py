# GPT-2 124M on OpenWebText, 0.5M tokens per step. One node of 8 GPUs:
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'

# 60 is the fastest that keeps 0.5M tokens on 8 GPUs: on an H100 549,000 tokens/s at 21 GiB, against 545,000 at 32
# (13 GiB) and 489,000 at 12 (7 GiB). One 80 GB card alone takes 120 x 4: 562,000 at 38 GiB (on an H200 580,000, and
# 240 x 2 587,000 at 73 GiB). Smaller cards: 12 and 40, or 20 and 24.
batch_size = 60
block_size = 1024
gradient_accumulation_steps = 8         # shared by all ranks: 60 x 1024 x 8 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 50                         # 3,000 windows of each split
log_interval = 10
