"""What each training window did for the validation loss, from a run with use_ghost=True (In-Run Data Shapley).

python scripts/data_value.py OUT_DIR [--out=FOLDER] [--top=N]     FOLDER default: OUT_DIR/data_value; N default: 10

Writes windows.csv and windows.jsonl (every window, the best first; the latter with its text), domains.csv and
data_value.png. The value of a sample at a step, lr * clip_coef * dot / B with B samples in the step, is the decrease of
the validation loss that its gradient predicts to first order, in nats per token; a window's value is the sum over the
run. It is that of plain gradient descent, whatever the optimizer; README says how to read it.
"""
import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.bins import find_folder, load_meta, write_file
from data.corpus import get_tokenizer
from scripts.common import printing


def fail(message, code=1):
    print(f'data_value.py: {message}', file=sys.stderr)
    sys.exit(code)


def note(message):
    print(f'data_value.py: {message}', file=sys.stderr)


def read_ghost(out_dir):
    """{name: array} of a run's scored steps in order: iter, lr, clip_coef, val_loss (S,), offset, loss, value (S, B).

    value is in nats per token, float64 (arXiv:2406.11011, first order). A step that lies in two files, as after a copy
    of one run over another, is taken from the later one. ValueError (one line): no file, a torn one, other batches.
    """
    paths = sorted(Path(out_dir, 'grad_dotprods').glob('iter_*.safetensors'), key=lambda p: (len(p.name), p.name))
    if not paths:
        raise ValueError(f'{out_dir}: no grad_dotprods/iter_*.safetensors; give the out_dir of a use_ghost=True run')
    names, parts = ('iter', 'lr', 'clip_coef', 'val_loss', 'offset', 'loss', 'dot_product'), []
    for path in paths:
        try:
            with safe_open(path, 'numpy') as file:      # of dot_product_per_param nothing is read
                parts.append({name: file.get_tensor(name) for name in names})
        except (SafetensorError, OSError) as error:
            raise ValueError(f'{path}: torn or not of train.py ({error}); '
                             'move it away and the others can be read') from None
        if parts[-1]['offset'].shape[1:] != parts[0]['offset'].shape[1:]:
            raise ValueError(f'{path}: {parts[-1]["offset"].shape[1]} samples a step, in {paths[0].name} '
                             f'{parts[0]["offset"].shape[1]}: not of one run')
    rows = {name: np.concatenate([part[name] for part in parts]) for name in names}
    _, last = np.unique(rows['iter'][::-1], return_index=True)
    rows = {name: array[len(array) - 1 - last] if len(array) else array for name, array in rows.items()}
    per_dot = rows['lr'].astype(np.float64) * rows['clip_coef'] / rows['offset'].shape[1]
    rows['value'] = per_dot[:, None] * rows.pop('dot_product')
    return rows


def by_window(rows):
    """(offset int64, value, seen, loss): each (windows,), in order of the offsets: the summed value of all visits to a
    window, in nats per token, their number, and the mean of the window's loss at them."""
    offset, window, seen = np.unique(rows['offset'], return_inverse=True, return_counts=True)
    window = window.ravel()     # numpy 2.0 keeps the shape of its input, others don't
    value, loss = (np.bincount(window, rows[name].ravel(), len(offset)) for name in ('value', 'loss'))
    return offset, value, seen, loss / seen


def read_meta(out_dir, folder):
    """What is known of the run's tokens: from its own checkpoint, else from the data folder; {} if nothing."""
    try:
        if (out_dir / 'ckpt.pt').is_file():
            import torch
            return torch.load(out_dir / 'ckpt.pt', map_location='cpu', weights_only=True, mmap=True).get('meta') or {}
        for path in out_dir.glob('ckpt_dcp/step_*/state.json'):
            return json.loads(path.read_text(encoding='utf-8')).get('meta') or {}
        return load_meta(folder) if folder.is_dir() else {}
    except Exception as error:      # a torn checkpoint fails in many ways, and values can be had without it
        note(f'no tokenizer and domains: {str(error).splitlines()[0]}')
    return {}


def text_reader(folder, meta, block_size, needed):
    """A function from a token offset to the text of its window; '' for all if tokens or tokenizer are missing."""
    try:
        dtype, path = np.dtype(meta.get('dtype', 'uint16')).newbyteorder('<'), folder / 'train.bin'
        tokens = path.stat().st_size // dtype.itemsize
        recorded = meta.get('splits', {}).get('train', {}).get('tokens', tokens)
        if tokens != recorded or needed > tokens:
            raise ValueError(f'{path} has {tokens:,} tokens, the run saw {max(recorded, needed):,}: prepared anew?')
        decode = get_tokenizer(meta.get('tokenizer') or 'gpt2').decode
        return lambda offset: decode(np.fromfile(path, dtype, block_size, offset=int(offset) * dtype.itemsize).tolist())
    except (OSError, ValueError, SystemExit) as error:
        note(f'no text: {error}')
        return lambda offset: ''


def draw(path, rows, value, names, of_step):
    """Three panels: values of windows, value of each domain up to a step, predicted and real decrease of the loss."""
    try:
        import matplotlib
    except ImportError:
        return note('no picture: it needs matplotlib (pip install matplotlib)')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout='constrained')
    left.hist(value, bins=min(100, max(10, len(value) // 20)), log=True)
    left.ticklabel_format(axis='x', style='sci', scilimits=(0, 0))
    left.axvline(0, color='black', linewidth=0.8)
    left.set(title='windows', xlabel='value (nats/token)', ylabel='number of windows')
    for name, values in zip(names, of_step):
        middle.plot(rows['iter'], np.cumsum(values), label=name)
    middle.set(title='value up to a step', xlabel='step', ylabel='nats/token')
    middle.legend(fontsize='small')
    gained = rows['val_loss'][0] - rows['val_loss']     # before step s, hence by the steps before it
    predicted = np.concatenate([[0], np.cumsum(rows['value'].sum(1))[:-1]])
    right.plot(rows['iter'], gained, color='C1', label='real')
    right.set(title='decrease of the validation loss', xlabel='step', ylabel='real (nats/token)')
    other = right.twinx()       # AdamW's steps are longer than plain gradient descent's: the shape is to be compared
    other.plot(rows['iter'], predicted, color='C0', label='sum of values')
    other.set_ylabel('sum of values (nats/token)')
    right.legend(handles=[*right.lines, *other.lines], fontsize='small', loc='lower right')
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format='png', dpi=120)
    write_file(path, picture.getvalue())


def main():
    if sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__.strip())
        sys.exit(0)
    dirs = [arg for arg in sys.argv[1:] if not arg.startswith('-')]
    options = dict(arg[2:].split('=', 1) for arg in sys.argv[1:] if arg.startswith('--') and '=' in arg)
    top = options.get('top', '10')
    bad = set(options) - {'out', 'top'} or not (top.isdecimal() and int(top))
    if bad or len(dirs) != 1 or len(dirs) + len(options) != len(sys.argv) - 1:
        given = ' '.join(sys.argv[1:]) or 'no OUT_DIR'
        fail(f'{given}: usage: data_value.py OUT_DIR [--out=FOLDER] [--top=N]; N > 0', 2)
    out_dir = Path(dirs[0])
    out, top = Path(options.get('out') or out_dir / 'data_value'), int(top)
    try:
        rows = read_ghost(out_dir)
    except ValueError as error:
        fail(error)
    try:
        config = json.loads((out_dir / 'config.json').read_text(encoding='utf-8'))
        folder, block_size = find_folder(config['dataset']), config['block_size']
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f'{out_dir / "config.json"}: {type(error).__name__}: {error}; train.py writes it beside grad_dotprods')
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f'--out={out}: {error.strerror}', 2)
    offset, value, seen, loss = by_window(rows)
    meta = read_meta(out_dir, folder)
    text = text_reader(folder, meta, block_size, int(offset.max()) + block_size + 1)

    # a window belongs to the domain of its first token
    domains = sorted(meta.get('domains') or [], key=lambda d: d['start'])
    starts, ends = (np.array([d[key] for d in domains], np.int64) for key in ('start', 'end'))
    names = [d['name'] for d in domains] + ['none' if domains else 'all']

    def domain_of(offsets):
        found = np.searchsorted(starts, offsets, 'right') - 1
        inside = (found >= 0) & (offsets < np.append(ends, 0)[found])
        return np.where(inside, found, len(domains))
    domain, sample_domain = domain_of(offset), domain_of(rows['offset'])
    of_step = [(rows['value'] * (sample_domain == d)).sum(1) for d in range(len(names))]
    kept = [d for d in range(len(names)) if (domain == d).any()]

    steps, order = rows['iter'], np.argsort(-value, kind='stable')
    table = [[names[d], int((domain == d).sum()), int(seen[domain == d].sum()), float(value[domain == d].sum()),
              float(value[domain == d].sum() / seen[domain == d].sum())] for d in kept]
    lines = [(int(offset[i]), float(value[i]), int(seen[i]), float(loss[i]), names[domain[i]]) for i in order]
    head = ('offset', 'value', 'visits', 'loss', 'domain')
    domain_head = ('domain', 'windows', 'visits', 'value', 'value_per_visit')
    try:    # before anything is printed: whoever reads that may go away, as head does
        for name, content in (('windows.csv', [head, *lines]), ('domains.csv', [domain_head, *table])):
            buffer = io.StringIO(newline='')
            csv.writer(buffer, lineterminator='\n').writerows(content)
            write_file(out / name, buffer.getvalue().encode())
        objects = (json.dumps({**dict(zip(head, line)), 'text': text(line[0])}, ensure_ascii=False) for line in lines)
        write_file(out / 'windows.jsonl', lambda f: f.writelines(line.encode() + b'\n' for line in objects))
        draw(out / 'data_value.png', rows, value, [names[d] for d in kept], [of_step[d] for d in kept])
    except OSError as error:
        fail(f'{error.filename or out}: {error.strerror}')

    gap = int(np.diff(steps).min()) if len(steps) > 1 else 1
    total, gained = rows['value'].sum(), rows['val_loss'][0] - rows['val_loss'][-1]
    print(f'{len(steps):,} scored steps, {steps[0]} to {steps[-1]}' + (f' (every {gap}th)' if gap > 1 else '')
          + f', {rows["offset"].size:,} samples, {len(offset):,} windows of {block_size} tokens')
    print(f'sum of values {total:.4g} nats/token; '
          f'the validation loss fell by {gained:.4g} between the first and the last of these steps')
    print(f'windows of negative value: {np.mean(value < 0):.1%}; half of the sum was reached at step '
          f'{steps[np.argmax(np.cumsum(rows["value"].sum(1)) * np.sign(total) >= abs(total) / 2)]}\n')
    print(f'{"domain":<24} {"windows":>10} {"visits":>10} {"value":>12} {"per visit":>12}')
    for row in sorted(table, key=lambda row: -row[4]):
        print('{:<24} {:>10,} {:>10,} {:>12.4g} {:>12.4g}'.format(*row))
    for title, some in (('best', order[:top]), ('worst', order[::-1][:top])):
        print(f'\n{title:<5} {"offset":>14} {"value":>11} {"visits":>7} {"loss":>7}')
        for rank, i in enumerate(some, 1):
            words = repr(text(offset[i])[:90])[1:-1]
            print(f'{rank:>5} {offset[i]:>14,} {value[i]:>11.3g} {seen[i]:>7,} {loss[i]:>7.3f}  {words}')
    print(f'\nwrote windows.csv, windows.jsonl, domains.csv and, where it could be drawn, data_value.png into {out}')


if __name__ == '__main__':
    with printing():
        main()
