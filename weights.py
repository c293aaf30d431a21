"""
Checkpoints and weights of any form, read in a plain process: ckpt.pt files, ours and nanoGPT's; ckpt_dcp/step_N folders
of torch.distributed.checkpoint; GPT-2 folders in Hugging Face form. Nothing in a file is ever executed.

A checkpoint is a dict: model (weights under the names of GPT.state_dict()), optimizer (state by parameter name),
model_args (for GPTConfig), iter_num, best_val_loss, config, meta (the record of the data), scaler, wandb_id.
"""
import glob
import io
import json
import math
import os
import pathlib
import pickle
import re
import sys
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from configurator import tell
from data.bins import check_meta, check_pickle, leads_nowhere, open_file, read_file, said
from model import GPT, GPTConfig


def why(error):
    """What an error says without the path: the system's words, also where torch has put an error of its own around."""
    failures = getattr(error, 'failures', None)     # torch.distributed.checkpoint's, by rank
    if failures:
        error = next(iter(failures.values()))[0]
    inner = error
    while inner and not isinstance(inner, OSError):
        inner = inner.__context__
    if getattr(inner, 'strerror', None):
        return inner.strerror
    if 'weights_only' not in str(error):
        return str(error)
    said = str(error).partition('WeightsUnpickler error: ')[2].strip()      # torch.load's comes after advice
    return said.partition('\n')[0].partition('. ')[0] or 'no tensors in it'


@contextmanager
def one_process_too():
    """Around torch.distributed.checkpoint's calls, which otherwise warn where there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        yield


# ---- checkpoints of any form, read in a plain process ----------------------------------------------------------------
def newest_that_loads(out_dir):
    """
    (path, dict, passed_over): out_dir's newest checkpoint that loads, of ckpt.pt, best.pt and ckpt_dcp/step_N; what it
    holds, of a sharded one without the tensors; {path: what is wrong with it} of newer ones that do not load.
    (None, {}, {}) if there is none. ValueError (one line) if none of several loads, or one may not be read: it may be
    sound; or the newest step_N has been renamed.
    """
    paths = [path for path in (Path(out_dir, 'ckpt.pt'), Path(out_dir, 'best.pt')) if os.path.lexists(path)]
    for path in paths:
        if path.is_dir():
            raise ValueError(f'{path}: a folder, not a file: mend that, or move it away')
    folder = Path(out_dir, 'ckpt_dcp')
    for path in (*paths, folder):
        if leads_nowhere(path):
            raise ValueError(f'{path}: a link that leads nowhere: mend that, or move it away')
    steps = [folder / name for name in glob.glob('step_*', root_dir=folder) if re.fullmatch(r'step_\d+', name)]
    steps.sort(key=lambda path: int(path.name[5:]), reverse=True)
    found, torn = [], {}
    for path in paths + steps:
        try:
            ckpt = read_progress(path) if path in steps else read_checkpoint(path)
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise ValueError(f'{error}: mend that, or move it away') from error.__cause__
            torn[path] = str(error)
        else:
            found.append((ckpt['iter_num'], path, ckpt))
            if path in steps:
                if path.name != f'step_{ckpt["iter_num"]}':     # the run's own, of that name, would count as older
                    raise ValueError(f'{path} holds step {ckpt["iter_num"]}: give it its name back, or move it away')
                break       # the older ones need no look
    if not found and torn:
        raise ValueError(f'no checkpoint in {out_dir} loads: {"; ".join(torn.values())}; '
                         'a run that needs them no more starts anew by --init_from=scratch --overwrite=True')
    if not found:
        return None, {}, {}
    _, path, ckpt = max(found, key=lambda entry: entry[0])      # of one step the first, which is ckpt.pt
    return str(path), ckpt, {str(path): problem for path, problem in torn.items()}


def newest_checkpoint(out_dir):
    """The path of the newest checkpoint in an out_dir that loads, or None; stderr says which it passes over."""
    path, _, passed_over = newest_that_loads(out_dir)
    for problem in passed_over.values():
        tell(f'passed over, since it does not load: {problem}', sys.stderr)
    return path


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
        if 'labels' in ckpt:
            raise ValueError(f'{src} is a classifier, which scripts/classify.py alone reads')
    try:
        ckpt.update(tidy(src, ckpt['model_args'], ckpt['model'], ckpt['optimizer']))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{src}: torn, or not a checkpoint ({type(error).__name__}: {error})') from None
    return check_fields(src, ckpt)


def is_utf8(text):
    """Whether a text, as a file's name, is UTF-8: Python takes other bytes too, libraries do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_full(path):
    """The dict of a .pt file, as it is. ValueError if it is missing, torn, or no checkpoint."""
    if not is_utf8(str(path)):
        raise ValueError(f'{path}: torch can only open names in UTF-8: rename it')
    try:
        with open_file(path) as file:       # torch.save's are zip files, whose directory comes last
            is_whole = zipfile.is_zipfile(file)
    except zipfile.BadZipFile:      # spoilt, so that it seems to be a part of several
        is_whole = False
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    if not is_whole:
        raise ValueError(f'{path}: torn, or not a checkpoint')
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):
                raise ValueError('it is compressed')     # may be any size
        check_pickle(torch._C.PyTorchFileReader(str(path)).get_record('data.pkl'))
        ckpt = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Exception as error:      # torch.load fails in many ways; a sentence of it says what is wrong
        what = why(error).partition('\n')[0].partition('. ')[0]
        raise ValueError(f'{path}: torn, or not a checkpoint ({what})') from None
    if not isinstance(ckpt, dict):
        raise ValueError(f'{path}: not a checkpoint of train.py but a {type(ckpt).__name__}')
    missing = [name for name in ('model', 'optimizer', 'model_args', 'iter_num')
               if not isinstance(ckpt.get(name), FIELDS[name])]
    if missing:
        raise ValueError(f'{path}: not a checkpoint of train.py, it has no {", ".join(missing)}')
    return check_fields(path, ckpt)


FIELDS = {'model': dict, 'optimizer': dict, 'model_args': dict, 'iter_num': int, 'samples_seen': int,
          'config': (dict, type(None)), 'meta': (dict, type(None)), 'scaler': dict, 'wandb_id': (str, type(None)),
          'param_groups': list}
# of nanoGPT's checkpoints, or of older ones
ABSENT = {'iter_num': 0, 'best_val_loss': math.inf, 'config': {}, 'meta': None, 'scaler': {}, 'wandb_id': None}
COUNTS = 'n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size'


def check_fields(src, ckpt):
    """A checkpoint's dict with what is ABSENT from it; best_val_loss a float. ValueError (one line) if a field holds
    what no run writes."""
    ckpt = {**ABSENT, **ckpt}
    try:
        for name, kind in FIELDS.items():
            if name in ckpt and (not isinstance(ckpt[name], kind) or isinstance(ckpt[name], bool)):
                raise ValueError(f'{name} is {ckpt[name]!r:.40}')
        for name in ('iter_num', 'samples_seen'):
            if not 0 <= ckpt.get(name, 0) < 2**63:
                raise ValueError(f'{name} is {ckpt[name]}')
        ckpt['best_val_loss'] = float(ckpt['best_val_loss'])
        if ckpt['meta']:
            check_meta({'vocab_size': 1, **ckpt['meta']})       # of a folder without a record it says no more
        config = ckpt['config'] = ckpt['config'] or {}
        for name, kind in (('dataset', str), ('batch_size', int), ('gradient_accumulation_steps', int)):
            if not isinstance(config.get(name, kind()), kind):
                raise ValueError(f'config.{name} is {config[name]!r:.40}')
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f'{src}: torn, or not a checkpoint ({error})') from None
    return ckpt


def check_shape(src, model_args, tensors):
    """ValueError (one line) if GPT cannot be built with these model_args, or has more layers than there are tensors:
    building a million of them would take all memory."""
    wrong = [f'{name}={model_args[name]!r:.40}' for name in COUNTS
             if type(model_args[name]) is not int or not 0 < model_args[name] < 2**31]
    if not wrong and model_args['n_embd'] % model_args['n_head']:
        wrong.append(f'n_embd={model_args["n_embd"]} is not divisible by n_head={model_args["n_head"]}')
    if not wrong and model_args['n_layer'] > tensors:
        wrong.append(f'n_layer={model_args["n_layer"]} and {tensors} tensors')
    for name, known in (('bias', (True, False)), ('gelu', ('tanh', 'none')), ('rope', (True, False)),
                        ('qk_norm', (True, False))):
        if model_args.get(name, False) not in known:
            wrong.append(f'{name}={model_args[name]!r:.40}')
    if not wrong and model_args.get('rope') and model_args['n_embd'] // model_args['n_head'] % 2:
        wrong.append(f'rope and an odd n_embd / n_head = {model_args["n_embd"] // model_args["n_head"]}')
    if wrong:
        raise ValueError(f'{src}: no GPT-2 has {", ".join(wrong)}')


def read_progress(folder):
    """The dict of a ckpt_dcp/step_N without its tensors: state.json. ValueError (one line) if a file of it is missing
    or too short."""
    try:
        ckpt = json.loads(read_file(Path(folder, 'state.json')))
        for group in ckpt['param_groups']:
            if 'betas' in group:
                group['betas'] = tuple(group['betas'])      # JSON has no tuple
        ckpt['model_args'], ckpt['iter_num']
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        cause = error if isinstance(error, PermissionError) else None
        raise ValueError(f'{folder}/state.json: missing or torn ({why(error)})') from cause
    ckpt = check_fields(f'{folder}/state.json', ckpt)
    tensors = check_sizes(folder)
    if ckpt['model_args']:
        check_shape(f'{folder}/state.json', complete(ckpt['model_args']), tensors)
    return ckpt


def check_sizes(folder):
    """The number of tensors in a torch.distributed.checkpoint folder. ValueError (one line) if a file that it speaks of
    is missing or too short."""
    ends, found = {}, read_metadata(folder)
    for part in found.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        path = Path(folder, name)
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            raise ValueError(f'{path}: missing or torn, it has {size} bytes of at least {end}')
    return len(found.state_dict_metadata)


def read_sharded(folder):
    """The dict of a ckpt_dcp/step_N folder: its tensors, and from state.json the rest."""
    ckpt = read_progress(folder)
    ckpt.update(model={}, optimizer={'state': {}, 'param_groups': ckpt.pop('param_groups')})
    for key, tensor in read_tensors(folder).items():
        part, _, name = key.partition('.')
        if part == 'model':
            ckpt['model'][name] = tensor
        else:       # optimizer.state.<parameter>.<exp_avg ...>
            name, _, entry = name.removeprefix('state.').rpartition('.')
            ckpt['optimizer']['state'].setdefault(name, {})[entry] = tensor
    return ckpt


def complete(model_args):
    """A checkpoint's model_args, with the defaults of what an older one, or nanoGPT's, lacks."""
    defaults = {**vars(GPTConfig()), 'gelu': 'none', 'bias': True}      # nanoGPT's GELU is the exact one
    return {name: model_args.get(name, default) for name, default in defaults.items()}


def tidy(src, model_args, weights, optimizer):
    """{'model', 'optimizer', 'model_args'} in our form: nanoGPT's prefix, masks and parameter numbers translated."""
    model_args = complete(model_args)
    check_shape(src, model_args, len(weights))
    weights = {k.removeprefix('_orig_mod.'): v for k, v in weights.items() if not k.endswith('.attn.bias')}
    with torch.device('meta'):
        expected = {name: tensor.shape for name, tensor in GPT(GPTConfig(**model_args)).state_dict().items()}
    head = weights.setdefault('lm_head.weight', weights.get('transformer.wte.weight'))
    wrong = [k for k in expected.keys() | weights.keys()
             if k not in expected or getattr(weights.get(k), 'shape', None) != expected[k]]
    if wrong:
        raise ValueError(f'{src}: missing, unknown or of another shape: {", ".join(sorted(wrong)[:3])}')
    for name, weight in weights.items():
        if not weight.is_floating_point():      # quantized, perhaps: without its scales it means nothing
            raise ValueError(f'{src}: {name} is of {weight.dtype}, weights are floating-point numbers')
    if not torch.equal(head, weights['transformer.wte.weight']):
        if head.isnan().any():      # which equals nothing
            raise ValueError(f'{src}: lm_head.weight holds NaN')
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
        shapes = [value.shape for value in entry.values() if torch.is_tensor(value) and value.dim() > 0]
        if name not in expected or any(shape != expected[name] for shape in shapes):
            raise ValueError(f'{src}: optimizer state of {name} does not fit the parameter')
    without = [name for name in expected if name not in optimizer.get('state', {}) and name != 'lm_head.weight']
    if optimizer.get('state') and without:
        raise ValueError(f'{src}: optimizer state of all parameters but {without[0]}')
    for group in optimizer.get('param_groups', []):
        entries = {name: sorted(map(str, optimizer['state'].get(name, {}))) for name in group.get('params', [])}
        if len(set(map(tuple, entries.values()))) > 1:
            fewest = min(entries, key=lambda name: len(entries[name]))
            raise ValueError(f'{src}: of {fewest} there is less optimizer state than of others')
    return {'model': weights, 'optimizer': optimizer, 'model_args': model_args}


# ---- torch.distributed.checkpoint folders -------------------------------------------------------------------------
# all that torch.distributed.checkpoint writes into .metadata; OLMo-core's own writer has a name of its own for one
METADATA = {('torch.distributed.checkpoint.metadata', name): getattr(metadata, name) for name in (
    'BytesStorageMetadata', 'ChunkStorageMetadata', 'Metadata', 'MetadataIndex', 'StorageMeta', 'TensorProperties',
    'TensorStorageMetadata', '_MEM_FORMAT_ENCODING')}
METADATA.update({(module, '_StorageInfo'): filesystem._StorageInfo for module in (
    'torch.distributed.checkpoint.filesystem', 'olmo_core.distributed.checkpoint.filesystem')})
METADATA.update({(module, name): pathlib.PurePath for module in ('pathlib', 'pathlib._local') for name in (
    'Path', 'PosixPath', 'WindowsPath', 'PurePath', 'PurePosixPath', 'PureWindowsPath')})   # where it was once saved
METADATA['torch', 'Size'] = torch.Size
METADATA['torch.serialization', '_get_layout'] = torch.serialization._get_layout


class MetadataUnpickler(pickle.Unpickler):
    """Builds only these classes, and torch's dtypes, so that a file cannot run code."""

    def find_class(self, module, name):
        if (module, name) in METADATA:
            return METADATA[module, name]
        dtype = getattr(torch, name, None) if module == 'torch' and '.' not in name else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f'{module}.{name} does not belong there')


class SafeReader(dcp.FileSystemReader):
    """torch's own reader, which is handed the metadata that MetadataUnpickler has read, and of that the tensors alone:
    torch reads those by weights_only=True, other entries not."""

    def __init__(self, folder):
        super().__init__(folder)
        self.checked = read_metadata(folder)

    def read_metadata(self, *args, **kwargs):
        return self.checked


def read_metadata(folder):
    """The torch.distributed.checkpoint Metadata of a folder, of its tensors alone; none of them is read. Raises
    ValueError (one line) where .metadata is missing or torn, or holds what torch does not write there."""
    path = os.path.join(folder, '.metadata')
    try:
        content = read_file(path)
        check_pickle(content)
        found = MetadataUnpickler(io.BytesIO(content)).load()
        if type(found) is not metadata.Metadata:
            raise ValueError(f'it holds a {type(found).__name__}')
        for part in found.storage_data.values():
            name = part.relative_path
            if type(part) is not filesystem._StorageInfo or type(name) is not str or os.path.basename(name) != name:
                raise ValueError(f'it names a file elsewhere, {part!r:.80}')
            if not (type(part.offset) is type(part.length) is int and min(part.offset, part.length) >= 0):
                raise ValueError(f'it speaks of a part {part!r:.80}')
            part.transform_descriptors = None       # older files lack it
        tensors = {name: entry for name, entry in found.state_dict_metadata.items()
                   if type(entry) is metadata.TensorStorageMetadata}
        for name, entry in tensors.items():
            check_entry(name, entry)
    except FileNotFoundError:
        raise ValueError(f'{folder}: has no .metadata: writing it was not finished, or the file was lost') from None
    except PermissionError as error:
        raise ValueError(f'{path}: {error.strerror}') from error
    except Exception as error:      # a torn pickle fails in many ways
        raise ValueError(f'{path}: torn or not a checkpoint ({said(error)})') from None
    return metadata.Metadata(tensors, storage_data=found.storage_data, storage_meta=metadata.StorageMeta())


def check_entry(name, entry):
    """ValueError if what metadata says of a tensor is not whole: torch would leave values undefined."""
    size, there = entry.size, 0
    for chunk in entry.chunks:
        for start, length, end in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if not 0 <= start <= start + length <= end:
                raise ValueError(f'{name}: a part lies outside')
        there += math.prod(chunk.sizes)
    if type(name) is not str or not isinstance(entry.properties.dtype, torch.dtype) or there != math.prod(size):
        raise ValueError(f'{name}: of {tuple(size)} values there are {there}')


def read_tensors(folder, names=None):
    """{name: tensor} of a torch.distributed.checkpoint folder, whole, on CPU, dtype as saved; names: of which (None:
    all). Raises ValueError (one line) for a missing or torn file."""
    reader = SafeReader(folder)
    check_sizes(folder)
    entries = reader.checked.state_dict_metadata
    names, tensors = list(names or entries), {}
    if not names:
        raise ValueError(f'{folder}: holds no tensor')
    try:
        for name in names:
            tensors[name] = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        with one_process_too():
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        first = names[0]
        raise ValueError(f'{folder}: missing or torn file, {first} cannot be read ({why(error)})') from None
    return tensors


# ---- weights in Hugging Face form ------------------------------------------------------------------------------------

# kept as (in, out) there
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')


OPENAI = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')


def is_hf_folder(path):
    """Whether a folder holds weights in Hugging Face form."""
    names = 'model.safetensors', 'model.safetensors.index.json'
    return any(os.path.isfile(os.path.join(path, name)) for name in names)


def download_gpt2(name):
    """Fetch OpenAI's weights, 'gpt2' (0.5 GB) to 'gpt2-xl' (6 GB), once. Returns their folder. Raises OSError."""
    from data.download import fetch, hub_files
    try:
        folder = Path.home() / '.cache' / 'flatgpt' / name
    except RuntimeError:
        raise OSError('there is no home directory to keep GPT-2\'s weights in; set HOME') from None
    wanted = ('config.json', 'model.safetensors')
    if all((folder / file).is_file() for file in wanted):
        return folder
    try:
        for file in hub_files(f'openai-community/{name}', [('main', '')], wanted, 'model'):
            if file['name'] in wanted and not (folder / file['name']).is_file():
                fetch(file, folder / file['name'])
    except OSError as error:
        raise OSError(f'{error}; fetch it elsewhere and name its folder by --init_from') from None
    return folder


def read_json(path):
    """The object that a JSON file holds. ValueError (one line) if it is missing, torn, or holds something else."""
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
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
            open_file(path / name).close()      # safetensors' own errors say less
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
    if type(c.get('n_embd')) is int and c.get('n_inner') == 4 * c['n_embd']:
        wanted['n_inner'] = c['n_inner']        # said, and as it is without
    odd = {k: c[k] for k, v in wanted.items() if c.get(k, v) != v}
    if gelu is None or odd:
        raise ValueError(f'{path}/config.json: not a plain GPT-2: {odd or c["activation_function"]}')
    model_args = {**{name: c.get(name) for name in ('n_layer', 'n_head', 'n_embd', 'vocab_size')},
                  'block_size': c.get('n_positions', 1024)}
    tensors, state = load_hf_tensors(path), {}
    check_shape(f'{path}/config.json', {**model_args, 'bias': True, 'gelu': gelu}, len(tensors))
    for name, w in tensors.items():
        name = name.removeprefix('transformer.')
        if name.endswith(('.attn.bias', '.attn.masked_bias')):     # old masks
            continue
        if name != 'lm_head.weight':
            name = f'transformer.{name}'
        w = w.t() if name.endswith(TRANSPOSED) else w
        state[name] = w.contiguous().float() if w.is_floating_point() else w       # tidy refuses the latter
    biases = [name for name in state if name.endswith('.bias')]
    if bias is False and not any(state[name].any() for name in biases):     # zeros that this form asks for
        for name in biases:
            del state[name]
    else:
        bias = True
    model_args.update(bias=bias, gelu=gelu)
    state.setdefault('lm_head.weight', state.get('transformer.wte.weight'))
    with torch.device('meta'):
        expected = {k: v.shape for k, v in GPT(GPTConfig(**model_args)).state_dict().items()}
    wrong = [k for k in expected.keys() | state.keys() if getattr(state.get(k), 'shape', None) != expected.get(k)]
    if wrong:
        raise ValueError(f'{path}: model.safetensors does not fit its config.json: {", ".join(sorted(wrong)[:3])}')
    return model_args, state
