"""scripts/retrain.py and data_value.py --drop: its loop against train.py, halves, data without the worst."""
import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, ckpt_of, log_of

sys.path.insert(0, ROOT)
from scripts.common import spearman  # noqa: E402
from scripts.data_value import by_window, read_ghost, without, without_domains  # noqa: E402
from scripts.retrain import kept_in, p_value, read_run, tokens_of, train  # noqa: E402

SCRIPT, DATA_VALUE = (os.path.join(ROOT, 'scripts', f'{name}.py') for name in ('retrain', 'data_value'))


@pytest.fixture(scope='module')
def run(tmp_path_factory, fork):
    folder = tmp_path_factory.mktemp('retrain')
    fork(folder, '--out_dir=run', '--use_ghost=True', '--data_order=epoch', '--gradient_accumulation_steps=3',
         '--dropout=0.1')
    return folder / 'run'


def test_losses_of_train_py(run):
    """Bit by bit, with accumulation and dropout; the weights too."""
    torch.set_num_threads(1)
    config, model_args, steps = read_run(run)
    model, losses = train(config, model_args, tokens_of(config['dataset']), steps, config['seed'])
    logged = [row['loss'] for row in log_of(run)[0].values()]
    assert steps == 20 and losses == logged
    after = ckpt_of(run)['model']
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())


def test_halves_and_what_they_print(run, fork):
    """Each half is trained once, also by a command that was stopped; the whole run again has train.py's losses."""
    done = fork(run.parent, 'run', '--halves=4', '--jobs=2', '--windows=8', script=SCRIPT, tiny_args=False, rc=None)
    assert 'at most 0.0e+00 from' in done.err and '4 halves of' in done.out, done.err
    path = run / 'retrain' / 'losses.jsonl'
    rows = path.read_text().splitlines(keepends=True)
    assert len(rows) == 5
    kept = [row for row in rows if json.loads(row)['number'] != 2]
    path.write_text(''.join(kept) + '{"run": "torn')
    again = fork(run.parent, 'run', '--halves=4', '--jobs=1', '--windows=8', script=SCRIPT, tiny_args=False, rc=None)
    assert again.out == done.out
    assert path.read_text().splitlines()[:4] == [row.strip() for row in kept] and path.read_text().count('\n') == 6
    # the score by hand
    offset, value, _, _ = by_window(read_ghost(run)[1])
    loss = {json.loads(row)['number']: json.loads(row)['loss'] for row in rows}
    sums = np.array([value[~kept_in(half, offset // 32)].sum() for half in range(4)])
    score = spearman(sums, np.array([loss[half] for half in range(4)]))
    line = next(line for line in done.out.splitlines() if line.startswith('value '))
    assert float(line.split()[1]) == pytest.approx(score, abs=6e-4)
    shares = [kept_in(half, np.arange(1000)).mean() for half in range(20)]
    assert 0.4 < min(shares) and max(shares) < 0.6 and len(set(shares)) > 10


def test_dropping_the_worst(run, fork):
    fork(run.parent, 'run', '--drop=0.2', '--to=./better', script=DATA_VALUE, tiny_args=False, rc=None)
    better, tokens = run.parent / 'better', tokens_of(ckpt_of(run)['config']['dataset'])
    offset, value, _, _ = by_window(read_ghost(run)[1])
    worst = offset[np.argsort(value)[:int(0.2 * len(value))]]
    rows = list(csv.DictReader(open(better / 'dropped.csv', newline='')))
    assert [int(row['offset']) for row in rows] == worst.tolist()
    kept = np.concatenate([tokens[at:at + 32] for at in range(0, len(tokens), 32) if at not in worst])
    assert np.array_equal(np.fromfile(better / 'train.bin', '<u2'), kept)
    meta = json.loads((better / 'meta.json').read_text())
    assert meta['dropped']['windows'] == len(worst) and meta['splits']['train']['tokens'] == len(kept)
    # train.py takes it, and retrain.py compares
    fork(run.parent, f'--dataset={better}', '--out_dir=more', '--max_iters=1')
    done = fork(run.parent, 'run', '--compare=./better', '--seeds=2', '--jobs=1', '--windows=8', script=SCRIPT,
                tiny_args=False, rc=None)
    assert [line.split()[0] for line in done.out.splitlines()[3:]] == ['all', 'at', './better'], done.err
    for script, args, what in ((DATA_VALUE, ['run', '--drop=0.2', '--to=./better'], 'is there already'),
                               (DATA_VALUE, ['run', '--drop=2', '--to=./best'], '--drop'),
                               (SCRIPT, ['run', f'--compare={Path(tokens.filename).parent}'], '--compare'),
                               (SCRIPT, ['more'], 'use_ghost')):
        failed = fork(run.parent, *args, script=script, tiny_args=False, rc=None)
        line = failed if isinstance(failed, str) else failed.err
        assert what in line and line.count('\n') <= 1, line


def test_windows_and_domains_without():
    tokens, dropped = np.arange(14), np.array([False, True, False, True])      # of 3 tokens; two behind them
    assert without(tokens, dropped, 3).tolist() == [0, 1, 2, 6, 7, 8, 12, 13]
    domains = [dict(name='a', start=0, end=4), dict(name='b', start=4, end=6), dict(name='c', start=6, end=14)]
    assert without_domains(domains, dropped, 3) == [dict(name='a', start=0, end=3), dict(name='c', start=3, end=8)]


def test_p_value():
    assert p_value(np.array([-1.0, -2.0, -3.0, -1.0, -2.0])) == 2 / 32
    assert p_value(np.array([1.0, -1.0])) == 1
