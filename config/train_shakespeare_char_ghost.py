# What each window of tiny Shakespeare does for the validation loss; on two CPU cores a minute or two:
#   python train.py config/train_shakespeare_char_ghost.py && python scripts/data_value.py out-shakespeare-char-ghost
out_dir = 'out-shakespeare-char-ghost'
dataset = 'shakespeare_char'
device = 'cpu'

use_ghost = True
# The validation batch: 32 fixed windows. Models of 0.8M and 10.7M parameters, with this block and batch size, were
# trained again on halves of the data, to see how well the values predict the real loss. With 8 windows they predicted
# it less well in the larger model. 256 windows, at 8 times the cost, were no better than 32, and neither were other
# windows in every step; with 16 visits of each window, in place of 4, both were a little better.
ghost_val_batch_size = 32
ghost_val_resample = False
ghost_save_interval = 50
data_order = 'epoch'                    # windows that do not overlap, each seen equally often

eval_interval = 250
eval_iters = 20
log_interval = 10

batch_size = 32
block_size = 64
gradient_accumulation_steps = 1
n_layer = 2
n_head = 2
n_embd = 64

learning_rate = 2e-3
min_lr = 2e-4
max_iters = 1000                        # about two epochs
lr_decay_iters = 1000
warmup_iters = 100
beta2 = 0.99
