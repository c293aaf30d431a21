# Loss of OpenAI's GPT-2 on the splits of a dataset in GPT-2 tokens; trains and writes nothing. One GPU, or a CPU:
#   python train.py config/eval_gpt2.py --dataset=openwebtext
# Other sizes: --init_from=gpt2-medium, gpt2-large, gpt2-xl, or a folder in Hugging Face form.
init_from = 'gpt2'
eval_only = True
eval_iters = 400                        # 400 x 8 windows of each split
batch_size = 8
gradient_accumulation_steps = 8         # unused but for its check: a multiple of the world size
