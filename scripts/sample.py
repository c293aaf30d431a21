"""
Continue a text with a trained model.

python scripts/sample.py --out_dir=out-shakespeare-char --start='ROMEO:'
python scripts/sample.py --init_from=gpt2-xl --start='The meaning of life is' --num_samples=3 --max_new_tokens=100
python scripts/sample.py --start=FILE:prompt.txt          the prompt is what the file holds
"""
import os
import sys
from contextlib import nullcontext
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import check_numbers, configure, fail     # before torch: it makes Ctrl-C one line

import torch

from data.bins import no_pipe
from data.corpus import EOT
from model import GPT, GPTConfig
from scripts.common import find_tokenizer, must_have_memory, note, printing
from weights import newest_checkpoint, read_checkpoint, why

# ---- what to sample from ---------------------------------------------------------------------------------------------
out_dir = 'out'             # a run of train.py: its newest checkpoint; or a .pt file, such as its best.pt
init_from = 'resume'        # 'resume': from out_dir | 'gpt2' | 'gpt2-medium' | 'gpt2-large' | 'gpt2-xl' |
                            # a folder in Hugging Face form
# ---- how -------------------------------------------------------------------------------------------------------------
start = '\n'                # the prompt; '' begins a document, and <|endoftext|> ends one; 'FILE:path' reads a file
num_samples = 10
max_new_tokens = 500        # per sample
temperature = 0.8           # 0 always takes the likeliest token; 1 draws as the model says
top_k = 200                 # draw from the k likeliest tokens; 0 disables
top_p = 1.0                 # draw from the fewest tokens with this much probability together; 1 disables
seed = 1337
# ---- machine ---------------------------------------------------------------------------------------------------------
device = 'auto'             # 'auto' | 'cpu' | 'cuda' | 'cuda:1' | 'mps'
dtype = 'auto'              # 'auto' (bfloat16 on a GPU that has it) | 'float32' | 'bfloat16' | 'float16'
compile = False             # torch.compile, which pays for many tokens only
# ----------------------------------------------------------------------------------------------------------------------
config, given = configure(globals())

check_numbers(config, counts='num_samples')
must_have_memory(48 * max_new_tokens, f'max_new_tokens={max_new_tokens}')
if not 0 < top_p <= 1:
    fail(f'top_p={top_p}: must be above 0 and at most 1')
if device == 'auto':
    has = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    device = next(kind for kind in has if has[kind])
if device.startswith('cuda') and not torch.cuda.is_available():
    fail(f'device={device}: this torch ({torch.__version__}) sees no GPU; use --device=cpu')
try:
    torch.empty(0, device=device)
    generator = torch.Generator(device).manual_seed(seed)
except (RuntimeError, AssertionError) as error:     # of an unknown name, or a device that is not there
    fail(f'device={device}: {str(error).splitlines()[0]}')
if dtype == 'auto':
    has_bfloat16 = device.startswith('cuda') and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = 'bfloat16' if has_bfloat16 else 'float32'
if dtype not in ('float32', 'bfloat16', 'float16'):
    fail(f'dtype={dtype}: expected float32, bfloat16 or float16')
if temperature < 1e-6:      # logits divided by so little are no numbers any more; the likeliest token takes it all
    temperature = 0


def read_prompt(tokenizer):
    """The token ids of `start`; an end of text that is written in it is that one token."""
    text = start
    if start.startswith('FILE:'):
        try:
            no_pipe(start[5:])
            text = Path(start[5:]).read_text(encoding='utf-8-sig')
        except (OSError, ValueError) as error:
            raise ValueError(f'start={start}: {why(error)}') from None
    documents = [text] if tokenizer.eot is None else text.split(EOT)
    try:
        ids = tokenizer.encode(documents[0])
        for document in documents[1:]:
            ids += [tokenizer.eot, *tokenizer.encode(document)]
    except ValueError:
        if 'start' in given:
            raise
        return []       # an alphabet without the line break that is the default
    return ids


try:
    source = init_from
    if init_from == 'resume':
        if not (out_dir and os.path.exists(out_dir)):
            raise ValueError(f'out_dir={out_dir} does not exist; train first, or name another by --out_dir')
        source = newest_checkpoint(out_dir) or out_dir
    checkpoint = read_checkpoint(source)
    tokenizer = find_tokenizer(source, checkpoint)
    ids = read_prompt(tokenizer)
except (ValueError, OSError, RuntimeError) as error:    # RuntimeError: no home directory for what is downloaded
    fail(error)
note(f'from {source}, step {checkpoint["iter_num"]}')
model = GPT(GPTConfig(**{**checkpoint['model_args'], 'dropout': 0.0})).to(device).eval()
model.load_state_dict(checkpoint['model'])
if compile:
    model.compile(dynamic=True)

prompt = torch.tensor(ids, dtype=torch.long, device=device)
autocast = nullcontext() if dtype == 'float32' else torch.autocast(torch.device(device).type, getattr(torch, dtype))
with printing():
    for _ in range(num_samples):
        with autocast:
            tokens = model.generate(prompt[None], max_new_tokens, temperature, top_k or None,
                                    top_p if top_p < 1 else None, vocab_size=tokenizer.vocab_size,
                                    bos=tokenizer.eot or 0, generator=generator)
        print(tokenizer.decode(tokens[0].tolist()))
        print('---------------')
