# GPT-2 124M as in train_gpt2.py, with every sample's gradient dot product with the validation gradient.
# One node of 8 GPUs: torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_ghost.py
# Then:               python scripts/data_value.py out-gpt2-ghost
# medium (354M): --n_layer=24 --n_head=16 --n_embd=1024 --learning_rate=3e-4 --min_lr=3e-5
# large (773M):  --n_layer=36 --n_head=20 --n_embd=1280 --learning_rate=2.5e-4 --min_lr=2.5e-5 --batch_size=6
#                --gradient_accumulation_steps=80 --use_fsdp=True
out_dir = 'out-gpt2-ghost'
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M-ghost'

use_ghost = True
# The validation batch: 16 fixed windows for the whole node, 2 a GPU, beside the 480 of a step. In small character
# models (train_shakespeare_char_ghost.py) values from 2,048 validation tokens predicted the real loss as well as those
# from 16,384, and other windows in every step were no better, if each training window was seen 4 times. Here 16 windows
# are 16,384 tokens. Not measured at 124M.
ghost_val_batch_size = 16
ghost_val_resample = False
ghost_val_dataset = ''                  # the data to value the training data for, by the name of its folder
ghost_save_interval = 100               # 100 steps x 480 samples in a file of 0.8 MB
data_order = 'epoch'                    # windows that do not overlap

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8     # shared by all ranks: 12 x 1024 x 40 = 491,520 tokens per step

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
