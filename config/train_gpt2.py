# GPT-2 124M on OpenWebText, 0.5M tokens per step; val loss about 2.85 expected.
# One node of 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8     # shared by all ranks: 12 x 1024 x 40 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
