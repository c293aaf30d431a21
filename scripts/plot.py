"""Draw loss, learning rate, gradient norm and speed of one or more runs from their log.jsonl.

python scripts/plot.py OUT_DIR [OUT_DIR ...] [--out=FILE]    several runs are overlaid; FILE default: OUT_DIR/plot.png
"""
import json
import os
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from data.bins import read_file
from scripts.common import fail, literal, load_pyplot, must_be_writable, note, one_line_parser, printing, write_picture

PANELS = [('loss', 'loss (nats/token); points: val'), ('lr', 'learning rate'),
          ('grad_norm', 'gradient norm before clipping'), ('tokens_per_s', 'tokens/s')]


def read_log(path):
    """(train, evals): {iter: row} each, by iter. Of a step that a resumed run logged again, the last row counts."""
    train, evals, torn = {}, {}, []
    try:
        lines = read_file(path).decode(errors='replace').splitlines()
    except OSError as error:
        fail(f'{path}: {error.strerror}; train.py writes it into its out_dir', code=1)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            kind = evals if 'val_loss' in row else train
            kind[row['iter']] = row
        except (ValueError, KeyError, TypeError, RecursionError):
            torn.append(number)
    if torn and torn != [len(lines)]:  # a run that was killed, or is writing just now, leaves a torn last line
        note(f'{path}: skipped {len(torn)} unreadable lines, first: {torn[0]}')
    if not train and not evals:
        fail(f'{path}: holds no logged step yet', code=1)
    return dict(sorted(train.items())), dict(sorted(evals.items()))


def curve(rows, key):
    """(iters, values) of the rows that have a number for `key`."""
    pairs = [(i, row[key]) for i, row in rows.items() if isinstance(row.get(key), (int, float))]
    return [i for i, _ in pairs], [value for _, value in pairs]


def main():
    parser = one_line_parser(__doc__, 'OUT_DIR [OUT_DIR ...] [--out=FILE]')
    parser.add_argument('out_dirs', metavar='OUT_DIR', nargs='+')
    parser.add_argument('--out', metavar='FILE')
    args = parser.parse_intermixed_args()
    for path in args.out_dirs:
        if os.path.isfile(path):
            parser.error(f'{path} is a file: name the folder of the run, which its log.jsonl lies in')
    runs = [read_log(os.path.join(path, 'log.jsonl')) for path in args.out_dirs]
    out = os.path.join(args.out_dirs[0], 'plot.png') if args.out is None else args.out
    plt = load_pyplot(out)
    must_be_writable(out)
    names = [os.path.basename(os.path.abspath(path)) for path in args.out_dirs]
    names = [name if names.count(name) == 1 else path for name, path in zip(names, args.out_dirs)]
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout='constrained')
    for index, (name, (train, evals)) in enumerate(zip(names, runs)):
        color = f'C{index % 10}'
        for ax, (key, title) in zip(axes.flat, PANELS):
            ax.plot(*curve(train, key), color=color, linewidth=1, label=literal(name))
            ax.set(title=title, xlabel='step')
        axes[0, 0].plot(*curve(evals, 'val_loss'), 'o', color=color, markersize=4)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    axes[0, 0].legend()
    write_picture(figure, out)
    print(f'wrote {out}')


if __name__ == '__main__':
    with printing():
        main()
