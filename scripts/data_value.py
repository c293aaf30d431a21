"""What each training window did for the validation loss, from a run with use_ghost=True (In-Run Data Shapley).

python scripts/data_value.py OUT_DIR [--out=FOLDER] [--top=N]     FOLDER default: OUT_DIR/data_value; N default: 10
python scripts/data_value.py OUT_DIR --drop=0.2 --to=NAME         also writes the data without the worst fifth

Writes windows.csv and windows.jsonl (every window, the best first; the latter with its text), domains.csv and
data_value.png. The value of a sample at a step, lr * clip_coef * dot / B with B samples in the step, is the decrease of
the validation loss that its gradient predicts to first order, in nats per token; a window's value is the sum over the
run. It is that of plain gradient descent, whatever the optimizer; docs/values.md says how to read it.

--drop, a share below 1, of a run with data_order=epoch: data/NAME, or the path NAME, gets the dataset without that
share of the scored windows, those of the lowest values, ready for train.py --dataset=NAME; dropped.csv there lists
them. scripts/retrain.py --compare=NAME tells whether this is worth anything.
"""
import csv
import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from data.bins import DATA, GPT2_VOCAB, find_bin, find_folder, fingerprint, load_meta
from data.corpus import folder_path, get_tokenizer
from scripts.common import (fail, literal, load_pyplot, note, one_line_parser, printing, run_tokens, write_picture,
                            write_result)

COLUMNS = 'iter', 'lr', 'clip_coef', 'val_loss', 'offset', 'loss', 'dot_product'
WINDOW_HEAD = 'offset', 'value', 'visits', 'loss', 'domain'
DOMAIN_HEAD = 'domain', 'windows', 'visits', 'value', 'value_per_visit'


def read_ghost(out_dir):
    """A run's scored steps, in order, and their samples: two dicts of arrays, ({iter, val_loss: (steps,)},
    {step, offset, loss, value: (samples,)}); step is an index into the first.

    value is in nats per token, float64 (arXiv:2406.11011, first order). A step that lies in two files, as after a copy
    of one run over another, is taken from the later one. ValueError (one line): no file, or a torn one.
    """
    paths = sorted(Path(out_dir, 'grad_dotprods').glob('iter_*.safetensors'), key=lambda p: (len(p.name), p.name))
    if not paths:
        raise ValueError(f'{out_dir}: no grad_dotprods/iter_*.safetensors; give the out_dir of a use_ghost=True run')
    parts = []
    for path in paths:
        try:
            with safe_open(path, 'numpy') as file:      # of dot_product_per_param nothing is read
                parts.append({name: file.get_tensor(name) for name in COLUMNS})
        except (SafetensorError, OSError) as error:
            raise ValueError(f'{path}: torn or not of train.py ({error}); '
                             'move it away and the others can be read') from None
    last = {step: number for number, part in enumerate(parts) for step in part['iter'].tolist()}
    per_step, per_sample = [], []
    for number, part in enumerate(parts):
        kept = np.array([last[step] == number for step in part['iter'].tolist()], bool)
        part = {name: array[kept] for name, array in part.items()}
        samples = part['offset'].shape[1]               # a run may go on with other batches
        per_dot = part['lr'].astype(np.float64) * part['clip_coef'] / samples
        per_step.append([part['iter'], part['val_loss']])
        per_sample.append([np.repeat(part['iter'], samples), part['offset'].ravel(), part['loss'].ravel(),
                           (per_dot[:, None] * part['dot_product']).ravel()])
    steps, samples = ([np.concatenate(arrays) for arrays in zip(*parts)] for parts in (per_step, per_sample))
    in_order, samples_in_order = (np.argsort(arrays[0], kind='stable') for arrays in (steps, samples))
    iters, val_loss = (array[in_order] for array in steps)
    sample_iter, offset, loss, value = (array[samples_in_order] for array in samples)
    return (dict(iter=iters, val_loss=val_loss),
            dict(step=np.searchsorted(iters, sample_iter), offset=offset, loss=loss, value=value))


def by_window(samples):
    """(offset int64, value, visits, loss): each (windows,), in order of the offsets: the summed value of all visits to
    a window, in nats per token, their number, and the mean of the window's loss at them."""
    offset, window, visits = np.unique(samples['offset'], return_inverse=True, return_counts=True)
    window = window.ravel()     # numpy 2.0 keeps the shape of its input, others don't
    value, loss = (np.bincount(window, samples[name], len(offset)) for name in ('value', 'loss'))
    return offset, value, visits, loss / visits


def read_checkpoint_meta(out_dir):
    """What the run's newest checkpoint records of its tokens; {} if there is none. ValueError if it cannot be read."""
    if not any((out_dir / name).exists() for name in ('ckpt.pt', 'best.pt', 'ckpt_dcp')):
        return {}
    from weights import newest_checkpoint, read_checkpoint, read_progress   # torch takes seconds to import
    newest = newest_checkpoint(out_dir)
    if newest is None:
        return {}
    state = Path(newest, 'state.json')      # of a sharded one, whose tensors are not needed
    checkpoint = read_progress(newest) if state.is_file() else read_checkpoint(newest)
    return checkpoint['meta'] or {}


def read_metas(out_dir, folder):
    """The records of the tokens that the run saw and of those in the data folder now; {} for one that is not known, and
    a note says why: values can be had without."""
    metas = []
    for read, path in ((read_checkpoint_meta, out_dir), (load_meta, folder)):
        try:
            metas.append(read(path))
        except (ValueError, OSError, LookupError, TypeError) as error:
            metas.append({})
            note(f'tokenizer and domains may be missing: {error}')
    return metas


def find_text(out_dir, folder, then, now, block_size, end):
    """A function from a token offset to the text of its window; '' for all, and a note says why, if the tokens that the
    run saw, up to `end`, or their tokenizer are not to be had. then, now: the records of read_metas."""
    try:
        seen, there = ((meta.get('splits') or {}).get('train', {}).get('sha256') for meta in (then, now))
        last = max(Path(out_dir, 'grad_dotprods').glob('iter_*.safetensors'), key=lambda p: (len(p.name), p.name))
        with safe_open(last, 'numpy') as file:
            train_bin = (file.metadata() or {}).get('train_bin')     # not in the files of older runs
        if train_bin:
            seen, there = train_bin, fingerprint(folder / 'train.bin', now)
        if seen and there and seen != there:
            raise ValueError(f'{folder} was prepared anew since the run: other text under the same offsets')
        meta, path = then or now, folder / 'train.bin'
        dtype = np.dtype(meta.get('dtype', 'uint16')).newbyteorder('<')
        tokens = path.stat().st_size // dtype.itemsize
        recorded = (meta.get('splits') or {}).get('train', {}).get('tokens', tokens)
        if tokens != recorded or end > tokens:
            raise ValueError(f'{path} has {tokens:,} tokens, the run saw {max(recorded, end):,}: prepared anew?')
        decode = get_tokenizer(meta.get('tokenizer') or 'gpt2').decode
    except (OSError, ValueError, SystemExit) as error:
        note(f'no text: {error}')
        return lambda offset: ''
    return lambda offset: decode(np.fromfile(path, dtype, block_size, offset=int(offset) * dtype.itemsize).tolist())


def find_domains(meta):
    """(names, a function from offsets to indices of names): a window belongs to the domain of its first token."""
    domains = sorted(meta.get('domains') or [], key=lambda d: d['start'])
    starts, ends = (np.array([d[key] for d in domains], np.int64) for key in ('start', 'end'))

    def domain_of(offsets):
        found = np.searchsorted(starts, offsets, 'right') - 1
        inside = (found >= 0) & (offsets < np.append(ends, 0)[found])
        return np.where(inside, found, len(domains))
    return [d['name'] for d in domains] + ['none' if domains else 'all'], domain_of


def draw(path, steps, samples, value, names, domain):
    """Three panels: values of windows, value of each domain up to a step, predicted and real decrease of the loss.
    value (windows,); domain (samples,): indices of names."""
    plt = load_pyplot(path, required=False)
    if plt is None:
        return
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout='constrained')
    left.hist(value, bins=min(100, max(10, len(value) // 20)), log=True)
    left.ticklabel_format(axis='x', style='sci', scilimits=(0, 0))
    left.axvline(0, color='black', linewidth=0.8)
    left.set(title='windows', xlabel='value (nats/token)', ylabel='number of windows')
    for index in np.unique(domain):
        its = np.where(domain == index, samples['value'], 0)
        its = np.bincount(samples['step'], its, len(steps['iter']))     # (steps,)
        middle.plot(steps['iter'], np.cumsum(its), label=literal(names[index]))
    middle.set(title='value up to a step', xlabel='step', ylabel='nats/token')
    middle.legend(fontsize='small')
    gained = steps['val_loss'][0] - steps['val_loss']   # before a step, hence by the steps before it
    predicted = np.concatenate([[0], np.cumsum(np.bincount(samples['step'], samples['value']))[:-1]])
    right.plot(steps['iter'], gained, color='C1', label='real')
    right.set(title='decrease of the validation loss', xlabel='step', ylabel='real (nats/token)')
    other = right.twinx()       # AdamW's steps are longer than plain gradient descent's: the shape is to be compared
    other.plot(steps['iter'], predicted, color='C0', label='sum of values')
    other.set_ylabel('sum of values (nats/token)')
    right.legend(handles=[*right.lines, *other.lines], fontsize='small', loc='lower right')
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
    write_picture(figure, path)


def write_csv(path, head, rows):
    buffer = io.StringIO(newline='')
    csv.writer(buffer, lineterminator='\n').writerows([head, *rows])
    write_result(path, buffer.getvalue().encode())


def show(steps, samples, windows, domain_rows, block_size, text, top):
    """Print the run's sums, its domains, and the `top` best and worst windows; windows: rows, the best first."""
    iters, total = steps['iter'], samples['value'].sum()
    gap = int(np.diff(iters).min()) if len(iters) > 1 else 1
    every = f' (every {gap}th)' if gap > 1 else ''
    print(f'{len(iters):,} scored steps, {iters[0]} to {iters[-1]}{every}, {len(samples["value"]):,} samples, '
          f'{len(windows):,} windows of {block_size} tokens')
    print(f'sum of values {total:.4g} nats/token; the validation loss fell by '
          f'{steps["val_loss"][0] - steps["val_loss"][-1]:.4g} between the first and the last of these steps')
    up_to_step = np.cumsum(np.bincount(samples['step'], samples['value']))
    half = np.argmax(up_to_step * np.sign(total) >= abs(total) / 2)
    print(f'windows of negative value: {np.mean([row[1] < 0 for row in windows]):.1%}; '
          f'half of the sum was reached at step {iters[half]}\n')
    print(f'{"domain":<24} {"windows":>10} {"visits":>10} {"value":>12} {"per visit":>12}')
    for row in sorted(domain_rows, key=lambda row: -row[4]):
        print('{:<24} {:>10,} {:>10,} {:>12.4g} {:>12.4g}'.format(*row))
    for title, rows in (('best', windows[:top]), ('worst', windows[::-1][:top])):
        print(f'\n{title:<5} {"offset":>14} {"value":>11} {"visits":>7} {"loss":>7}')
        for rank, (offset, value, visits, loss, _) in enumerate(rows, 1):
            words = repr(text(offset)[:90])[1:-1]
            print(f'{rank:>5} {offset:>14,} {value:>11.3g} {visits:>7,} {loss:>7.3f}  {words}')


def new_folder(name):
    """The folder of a new dataset: data/NAME, or NAME if it is a path. ValueError (one line) if it is there already."""
    folder = Path(name)
    if folder.name == name and not name.startswith('.'):
        folder = DATA / name
    if folder.exists():
        raise ValueError(f'--to={name}: {folder} is there already; choose another name or delete it')
    return folder


def without(tokens, dropped, block_size):
    """The tokens without the windows (windows,) that are dropped. The rest moves up, so the last target of a window
    before a gap becomes the first token behind it; what follows the last window stays."""
    end = len(dropped) * block_size
    body = np.asarray(tokens[:end]).reshape(len(dropped), block_size)
    return np.concatenate([body[~dropped].ravel(), tokens[end:]])


def without_domains(domains, dropped, block_size):
    """Where domains [{name, start, end}] of the tokens are after without(); those of which nothing is left are gone."""
    edges = np.concatenate([[0], np.cumsum(~dropped)]) * block_size     # tokens kept before each window, and in all

    def moved(position):
        window = min(position // block_size, len(dropped))
        into = position - window * block_size       # tokens into the window, or behind the last one
        if window < len(dropped) and dropped[window]:
            into = 0
        return int(edges[window]) + into
    moved_domains = [{**d, 'start': moved(d['start']), 'end': moved(d['end'])} for d in domains]
    return [d for d in moved_domains if d['end'] > d['start']]


def drop_worst(out_dir, config, then, offset, value, share, folder):
    """The run's dataset without the share of its scored windows that has the lowest values -> folder, which appears
    whole. then: read_metas' record of the tokens that the run saw. ValueError (one line) if they are others now."""
    if config['data_order'] != 'epoch':
        raise ValueError(f'{out_dir}: --drop needs a run with --data_order=epoch, whose windows do not overlap')
    block_size = config['block_size']
    (path, dtype, tokens), meta = run_tokens(config, then)
    (val, _, val_tokens), _ = find_bin(config['dataset'], 'val')
    if offset.max() + block_size > tokens:
        raise ValueError(f'{path} was prepared anew since the run: other text under the same offsets')
    worst = np.argsort(value, kind='stable')[:int(share * len(value))]
    dropped = np.zeros((tokens - 1) // block_size, bool)
    dropped[offset[worst] // block_size] = True
    content = without(np.fromfile(path, dtype), dropped, block_size).tobytes()

    meta = {'vocab_size': GPT2_VOCAB, 'dtype': dtype.name, **meta}
    if meta.get('domains'):
        meta['domains'] = without_domains(meta['domains'], dropped, block_size)
    meta['splits'] = {'val': {'tokens': val_tokens}, **(meta.get('splits') or {})}
    meta['splits']['train'] = {'tokens': len(content) // dtype.itemsize, 'sha256': hashlib.sha256(content).hexdigest()}
    meta['dropped'] = {'windows': len(worst), 'of': len(dropped), 'block_size': block_size, 'why': 'the lowest values',
                       'run': str(out_dir.resolve()), 'dataset': config['dataset']}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'.{folder.name}.') as beside:
        made = Path(beside, 'data')
        made.mkdir()
        with open(val, 'rb') as source:
            write_result(made / 'val.bin', lambda file: shutil.copyfileobj(source, file))
        write_result(made / 'train.bin', content)
        write_csv(made / 'dropped.csv', ('offset', 'value'), [(int(offset[i]), float(value[i])) for i in worst])
        write_result(made / 'meta.json', json.dumps(meta).encode())
        made.rename(folder)
    print(f'wrote {folder}: without {len(worst):,} of {len(dropped):,} windows of {block_size} tokens\n')


def main():
    parser = one_line_parser(__doc__, 'OUT_DIR [--out=FOLDER] [--top=N] [--drop=SHARE --to=NAME]')
    parser.add_argument('--drop', metavar='SHARE', type=float)
    parser.add_argument('--to', metavar='NAME')
    parser.add_argument('out_dir', metavar='OUT_DIR', type=folder_path)
    parser.add_argument('--out', metavar='FOLDER', type=folder_path)
    parser.add_argument('--top', metavar='N', type=int, default=10)
    args = parser.parse_args()
    if args.top < 1:
        parser.error(f'--top={args.top}: must be at least 1')
    if (args.drop is None) != (args.to is None) or args.drop is not None and not 0 < args.drop < 1:
        parser.error(f'--drop={args.drop} --to={args.to}: a share between 0 and 1, and the name of a new dataset')
    out_dir, out = args.out_dir, args.out or args.out_dir / 'data_value'
    steps, samples = read_ghost(out_dir)
    try:
        config = json.loads((out_dir / 'config.json').read_text(encoding='utf-8'))
        folder, block_size = find_folder(config['dataset']), int(config['block_size'])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fail(f'{out_dir / "config.json"}: {type(error).__name__}: {error}; train.py writes it beside grad_dotprods', 1)
    new = new_folder(args.to) if args.to else None
    offset, value, visits, loss = by_window(samples)
    if new and int(args.drop * len(offset)) == 0:
        parser.error(f'--drop={args.drop} of {len(offset):,} scored windows is less than one: a larger share')
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f'--out={out}: {error.strerror}')

    then, now = read_metas(out_dir, folder)
    if new:
        drop_worst(out_dir, config, then, offset, value, args.drop, new)
    text = find_text(out_dir, folder, then, now, block_size, int(offset.max()) + block_size + 1)
    try:
        names, domain_of = find_domains(then or now)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        note(f'no domains: {type(error).__name__}: {error} in the record of the tokens')
        names, domain_of = find_domains({})
    domain = domain_of(offset)
    windows = [(int(offset[i]), float(value[i]), int(visits[i]), float(loss[i]), names[domain[i]])
               for i in np.argsort(-value, kind='stable')]
    domain_rows = []
    for index in np.unique(domain):
        these = domain == index
        total, number = float(value[these].sum()), int(visits[these].sum())
        domain_rows.append([names[index], int(these.sum()), number, total, total / number])

    # files before prints, since whoever reads these may go away, as head does
    write_csv(out / 'windows.csv', WINDOW_HEAD, windows)
    write_csv(out / 'domains.csv', DOMAIN_HEAD, domain_rows)
    lines = (json.dumps({**dict(zip(WINDOW_HEAD, row)), 'text': text(row[0])}, ensure_ascii=False) for row in windows)
    write_result(out / 'windows.jsonl', lambda file: file.writelines(line.encode() + b'\n' for line in lines))
    draw(out / 'data_value.png', steps, samples, value, names, domain_of(samples['offset']))
    show(steps, samples, windows, domain_rows, block_size, text, args.top)
    print(f'\nwrote windows.csv, windows.jsonl, domains.csv and, where it could be drawn, data_value.png into {out}')


if __name__ == '__main__':
    with printing():
        main()
