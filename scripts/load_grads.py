"""Read gradient dumps (grad_dump=True of train.py) in a plain process: a small library and a command.

STEP is a folder out_dir/gradient_dumper/stepN; RUN is an out_dir, or its gradient_dumper folder.
python scripts/load_grads.py list STEP                          names, shapes and dtypes, from the metadata alone
python scripts/load_grads.py norms STEP                         gradient norms, the largest first
python scripts/load_grads.py compare STEP STEP                  cosine and norm ratio of each parameter in two steps
python scripts/load_grads.py follow RUN NAME [NAME ...]         parameters over all steps
python scripts/load_grads.py export STEP FILE.safetensors [NAME ...]   all parameters, or those named, in one new file
python scripts/load_grads.py plot RUN FILE.png                  norms by layer over the steps
"""
import difflib
import io
import math
import os
import pathlib
import pickle
import re
import sys

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem, metadata

SAMPLED = re.compile(r'(.+)_first(\d+)\.safetensors')  # <param>_first<n>.safetensors: rows 0..n-1 of its gradient
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
COMMANDS = {'list': (1, 1), 'norms': (1, 1), 'compare': (2, 2), 'follow': (2, 99), 'export': (2, 999), 'plot': (2, 2)}


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


def find_steps(run):
    """{step: folder} of the complete dumps in a run's out_dir or its gradient_dumper folder, in order of the steps."""
    inner = os.path.join(run, 'gradient_dumper')
    inner = inner if os.path.isdir(inner) else run
    names = os.listdir(inner) if os.path.isdir(inner) else []
    steps = {int(name[4:]): os.path.join(inner, name) for name in names if re.fullmatch(r'step\d+', name)}
    if not steps:
        raise ValueError(f'{run}: no stepN folder in it; give an out_dir of a run with grad_dump=True')
    return dict(sorted(steps.items()))


def norm(tensor):
    """The 2-norm, summed in float64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def cosine(a, b):
    """Cosine of the angle between two tensors of one shape, in float64; nan if either is 0."""
    return torch.dot(a.flatten().double(), b.flatten().double()).item() / (norm(a) * norm(b) or math.nan)


def why(error):
    """What an error says without the path: the system's words, also where torch has put an error of its own around."""
    if failures := getattr(error, 'failures', None):  # torch.distributed.checkpoint's, by rank
        error = next(iter(failures.values()))[0]
    inner = error
    while inner and not isinstance(inner, OSError):
        inner = inner.__context__
    return getattr(inner, 'strerror', None) or str(error)


def obstacle(path, new):
    """Why no file can be put at `path`, one line, or None; if it is to be new, an existing one is in the way too."""
    if os.path.isdir(path) or new and os.path.exists(path):
        return f'{path}: exists; choose another FILE or move it away'
    try:
        open(f'{path}.{os.getpid()}.tmp', 'wb').close()
        os.remove(f'{path}.{os.getpid()}.tmp')
    except OSError as error:
        return f'{path}: cannot be written: {error.strerror}'


def replace_file(path, write):
    """write(temporary path), then give it its name: the file appears whole or not at all. ValueError if it cannot."""
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        write(temporary)
        with open(temporary, 'rb+') as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f'{path}: cannot be written: {why(error)}') from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    print(f'wrote {path}')


def plot(run, path):
    """Norm of each layer's gradient over the steps; a layer is a block h.N, or what lies outside the blocks."""
    kind, layers = os.path.splitext(path)[1][1:].lower(), {}
    try:
        import matplotlib
    except ImportError:
        raise ValueError('plots need matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')  # draws into a file, with or without a display
    import matplotlib.pyplot as plt
    figure, ax = plt.subplots(figsize=(10, 6), layout='constrained')
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(f'{path}: the name must end in one of {", ".join(figure.canvas.get_supported_filetypes())}')
    steps = find_steps(run)
    for step, folder in steps.items():
        for name, gradient in load_keys(folder):
            layer = re.sub(r'^transformer\.', '', name)
            layer = re.match(r'h\.\d+|[^.]+', layer)[0]
            squares = layers.setdefault(layer, {})
            squares[step] = squares.get(step, 0) + norm(gradient) ** 2
    blocks = [layer for layer in layers if layer.startswith('h.')]
    for layer, squares in layers.items():  # blocks by a colour scale of depth, the others dashed
        style = {'color': plt.cm.viridis(blocks.index(layer) / len(blocks))} if layer in blocks else {'linestyle': '--'}
        ax.plot(list(squares), [math.sqrt(s) for s in squares.values()], marker='.', label=layer, **style)
    ax.set(xlabel='step', ylabel='gradient norm', title='gradient norm by layer')
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yscale('log', nonpositive='mask')
    ax.legend(ncols=1 + len(layers) // 20, fontsize='small')
    ax.grid(alpha=0.3)
    replace_file(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=120))


def run(command, args):
    """Carry out one command of the module's docstring; ValueError with one line where it cannot be done."""
    if command == 'list':
        tensors = find_keys(args[0])[2]
        width = max(map(len, tensors))
        for name, info in tensors.items():
            print(f'{name:{width}}  {tuple(info.size)!s:16} {str(info.properties.dtype).removeprefix("torch.")}')
        print(f'{len(tensors)} tensors, {sum(info.size.numel() for info in tensors.values()):,} values')
    elif command == 'norms':
        norms = {name: norm(gradient) for name, gradient in load_keys(args[0])}
        for name, value in sorted(norms.items(), key=lambda item: (math.isnan(item[1]), -item[1])):
            print(f'{value:12.6e}  {name}')
        print(f'{math.hypot(*norms.values()):12.6e}  all')
    elif command == 'compare':
        first, second = (find_keys(step)[2] for step in args)
        names = [name for name in first if name in second]
        if not names:
            raise ValueError(f'{args[0]} and {args[1]} have no parameter in common')
        for name in names:
            if (a := tuple(first[name].size)) != (b := tuple(second[name].size)):
                raise ValueError(f'{name}: shapes {a} and {b} cannot be compared')
        print('  cosine  norm ratio  parameter (norm of the second / norm of the first)')
        for (name, a), (_, b) in zip(load_keys(args[0], names), load_keys(args[1], names)):
            print(f'{cosine(a, b):+.5f}  {norm(b) / (norm(a) or math.nan):10.5g}  {name}')
    elif command == 'follow':
        steps = find_steps(args[0])
        for folder in steps.values():
            find_keys(folder, args[1:])  # a wrong name is told before anything is printed
        for name in args[1:]:
            print(f'{name}\n    step          norm  cosine with the step before')
            before = None
            for step, folder in steps.items():
                (_, gradient), = load_keys(folder, [name])
                beside = '' if before is None or before.shape != gradient.shape else f'{cosine(before, gradient):+.5f}'
                print(f'{step:8}  {norm(gradient):12.6e}  {beside}'.rstrip())
                before = gradient
    elif command == 'export':
        tensors = dict(load_keys(args[0], args[2:] or None))
        replace_file(args[1], lambda temporary: save_file(tensors, temporary))
    else:
        plot(*args)


if __name__ == '__main__':
    from printing import printing
    command, *args = sys.argv[1:] or ['']
    if command in ('-h', '--help'):
        print(__doc__.strip())
        sys.exit(0)
    least, most = COMMANDS.get(command, (1, 0))
    problem = None
    if not least <= len(args) <= most:
        problem = f'{"wrong number of arguments for" if command in COMMANDS else "unknown command"} {command!r}; ' \
                  f'commands: {", ".join(COMMANDS)} (--help shows their arguments)'
    elif command in ('export', 'plot'):
        problem = obstacle(args[1], new=command == 'export')
    if problem:
        print(f'load_grads.py: {problem}', file=sys.stderr)
        sys.exit(2)
    try:
        with printing():
            run(command, args)
    except ValueError as error:
        print(' '.join(f'load_grads.py: {error}'.split()), file=sys.stderr)
        sys.exit(1)
