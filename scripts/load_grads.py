"""Read gradient dumps (grad_dump=True of train.py) in a plain process: a small library and a command.

STEP is a folder out_dir/gradient_dumper/stepN; RUN is an out_dir, or its gradient_dumper folder.
python scripts/load_grads.py list STEP                          names, shapes and dtypes, from the metadata alone
python scripts/load_grads.py norms STEP                         gradient norms, the largest first
python scripts/load_grads.py compare STEP STEP                  cosine and norm ratio of each parameter in two steps
python scripts/load_grads.py follow RUN NAME [NAME ...]         parameters over all steps
python scripts/load_grads.py export STEP FILE.safetensors [NAME ...]   all parameters, or those named, in one new file
python scripts/load_grads.py plot RUN FILE.png                  norms by layer over the steps
"""
import math
import os
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoint import find_keys, get_checkpoint_metadata, load_keys  # noqa: E402, F401
from scripts.common import obstacle, printing, replace_file  # noqa: E402

COMMANDS = {'list': (1, 1), 'norms': (1, 1), 'compare': (2, 2), 'follow': (2, 99), 'export': (2, 999), 'plot': (2, 2)}


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
