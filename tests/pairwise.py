"""
Train with settings in all pairs: a set of short runs in which any two values of two settings meet in one run at least.

    python tests/pairwise.py [--seed=S] [--runs=FROM:TO] [--only=WORD]

A run trains to its end or is refused in one line; anything else is told, and the exit code is 1. seed: of the set;
runs: a part of it; only: runs with this word in their arguments. By hand, not by pytest: compiled ones take a minute.
"""
import itertools
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos import live
from conftest import TINY, log_of, write_dataset

MODES = {'plain': 1, 'ddp': 2, 'fsdp': 2, 'hsdp': 4}        # and their ranks
SETTINGS = dict(
    mode=list(MODES),
    compile=['False', 'True', 'blocks'],
    use_ghost=['False', 'True'], ghost_per_param=['False', 'True'], ghost_val_resample=['False', 'True'],
    ghost_interval=['1', '2'], ghost_val_batch_size=['4', '8'],
    grad_dump=['False', 'True'], grad_dump_save_first_n=['None', '3'],
    dtype=['float32', 'bfloat16', 'float16'],
    gradient_accumulation_steps=['4', '8'], batch_size=['1', '4'],
    fsdp_activation_checkpointing=['False', 'full', 'selective'],
    fsdp_min_num_params=['0', '60000'], fsdp_cpu_offload=['False', 'True'],
    fsdp_reshard_after_forward=['True', 'False'],
    data_order=['random', 'epoch'],
    checkpoint_format=['full', 'sharded'], checkpoint_async=['False', 'True'], keep_checkpoints=['0', '1'],
    checkpoint_interval=['0', '1'], always_save_checkpoint=['True', 'False'],
    eval_interval=['1', '100'],
    bias=['False', 'True'], dropout=['0.0', '0.1'],
    grad_clip=['1.0', '0.0'], decay_lr=['True', 'False'], decay=['cosine', 'wsd'],
    weight_decay=['0.1', '0.0'], scale_lr=['False', 'True'],
    check_sync_interval=['0', '1'], on_nonfinite=['stop', 'skip'], deterministic=['False', 'True'],
    optimizer=['adamw', 'muon'], rope=['False', 'True'], qk_norm=['False', 'True'],
    init_from=['scratch', 'auto'], n_layer=['1', '3'])


def pairs_of(run):
    """All pairs of ((setting, value), (setting, value)) of a run {setting: value}."""
    return set(itertools.combinations(sorted(run.items()), 2))


def allowed(run):
    """A run without what train.py refuses, which would hide whether the rest works."""
    run = dict(run)
    if run.get('mode') in ('plain', 'ddp') and 'fsdp_cpu_offload' in run:
        run['fsdp_cpu_offload'] = 'False'
    if run.get('optimizer') == 'muon' and 'fsdp_cpu_offload' in run:
        run['fsdp_cpu_offload'] = 'False'
    if run.get('checkpoint_format') == 'full' and 'checkpoint_async' in run:
        run['checkpoint_async'] = 'False'
    return run


def covering(draw):
    """Runs that hold every pair: again and again the best of some candidates built around a pair that is missing."""
    missing = {pair for a, b in itertools.combinations(sorted(SETTINGS), 2)
               for pair in itertools.product(((a, v) for v in SETTINGS[a]), ((b, v) for v in SETTINGS[b]))
               if allowed(dict(pair)) == dict(pair)}
    runs = []
    while missing:
        seeds = draw.sample(sorted(missing), min(30, len(missing)))
        candidates = [allowed({**{name: draw.choice(values) for name, values in SETTINGS.items()}, **dict(pair)})
                      for pair in seeds]
        runs.append(max(candidates, key=lambda run: len(pairs_of(run) & missing)))
        missing -= pairs_of(runs[-1])
    return runs


def outcome(run, folder, data):
    """'trained', 'refused: LINE', or what else has happened."""
    argv = [*TINY, f'--dataset={data}', '--max_iters=3', '--n_embd=32', '--eval_iters=1', f'--out_dir={folder / "out"}']
    argv += [f'--{name}={value}' for name, value in run.items() if name != 'mode']
    if run['mode'] in ('fsdp', 'hsdp'):
        argv.append('--use_fsdp=True')
    if run['mode'] == 'hsdp':
        argv.append('--fsdp_replicate=2')
    codes, _ = live(argv, MODES[run['mode']], folder / 'told.txt')
    lines = (folder / 'told.txt').read_text().splitlines()
    if set(codes) == {2} and lines[-1].startswith('train.py: ') and not any('Traceback' in line for line in lines):
        return 'refused: ' + lines[-1].removeprefix('train.py: ')
    if any(codes):
        return f'exit codes {codes}: {lines[-1] if lines else ""}'
    steps, _ = log_of(folder / 'out')
    if list(steps) != [0, 1, 2] or not all(math.isfinite(row['loss']) for row in steps.values()):
        return f'steps {steps}'
    return 'trained'


def main():
    if '--help' in sys.argv:
        sys.exit(print(__doc__))
    given = dict(argument.lstrip('-').split('=', 1) for argument in sys.argv[1:])
    runs = covering(random.Random(int(given.get('seed', 1))))
    first, last = (int(n) if n else None for n in given.get('runs', ':').split(':'))
    top, wrong = Path(tempfile.mkdtemp(prefix='pairwise')), 0
    data = write_dataset(top / 'data', ''.join(random.Random(1).choices('abcdefgh ,.\n', k=20000)))
    print(f'{len(runs)} runs')
    for number, run in list(enumerate(runs))[first:last]:
        words = ' '.join(f'{name}={value}' for name, value in run.items() if value != SETTINGS[name][0])
        if given.get('only', '') not in words:
            continue
        folder, began = top / str(number), time.monotonic()
        folder.mkdir()
        result = outcome(run, folder, data)
        if result == 'trained' or result.startswith('refused'):
            shutil.rmtree(folder)
        else:
            wrong += 1
        print(f'{number:3} {time.monotonic() - began:5.1f} s  {result}  [{words}]', flush=True)
    if wrong:
        print(f'{wrong} wrong: {top}')
        return 1
    shutil.rmtree(top)
    return 0


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
