# GPT-2 124M on the Pile, with every sample's gradient dot product with the validation gradient, on a node of 8 GPUs:
#   python data/pile/prepare.py --num_docs=1000000         # without --num_docs all of it
#   torchrun --standalone --nproc_per_node=8 train.py config/train_pile_ghost.py
#   python scripts/data_value.py out-pile-ghost            # by domain too
out_dir = 'out-pile-ghost'
dataset = 'pile'
wandb_project = 'pile'
wandb_run_name = 'gpt2-124M-ghost'

use_ghost = True
# The validation batch: 16 fixed windows for the whole node, 2 a GPU, beside the 480 of a step. In small character
# models (train_shakespeare_char_ghost.py) values from 2,048 validation tokens predicted the real loss as well as those
# from 16,384, and other windows in every step were no better. Here 16 windows are 16,384 tokens. Not measured at 124M.
ghost_val_batch_size = 16
ghost_val_resample = False
ghost_save_interval = 100               # 100 steps x 480 samples in a file of 0.8 MB
data_order = 'epoch'                    # windows that do not overlap

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8     # shared by all ranks: 12 x 1024 x 40 = 491,520 tokens per step

max_iters = 50000                       # 25 billion tokens
lr_decay_iters = 50000
eval_interval = 1000
eval_iters = 200
log_interval = 10
