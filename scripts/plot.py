"""Draw loss, learning rate, gradient norm and speed of one or more runs from their log.jsonl.

python scripts/plot.py OUT_DIR [OUT_DIR ...] [--out=FILE]    several runs are overlaid; FILE default: OUT_DIR/plot.png
"""
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.common import printing

PANELS = [('loss', 'loss (nats/token); points: val'), ('lr', 'learning rate'),
          ('grad_norm', 'gradient norm before clipping'), ('tokens_per_s', 'tokens/s')]


def fail(message, code=1):
    print(f'plot.py: {message}', file=sys.stderr)
    sys.exit(code)


def read_log(path):
    """(train, evals): {iter: row} each, by iter. Of a step that a resumed run logged again, the last row counts."""
    train, evals, torn = {}, {}, []
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            lines = file.read().splitlines()
    except OSError as error:
        fail(f'{path}: {error.strerror}; train.py writes it into its out_dir')
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            (evals if 'val_loss' in row else train)[row['iter']] = row
        except (ValueError, KeyError, TypeError):
            torn.append(number)
    if torn and torn != [len(lines)]:  # a run that was killed, or is writing just now, leaves a torn last line
        print(f'plot.py: {path}: skipped {len(torn)} unreadable lines, first: {torn[0]}', file=sys.stderr)
    if not train and not evals:
        fail(f'{path}: holds no logged step yet')
    return dict(sorted(train.items())), dict(sorted(evals.items()))


def curve(rows, key):
    """(iters, values) of the rows that have a number for `key`."""
    pairs = [(i, row[key]) for i, row in rows.items() if isinstance(row.get(key), (int, float))]
    return [i for i, _ in pairs], [value for _, value in pairs]


if __name__ == '__main__':
    dirs = [arg for arg in sys.argv[1:] if not arg.startswith('-')]
    options = [arg for arg in sys.argv[1:] if arg.startswith('-')]
    if options in (['-h'], ['--help']):
        print(__doc__.strip())
        sys.exit(0)
    bad = [arg for arg in options if not arg.startswith('--out=') or arg == '--out=']
    if bad or not dirs:
        fail(f'{bad[0] if bad else "no OUT_DIR given"}; usage: plot.py OUT_DIR [OUT_DIR ...] [--out=FILE]', 2)
    runs = [read_log(os.path.join(path, 'log.jsonl')) for path in dirs]
    out = options[-1][len('--out='):] if options else os.path.join(dirs[0], 'plot.png')
    kind = os.path.splitext(out)[1][1:].lower()
    if not os.path.isdir(os.path.dirname(os.path.abspath(out))):
        fail(f'--out={out}: its folder does not exist', 2)
    try:
        import matplotlib
    except ImportError:
        fail('plots need matplotlib: pip install matplotlib')
    matplotlib.use('Agg')  # draws into a file, with or without a display
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout='constrained')
    if kind not in figure.canvas.get_supported_filetypes():
        fail(f'--out={out}: the name must end in one of {", ".join(figure.canvas.get_supported_filetypes())}', 2)
    names = [os.path.basename(os.path.abspath(path)) for path in dirs]
    for index, (train, evals) in enumerate(runs):
        label, color = dirs[index] if names.count(names[index]) > 1 else names[index], f'C{index % 10}'
        for ax, (key, title) in zip(axes.flat, PANELS):
            ax.plot(*curve(train, key), color=color, linewidth=1, label=label)
            ax.set(title=title, xlabel='step')
        axes[0, 0].plot(*curve(evals, 'val_loss'), 'o', color=color, markersize=4)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    axes[0, 0].legend()
    temporary = f'{out}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            figure.savefig(file, format=kind, dpi=120)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except OSError as error:
        fail(f'{out}: {error.strerror}')
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    with printing():
        print(f'wrote {out}')
