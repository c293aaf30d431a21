# GPT-2 XL, 1,556.8M parameters, sharded over 8 H100 of 80 GB, 0.5M tokens per step:
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py
# Weights, gradients and AdamW's two moments in float32 are 16 bytes x 1,556.8M = 23.2 GiB, of which each of 8 GPUs
# holds 2.9 GiB; activations are 2.5 GiB per sample, fewer with --fsdp_activation_checkpointing=selective. On two H200
# 16 gave 52,100 tokens/s per GPU (57 GiB), and 32, which 80 GB do not hold, 53,200.
# Several nodes: sbatch scripts/slurm.sh config/train_gpt2_xl.py
out_dir = 'out-gpt2-xl'
wandb_project = 'owt'
wandb_run_name = 'gpt2-xl'

use_fsdp = True
fsdp_reshard_after_forward = False      # weights are sent once per step: 6% faster than at every micro-batch at 16
checkpoint_format = 'sharded'           # each rank writes its part of 17.4 GiB, not rank 0 all of it
keep_checkpoints = 3

n_layer = 48
n_head = 25
n_embd = 1600

batch_size = 16
block_size = 1024
gradient_accumulation_steps = 4 * 8     # shared by all ranks: 16 x 1024 x 32 = 524,288 tokens per step

learning_rate = 2e-4
min_lr = 2e-5
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
log_interval = 10
