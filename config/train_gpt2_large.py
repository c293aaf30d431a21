# GPT-2 large, 773.6M parameters, for 8 H100 of 80 GB, 0.5M tokens per step:
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_large.py
# Each GPU holds weights, gradients and AdamW's two moments in float32: 16 bytes x 773.6M = 11.5 GiB, 1.4 GiB with
# --use_fsdp=True; activations are about 1.5 GiB per sample (reckoned from medium's and XL's, not measured).
out_dir = 'out-gpt2-large'
wandb_project = 'owt'
wandb_run_name = 'gpt2-large'

n_layer = 36
n_head = 20
n_embd = 1280

batch_size = 16
block_size = 1024
gradient_accumulation_steps = 4 * 8     # shared by all ranks: 16 x 1024 x 32 = 524,288 tokens per step

learning_rate = 2.5e-4
min_lr = 2.5e-5
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
log_interval = 10
