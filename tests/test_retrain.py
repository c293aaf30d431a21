"""scripts/retrain.py and data_value.py --drop: its loop against train.py, halves, data without the worst."""
import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, ckpt_of, log_of
from modes_helper import far

import checkpoint
from data.bins import sample_offsets
from model import GPT, GPTConfig
from scripts import retrain
from scripts.common import bootstrap, lr_at, ranks, spearman, without
from scripts.data_value import by_window, read_ghost, without_domains
from scripts.retrain import kept_in, known_windows, p_value, read_run, tokens_of, train, validation_windows

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


def test_a_half_by_hand(run):
    """Its windows alone, each with the same weight in its step's mean, however many of a micro-batch are left."""
    config, model_args, _ = read_run(run)
    config, tokens, steps = {**config, 'dropout': 0.0}, tokens_of(config['dataset']), 3
    model, losses = train(config, model_args, tokens, steps, 7, half=1)
    torch.manual_seed(7)
    net = GPT(GPTConfig(**{**model_args, 'dropout': 0.0}))
    optimizer = torch.optim.AdamW(net.param_groups(config['weight_decay']), betas=(config['beta1'], config['beta2']))
    for t in range(steps):
        offsets = sample_offsets('epoch', 7, t, np.arange(12), 12 * t, len(tokens), 32)
        left = offsets[kept_in(1, offsets // 32)]
        assert 0 < len(left) < 12
        batch = torch.from_numpy(np.stack([tokens[at:at + 33] for at in left]).astype(np.int64))
        loss = net(batch[:, :-1], batch[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), config['grad_clip'])
        for group in optimizer.param_groups:
            group['lr'] = lr_at(config, t)
        optimizer.step()
        assert losses[t] == pytest.approx(loss.item(), rel=1e-6)
    assert far(dict(model.named_parameters()), dict(net.named_parameters())) < 5e-6


def test_halves_and_what_they_print(run, fork):
    """Each half is trained once, also by a command that was stopped; the whole run again has train.py's losses."""
    done = fork(run.parent, 'run', '--halves=4', '--jobs=2', '--windows=8', script=SCRIPT, tiny_args=False, rc=None)
    assert 'at most 0.0e+00 from' in done.err and '4 halves of' in done.out, done.err
    path = run / 'retrain' / 'losses.jsonl'
    rows = path.read_text().splitlines(keepends=True)
    assert len(rows) == 5
    kept = [row for row in rows if json.loads(row)['number'] != 2]
    path.write_text(''.join(kept) + '[]\n{"run": "torn')
    again = fork(run.parent, 'run', '--halves=4', '--jobs=1', '--windows=8', script=SCRIPT, tiny_args=False, rc=None)
    assert again.out == done.out
    assert path.read_text().splitlines()[:4] == [row.strip() for row in kept] and path.read_text().count('\n') == 7
    # the score by hand
    offset, value, _, _ = by_window(read_ghost(run)[1])
    loss = {json.loads(row)['number']: json.loads(row)['loss'] for row in rows}
    sums = np.array([value[~kept_in(half, offset // 32)].sum() for half in range(4)])
    places = [np.array([sorted(x).index(one) for one in x]) for x in (sums, [loss[half] for half in range(4)])]
    score = 1 - 6 * ((places[0] - places[1]) ** 2).sum() / (4 * (4 ** 2 - 1))
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
    table = done.out.splitlines()[4:]
    assert [line.split()[0] for line in table] == ['all', 'at', './better'], done.err
    rows = retrain.json_lines(run / 'retrain' / 'losses.jsonl')
    losses = {row['what'].split()[0]: {} for row in rows}
    for row in rows:
        losses[row['what'].split()[0]][row['number']] = row['loss']
    other = losses['random']
    assert sorted(other) == [1338, 1339] and len({*other.values(), *losses['all'].values()}) == 4
    for line, kind in zip(table, ('all', 'random', 'dataset')):
        its = [losses[kind][seed] for seed in sorted(other)]
        mean, std, minus = (float(cell) for cell in line.replace('at random', 'random').split()[1:4])
        assert mean == pytest.approx(sum(its) / 2, abs=6e-5)
        assert std == pytest.approx(abs(its[0] - its[1]) / 2 ** 0.5, abs=6e-5)
        assert minus == pytest.approx((sum(its) - sum(other.values())) / 2, abs=1.1e-4)
    # not what other values have chosen, whose validation windows these know nothing of
    (better / 'meta.json').write_text(json.dumps({**meta, 'dropped': {**meta['dropped'], 'values': 'other'}}))
    assert 'make it by data_value.py run' in fork(run.parent, 'run', '--compare=./better', script=SCRIPT,
                                                  tiny_args=False, rc=2)
    (better / 'meta.json').write_text(json.dumps(meta))
    # another dataset under the same name is trained on, and what was trained on the others stays
    fork(run.parent, 'run', '--drop=0.1', '--to=./other', script=DATA_VALUE, tiny_args=False, rc=None)
    better.rename(run.parent / 'before')
    (run.parent / 'other').rename(better)
    done = fork(run.parent, 'run', '--compare=./better', '--seeds=2', '--jobs=1', '--windows=8', script=SCRIPT,
                tiny_args=False, rc=None)
    more = retrain.json_lines(run / 'retrain' / 'losses.jsonl')
    assert [row['what'].split()[0] for row in more[len(rows):]] == ['random', 'dataset'] * 2, done.err
    assert more[-1]['loss'] != rows[-1]['loss'] and f'{int(0.1 * len(value)):,} of' in done.out
    for script, args, what in ((DATA_VALUE, ['run', '--drop=0.2', '--to=./better'], 'is there already'),
                               (DATA_VALUE, ['run', '--drop=2', '--to=./best'], '--drop'),
                               (SCRIPT, ['run', f'--compare={Path(tokens.filename).parent}'], '--compare'),
                               (DATA_VALUE, ['run', '--drop=0.0001', '--to=./best'], 'less than one'),
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


def test_ranks_and_spearman():
    assert ranks([3, 1, 3, 2, 3]).tolist() == [3, 0, 3, 1, 3]
    assert ranks(np.array([[1, 1, 2], [5, 4, 4]])).tolist() == [[0.5, 0.5, 2], [2, 0.5, 0.5]]
    assert spearman([86, 97, 99, 100, 101], [2, 20, 28, 27, 50]) == pytest.approx(1 - 6 * 2 / (5 * 24))
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)     # by hand, with a tie
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3]))
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 5, (2, 3, 40))
    below = [[(row < one).sum() + ((row == one).sum() - 1) / 2 for one in row] for row in x]
    assert ranks(x).tolist() == below
    try:
        from scipy.stats import spearmanr
    except ImportError:
        return
    assert spearman(x, y) == pytest.approx([spearmanr(a, b)[0] for a, b in zip(x, y)])


def test_bootstrap_is_not_biased_by_halves_drawn_twice():
    """Of sums of the other sign it gives the mirrored interval, also of four halves."""
    draw = np.random.default_rng(1)
    sums, loss = draw.normal(size=4), draw.normal(size=4)
    (low, high), _ = bootstrap(np.stack([[sums, -sums]]), loss[None], first=0, draws=1000)
    assert low == pytest.approx(-high[::-1])
    assert low[0] < spearman(sums, loss) < high[0]


def test_what_the_values_know_is_not_judged_on(run, fork, tmp_path, monkeypatch):
    """Validation windows apart from those of ghost; the random arm; runs that cannot be done again."""
    config, _, steps = read_run(run)
    own, known = validation_windows(run, config, '', 10 ** 9, []), known_windows(run)
    assert len(known) == 4 and len(own[1]) == own[0][2] - 32
    val, offsets = validation_windows(run, config, '', 10 ** 9, known)
    covered = {token for offset in known.tolist() for token in range(offset, offset + 33)}
    wanted = [at for at in range(val[2] - 32) if covered.isdisjoint(range(at, at + 33))]
    assert offsets.tolist() == wanted
    few = validation_windows(run, config, config['dataset'], 8, known)[1]       # the same val.bin by its name
    assert len(few) == 8 and set(few.tolist()) <= set(wanted)
    with pytest.raises(ValueError, match='--val=DATASET'):
        validation_windows(run, config, '', 8, np.arange(0, val[2], 33))
    # prepared anew since; and a copy of what was there before, by another name
    shutil.copytree(config['dataset'], tmp_path / 'before')
    shutil.copytree(config['dataset'], tmp_path / 'anew')
    np.roll(np.fromfile(tmp_path / 'anew' / 'val.bin', '<u2'), 13).tofile(tmp_path / 'anew' / 'val.bin')
    changed = {**config, 'ghost_val_dataset': str(tmp_path / 'anew')}
    with pytest.raises(ValueError, match='prepared anew since the run'):
        validation_windows(run, changed, '', 8, known)
    assert validation_windows(run, changed, str(tmp_path / 'before'), 10 ** 9, known)[1].tolist() == wanted
    # a run that went on with another validation batch knows both
    shutil.copytree(run / 'grad_dotprods', tmp_path / 'other' / 'grad_dotprods')
    X = torch.zeros(2, 32, dtype=torch.int64)
    for _ in range(2):
        checkpoint.write_valset(tmp_path / 'other', np.array([5, 7]), X, X, step=20)
    assert known_windows(tmp_path / 'other').tolist() == sorted({5, 7, *known.tolist()})

    seen = []
    monkeypatch.setattr(retrain, 'train', lambda *args: seen.append(args) or (None, [1.0]))
    monkeypatch.setattr(retrain, 'validate', lambda model, config, windows: len(windows))
    for seed in (5, 6):
        assert retrain.do(run, 'random 100', seed, val, few) == (8, [1.0])
    tokens, windows = tokens_of(config['dataset']), []
    for _, _, left, _, seed, half in seen:
        assert len(left) == len(tokens) - 100 * 32 and half is None
        whole = [tuple(tokens[at:at + 32]) for at in range(0, len(tokens) - 32, 32)]
        rest = iter(whole)
        assert all(tuple(left[at:at + 32]) in rest for at in range(0, len(left) - 32, 32))      # in their order
        windows.append(left.tobytes())
    assert windows[0] != windows[1]

    keys = [retrain.key_of(run, 'all', config, some, val, at) for some, at in
            ((steps, few), (steps, few), (steps + 1, few), (steps, offsets))]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert retrain.far_from_log(tmp_path, [1.0]) is None
    (tmp_path / 'log.jsonl').write_text('{"iter": 0, "loss": null}\n{"iter": 1, "loss": 2.0}\n{"iter": 2, "lo')
    assert retrain.far_from_log(tmp_path, [1.0]) is None and retrain.far_from_log(tmp_path, [1.0, 2.5]) == 0.5

    saved = (run / 'config.json').read_text()
    (run / 'config.json').write_text(json.dumps({**json.loads(saved), 'world_size': 2}))
    with pytest.raises(ValueError, match='dropout=0.1 on 2 processes'):
        read_run(run)
    (run / 'config.json').write_text(saved)
    whole = retrain.read_checkpoint(str(run))
    monkeypatch.setattr(retrain, 'read_checkpoint', lambda _: {**whole, 'config': {**config, 'device': 'cuda:0'}})
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(ValueError, match='device=cuda:0'):
        read_run(run)


def test_a_run_that_is_not_the_same_again_is_told_beside_the_table(run, monkeypatch, capsys):
    config, _, steps = read_run(run)
    for gap, told in ((1e-7, None), (0.03, 'up to 3.0e-02 away'), (float('nan'), 'up to nan away'), (None, 'no loss')):
        monkeypatch.setattr(retrain, 'do_all', lambda _, tasks, *__: {
            task: dict(loss=2 + task[1] / 10, gap=gap) for task in tasks})
        retrain.score(run, config, steps, 4, 8, '', 1)
        out = capsys.readouterr().out
        assert ('WARNING' in out) == (told is not None) and (told or '') in out
    with pytest.raises(SystemExit):
        retrain.score(run, {**config, 'gradient_accumulation_steps': 1, 'batch_size': 1}, steps, 4, 8, '', 1)
    assert 'one window a step' in capsys.readouterr().err
    with pytest.raises(SystemExit):     # as of a run that goes on, or was killed: values beyond its newest checkpoint
        retrain.score(run, config, steps - 1, 4, 8, '', 1)
    assert 'must be of the same steps' in capsys.readouterr().err
    whole = retrain.read_checkpoint(str(run))
    monkeypatch.setattr(retrain, 'read_checkpoint', lambda _: {**whole, 'iter_num': 0})
    with pytest.raises(ValueError, match='not taken a step'):
        read_run(run)
