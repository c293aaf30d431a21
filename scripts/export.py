"""Turn a checkpoint into another form, in a plain process: one file, sharded, or a Hugging Face GPT-2 folder.

python scripts/export.py SRC DST --to=full       DST/ckpt.pt, or DST itself if it ends in .pt
python scripts/export.py SRC DST --to=sharded    DST/ckpt_dcp/step_N
python scripts/export.py SRC DST --to=hf         DST/model.safetensors and DST/config.json, for from_pretrained

SRC: an out_dir (its newest checkpoint), a .pt file (also nanoGPT's), a ckpt_dcp/step_N or a Hugging Face folder.
Nothing that exists is overwritten. From the Hugging Face form comes a checkpoint of step 0 without optimizer state;
sharded, it has the zeros that AdamW starts from.
To it, rows of the embedding that only pad the vocabulary are left out where the checkpoint knows the vocabulary's size,
so that the model fits its tokenizer; a model without biases gets zeros for them, which compute the same.
"""
import json
import os
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoint import TRANSPOSED, read_checkpoint, why  # noqa: E402
from scripts.common import printing  # noqa: E402

USAGE = 'usage: python scripts/export.py SRC DST --to=full|sharded|hf (--help tells more)'


def write_full(ckpt, path):
    """One file, which appears whole or not at all."""
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            torch.save(ckpt, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_sharded(ckpt, folder):
    """Tensors by torch.distributed.checkpoint, all else in state.json."""
    rest = {name: value for name, value in ckpt.items() if name not in ('model', 'optimizer')}
    rest['param_groups'] = ckpt['optimizer'].get('param_groups', [])
    weights = {name: weight for name, weight in ckpt['model'].items() if name != 'lm_head.weight'}  # tied, stored once
    state = ckpt['optimizer'].get('state') or {  # AdamW before its first step
        name: {'step': torch.tensor(0.0), 'exp_avg': torch.zeros_like(w), 'exp_avg_sq': torch.zeros_like(w)}
        for name, w in weights.items()}
    write_synced(os.path.join(folder, 'state.json'), json.dumps(rest).encode())
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'torch.distributed is', UserWarning)  # one process is what we mean
        dcp.save({'model': weights, 'optimizer': {'state': state}}, checkpoint_id=folder, no_dist=True)


def write_hf(ckpt, folder):
    """GPT-2 as transformers keeps it: Linear weights (in, out), all biases, config.json."""
    args, meta, weights = ckpt['model_args'], ckpt['meta'] or {}, dict(ckpt['model'])
    vocab_size = min(args['vocab_size'], meta.get('vocab_size') or args['vocab_size'])
    weights['transformer.wte.weight'] = weights['transformer.wte.weight'][:vocab_size]
    del weights['lm_head.weight']  # tied there too
    if not args['bias']:
        for name in [name for name in weights if '.wte.' not in name and '.wpe.' not in name]:
            weights[name.removesuffix('weight') + 'bias'] = torch.zeros(len(weights[name]))
    weights = {k: (w.t() if k.endswith(TRANSPOSED) else w).contiguous() for k, w in weights.items()}
    config = {
        'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'vocab_size': vocab_size,
        'n_positions': args['block_size'], 'n_embd': args['n_embd'], 'n_layer': args['n_layer'],
        'n_head': args['n_head'], 'activation_function': {'tanh': 'gelu_new', 'none': 'gelu'}[args['gelu']],
        'layer_norm_epsilon': 1e-5, **dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), args['dropout']),
        'tie_word_embeddings': True, 'bos_token_id': meta.get('eot'), 'eos_token_id': meta.get('eot')}
    save_file(weights, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    write_synced(os.path.join(folder, 'config.json'), json.dumps(config, indent=2).encode())


def write_synced(path, data):
    with open(path, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_folder(ckpt, folder, write):
    """write(ckpt, temporary folder), which then takes its name: it appears complete or not at all."""
    parent, name = os.path.split(os.path.abspath(folder))
    temporary = os.path.join(parent, f'.{name}.{os.getpid()}.tmp')
    os.makedirs(temporary)
    try:
        write(ckpt, temporary)
        if os.path.isdir(folder):
            os.rmdir(folder)  # empty, as checked
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export(src, dst, to):
    """Write the checkpoint at `src` to `dst` in the form `to`; returns the path. ValueError (one line) if it cannot."""
    ckpt = read_checkpoint(src)
    if to == 'full':
        path = dst if dst.endswith('.pt') else os.path.join(dst, 'ckpt.pt')
    else:
        path = os.path.join(dst, 'ckpt_dcp', f'step_{ckpt["iter_num"]}') if to == 'sharded' else dst
    if os.path.isfile(path) or os.path.isdir(path) and os.listdir(path):
        raise ValueError(f'{path}: exists; choose another DST or move it away')
    missing = [folder for folder in Path(path).absolute().parents if not os.path.exists(folder)]  # the innermost first
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if to == 'full':
            write_full(ckpt, path)
        else:
            write_folder(ckpt, path, write_sharded if to == 'sharded' else write_hf)
    except (OSError, RuntimeError, SafetensorError, dcp.CheckpointException) as error:
        raise ValueError(f'{path}: cannot be written: {why(error)}') from None
    finally:
        for folder in missing:
            with suppress(OSError):  # not empty: nothing has failed
                os.rmdir(folder)
    return path


if __name__ == '__main__':
    if '-h' in sys.argv or '--help' in sys.argv:
        print(__doc__.strip())
        sys.exit(0)
    paths = [arg for arg in sys.argv[1:] if not arg.startswith('-')]
    options = [arg for arg in sys.argv[1:] if arg.startswith('-')]
    if len(list(filter(None, paths))) != 2 or options not in (['--to=full'], ['--to=sharded'], ['--to=hf']):
        print(f'export.py: not understood: {" ".join(sys.argv[1:]) or "no arguments"}; {USAGE}', file=sys.stderr)
        sys.exit(2)
    try:
        with printing():
            print(f'wrote {export(*paths, options[0][5:])}')
    except ValueError as error:
        print(' '.join(f'export.py: {error}'.split()), file=sys.stderr)
        sys.exit(1)
