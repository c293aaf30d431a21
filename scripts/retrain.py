"""Does a value say what a window did for the run? Trains a small run again on random halves of its windows.

python scripts/retrain.py OUT_DIR [--halves=100] [--jobs=N] [--windows=1000]
python scripts/retrain.py OUT_DIR --compare=DATASET [--seeds=5] [--jobs=N] [--windows=1000]

OUT_DIR: a run of train.py on one process, from scratch, with use_ghost=True, data_order=epoch and ghost_interval=1.

The first form prints the linear datamodeling score of each value that the run wrote: over the halves, the Spearman
correlation of the real validation loss with the sum of the values of the windows left out. A half is the run again,
with the same weights at the start, the same steps and batches, but a window that is left out (each with probability
1/2) does not enter its batch, whose mean is over the rest. So nothing but the windows differs from the run that the
values are of; on a dataset of its own a half would have other batches and orders, whose effect no value can know.

The second form compares training on DATASET, which `data_value.py OUT_DIR --drop=0.2 --to=DATASET` has written, with
training on a random choice of as many windows and on all, with each of N seeds for weights and order, in as many steps.

--jobs: trainings at a time; by default one per CPU core, or 8 on a GPU. --windows: how many evenly spread validation
windows the loss is over. What is finished is kept in OUT_DIR/retrain/losses.jsonl, so a command that was stopped goes
on where it was, and one that asks for more halves adds to them.
"""
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from data.bins import find_bin, fingerprint, hash64, read_tokens, sample_offsets
from model import GPT, GPTConfig
from scripts.common import fail, lr_at, note, one_line_parser, printing, spearman
from scripts.data_value import by_window, read_ghost, without
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
            with autocast(config):
                loss = model(batch[:, :-1], batch[:, 1:]).mean() / (keep.sum() / len(some))
            loss.backward()
            train_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config['grad_clip'] or torch.inf)
        optimizer.step()
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
    bin, meta = find_bin(config['dataset'], 'train')
    recorded = (checkpoint['meta'] or {}).get('fingerprint')
    if recorded and recorded != fingerprint(bin[0], meta):
        raise ValueError(f'{bin[0]} was prepared anew since the run: other text under the same offsets')
    return config, checkpoint['model_args'], steps


def tokens_of(dataset):
    (path, dtype, _), _ = find_bin(dataset, 'train')
    return np.memmap(path, dtype, 'r')


def do(out_dir, what, number, windows):
    """Train once: a half ('half', its number), or with a seed on 'all', on a 'random N' windows fewer, or on a dataset.
    Returns the validation loss and the training losses. Runs in a process of its own."""
    torch.set_num_threads(1)
    config, model_args, steps = read_run(out_dir)
    val, _ = find_bin(config['ghost_val_dataset'] or config['dataset'], 'val')
    block, half, seed = config['block_size'], None, number
    if what == 'half':
        half, seed = number, config['seed']
        if number < 0:      # the run itself
            half = None
    dataset = config['dataset']
    if what not in ('half', 'all') and not what.startswith('random '):
        dataset = what
    tokens = tokens_of(dataset)
    if what.startswith('random '):
        dropped = np.zeros((len(tokens) - 1) // block, bool)
        dropped[np.random.default_rng(seed).permutation(len(dropped))[:int(what.split()[1])]] = True
        tokens = without(tokens, dropped, block)
    model, losses = train(config, model_args, tokens, steps, seed, half)
    number = min(windows, val[2] - block)
    offsets = np.arange(number) * (val[2] - block) // number
    return validate(model, config, read_tokens(val, offsets, block + 1, model_args['vocab_size'])), losses


def finished(out_dir, tasks, windows, jobs):
    """Yields (task, what do() returns) in the order in which they are finished."""
    if jobs == 1:
        for task in tasks:
            yield task, do(out_dir, *task, windows)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context('spawn')) as pool:
        futures = {pool.submit(do, out_dir, *task, windows): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            fail('a training process was killed, perhaps for lack of memory; the same command with --jobs=1 goes on', 1)
        finally:
            pool.shutdown(cancel_futures=True)


def do_all(out_dir, tasks, windows, jobs):
    """{task: validation loss} of tasks (what, number). Each is appended to losses.jsonl as soon as it is there, and one
    that is there already is not done again."""
    path = out_dir / 'retrain' / 'losses.jsonl'
    path.parent.mkdir(exist_ok=True)
    run = hashlib.sha256((out_dir / 'config.json').read_bytes()).hexdigest()[:12]      # a run anew has other losses
    done = {}
    if path.is_file():
        for line in path.read_text(encoding='utf-8').splitlines():
            try:
                row = json.loads(line)
            except ValueError:      # the last one, if a kill has cut it
                continue
            if row['run'] == run and row['windows'] == windows:
                done[row['what'], row['number']] = row['loss']
        if not path.read_bytes().endswith(b'\n'):
            with open(path, 'a') as file:
                file.write('\n')
    todo = [task for task in tasks if task not in done]
    began = time.perf_counter()
    for count, ((what, number), (loss, losses)) in enumerate(finished(out_dir, todo, windows, jobs), 1):
        if number < 0:
            compare_with_log(out_dir, losses)
        done[what, number] = loss
        with open(path, 'a') as file:
            file.write(json.dumps(dict(run=run, what=what, number=number, windows=windows, loss=loss)) + '\n')
        left = (time.perf_counter() - began) / count * (len(todo) - count)
        if count % max(1, len(todo) // 10) == 0:
            note(f'{count} of {len(todo)} trained, {left / 60:.1f} minutes left')
    return {task: done[task] for task in tasks}


def compare_with_log(out_dir, losses):
    """Say how far the losses of the run done again are from those that train.py logged."""
    rows = [json.loads(line) for line in (out_dir / 'log.jsonl').read_text(encoding='utf-8').splitlines()]
    far = max(abs(losses[row['iter']] - row['loss']) for row in rows if 'loss' in row and row['iter'] < len(losses))
    note(f'the whole run again: training losses at most {far:.1e} from those in log.jsonl')


# ---- what comes out --------------------------------------------------------------------------------------------------
def bootstrap(sums, loss, draws=1000):
    """2.5th and 97.5th percentile (2, kinds) of Spearman's correlation of sums (kinds, halves) with loss (halves,), and
    of its difference to the first kind's, over halves drawn with replacement."""
    generator, found = np.random.default_rng(0), []
    for _ in range(draws):
        some = generator.integers(len(loss), size=len(loss))
        found.append(spearman(sums[:, some], loss[some]))
    found = np.array(found)                                                     # (draws, kinds)
    return np.percentile(found, (2.5, 97.5), 0), np.percentile(found - found[:, :1], (2.5, 97.5), 0)


def score(out_dir, config, steps, halves, windows, jobs):
    """Print the linear datamodeling score of each kind of value."""
    offset, value, visits, loss = by_window(read_ghost(out_dir)[1])
    kinds = {'value': value, 'loss': loss}      # the second, a window's own mean loss, is what a value has to beat
    trained = do_all(out_dir, [('half', number) for number in range(-1, halves)], windows, jobs)
    real = np.array([trained['half', number] for number in range(halves)])
    left_out = np.array([~kept_in(half, offset // config['block_size']) for half in range(halves)])  # (halves, windows)
    sums = np.array([left_out @ its for its in kinds.values()])                 # (kinds, halves)
    scores, (intervals, differences) = spearman(sums, real), bootstrap(sums, real)
    print(f'{halves} halves of {len(offset):,} windows, {visits.mean():.1f} visits each; {steps:,} steps, '
          f'learning rate {config["learning_rate"]:g}, seed {config["seed"]}')
    print(f'validation loss {trained["half", -1]:.4f} on all; on a half {real.mean():.4f}, standard deviation '
          f'{real.std():.4f}\n')
    print(f'{"kind":<10} {"LDS":>7}  {"95% interval":<16}  minus the first')
    for kind, s, (low, high), (below, above) in zip(kinds, scores, intervals.T, differences.T):
        print(f'{kind:<10} {s:>7.3f}  {f"{low:.3f} to {high:.3f}":<16}  {below:.3f} to {above:.3f}')


def p_value(differences):
    """The probability that n differences, if their signs were chance, would have so low a sum, or as far above 0 (n,):
    exact, over all 2^n signs, both sides."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    return np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12)


def compare(out_dir, config, steps, dataset, seeds, windows, jobs):
    """Print the validation loss after training on a dataset, on a random choice of as many windows, and on all."""
    tokens, fewer, block = tokens_of(config['dataset']), tokens_of(dataset), config['block_size']
    number = (len(tokens) - len(fewer)) // block
    if number <= 0 or number * block != len(tokens) - len(fewer):
        fail(f'--compare={dataset}: not {config["dataset"]} without some windows of {block} tokens: make it by '
             'data_value.py --drop')
    rows = {'all': 'all', 'at random': f'random {number}', dataset: dataset}
    numbers = [config['seed'] + 1 + i for i in range(seeds)]    # not the run's own, which the values know
    trained = do_all(out_dir, [(what, seed) for seed in numbers for what in rows.values()], windows, jobs)
    losses = {name: np.array([trained[what, seed] for seed in numbers]) for name, what in rows.items()}
    print(f'{number:,} of {(len(tokens) - 1) // block:,} windows left out; {steps:,} steps, learning rate '
          f'{config["learning_rate"]:g}, seeds {numbers[0]} to {numbers[-1]}\n')
    print(f'{"trained on":<24} {"loss":>8} {"std":>8} {"minus random":>13} {"p":>6}')
    for name, loss in losses.items():
        difference = loss - losses['at random']
        p = '' if name == 'at random' else f'{p_value(difference):.3f}'
        print(f'{name:<24} {loss.mean():>8.4f} {loss.std(ddof=1):>8.4f} {difference.mean():>13.4f} {p:>6}')


def main():
    usage = 'OUT_DIR [--halves=N] [--compare=DATASET] [--seeds=N] [--jobs=N] [--windows=N]'
    parser = one_line_parser(__doc__, usage)
    parser.add_argument('out_dir', metavar='OUT_DIR', type=Path)
    parser.add_argument('--compare', metavar='DATASET')
    for name, default in (('halves', 100), ('seeds', 5), ('jobs', 0), ('windows', 1000)):
        parser.add_argument(f'--{name}', metavar='N', type=int, default=default)
    args = parser.parse_args()
    if args.halves < 4 or not 2 <= args.seeds <= 16 or args.jobs < 0 or args.windows < 1:
        parser.error('--halves must be at least 4, --seeds from 2 to 16, --windows at least 1')
    config, _, steps = read_run(args.out_dir)
    jobs = args.jobs
    if jobs == 0:
        jobs = 8 if config['device'].startswith('cuda') else os.cpu_count()
    if args.compare:
        compare(args.out_dir, config, steps, args.compare, args.seeds, args.windows, jobs)
    else:
        score(args.out_dir, config, steps, args.halves, args.windows, jobs)


if __name__ == '__main__':
    with printing():
        main()
