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
import math
import os
import re
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import fail     # before torch: it makes Ctrl-C one line

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch.distributed.checkpoint import metadata

from data.bins import leads_nowhere, open_file, said
from scripts.common import literal, load_pyplot, must_be_writable, printing, write_picture, write_result
from weights import read_metadata, read_tensors

# the second and fourth are what OLMo-core's dumper calls them in other revisions; the files are the same
FOLDERS = 'sharded', 'full_gradients', 'sampled', 'sampled_gradients'
COMMANDS = {'list': (1, 1), 'norms': (1, 1), 'compare': (2, 2), 'follow': (2, 99), 'export': (2, 999), 'plot': (2, 2)}


SAMPLED = re.compile(r'(.+)_first(\d+)\.safetensors')  # <param>_first<n>.safetensors: rows 0..n-1 of its gradient
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}


def find_dump(path):
    """The folder of a dump's files: `path` itself, or one of FOLDERS in it. ValueError if there is none."""
    for folder in (path, *(os.path.join(path, name) for name in FOLDERS)):
        if leads_nowhere(folder):
            raise ValueError(f'{folder}: a link that leads nowhere: mend that, or move it away')
        if os.path.isdir(folder):
            names = os.listdir(folder)
            if '.metadata' in names or any(SAMPLED.fullmatch(name) for name in names):
                return folder
            if any(name.endswith('.distcp') for name in names):
                raise ValueError(f'{folder}: has no .metadata: writing it was not finished, or the file was lost')
    raise ValueError(f'{path}: no gradient dump (neither .metadata nor *_first<n>.safetensors); steps are in '
                     'out_dir/gradient_dumper/stepN')


def get_checkpoint_metadata(dir):
    """The torch.distributed.checkpoint Metadata of a dump, of its tensors alone; none of them is read.

    `.state_dict_metadata[name]` has `.size` and `.properties.dtype`; for a sampled dump those of the rows it holds.
    `dir`: stepN, or the folder in it. Raises ValueError (one line) where .metadata is missing or torn, or
    holds what torch does not write there.
    """
    folder = find_dump(dir)
    if os.path.lexists(os.path.join(folder, '.metadata')):
        return read_metadata(folder)
    return sampled_metadata(folder)


def sampled_metadata(folder):
    """get_checkpoint_metadata of a folder of sampled gradients; storage_data: {name: its file}."""
    tensors, files = {}, {}
    for file_name in sorted(os.listdir(folder)):
        match = SAMPLED.fullmatch(file_name)
        if match:
            with open_sampled(os.path.join(folder, file_name)) as file:
                part = file.get_slice('gradient')
                size, dtype = torch.Size(part.get_shape()), DTYPES.get(part.get_dtype())
            chunk = metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            tensors[match[1]] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), size, [chunk])
            files[match[1]] = file_name
    return metadata.Metadata(tensors, storage_data=files)


def find_keys(dir, names=None):
    """(folder, {name: its TensorStorageMetadata} for each of `names`, None: all) of a dump; reads no tensor.

    Raises ValueError (one line) for an unknown name.
    """
    folder, known = find_dump(dir), get_checkpoint_metadata(dir).state_dict_metadata
    names = list(known) if names is None else list(names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ValueError(f'{folder}: no tensor {name!r}; nearest name: {"".join(near)}')
    return folder, {name: known[name] for name in names}


def load_keys(dir, names=None):
    """Yield the gradients of `names` (None: all) in their order, one in memory at a time, on CPU, dtype as saved.

    `dir` as in get_checkpoint_metadata; a sampled dump yields the first rows it holds, (n, ...) instead of (rows, ...).
    Raises ValueError (one line) for an unknown name, before any is read, and for a missing or torn file.
    """
    for _, gradient in load_pairs(dir, names):
        yield gradient


def load_pairs(dir, names=None):
    """load_keys with the names: yields (name, gradient)."""
    names = None if names is None else list(names)
    folder, known = find_keys(dir, names)
    sharded = os.path.lexists(os.path.join(folder, '.metadata'))
    for name in known if names is None else names:      # one that is named twice comes twice
        if sharded:
            yield name, read_tensors(folder, [name])[name]
        else:
            file_name = get_checkpoint_metadata(folder).storage_data[name]
            with open_sampled(os.path.join(folder, file_name)) as file:
                yield name, file.get_tensor('gradient')


def open_sampled(path):
    """A sampled gradient's file, opened lazily; ValueError if it is torn or holds no tensor named `gradient`."""
    try:
        open_file(path).close()     # safetensors' own errors say less
        file = safe_open(path, 'pt')
        file.get_slice('gradient')
        return file
    except (SafetensorError, OSError) as error:
        raise ValueError(f'{path}: missing or torn ({said(error)})') from None


def find_steps(run):
    """{step: folder} of the complete dumps in a run's out_dir or its gradient_dumper folder, in order of the steps."""
    inner = run
    for name in 'grad_dumper', 'gradient_dumper':       # the first in older dumps of OLMo-core's
        if os.path.isdir(os.path.join(run, name)):
            inner = os.path.join(run, name)
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


def plot(run, path):
    """Norm of each layer's gradient over the steps; a layer is a block h.N, or what lies outside the blocks."""
    plt, layers = load_pyplot(path), {}  # {layer: {step: sum of squares}}
    for step, folder in find_steps(run).items():
        for name, gradient in load_pairs(folder):
            layer = re.match(r'h\.\d+|[^.]*', name.removeprefix('transformer.'))[0]
            squares = layers.setdefault(layer, {})
            squares[step] = squares.get(step, 0) + norm(gradient) ** 2
    figure, ax = plt.subplots(figsize=(10, 6), layout='constrained')
    blocks = [layer for layer in layers if layer.startswith('h.')]
    for layer, squares in layers.items():
        if layer in blocks:  # coloured by depth
            style = {'color': plt.cm.viridis(blocks.index(layer) / len(blocks))}
        else:
            style = {'linestyle': '--'}
        norms = [math.sqrt(s) for s in squares.values()]
        ax.plot(list(squares), norms, marker='.', label=literal(layer), **style)
    ax.set(xlabel='step', ylabel='gradient norm', title='gradient norm by layer')
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yscale('log', nonpositive='mask')
    ax.legend(ncols=1 + len(layers) // 20, fontsize='small')
    ax.grid(alpha=0.3)
    write_picture(figure, path)


def compare(first_dir, second_dir):
    """Print the cosine and the norm ratio of each parameter that two dumps have in common."""
    (_, first), (_, second) = find_keys(first_dir), find_keys(second_dir)
    names = [name for name in first if name in second]
    if not names:
        raise ValueError(f'{first_dir} and {second_dir} have no parameter in common')
    for name in names:
        a, b = tuple(first[name].size), tuple(second[name].size)
        if a != b:
            raise ValueError(f'{name}: shapes {a} and {b} cannot be compared')
    print('  cosine  norm ratio  parameter (norm of the second / norm of the first)')
    for name, a, b in zip(names, load_keys(first_dir, names), load_keys(second_dir, names)):
        print(f'{cosine(a, b):+.5f}  {norm(b) / (norm(a) or math.nan):10.5g}  {name}')


def follow(run, names):
    """Print these parameters' norms in every step, and their cosines with the step before."""
    steps = find_steps(run)
    for folder in steps.values():
        find_keys(folder, names)  # a wrong name is told before anything is printed
    for name in names:
        print(f'{name}\n    step          norm  cosine with the step before')
        before = None
        for step, folder in steps.items():
            gradient, = load_keys(folder, [name])
            line = f'{step:8}  {norm(gradient):12.6e}'
            if before is not None and before.shape == gradient.shape:
                line += f'  {cosine(before, gradient):+.5f}'
            print(line)
            before = gradient


def run(command, args):
    """Carry out one command of the module's docstring; ValueError with one line where it cannot be done."""
    if command == 'list':
        _, tensors = find_keys(args[0])
        width = max(map(len, tensors))
        for name, info in tensors.items():
            print(f'{name:{width}}  {tuple(info.size)!s:16} {str(info.properties.dtype).removeprefix("torch.")}')
        print(f'{len(tensors)} tensors, {sum(info.size.numel() for info in tensors.values()):,} values')
    elif command == 'norms':
        norms = {name: norm(gradient) for name, gradient in load_pairs(args[0])}
        for name, value in sorted(norms.items(), key=lambda item: (math.isnan(item[1]), -item[1])):
            print(f'{value:12.6e}  {name}')
        print(f'{math.hypot(*norms.values()):12.6e}  all')
    elif command == 'compare':
        compare(*args)
    elif command == 'follow':
        follow(args[0], args[1:])
    elif command == 'export':
        write_result(args[1], to_safetensors(dict(load_pairs(args[0], args[2:] or None))))
        print(f'wrote {args[1]}')
    else:
        plot(*args)
        print(f'wrote {args[1]}')


def main():
    command, *args = sys.argv[1:] or ['']
    if command in ('-h', '--help'):
        print((__doc__ or f'commands: {", ".join(COMMANDS)}').strip())     # python -OO leaves docstrings out
        return
    if command not in COMMANDS:
        fail(f'unknown command {command!r}; commands: {", ".join(COMMANDS)} (--help shows their arguments)')
    least, most = COMMANDS[command]
    if not least <= len(args) <= most:
        fail(f'wrong number of arguments for {command!r}; commands: {", ".join(COMMANDS)} '
             '(--help shows their arguments)')
    if command in ('export', 'plot'):
        must_be_writable(args[1], new=command == 'export')
    run(command, args)


if __name__ == '__main__':
    with printing():
        main()
