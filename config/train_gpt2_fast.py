# GPT-2 124M that needs fewer tokens to the same loss: Muon, rotary positions, RMS norm of queries and keys, 6 heads.
# It reaches nanoGPT's loss in 0.27 of the tokens (its end, 31 million tokens), 0.34 (best checkpoint, 98 million)
# (docs/speed.md); over billions it was not measured. Not GPT-2 any more, so Hugging Face form cannot hold it.
# One node of 8 GPUs:
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_fast.py
# Those runs had this learning rate, and a tenth of their steps of warm-up. At 491,520 tokens per step it has been
# timed, not trained; medium and XL neither. Look for a learning rate of their own first.
# medium: --n_layer=24 --n_head=8 --n_embd=1024 --use_fsdp=True
# XL:     --n_layer=48 --n_head=25 --n_embd=1600 --batch_size=16 --gradient_accumulation_steps=32 --use_fsdp=True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M-fast'

optimizer = 'muon'
learning_rate = 2.4e-3
min_lr = 2.4e-4
rope = True
qk_norm = True
n_head = 6                              # of 128: attention is 7% faster than with 12 of 64, and the loss was lower

batch_size = 60
block_size = 1024
gradient_accumulation_steps = 8         # shared by all ranks: 60 x 1024 x 8 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 50                         # 3,000 windows of each split
log_interval = 10
