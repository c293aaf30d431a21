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
import math
import os
import re
import shutil
import sys
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(__file__))]
from load_grads import load_keys, why  # noqa: E402
from model import GPT, OPENAI, TRANSPOSED, GPTConfig, load_hf  # noqa: E402

USAGE = 'usage: python scripts/export.py SRC DST --to=full|sharded|hf (--help tells more)'


def newest_checkpoint(out_dir):
    """The path of the newest complete checkpoint in an out_dir, or None; of a sharded one .metadata is written last."""
    inner, best, full = (os.path.join(out_dir, name) for name in ('ckpt_dcp', 'best.pt', 'ckpt.pt'))
    found = {}
    for name in os.listdir(inner) if os.path.isdir(inner) else []:
        if re.fullmatch(r'step_\d+', name) and os.path.isfile(os.path.join(inner, name, '.metadata')):
            found[int(name[5:])] = os.path.join(inner, name)
    for path in (best, full):       # ckpt.pt, if they are of one step; after a kill there may be a best.pt alone
        if os.path.isfile(path):
            found[read_full(path)['iter_num']] = path
    return found[max(found)] if found else None


def read_checkpoint(src):
    """The checkpoint at `src`, of any form, as the dict of a ckpt.pt; tensors on CPU, a file's mapped, not read.

    Weights have the names and shapes of GPT.state_dict(), checked; optimizer state is by parameter name.
    src may be the name of OpenAI's weights, such as 'gpt2-xl', too.
    Raises ValueError (one line) if there is no complete checkpoint of ours, nanoGPT's or GPT-2 in Hugging Face form.
    """
    if src in OPENAI or os.path.isfile(os.path.join(src, 'model.safetensors')):
        model_args, weights = load_hf(src)
        ckpt = {'model': weights, 'optimizer': {}, 'model_args': model_args}
    elif os.path.isfile(os.path.join(src, '.metadata')):
        ckpt = read_sharded(src)
    elif os.path.isdir(src):
        newest = newest_checkpoint(src)
        if newest is None:
            raise ValueError(f'{src}: no ckpt.pt, no complete ckpt_dcp/step_N and no model.safetensors in it')
        return read_checkpoint(newest)
    else:
        ckpt = read_full(src)
    try:
        ckpt.update(tidy(src, ckpt['model_args'], ckpt['model'], ckpt['optimizer']))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{src}: torn, or not a checkpoint ({type(error).__name__}: {error})') from None
    return {**ckpt, 'iter_num': ckpt.get('iter_num', 0), 'best_val_loss': float(ckpt.get('best_val_loss', math.inf)),
            'config': ckpt.get('config', {}), 'meta': ckpt.get('meta'), 'scaler': ckpt.get('scaler', {}),
            'wandb_id': ckpt.get('wandb_id')}


def read_full(path):
    """The dict of a .pt file, as it is. ValueError if it is missing, torn, or no checkpoint."""
    try:
        with open(path, 'rb') as file:  # torch.save's are zip files, whose directory comes last
            problem = '' if zipfile.is_zipfile(file) else 'torn, or not a checkpoint'
    except OSError as error:
        problem = error.strerror
    if problem:
        raise ValueError(f'{path}: {problem}')
    try:
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        kinds = {'model': dict, 'optimizer': dict, 'model_args': dict, 'iter_num': int}
        missing = [name for name, kind in kinds.items() if not isinstance(ckpt.get(name), kind)]
    except Exception as error:  # torch.load fails in many ways; a sentence of it says what is wrong
        text = str(error).partition('WeightsUnpickler error: ')[2] or str(error)  # before that comes advice
        what = text.partition('\n')[0].partition('. ')[0]
        raise ValueError(f'{path}: torn, or not a checkpoint ({what})') from None
    if missing:
        raise ValueError(f'{path}: not a checkpoint of train.py, it has no {", ".join(missing)}')
    return ckpt


def read_sharded(folder):
    """The dict of a ckpt_dcp/step_N folder: its tensors, and from state.json the rest."""
    try:
        with open(os.path.join(folder, 'state.json'), encoding='utf-8') as file:
            ckpt = json.load(file)
        groups = [{**g, 'betas': tuple(g['betas'])} for g in ckpt.pop('param_groups')]  # JSON has no tuple
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f'{folder}/state.json: missing or torn ({why(error)})') from None
    ckpt.update(model={}, optimizer={'state': {}, 'param_groups': groups})
    for key, tensor in load_keys(folder):
        part, _, name = key.partition('.')
        if part == 'model':
            ckpt['model'][name] = tensor
        else:  # optimizer.state.<parameter>.<exp_avg ...>
            name, _, entry = name.removeprefix('state.').rpartition('.')
            ckpt['optimizer']['state'].setdefault(name, {})[entry] = tensor
    return ckpt


def tidy(src, model_args, weights, optimizer):
    """{'model', 'optimizer', 'model_args'} in our form: nanoGPT's prefix, masks and parameter numbers translated."""
    model_args = {'gelu': 'none', 'bias': True, 'dropout': 0.0, **model_args}  # nanoGPT's GELU is the exact one
    weights = {k.removeprefix('_orig_mod.'): v for k, v in weights.items() if not k.endswith('.attn.bias')}
    model_args = {k: v for k, v in model_args.items() if k in GPTConfig.__dataclass_fields__}
    with torch.device('meta'):
        expected = {name: tensor.shape for name, tensor in GPT(GPTConfig(**model_args)).state_dict().items()}
    head = weights.setdefault('lm_head.weight', weights.get('transformer.wte.weight'))
    wrong = [k for k in expected.keys() | weights.keys() if getattr(weights.get(k), 'shape', None) != expected.get(k)]
    if wrong:
        raise ValueError(f'{src}: missing, unknown or of another shape: {", ".join(sorted(wrong)[:3])}')
    if not torch.equal(head, weights['transformer.wte.weight']):
        raise ValueError(f'{src}: lm_head.weight differs from transformer.wte.weight; the two are one tensor in GPT-2')
    weights = {name: weights[name] for name in expected}
    weights['lm_head.weight'] = weights['transformer.wte.weight']  # one storage, so it is saved once
    state = optimizer.get('state', {})
    if 0 in state:  # numbers count the parameters in the order of AdamW's groups: matrices, then vectors
        order = [name for name in expected if name != 'lm_head.weight']
        order.sort(key=lambda name: len(expected[name]) < 2)  # a stable sort
        if len(state) != len(order):
            raise ValueError(f'{src}: optimizer state of {len(state)} parameters, the model has {len(order)}')
        optimizer = {'state': {order[i]: entry for i, entry in state.items()}, 'param_groups': [
            {**group, 'params': [order[i] for i in group['params']]} for group in optimizer['param_groups']]}
    for name, entry in optimizer.get('state', {}).items():
        if name not in expected or entry['exp_avg'].shape != expected[name]:
            raise ValueError(f'{src}: optimizer state of {name} does not fit the parameter')
    without = [name for name in expected if name not in optimizer.get('state', {}) and name != 'lm_head.weight']
    if optimizer.get('state') and without:
        raise ValueError(f'{src}: optimizer state of all parameters but {without[0]}')
    return {'model': weights, 'optimizer': optimizer, 'model_args': model_args}


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
    from printing import printing
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
