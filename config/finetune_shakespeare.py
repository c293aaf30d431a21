# GPT-2 XL continues on tiny Shakespeare in GPT-2 tokens (python data/shakespeare/prepare.py), on one GPU of 80 GB:
#   python train.py config/finetune_shakespeare.py
# 23.2 GiB and activations; on a smaller GPU --init_from=gpt2 (1.9 GiB), gpt2-medium (5.3) or gpt2-large (11.5).
out_dir = 'out-shakespeare'
dataset = 'shakespeare'
init_from = 'gpt2-xl'                   # brings its own shape
wandb_project = 'shakespeare'
wandb_run_name = 'finetune'

eval_interval = 10
eval_iters = 8                          # 16 windows of each split; there are 35 in the validation split
always_save_checkpoint = False          # best.pt holds what validates best; it overfits soon

batch_size = 2
gradient_accumulation_steps = 8         # 2 x 1024 x 8 = 16,384 tokens per step: 18 steps see the text once

dropout = 0.1
weight_decay = 0.0                      # towards zero is away from what was learnt
learning_rate = 2e-5                    # a small fraction of pretraining's
decay_lr = False
max_iters = 60
log_interval = 5
