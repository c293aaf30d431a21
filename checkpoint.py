"""The files of a run: where to start, what fits no longer, what is to be deleted; checkpoints of every form, and GPT-2
folders in Hugging Face form."""
import difflib
import io
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import sys
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import filesystem, metadata

from data.bins import FULL, write_file
from model import GPT, GPTConfig

SAMPLED = re.compile(r'(.+)_first(\d+)\.safetensors')  # <param>_first<n>.safetensors: rows 0..n-1 of its gradient
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}


# ---- where a run starts, and the files that an earlier one left ---

def find_start(init_from, out_dir, overwrite, eval_only):
    """(checkpoint, state, leftovers): the path of out_dir's newest checkpoint, None if there is none or init_from asks
    for something else; what it holds, or the pretrained weights that init_from names, or {}; an earlier run's files,
    by name, that a new run has to delete.

    state is read_checkpoint's dict, of a sharded checkpoint without the tensors: every rank reads its part of those.
    Raises ValueError (one line) if a checkpoint is torn, there is none to resume, or a new run would come upon an
    earlier one's files, unless it only evaluates or may overwrite them; what it starts from it may not.
    """
    names = 'ckpt.pt', 'best.pt', 'ckpt_dcp', 'log.jsonl', 'grad_dotprods', 'gradient_dumper'
    leftovers = [name for name in names if Path(out_dir, name).exists()]
    checkpoint, state = newest_checkpoint(out_dir) if init_from in ('resume', 'auto') else None, {}
    if checkpoint is not None and os.path.isdir(checkpoint):
        try:
            state = json.loads(Path(checkpoint, 'state.json').read_text())
            get_checkpoint_metadata(checkpoint)
            state['model_args'], state['iter_num'], state['param_groups']
        except (OSError, ValueError, LookupError, TypeError):
            raise ValueError(f'{checkpoint} is torn: delete that folder, and the one before is taken') from None
    elif checkpoint is not None or init_from not in ('scratch', 'resume', 'auto'):
        state = read_checkpoint(checkpoint or init_from)
    elif init_from == 'resume':
        raise ValueError(f'no complete checkpoint in {out_dir}')
    source = Path(init_from).resolve() if state and checkpoint is None else Path()
    if overwrite and not eval_only and source.exists() and Path(out_dir).resolve() in (source, *source.parents):
        raise ValueError(f'it lies in {out_dir}, which --overwrite=True would empty: another --out_dir')
    if checkpoint is None and leftovers and not (overwrite or eval_only or init_from == 'auto'):
        raise ValueError(f'{out_dir} holds an earlier run ({", ".join(leftovers)}): another --out_dir, or go on '
                         'by --init_from=auto, or delete it by --overwrite=True')
    return checkpoint, state, leftovers if checkpoint is None else []


def must_fit(source, state, config, names, meta):
    """Raises ValueError (one line) if a checkpoint or pretrained model, whose dict is `state`, has another value of one
    of these settings than config, or another tokenizer than today's training data, whose record is `meta`."""
    args, then = state['model_args'], (state.get('meta') or {}).get('tokenizer')
    wrong = [f'{k}={config[k]} (there {args[k]})' for k in sorted(names) if config[k] != args[k]]
    if wrong:
        raise ValueError(f'{source} has another {", ".join(wrong)}: leave that out, or start from another, '
                         'or from scratch in another out_dir')
    if then and meta.get('tokenizer', then) != then:
        raise ValueError(f'{source} has another tokenizer than dataset={config["dataset"]}: same ids, other text')


def changes(state, config, meta, shape_names):
    """What has changed since a checkpoint, whose dict is `state`, was written: a list of phrases."""
    changed = [f'{k} {v!r} -> {config[k]!r}' for k, v in (state.get('config') or {}).items() if k in config
               and config[k] != v and k not in ('init_from', 'overwrite', *shape_names)]
    return changed + ['the tokens of the dataset'] * ((state.get('meta') or meta).get('splits') != meta.get('splits'))


def forget_later(out, step, evaluates):
    """Drop what a killed run logged and scored after its last checkpoint, of `step`, since it will happen again; also
    that step's evaluation, if the run that goes on begins with it."""
    log = out / 'log.jsonl'
    lines = []
    for line in log.read_text(errors='replace').splitlines() if log.is_file() else []:
        try:
            lines += [line + '\n'] * (json.loads(line)['iter'] < step + ('val_loss' in line and not evaluates))
        except (ValueError, LookupError, TypeError):
            pass        # a kill may have cut the last one
    write_file(log, ''.join(lines).encode())
    for path in (out / 'grad_dotprods').glob('iter_*.safetensors'):
        if path.stem[5:].isdigit() and int(path.stem[5:]) > step:
            path.unlink()


def keep_newest(folder, keep):
    """Delete all complete step_N in ckpt_dcp but the newest `keep` and the best; 0 deletes none."""
    complete = [f.parent for f in folder.glob('step_*/.metadata') if re.fullmatch(r'step_\d+', f.parent.name)]
    complete.sort(key=lambda p: int(p.name[5:]))
    best = None
    for path in complete if keep else []:
        with suppress(OSError, ValueError):     # without state.json it is none to resume from
            best = path if json.loads((path / 'state.json').read_text()).get('best') else best
    for old in complete[:-keep] if keep else []:
        if old != best:
            (old / '.metadata').unlink()        # first: a half-deleted checkpoint must not count as one
            shutil.rmtree(old)


def excepthook(out_dir):
    """For sys.excepthook: what the system refuses, such as room on a disk, is one line: a traceback would not help."""
    def report(kind, error, trace):
        cause, path = why(error), getattr(error, 'filename', None)
        if 'unexpected pos' in cause:       # of the ranks' errors only the words of torch's zip writer get through
            cause = os.strerror(FULL[0]) + ', it seems'
        if cause.startswith(tuple(map(os.strerror, FULL))):
            path, cause = out_dir, f'{cause}: make room; --init_from=auto then goes on'
        elif not isinstance(error, OSError) or path is None:
            return sys.__excepthook__(kind, error, trace)
        print(f'train.py: {path}: {cause}', file=sys.stderr, flush=True)
    return report


# ---- reading checkpoints ---

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
    if src in OPENAI or is_hf_folder(src):
        model_args, weights = load_hf(src)
        ckpt = {'model': weights, 'optimizer': {}, 'model_args': model_args, 'meta': hf_record(src).get('meta')}
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


# ---- torch.distributed.checkpoint folders, and sampled dumps ---

class MetadataUnpickler(pickle.Unpickler):
    """Builds only what torch.distributed.checkpoint writes into .metadata, so that a file cannot run code."""

    def find_class(self, module, name):
        if module.startswith('pathlib'):  # where it was once saved; a Windows path on Linux must not fail
            return pathlib.PurePath
        if name == '_StorageInfo':  # also under the name of OLMo-core's own writer
            return filesystem._StorageInfo
        found = getattr({'torch': torch, metadata.__name__: metadata}.get(module), name, None)
        ours = found is torch.Size or getattr(found, '__module__', '') == metadata.__name__
        if ours or isinstance(found, torch.dtype):
            return found
        if (module, name) == ('torch.serialization', '_get_layout'):
            return torch.serialization._get_layout
        raise pickle.UnpicklingError(f'{module}.{name} does not belong there')


def find_dump(path):
    """The folder of a dump's files: `path` itself, or `sharded` or `sampled` in it. ValueError if there is none."""
    for folder in (path, os.path.join(path, 'sharded'), os.path.join(path, 'sampled')):
        if os.path.isdir(folder):
            names = os.listdir(folder)
            if '.metadata' in names or any(SAMPLED.fullmatch(name) for name in names):
                return folder
            if any(name.endswith('.distcp') for name in names):
                raise ValueError(f'{folder}: has no .metadata: writing it was not finished, or the file was lost')
    raise ValueError(f'{path}: no gradient dump (neither .metadata nor *_first<n>.safetensors); steps are in '
                     'out_dir/gradient_dumper/stepN')


def get_checkpoint_metadata(dir):
    """The torch.distributed.checkpoint Metadata of a dump; no tensor is read.

    `.state_dict_metadata[name]` has `.size` and `.properties.dtype`; for a sampled dump those of the rows it holds.
    `dir`: stepN, or its sharded or sampled folder. Raises ValueError (one line) where .metadata is missing or torn.
    """
    folder = find_dump(dir)
    if os.path.exists(os.path.join(folder, '.metadata')):
        with open(os.path.join(folder, '.metadata'), 'rb') as file:
            try:
                return MetadataUnpickler(file).load()
            except Exception as error:  # a torn pickle fails in many ways
                raise ValueError(f'{folder}/.metadata: torn or not a checkpoint ({error})') from None
    tensors, files = {}, {}
    for name in sorted(os.listdir(folder)):
        if match := SAMPLED.fullmatch(name):
            with open_sampled(os.path.join(folder, name)) as file:
                part = file.get_slice('gradient')
                size, dtype = torch.Size(part.get_shape()), DTYPES.get(part.get_dtype())
            chunk = metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            tensors[match[1]] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), size, [chunk])
            files[match[1]] = name
    return metadata.Metadata(tensors, storage_data=files)


def find_keys(dir, names=None):
    """(folder, Metadata, {name: its TensorStorageMetadata} for each of `names`, None: all) of a dump; reads no tensor.

    Raises ValueError (one line) for an unknown name.
    """
    folder, meta = find_dump(dir), get_checkpoint_metadata(dir)
    known = {k: v for k, v in meta.state_dict_metadata.items() if isinstance(v, metadata.TensorStorageMetadata)}
    names = list(known) if names is None else list(names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ValueError(f'{folder}: no tensor {name!r}; nearest name: {"".join(near)}')
    return folder, meta, {name: known[name] for name in names}


def load_keys(dir, names=None):
    """Yield (name, gradient) for each of `names` (None: all), one tensor in memory at a time, on CPU, dtype as saved.

    `dir` as in get_checkpoint_metadata; a sampled dump yields the first rows it holds, (n, ...) instead of (rows, ...).
    Raises ValueError (one line) for an unknown name, before any is read, and for a missing or torn file.
    """
    folder, meta, known = find_keys(dir, names)
    for name in known:
        if isinstance(meta.storage_data.get(name), str):
            with open_sampled(os.path.join(folder, meta.storage_data[name])) as file:
                yield name, file.get_tensor('gradient')
            continue
        tensor = torch.empty(known[name].size, dtype=known[name].properties.dtype)
        for chunk in known[name].chunks:  # each rank's piece is a torch.save of its own within that rank's file
            try:
                info = meta.storage_data[metadata.MetadataIndex(name, chunk.offsets)]
                path = os.path.join(folder, info.relative_path)
                with open(path, 'rb') as file:
                    file.seek(info.offset)
                    data = file.read(info.length)
                if len(data) < info.length:
                    size, end = os.path.getsize(path), info.offset + info.length
                    raise ValueError(f'{info.relative_path} has {size} bytes of at least {end}')
                piece = torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)
                tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] = piece
            except Exception as error:
                raise ValueError(f'{folder}: missing or torn file, {name} cannot be read ({error})') from None
        yield name, tensor


def open_sampled(path):
    """A sampled gradient's file, opened lazily; ValueError if it is torn or holds no tensor named `gradient`."""
    try:
        file = safe_open(path, 'pt')
        file.get_slice('gradient')
        return file
    except (SafetensorError, OSError) as error:
        raise ValueError(f'{path}: missing or torn ({error})') from None


def why(error):
    """What an error says without the path: the system's words, also where torch has put an error of its own around."""
    if failures := getattr(error, 'failures', None):  # torch.distributed.checkpoint's, by rank
        error = next(iter(failures.values()))[0]
    inner = error
    while inner and not isinstance(inner, OSError):
        inner = inner.__context__
    return getattr(inner, 'strerror', None) or str(error)


# ---- weights in Hugging Face form ------------------------------------------------------------------------------------

# kept as (in, out) there
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')


OPENAI = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')


def is_hf_folder(path):
    """Whether a folder holds weights in Hugging Face form."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ('model.safetensors', 'model.safetensors.index.json'))


def download_gpt2(name):
    """Fetch OpenAI's weights, 'gpt2' (0.5 GB) to 'gpt2-xl' (6 GB), once. Returns their folder. Raises OSError."""
    from data.corpus import fetch
    folder = Path.home() / '.cache' / 'flatgpt' / name
    for file in ('config.json', 'model.safetensors'):
        url = f'{os.environ.get("HF_ENDPOINT", "https://huggingface.co")}/openai-community/{name}/resolve/main/{file}'
        if not (folder / file).is_file():
            try:
                with urllib.request.urlopen(urllib.request.Request(url, method='HEAD'), timeout=10) as reply:
                    size = int(reply.headers['Content-Length'])
            except OSError as error:
                raise OSError(f'{url}: {error}; fetch it elsewhere and name its folder by --init_from') from None
            fetch({'url': url, 'size': size, 'sha256': None}, folder / file)
    return folder


def read_json(path):
    """The object that a JSON file holds. ValueError (one line) if it is missing, torn, or holds something else."""
    try:
        found = json.loads(Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise ValueError(f'{path}: missing or torn ({why(error)})') from None
    if not isinstance(found, dict):
        raise ValueError(f'{path}: holds {str(found)[:40]}, not an object')
    return found


def hf_record(path):
    """What scripts/export.py adds to the config.json of a folder in Hugging Face form: 'bias', and 'meta' of the
    tokens; {} of another's folder or of OpenAI's weights."""
    record = {} if path in OPENAI else read_json(Path(path, 'config.json')).get('flatgpt')
    return record if isinstance(record, dict) else {}


def load_hf_tensors(path):
    """{name: tensor} of the model.safetensors in a folder, or of the files that its index names."""
    from safetensors.torch import load_file
    names = ['model.safetensors']
    if not (path / names[0]).is_file():
        index = path / 'model.safetensors.index.json'
        files = read_json(index).get('weight_map')
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f'{index}: has no weight_map of names')
        names = sorted({os.path.basename(name) for name in files.values()})
    tensors = {}
    for name in names:
        try:
            tensors.update(load_file(path / name))
        except Exception as error:      # safetensors has its own kinds
            raise ValueError(f'{path / name}: missing or torn ({why(error)})') from None
    return tensors


def load_hf(path):
    """
    Read a GPT-2 folder in Hugging Face form (config.json and model.safetensors, or the parts that
    model.safetensors.index.json names), or OpenAI's weights by name ('gpt2-xl').
    Returns (model_args for GPTConfig, state dict of GPT). Raises ValueError saying what is missing or unsupported, and
    OSError if a download fails.
    """
    bias = hf_record(path).get('bias', True)
    path = download_gpt2(path) if path in OPENAI else Path(path)
    c = read_json(path / 'config.json')
    gelus = {'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh', 'gelu': 'none'}
    gelu = gelus.get(str(c.get('activation_function', 'gelu_new')))
    wanted = {'model_type': 'gpt2', 'layer_norm_epsilon': 1e-5, 'tie_word_embeddings': True, 'scale_attn_weights': True,
              'scale_attn_by_inverse_layer_idx': False, 'n_inner': None}
    odd = {k: c[k] for k, v in wanted.items() if c.get(k, v) != v and (k, c[k]) != ('n_inner', 4 * c.get('n_embd', 0))}
    if gelu is None or odd:
        raise ValueError(f'{path}/config.json: not a plain GPT-2: {odd or c["activation_function"]}')
    model_args = {**{name: c.get(name) for name in ('n_layer', 'n_head', 'n_embd', 'vocab_size')},
                  'block_size': c.get('n_positions', 1024)}
    wrong = [f'{name}={value}' for name, value in model_args.items() if type(value) is not int or value < 1]
    if wrong:
        raise ValueError(f'{path}/config.json: {", ".join(wrong)}')
    state = {}
    for name, w in load_hf_tensors(path).items():
        name = name.removeprefix('transformer.')
        if name != 'lm_head.weight' and not name.endswith(('.attn.bias', '.attn.masked_bias')):     # old masks
            state['transformer.' + name] = (w.t() if name.endswith(TRANSPOSED) else w).contiguous().float()
    biases = [name for name in state if name.endswith('.bias')]
    if bias is False and not any(state[name].any() for name in biases):     # zeros that this form asks for
        for name in biases:
            del state[name]
    else:
        bias = True
    model_args.update(bias=bias, gelu=gelu)
    state['lm_head.weight'] = state.get('transformer.wte.weight')
    with torch.device('meta'):
        expected = {k: v.shape for k, v in GPT(GPTConfig(**model_args)).state_dict().items()}
    wrong = [k for k in expected.keys() | state.keys() if getattr(state.get(k), 'shape', None) != expected.get(k)]
    if wrong:
        raise ValueError(f'{path}: model.safetensors does not fit its config.json: {", ".join(sorted(wrong)[:3])}')
    return model_args, state
