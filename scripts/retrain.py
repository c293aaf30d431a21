"""Does a value say what a window did for the run? Trains a small run again on random halves of its windows.

python scripts/retrain.py OUT_DIR [--halves=100] [--jobs=N] [--windows=1000] [--val=DATASET]
python scripts/retrain.py OUT_DIR --compare=DATASET [--seeds=5] [--jobs=N] [--windows=1000] [--val=DATASET]

OUT_DIR: a run of train.py on one process, from scratch, with use_ghost=True, data_order=epoch and ghost_interval=1.

The first form prints the linear datamodeling score of each value that the run wrote: over the halves, the Spearman
correlation of the real validation loss with the sum of the values of the windows left out. A half is the run again,
with the same weights at the start, the same steps and batches, but a window that is left out (each with probability
1/2) does not enter its batch, whose mean is over the rest. So nothing but the windows differs from the run that the
values are of; on a dataset of its own a half would have other batches and orders, whose effect no value can know. A
step whose windows are all left out is none: no weight decay and no momentum either. With few windows a step (4: one
step in 16) this is part of what the halves differ by.

The second form compares training on DATASET, which `data_value.py OUT_DIR --drop=0.2 --to=DATASET` has written, with
training on a random choice of as many windows and on all, with each of N seeds for weights and order, in as many steps.
Its validation windows share no token with those that the values were computed from.

--jobs: trainings at a time; by default one per CPU core, or 8 on a GPU. --windows: how many evenly spread validation
windows the loss is over. --val: the dataset whose val.bin they are of; by default the one that the values are for. What
is finished is kept in OUT_DIR/retrain/losses.jsonl, so a command that was stopped goes on where it was, and one that
asks for more halves adds to them.
"""
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import fail     # before torch: it makes Ctrl-C one line

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from data.bins import (append_rows, find_bin, fingerprint, hash64, load_meta, made_folder, no_pipe, open_file,
                       read_file, read_tokens, said, sample_offsets)
from data.corpus import folder_path, start_worker, without_ctrl_c
from model import GPT, GPTConfig
from scripts.common import (bootstrap, is_there, lr_at, must_be_one_process, must_have_memory, note, one_line_parser,
                            printing, run_tokens, spearman, without)
from scripts.data_value import by_window, files_of, hash_of_values, read_ghost
from weights import newest_checkpoint, read_checkpoint

HALVES = 1      # in the hash that draws them, so that they depend on nothing else


def kept_in(half, windows):
    """Which windows (n,), by their number, a half keeps: bool (n,)."""
    return hash64(HALVES, half, windows) % np.uint64(2) == 0


def train(config, model_args, tokens, steps, seed, half=None):
    """
    train.py's run in one process: the same numbers, bit by bit on a CPU with as many threads. tokens: train.bin as an
    array; half: the number of the half of its windows to train on; None: all. Returns the model and each step's loss.
    """
    device, block, micro_batches = config['device'], config['block_size'], config['gradient_accumulation_steps']
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**model_args, 'dropout': config['dropout']})).to(device)
    options = dict(lr=config['learning_rate'], betas=(config['beta1'], config['beta2']), fused=True)
    if config.get('optimizer') == 'muon':
        from muon import Muon
        optimizer = Muon(model.param_groups(config['weight_decay'], muon=True), **options)
    else:
        optimizer = torch.optim.AdamW(model.param_groups(config['weight_decay']), **options)
    per_step, found = micro_batches * config['batch_size'], []
    for t in range(steps):
        for group in optimizer.param_groups:
            group['lr'] = lr_at(config, t)
        if config['dropout'] > 0:
            torch.manual_seed(int(hash64(seed, t, 0)[0] >> np.uint64(1)))
        offsets = sample_offsets('epoch', seed, t, np.arange(per_step), t * per_step, len(tokens), block)
        keep = np.ones(per_step, bool) if half is None else kept_in(half, offsets // block)
        train_loss = torch.zeros((), device=device)
        for some, kept in zip(np.split(offsets, micro_batches), np.split(keep, micro_batches)):
            some = some[kept]
            if len(some) == 0:
                continue
            batch = torch.from_numpy(tokens[some[:, None] + np.arange(block + 1)].astype(np.int64)).to(device)
            with autocast(config):      # if all windows are kept, the divisor is micro_batches, as in train.py
                loss = model(batch[:, :-1], batch[:, 1:]).mean() / (keep.sum() / len(some))
            loss.backward()
            train_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config['grad_clip'] or torch.inf)
        optimizer.step()        # changes nothing if all windows of the step are left out: then there are no gradients
        optimizer.zero_grad()
        found.append(train_loss)
    return model, torch.stack(found).tolist()


def autocast(config):
    if config['dtype'] == 'float32':
        return nullcontext()
    return torch.autocast(config['device'].split(':')[0], getattr(torch, config['dtype']))


@torch.no_grad()
def validate(model, config, windows):
    """The mean loss over windows (n, block_size + 1), summed in float64."""
    model.eval()
    total = 0.0
    for part in torch.from_numpy(windows).split(64):
        part = part.to(config['device'])
        with autocast(config):
            total += model(part[:, :-1], part[:, 1:]).double().sum().item()
    return total / len(windows)


# ---- a run, and what is trained again --------------------------------------------------------------------------------
def read_run(out_dir):
    """(config, model_args, steps) of a run that can be done again. ValueError (one line) if it cannot."""
    checkpoint = read_checkpoint(str(newest_checkpoint(out_dir) or out_dir))
    config, steps = checkpoint['config'], checkpoint['iter_num']
    for name, wanted in (('use_ghost', [True]), ('data_order', ['epoch']), ('ghost_interval', [1]),
                         ('dtype', ['float32', 'bfloat16']), ('init_from', ['scratch', 'auto', 'resume'])):
        if config.get(name) not in wanted:
            raise ValueError(f'{out_dir}: the run has {name}={config.get(name)!r}, this needs --{name}={wanted[0]}')
    run_tokens(config, checkpoint['meta'])
    if steps == 0:
        raise ValueError(f'{out_dir}: the run has not taken a step')
    path = Path(out_dir, 'config.json')
    try:
        processes = json.loads(read_file(path)).get('world_size', 1)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f'{path} has no settings of a run ({said(error)}); train.py writes it') from None
    if processes != 1 and config['dropout'] > 0:
        raise ValueError(f'{out_dir}: the run has dropout={config["dropout"]} on {processes} processes, each with '
                         'draws of its own, which cannot be done again on one: this needs --dropout=0, or a run on one '
                         'process')
    here = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    if not here.get(config['device'].split(':')[0], True):
        raise ValueError(f'{out_dir}: the run has device={config["device"]}, which this machine has not: do this '
                         'on one that has it')
    return config, checkpoint['model_args'], steps


def tokens_of(dataset):
    (path, dtype, _), _ = find_bin(dataset, 'train')
    return np.memmap(path, dtype, 'r')


def known_windows(out_dir):
    """Where in val.bin the validation windows begin that the run's values were computed from: int64 (n,)."""
    folder, found = Path(out_dir, 'grad_dotprods'), []
    for path in sorted(folder.glob('*.safetensors')):
        name = 'offset' if path.name.startswith('valset') else 'val_offset'
        try:
            open_file(path).close()     # safetensors' own errors say less
            with safe_open(path, 'numpy') as file:
                if name in file.keys():
                    found.append(file.get_tensor(name).ravel())
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{path}: torn or not of train.py ({said(error)}): run train.py again') from None
    if not found:
        raise ValueError(f'{folder}: no valset.safetensors and no val_offset: which validation windows the values are '
                         'of is not known')
    return np.unique(np.concatenate(found))


def is_bin(path, recorded):
    """Whether a bin is the one that has this fingerprint, of either form (data.bins.fingerprint)."""
    if recorded.startswith('sha256:'):
        return recorded == f'sha256:{hashlib.sha256(read_file(path)).hexdigest()}'
    return recorded == fingerprint(path, {})


def validation_windows(out_dir, config, name, number, apart):
    """(bin, where windows of its tokens begin (n,)): at most `number` of them, evenly spread over the val.bin of a
    dataset; '': the one that the values are for. None has a token of the windows that begin at `apart` in the latter.
    ValueError (one line) if they leave less than a tenth of it, or if that val.bin is another one now."""
    block, (val, meta) = config['block_size'], find_bin(name or config['ghost_val_dataset'] or config['dataset'], 'val')
    with safe_open(files_of(out_dir)[0], 'numpy') as file:      # read_ghost has seen that all have the same
        recorded = (file.metadata() or {}).get('val_bin')
    if recorded is None:        # an older run's
        recorded = fingerprint(find_bin(config['ghost_val_dataset'] or config['dataset'], 'val')[0][0], {})
    known = is_bin(val[0], recorded)
    if name:
        _, trained = find_bin(config['dataset'], 'train')
        tokenizers = [record['tokenizer'] for record in (meta, trained) if record.get('tokenizer')]
        if len(tokenizers) == 2 and tokenizers[0] != tokenizers[1]:
            raise ValueError(f'--val={name} has another tokenizer than {config["dataset"]}: the same '
                             'ids mean other text; prepare it with the same --tokenizer')
    elif not known:
        raise ValueError(f'{val[0]} was prepared anew since the run, whose values are for the text before: run '
                         'train.py again, or name another dataset to judge them on: --val=DATASET')
    free = np.ones(max(0, val[2] - block), bool)
    if known:
        for offset in apart:
            free[max(0, offset - block):offset + block + 1] = False
    offsets = np.flatnonzero(free)
    if len(offsets) == 0 or len(offsets) < len(free) / 10:
        raise ValueError(f'{val[0]} has too little text that the values were not computed from; name another dataset '
                         'to judge them on: --val=DATASET')
    number = min(number, len(offsets))
    return val, offsets[np.arange(number) * len(offsets) // number]


def do(out_dir, what, number, val, offsets):
    """Train once. what and number: 'half' and its number, -1 for the run itself; or a seed, for 'all' windows, for
    'random N' windows fewer, or for a 'dataset NAME'. Returns the loss over the windows of val (a bin) at offsets, and
    the training losses. Runs in a process of its own."""
    torch.set_num_threads(1)
    config, model_args, steps = read_run(out_dir)
    block, half, seed = config['block_size'], None, number
    if what == 'half':
        seed = config['seed']
        if number >= 0:
            half = number
    tokens = tokens_of(dataset_of(what, config))
    if what.startswith('random '):
        dropped = np.zeros((len(tokens) - 1) // block, bool)
        dropped[np.random.default_rng(seed).permutation(len(dropped))[:int(what.split()[1])]] = True
        tokens = without(tokens, dropped, block)
    model, losses = train(config, model_args, tokens, steps, seed, half)
    return validate(model, config, read_tokens(val, offsets, block + 1, model_args['vocab_size'])), losses


def dataset_of(what, config):
    return what.removeprefix('dataset ') if what.startswith('dataset ') else config['dataset']


def finished(out_dir, tasks, val, offsets, jobs):
    """Yields (task, what do() returns) in the order in which they are finished."""
    if jobs == 1:
        for task in tasks:
            yield task, do(out_dir, *task, val, offsets)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context('spawn'), start_worker) as pool:
        try:
            with without_ctrl_c():
                futures = {pool.submit(do, out_dir, *task, val, offsets): task for task in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:       # which has ended the other workers
            fail('a training process was killed, perhaps for lack of memory; the same command with --jobs=1 goes on', 1)
        except BaseException:           # Ctrl-C and SIGTERM too: the workers still train
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def json_lines(path):
    """The objects of a file's lines; what is none, as a line that a kill has cut, is passed over. [] without a file;
    ValueError (one line) if it is there but can't be read."""
    content, found = b'', []
    try:
        if is_there(path):
            content = read_file(path)
    except OSError as error:
        raise ValueError(f'{path}: cannot be read: {said(error)}: mend that, or move it away') from None
    for line in content.decode(errors='replace').splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if isinstance(row, dict)]


def key_of(out_dir, what, config, steps, val, offsets):
    """A hash of what a result depends on beside what was trained, and with which number: the run, the tokens trained
    on, and those that the loss is over."""
    (train_bin, _, _), meta = find_bin(dataset_of(what, config), 'train')
    val_bin = Path(val[0])
    parts = [Path(out_dir, 'config.json').read_text(encoding='utf-8'), steps, fingerprint(train_bin, meta),
             fingerprint(val_bin, load_meta(val_bin.parent)), offsets.tolist()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def do_all(out_dir, tasks, config, steps, val, offsets, jobs):
    """{task: its row of losses.jsonl} of tasks (what, number): dicts with loss, over the windows of val at offsets, and
    gap, far_from_log's. Each is appended to losses.jsonl as soon as it is there, and none is done twice."""
    path = out_dir / 'retrain' / 'losses.jsonl'
    try:        # if it can't be written, this is the place to say so
        with made_folder(path.parent):
            no_pipe(path)
            open(path, 'ab').close()
    except OSError as error:
        raise ValueError(f'{path}: cannot be written: {error.strerror}: mend that, or move what is there '
                         'away') from None
    keys = {what: key_of(out_dir, what, config, steps, val, offsets) for what, _ in tasks}
    done = {}
    for row in json_lines(path):
        if row.get('run') in keys.values():
            done[row['what'], row['number']] = row
    todo = [task for task in tasks if task not in done]
    began = time.perf_counter()
    for count, ((what, number), (loss, losses)) in enumerate(finished(out_dir, todo, val, offsets, jobs), 1):
        row = dict(run=keys[what], what=what, number=number, steps=steps, windows=len(offsets), loss=loss)
        if number < 0:
            row['gap'] = far_from_log(out_dir, losses)
        done[what, number] = row
        append_rows(path, [row])
        left = (time.perf_counter() - began) / count * (len(todo) - count)
        if count % max(1, len(todo) // 10) == 0:
            note(f'{count} of {len(todo)} trained, {left / 60:.1f} minutes left')
    return {task: done[task] for task in tasks}


def far_from_log(out_dir, losses):
    """How far the losses of the run done again are at most from those that train.py logged; None if it logged none."""
    gaps = [abs(losses[row['iter']] - row['loss']) for row in json_lines(out_dir / 'log.jsonl')
            if row.get('loss') is not None and row['iter'] < len(losses)]
    if not gaps:
        return None
    far = float(np.max(gaps))
    note(f'the whole run again: training losses at most {far:.1e} from those in log.jsonl')
    return far


# ---- what comes out --------------------------------------------------------------------------------------------------
def score(out_dir, config, steps, halves, windows, val_dataset, jobs):
    """Print the linear datamodeling score of each kind of value."""
    if config['gradient_accumulation_steps'] * config['batch_size'] < 2:
        fail(f'{out_dir}: the run has one window a step, and half of the steps of a half would be none: this needs at '
             'least 2', 1)
    scored, samples = read_ghost(out_dir)
    val, at = validation_windows(out_dir, config, val_dataset, windows, apart=[])
    if scored['iter'].tolist() != list(range(steps)):
        fail(f'{out_dir}: the values are of {len(scored["iter"]):,} steps up to {scored["iter"][-1]:,}, the newest '
             f'checkpoint is of {steps:,}: both must be of the same steps, so let the run end, or resume it', 1)
    offset, value, visits, loss = by_window(samples)
    must_have_memory(halves * (2000 + 10 * len(offset)), f'--halves={halves}')
    kinds = {'value': value, 'loss': loss}      # the second, a window's own mean loss, is what a value has to beat
    tasks = [('half', number) for number in range(-1, halves)]
    json_lines(out_dir / 'log.jsonl')       # if it can't be read, this is the place to say so
    trained = do_all(out_dir, tasks, config, steps, val, at, jobs)
    real = np.array([trained['half', number]['loss'] for number in range(halves)])
    left_out = np.array([~kept_in(half, offset // config['block_size']) for half in range(halves)])  # (halves, windows)
    sums = np.array([left_out @ its for its in kinds.values()])                 # (kinds, halves)
    scores = spearman(sums, real)
    intervals, differences = bootstrap(sums[None], real[None], first=0, draws=1000)
    print(f'{halves} halves of {len(offset):,} windows, {visits.mean():.1f} visits each; {steps:,} steps, '
          f'learning rate {config["learning_rate"]:g}, seed {config["seed"]}')
    print(f'validation loss {trained["half", -1]["loss"]:.4f} on all; on a half {real.mean():.4f}, standard deviation '
          f'{real.std():.4f}\n')
    gap = trained['half', -1]['gap']
    if gap is None:
        print('WARNING: log.jsonl has no loss that the run done again could be held against\n')
    elif not gap <= 1e-3:       # NaN too
        print(f'WARNING: done again, the run has training losses up to {gap:.1e} away from those in log.jsonl. The '
              'values are\nof another run than the halves, and the scores say little about them.\n')
    print(f'{"kind":<10} {"LDS":>7}  {"95% interval":<16}  minus the first')
    for kind, s, (low, high), (below, above) in zip(kinds, scores, intervals.T, differences.T):
        print(f'{kind:<10} {s:>7.3f}  {f"{low:.3f} to {high:.3f}":<16}  {below:.3f} to {above:.3f}')


def p_value(differences):
    """The probability that n differences, if their signs were chance, would have so low a sum, or as far above 0 (n,):
    exact, over all 2^n signs, both sides."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    return np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12)


def compare(out_dir, config, steps, dataset, seeds, windows, val_dataset, jobs):
    """Print the validation loss after training on a dataset, on a random choice of as many windows, and on all; over
    validation windows that the values know nothing of."""
    tokens, fewer, block = tokens_of(config['dataset']), tokens_of(dataset), config['block_size']
    number = (len(tokens) - len(fewer)) // block
    if number <= 0 or number * block != len(tokens) - len(fewer):
        fail(f'--compare={dataset}: not {config["dataset"]} without some windows of {block} tokens: make it by '
             'data_value.py --drop')
    offset, value, _, _ = by_window(read_ghost(out_dir)[1])
    record = find_bin(dataset, 'train')[1].get('dropped')
    values = hash_of_values(offset, value)
    if isinstance(record, dict) and record.get('values', values) != values:     # one's own choice has no record
        fail(f'--compare={dataset} was chosen by the values of {record.get("run")} as they were then, not by those of '
             f'{out_dir}: make it by data_value.py {out_dir} --drop')
    val, at = validation_windows(out_dir, config, val_dataset, windows, known_windows(out_dir))
    rows = {'all': 'all', 'at random': f'random {number}', dataset: f'dataset {dataset}'}
    numbers = [config['seed'] + 1 + i for i in range(seeds)]    # not the run's own, which the values know
    tasks = [(what, seed) for seed in numbers for what in rows.values()]
    trained = do_all(out_dir, tasks, config, steps, val, at, jobs)
    losses = {name: np.array([trained[what, seed]['loss'] for seed in numbers]) for name, what in rows.items()}
    print(f'{number:,} of {(len(tokens) - 1) // block:,} windows left out; {steps:,} steps, learning rate '
          f'{config["learning_rate"]:g}, seeds {numbers[0]} to {numbers[-1]}')
    print(f'loss over {len(at):,} windows of {val[0]} that the values were not computed from\n')
    print(f'{"trained on":<24} {"loss":>8} {"std":>8} {"minus random":>13} {"p":>6}')
    for name, loss in losses.items():
        difference = loss - losses['at random']
        p = '' if name == 'at random' else f'{p_value(difference):.3f}'
        print(f'{name:<24} {loss.mean():>8.4f} {loss.std(ddof=1):>8.4f} {difference.mean():>13.4f} {p:>6}')


def main():
    must_be_one_process()
    usage = 'OUT_DIR [--halves=N] [--compare=DATASET] [--seeds=N] [--jobs=N] [--windows=N] [--val=DATASET]'
    parser = one_line_parser(__doc__, usage)
    parser.add_argument('out_dir', metavar='OUT_DIR', type=folder_path)
    parser.add_argument('--compare', metavar='DATASET')
    parser.add_argument('--val', metavar='DATASET', default='')
    for name, default in (('halves', 100), ('seeds', 5), ('jobs', 0), ('windows', 1000)):
        parser.add_argument(f'--{name}', metavar='N', type=int, default=default)
    args = parser.parse_args()
    for name, low, high in (('halves', 4, math.inf), ('seeds', 2, 16), ('jobs', 0, 1024), ('windows', 1, math.inf)):
        value = getattr(args, name)
        if not low <= value <= high:
            bound = f'at least {low}' if value < low else f'at most {high}'
            parser.error(f'--{name}={value}: must be {bound}')
    config, _, steps = read_run(args.out_dir)
    jobs = args.jobs
    if jobs == 0:
        jobs = 8 if config['device'].startswith('cuda') else os.cpu_count()
    if args.compare is not None:
        compare(args.out_dir, config, steps, args.compare, args.seeds, args.windows, args.val, jobs)
    else:
        score(args.out_dir, config, steps, args.halves, args.windows, args.val, jobs)


if __name__ == '__main__':
    with printing():
        main()
