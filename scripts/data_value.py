"""What each training window did for the validation loss, from a run with use_ghost=True (In-Run Data Shapley).

python scripts/data_value.py OUT_DIR [--out=FOLDER] [--top=N]     FOLDER default: OUT_DIR/data_value; N default: 10
python scripts/data_value.py OUT_DIR --drop=0.2 --to=NAME         also writes the data without the worst fifth

Writes windows.csv and windows.jsonl (every window, the best first; the latter with its text), domains.csv and
data_value.png. The value of a sample at a step, lr * clip_coef * dot / B with B samples in the step, is the decrease of
the validation loss that its gradient predicts to first order, in nats per token; a window's value is the sum over the
run. It is that of plain gradient descent, whatever the optimizer; docs/values.md says how to read it.

domains.csv has the sums of each domain, and 95% intervals of what as many other windows of the domain would have had in
this run. Windows are what is drawn at random: the visits of one window are of one text, and the steps at which it came
are part of its luck. A domain with few windows, below 30, has too narrow an interval, with one window none (nan).

--drop, a share below 1, of a run with data_order=epoch: data/NAME, or the path NAME, gets the dataset without that
share of the scored windows, those of the lowest values, ready for train.py --dataset=NAME; dropped.csv there lists
them. scripts/retrain.py --compare=NAME tells whether this is worth anything.
"""
import hashlib
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from data.bins import (DATA, GPT2_VOCAB, find_bin, find_folder, fingerprint, load_meta, lock_folder, made_folder,
                       open_file, read_file, said)
from data.corpus import folder_path, get_tokenizer
from scripts.common import (fail, literal, load_pyplot, make_out_folder, must_be_one_process, must_be_writable,
                            note, one_line_parser, printing, record_of_part, run_tokens, without, write_csv,
                            write_picture, write_result)

PER_STEP = 'iter', 'lr', 'clip_coef', 'val_loss'
PER_SAMPLE = 'offset', 'loss', 'dot_product'
PART = 4096     # windows in memory at a time
WINDOW_HEAD = 'offset', 'value', 'visits', 'loss', 'domain'
DOMAIN_HEAD = ('domain', 'windows', 'visits', 'value', 'value_per_visit', 'value_low', 'value_high',
               'value_per_visit_low', 'value_per_visit_high')


def files_of(out_dir):
    """The paths of a run's files of values, the latest steps last."""
    return sorted(Path(out_dir, 'grad_dotprods').glob('iter_*.safetensors'), key=lambda p: (len(p.name), p.name))


def read_ghost(out_dir):
    """A run's scored steps, in order, and their samples: two dicts of arrays, ({iter, val_loss: (steps,)},
    {step, offset, loss, value: (samples,)}); step is an index into the first.

    value is in nats per token, float64 (arXiv:2406.11011, first order). A step that lies in two files, as after a copy
    of one run over another, is taken from the later one. Samples whose value is not finite are left out, with a note.
    ValueError (one line): no file, a torn one, nothing in them, or values that are of different tokens.
    """
    paths = files_of(out_dir)
    if not paths:
        raise ValueError(f'{out_dir}: no grad_dotprods/iter_*.safetensors; give the out_dir of a use_ghost=True run')
    parts, bins = [], {'train_bin': set(), 'val_bin': set()}
    for path in paths:
        try:
            open_file(path).close()         # safetensors' own errors say less
            with safe_open(path, 'numpy') as file:      # of dot_product_per_param nothing is read
                record = file.metadata() or {}
                for name in bins.keys() & record.keys():        # older runs have neither
                    bins[name].add(record[name])
                part = {name: file.get_tensor(name) for name in PER_STEP + PER_SAMPLE}
            steps, shape = len(part['iter']), part['offset'].shape
            if any(part[name].shape != (steps,) for name in PER_STEP) or shape[:1] != (steps,) or len(shape) != 2:
                raise ValueError('its tensors are not of the same steps')
            if any(part[name].shape != shape for name in PER_SAMPLE):
                raise ValueError('its tensors are not of the same samples')
            if (part['offset'] < 0).any():
                raise ValueError('it has an offset below 0')
            parts.append(part)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f'{path}: torn or not of train.py ({said(error)}); '
                             'move it away and the others can be read') from None
    for name, seen in bins.items():
        if len(seen) > 1:
            raise ValueError(f'{out_dir}: its values are of {len(seen)} different {name.replace("_", ".")}, so they'
                             ' are no sum: of the files in grad_dotprods move those of all but one away')
    file_of = {step: number for number, part in enumerate(parts) for step in part['iter'].tolist()}
    per_step, per_sample = [], []
    for number, part in enumerate(parts):
        kept = np.array([file_of[step] == number for step in part['iter'].tolist()], bool)
        part = {name: array[kept] for name, array in part.items()}
        samples = part['offset'].shape[1]               # a run may go on with other batches
        per_dot = part['lr'].astype(np.float64) * part['clip_coef'] / max(1, samples)
        per_step.append([part['iter'], part['val_loss']])
        per_sample.append([np.repeat(part['iter'], samples), part['offset'].ravel(), part['loss'].ravel(),
                           (per_dot[:, None] * part['dot_product']).ravel()])
    iters, val_loss = in_order(per_step)
    sample_iter, offset, loss, value = in_order(per_sample)
    finite = np.isfinite(value)
    if not finite.any():
        raise ValueError(f'{out_dir}: the files in grad_dotprods hold no scored sample with a finite value')
    if not finite.all():
        note(f'left out {(~finite).sum():,} of {len(value):,} samples, whose values are not finite')
        sample_iter, offset, loss, value = (array[finite] for array in (sample_iter, offset, loss, value))
    return (dict(iter=iters, val_loss=val_loss),
            dict(step=np.searchsorted(iters, sample_iter), offset=offset, loss=loss, value=value))


def in_order(parts):
    """The columns of all parts, each a list of columns, in order of the first column."""
    columns = [np.concatenate(arrays) for arrays in zip(*parts)]
    order = np.argsort(columns[0], kind='stable')
    return [column[order] for column in columns]


def by_window(samples):
    """(offset int64, value, visits, loss): each (windows,), in order of the offsets: the summed value of all visits to
    a window, in nats per token, their number, and the mean of the window's loss at them."""
    offset, window, visits = np.unique(samples['offset'], return_inverse=True, return_counts=True)
    window = window.ravel()     # numpy 2.0 keeps the shape of its input, others don't
    value, loss = (np.bincount(window, samples[name], len(offset)) for name in ('value', 'loss'))
    return offset, value, visits, loss / visits


def hash_of_values(offset, value):
    """A text that tells a run's values from those of another, or of other steps: of by_window's arrays."""
    return hashlib.sha256(offset.tobytes() + value.tobytes()).hexdigest()


def read_checkpoint_meta(out_dir):
    """What the run's newest checkpoint records of its tokens; {} if there is none. ValueError if it cannot be read."""
    if not any(os.path.lexists(out_dir / name) for name in ('ckpt.pt', 'best.pt', 'ckpt_dcp')):
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
            note(f'tokenizer and domains may be missing: {said(error)}')
    return metas


def check_tokens_seen(out_dir, folder, then, now):
    """ValueError (one line) if the tokens in the data folder are not those that all values of the run are of, as far as
    its files or its checkpoint tell. then, now: the records of read_metas."""
    seen, there = ((meta.get('splits') or {}).get('train', {}).get('sha256') for meta in (then, now))
    with safe_open(files_of(out_dir)[-1], 'numpy') as file:     # read_ghost has refused a run whose files name several
        recorded = (file.metadata() or {}).get('train_bin')
    if recorded:    # by newer runs
        seen, there = recorded, fingerprint(folder / 'train.bin', now)
    if seen and there and seen != there:
        raise ValueError(f'{folder} was prepared anew since the run: other text under the same offsets')


def find_text(out_dir, folder, then, now, block_size, end):
    """A function from a token offset to the text of its window; '' for all, and a note says why, if the tokens that the
    run saw, up to `end`, or their tokenizer are not to be had. then, now: the records of read_metas."""
    try:
        check_tokens_seen(out_dir, folder, then, now)
        meta, path = then or now, folder / 'train.bin'
        dtype = np.dtype(meta.get('dtype', 'uint16')).newbyteorder('<')
        tokens = path.stat().st_size // dtype.itemsize
        recorded = (meta.get('splits') or {}).get('train', {}).get('tokens', tokens)
        if tokens != recorded or end > tokens:
            raise ValueError(f'{path} has {tokens:,} tokens, the run saw {max(recorded, end):,}: prepared anew?')
        decode = get_tokenizer(meta.get('tokenizer') or 'gpt2').decode
    except (OSError, ValueError, SystemExit) as error:
        note(f'no text: {said(error)}')
        return lambda offset: ''
    return lambda offset: decode(np.fromfile(path, dtype, block_size, offset=int(offset) * dtype.itemsize).tolist())


def domains_of(meta):
    """The domains [{name, start, end}] of a record, in order of their starts; [], and a note, if they make no sense."""
    try:
        domains = sorted(meta.get('domains') or [], key=lambda d: d['start'])
        for d in domains:
            if not isinstance(d['name'], str) or not all(isinstance(d[key], int) for key in ('start', 'end')):
                raise ValueError(f'{d} is not a name with a start and an end in tokens')
            if not 0 <= d['start'] <= d['end'] < 2**63:
                raise ValueError(f'{d["name"]} from {d["start"]} to {d["end"]}')
    except (LookupError, TypeError, ValueError) as error:
        note(f'no domains: {type(error).__name__}: {error} in the record of the tokens')
        return []
    return domains


def find_domains(domains):
    """(names, a function from offsets to indices of names): a window belongs to the domain of its first token. domains:
    of domains_of."""
    starts, ends = (np.array([d[key] for d in domains], np.int64) for key in ('start', 'end'))

    def domain_of(offsets):
        found = np.searchsorted(starts, offsets, 'right') - 1
        inside = (found >= 0) & (offsets < np.append(ends, 0)[found])      # 0: there may be no domain
        return np.where(inside, found, len(domains))
    return [d['name'] for d in domains] + ['none' if domains else 'all'], domain_of


def half_interval(x, piece):
    """Half of the 95% interval of the sum of x (windows,), if others of the same kind and number had been drawn: 1.96
    standard deviations of a sum of independent pieces. piece (windows,): which windows share text and count as one.
    nan for one piece."""
    pieces = np.bincount(np.unique(piece, return_inverse=True)[1].ravel(), x)
    if len(pieces) < 2:
        return math.nan
    return float(1.96 * np.sqrt(len(pieces) * pieces.var(ddof=1)))


def sum_domains(offset, value, visits, domain, names, block_size):
    """
    The rows of domains.csv, of windows (windows,) and their domains, indices of names: how many windows and visits, the
    total value and that per visit (nats per token), and the ends of 95% intervals of these two.

    docs/values.md says what the intervals are of. The unit is the window, since its visits are of one text. Windows are
    not compared within steps only: a domain is also worth more because its windows happened to come at steps of large
    values. The ends are a normal distribution's, as a bootstrap over many windows would give, without random numbers.
    The value per visit is a ratio: its error is, to first order, that of the sum of value - (value per visit) * visits.

    Windows that overlap, as those of data_order=random do, are not independent: those that begin in the same block_size
    tokens count as one. Neighbours that still overlap make the interval too narrow, by up to a fifth.
    """
    rows = []
    for index in np.unique(domain):
        these = domain == index
        its_value, its_visits, piece = value[these], visits[these], offset[these] // block_size
        total, number = float(its_value.sum()), int(its_visits.sum())
        each = total / number
        of_total = half_interval(its_value, piece)
        of_each = half_interval(its_value - each * its_visits, piece) / number
        rows.append([names[index], int(these.sum()), number, total, each, total - of_total, total + of_total,
                     each - of_each, each + of_each])
    return rows


def draw(path, steps, samples, value, names, domain):
    """Three panels: values of windows; value of each domain up to a step; real decrease of the validation loss and the
    sum of the values, in nats on one axis. value (windows,); domain (samples,): indices of names."""
    plt = load_pyplot(path, required=False)
    if plt is None:
        return
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout='constrained')
    left.hist(value, bins=min(100, max(10, len(value) // 20)), log=True)
    left.ticklabel_format(axis='x', style='sci', scilimits=(0, 0))
    left.axvline(0, color='black', linewidth=0.8)
    left.set(title='windows', xlabel='value (nats/token)', ylabel='number of windows')

    def before_a_step(values):
        """values (samples,) -> (steps,): the sum of all steps before each, as val_loss is of the weights before it."""
        summed = np.cumsum(np.bincount(samples['step'], values, len(steps['iter'])))
        return np.concatenate([[0], summed[:-1]])
    for index in np.unique(domain):
        its = np.where(domain == index, samples['value'], 0)
        middle.plot(steps['iter'], before_a_step(its), label=literal(names[index]))
    middle.set(title='value of each domain up to a step', xlabel='step', ylabel='nats/token')
    middle.legend(fontsize='small')
    right.plot(steps['iter'], steps['val_loss'][0] - steps['val_loss'], color='black',
               label='real: the fall since the first scored step')
    right.plot(steps['iter'], before_a_step(samples['value']), color='black', linestyle='--',
               label='predicted: sum of all values so far')
    right.set(title='decrease of the validation loss up to a step', xlabel='step', ylabel='nats/token')
    right.legend(fontsize='small')
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
    write_picture(figure, path)


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
    print(f'{"domain":<24} {"windows":>10} {"visits":>10} {"value":>10} {"95% interval":>22} {"per visit":>10} '
          f'{"95% interval":>22}')
    for name, number, visits, total, each, low, high, each_low, each_high in sorted(domain_rows, key=lambda r: -r[4]):
        intervals = [f'{start:.3g} to {end:.3g}' for start, end in ((low, high), (each_low, each_high))]
        print(f'{name:<24} {number:>10,} {visits:>10,} {total:>10.4g} {intervals[0]:>22} {each:>10.4g} '
              f'{intervals[1]:>22}')
    for title, rows in (('best', windows[:top]), ('worst', windows[::-1][:top])):
        print(f'\n{title:<5} {"offset":>14} {"value":>11} {"visits":>7} {"loss":>7}')
        for rank, (offset, value, visits, loss, _) in enumerate(rows, 1):
            words = repr(text(offset)[:90])[1:-1]
            print(f'{rank:>5} {offset:>14,} {value:>11.3g} {visits:>7,} {loss:>7.3f}  {words}')


def new_folder(name):
    """The folder of a new dataset: data/NAME, or NAME if it is a path. ValueError (one line) if it is there already, or
    train.py would find another one by this name."""
    folder = Path(name)
    if folder.name == name and not name.startswith('.'):
        folder = DATA / name
    for there in (folder, find_folder(name)):
        if os.path.lexists(there):
            raise ValueError(f'--to={name}: {there} is there already; choose another name or delete it')
    if temporary_of(folder).is_symlink():
        raise ValueError(f'--to={name}: {temporary_of(folder)} is a link, where a folder is to be made; move it away')
    return folder


def without_domains(domains, dropped, block_size):
    """Where domains [{name, start, end}] of the tokens are after without(); those of which nothing is left are gone."""
    bounds = np.arange(len(dropped) + 1) * block_size                   # between windows
    kept = np.concatenate([[0], np.cumsum(~dropped)]) * block_size      # tokens kept before each bound

    def moved(position):    # how many tokens before it are kept; all are behind the last window
        return int(np.interp(position, bounds, kept)) + max(0, position - int(bounds[-1]))
    moved_domains = [{**d, 'start': moved(d['start']), 'end': moved(d['end'])} for d in domains]
    return [d for d in moved_domains if d['end'] > d['start']]


def check_drop(out_dir, config, then, now, offset, number):
    """(train.bin as find_bin has it, its record, the path of val.bin) of the run's dataset. ValueError (one line) if
    `number` windows of those that begin at offset (windows,) cannot be dropped from it. then, now: read_metas' records
    of the tokens that the run saw and of those that are there."""
    if config.get('data_order') != 'epoch':
        raise ValueError(f'{out_dir}: --drop needs a run with --data_order=epoch, whose windows do not overlap')
    block_size = config['block_size']
    train, meta = run_tokens(config, then)
    path, _, tokens = train
    check_tokens_seen(out_dir, path.parent, then, now)
    (val, _, val_tokens), _ = find_bin(config['dataset'], 'val')
    if offset.max() + block_size >= tokens:
        raise ValueError(f'{path} was prepared anew since the run: it has no window at token {offset.max():,}')
    if (offset % block_size).any():
        raise ValueError(f'{out_dir}: --drop needs windows that do not overlap, but some begin between multiples of '
                         f'block_size={block_size}: was an earlier part of the run without --data_order=epoch?')
    left = tokens - number * block_size
    if left <= block_size:
        raise ValueError(f'--drop would leave {left:,} tokens, less than one window: a smaller share')
    meta = {'vocab_size': GPT2_VOCAB, 'dtype': train[1].name, **meta}
    meta['splits'] = {'val': {'tokens': val_tokens}, **(meta.get('splits') or {})}
    return train, meta, val


def temporary_of(folder):
    """Beside a new folder, always the same: what a kill leaves goes with the next try."""
    return folder.with_name(f'.{folder.name}.tmp')


def write_without(folder, train, meta, val, block_size, dropped, rows, why):
    """Write the dataset of train, meta and val (of check_drop) without the windows dropped (all windows of train.bin,)
    -> folder, which appears whole. rows: of dropped.csv; why: what meta.json says of it."""
    path, dtype, tokens = train
    beside, digest = temporary_of(folder), hashlib.sha256()
    made = beside / 'data'
    beside.mkdir(parents=True, exist_ok=True)
    lock_folder(beside)     # since main's check another command may have begun
    shutil.rmtree(made, ignore_errors=True)

    def write_kept(file):
        for first in range(0, len(dropped), PART):
            last = min(first + PART, len(dropped))
            end = last * block_size
            if last == len(dropped):
                end = tokens        # with what follows the last window
            start = first * block_size
            part = np.fromfile(path, dtype, end - start, offset=start * dtype.itemsize)
            content = without(part, dropped[first:last], block_size).tobytes()
            digest.update(content)
            file.write(content)
    try:
        if os.path.lexists(folder):     # or have ended
            raise ValueError(f'{folder} is there already; choose another name or delete it')
        made.mkdir()
        with open(val, 'rb') as source:
            write_result(made / 'val.bin', lambda file: shutil.copyfileobj(source, file))
        write_result(made / 'train.bin', write_kept)
        left = tokens - int(dropped.sum()) * block_size
        splits = {**meta['splits'], 'train': {'tokens': left, 'sha256': digest.hexdigest()}}
        write_csv(made / 'dropped.csv', ('offset', 'value'), rows)
        record = {**record_of_part(meta), 'dropped': why, 'splits': splits}
        write_result(made / 'meta.json', json.dumps(record).encode())
        made.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_config(out_dir):
    """The run's config.json, of which dataset and block_size are used; one line if it has not these."""
    path = out_dir / 'config.json'
    try:
        config = json.loads(read_file(path))
        find_folder(config['dataset'])
        if type(config['block_size']) is not int or config['block_size'] < 1:
            raise ValueError(f'block_size is {config["block_size"]!r}')
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fail(f'{path}: {type(error).__name__}: {said(error)}; train.py writes it beside grad_dotprods', 1)
    return config


def main():
    must_be_one_process()
    parser = one_line_parser(__doc__, 'OUT_DIR [--out=FOLDER] [--top=N] [--drop=SHARE --to=NAME]')
    parser.add_argument('--drop', metavar='SHARE', type=float)
    parser.add_argument('--to', metavar='NAME')
    parser.add_argument('out_dir', metavar='OUT_DIR', type=folder_path)
    parser.add_argument('--out', metavar='FOLDER', type=folder_path)
    parser.add_argument('--top', metavar='N', type=int, default=10)
    args = parser.parse_args()
    if args.top < 1:
        parser.error(f'--top={args.top}: must be at least 1')
    if args.drop is not None or args.to is not None:
        if not args.to or args.drop is None or not 0 < args.drop < 1:
            parser.error(f'--drop={args.drop} --to={args.to}: a share between 0 and 1, and the name of a new dataset')
    out_dir, out = args.out_dir, args.out or args.out_dir / 'data_value'
    steps, samples = read_ghost(out_dir)
    config = read_config(out_dir)
    folder, block_size = find_folder(config['dataset']), config['block_size']
    offset, value, visits, loss = by_window(samples)
    if args.to:
        number = math.floor(args.drop * len(offset) + 1e-9)     # 0.29 * 100 is a little below 29
        if number == 0:
            parser.error(f'--drop={args.drop} of {len(offset):,} scored windows is less than one: a larger share')
        new = new_folder(args.to)
        if new.resolve() in (out.resolve(), *out.resolve().parents):
            parser.error(f'--out={out} lies in --to={args.to}, which is written last; name another folder')
        find_bin(config['dataset'], 'train')    # if it cannot be read, this is the one line, without read_metas' note
    then, now = read_metas(out_dir, folder)
    if args.to:
        train, meta, val = check_drop(out_dir, config, then, now, offset, number)
        try:
            with made_folder(temporary_of(new)):    # neither is made if the other can't be
                lock_folder(temporary_of(new))
                make_out_folder(out)
            shutil.rmtree(temporary_of(new), ignore_errors=True)
        except BlockingIOError as error:
            fail(f'--to={args.to}: {error.filename}: {error.strerror}', 1)
        except OSError as error:
            parser.error(f'--to={args.to}: {error.strerror}: name a folder that can be written')
    else:
        make_out_folder(out)

    for name in ('windows.csv', 'windows.jsonl', 'domains.csv', 'data_value.png'):
        must_be_writable(out / name)
    text = find_text(out_dir, folder, then, now, block_size, int(offset.max()) + block_size + 1)
    domains = domains_of(then or now)
    names, domain_of = find_domains(domains)
    domain = domain_of(offset)
    windows = [(int(offset[i]), float(value[i]), int(visits[i]), float(loss[i]), names[domain[i]])
               for i in np.argsort(-value, kind='stable')]
    domain_rows = sum_domains(offset, value, visits, domain, names, block_size)

    # files before prints, since whoever reads these may go away, as head does
    write_csv(out / 'windows.csv', WINDOW_HEAD, windows)
    write_csv(out / 'domains.csv', DOMAIN_HEAD, domain_rows)
    lines = (json.dumps({**dict(zip(WINDOW_HEAD, row)), 'text': text(row[0])}, ensure_ascii=False) for row in windows)
    write_result(out / 'windows.jsonl', lambda file: file.writelines(line.encode() + b'\n' for line in lines))
    draw(out / 'data_value.png', steps, samples, value, names, domain_of(samples['offset']))
    if args.to:
        worst = np.argsort(value, kind='stable')[:number]
        dropped = np.zeros((train[2] - 1) // block_size, bool)
        dropped[offset[worst] // block_size] = True
        why = {'windows': number, 'of': len(dropped), 'block_size': block_size, 'why': 'the lowest values',
               'run': str(out_dir.resolve()), 'values': hash_of_values(offset, value), 'dataset': config['dataset']}
        rows = [(int(offset[i]), float(value[i])) for i in worst]
        if domains:
            meta['domains'] = without_domains(domains, dropped, block_size)
        write_without(new, train, meta, val, block_size, dropped, rows, why)
    show(steps, samples, windows, domain_rows, block_size, text, args.top)
    print(f'\nwrote windows.csv, windows.jsonl, domains.csv and, where it could be drawn, data_value.png into {out}')
    if args.to:
        print(f'wrote {new}: without {number:,} of {len(dropped):,} windows of {block_size} tokens')


if __name__ == '__main__':
    with printing():
        main()
