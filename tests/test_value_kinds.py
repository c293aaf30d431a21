"""scripts/value_kinds.py: its stacked models, steps and values against model.py, torch's AdamW and differences."""
import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ENV, ROOT

from data.bins import find_bin
from model import GPT, GPTConfig
from scripts import value_kinds as vk
from scripts.common import spearman

SCRIPT = os.path.join(ROOT, 'scripts', 'value_kinds.py')
NAMES = {'attn': 'attn.c_attn', 'attn.proj': 'attn.c_proj', 'fc': 'mlp.c_fc', 'fc.proj': 'mlp.c_proj'}


@pytest.fixture(scope='module')
def job(tiny):
    """Settings, tokens of train, tokens of val."""
    args = SimpleNamespace(dataset=str(tiny), size='tiny', device='cpu', seeds=2, steps=2, visits=1, windows=64,
                           garbled=0.5, learning_rate=0.02, at_once=3)
    return args, *vk.read_data(args)


def model_of(flat, args):
    """model.py's GPT with the weights of one model (P,)."""
    layers, heads, width = vk.SIZES[args.size]
    model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=vk.T, vocab_size=args.vocab,
                          bias=False)).to(flat.dtype)
    with torch.no_grad():
        for name, p in vk.split(flat[None], args).items():
            number, _, rest = name.partition('.')
            ours, p = f'{name}.weight', p[0]
            if number.isdecimal():
                ours = f'h.{number}.{NAMES.get(rest, rest)}.weight'
                p = p if rest.startswith('ln') else p.T
            model.get_parameter(f'transformer.{ours}').copy_(p)
    return model


def gradient_of(model, windows, args):
    """The gradient (P,) of the mean loss over windows, in the script's order."""
    model.zero_grad()
    model(windows[:, :-1], windows[:, 1:]).mean().backward()
    found = []
    for name in vk.shapes(args):
        number, _, rest = name.partition('.')
        if number.isdecimal():
            g = model.get_parameter(f'transformer.h.{number}.{NAMES.get(rest, rest)}.weight').grad
            g = g if rest.startswith('ln') else g.T
        else:
            g = model.get_parameter(f'transformer.{name}.weight').grad
        found.append(g.flatten())
    return torch.cat(found)


def close(a, b, tolerance):
    return (torch.as_tensor(a) - torch.as_tensor(b)).abs().max() <= tolerance * torch.as_tensor(b).abs().max()


def test_stacked_models_are_model_py(job):
    args, train, _ = job
    flat = torch.stack([vk.initial(args, seed) for seed in (0, 1)]).double()
    flat += 0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    windows = train[:2 * 3 * (vk.T + 1)].view(2, 3, vk.T + 1)
    losses = vk.losses(vk.split(flat, args), windows, args.size)
    summed = vk.gradients(flat, windows, args)
    per_sample = vk.gradients(flat.repeat_interleave(3, 0), windows.view(6, 1, -1), args).view(2, 3, -1)
    for one, its, loss, total, each in zip(flat, windows, losses, summed, per_sample):
        model = model_of(one, args)
        assert close(loss, model(its[:, :-1], its[:, 1:]).detach(), 1e-14)
        assert close(total, 3 * gradient_of(model, its, args), 1e-14)
        for window, g in zip(its, each):
            assert close(g, gradient_of(model, window[None], args), 1e-14)


@pytest.mark.parametrize('limit', [1e-2, 1e9])
def test_effect_and_factor_against_central_differences(job, monkeypatch, limit):
    args, train, val = job
    monkeypatch.setattr(vk, 'CLIP', limit)
    generator, lr, t = torch.Generator().manual_seed(1), 0.01, 6
    flat = vk.initial(args, 0)[None].double()
    mean, square = (0.01 * torch.randn(2, *flat.shape, generator=generator)).double()
    square = square ** 2 + 1e-6
    per_sample = vk.gradients(flat.expand(3, -1).contiguous(), train[:195].view(3, 1, 65), args)
    windows, decay = val[:130].view(1, 2, 65), torch.full_like(flat[0], 0.1)

    def after(weights):     # of the samples
        gradient = (torch.tensor(weights).double() @ per_sample)[None] / 3
        found = vk.adamw(flat, vk.clip(gradient) * gradient, mean, square, t, lr, decay)
        return gradient, *found, vk.losses(vk.split(found[0], args), windows, args.size).mean().item()

    gradient, moved, mean_after, square_after, _ = after([1, 1, 1])
    clip_coef = vk.clip(gradient)
    assert (clip_coef < 1).item() == (limit < 1)
    u = vk.effect_vector(gradient, mean_after, square_after, t, vk.gradients(moved, windows, args) / 2)
    effects = lr * clip_coef.item() * (per_sample @ u[0]) / 3
    for i, effect in enumerate(effects):
        low, high = ([1 + change if j == i else 1 for j in range(3)] for change in (-1e-3, 1e-3))
        difference = (after(low)[-1] - after(high)[-1]) / 2e-3
        assert effect.item() == pytest.approx(difference, rel=1e-4, abs=1e-9)
    # P: how the move follows the gradient while the square hardly does
    monkeypatch.setattr(vk, 'BETA2', 1 - 1e-12)
    square = square * 1e-12
    low, high = (vk.adamw(flat, change * gradient, mean, square, t, lr, 0 * decay)[0] for change in (-1e-6, 1e-6))
    assert close((low - high) / 2e-6, lr * vk.factor(square, t) * gradient, 1e-8)


def adam(model, args):
    return torch.optim.AdamW(model.param_groups(vk.DECAY), lr=args.learning_rate, betas=(vk.BETA1, vk.BETA2))


def step(model, optimizer, t, args):
    factor = torch.nn.utils.clip_grad_norm_(model.parameters(), vk.CLIP)
    optimizer.param_groups[0]['lr'] = optimizer.param_groups[1]['lr'] = vk.lr_of(args, t)
    optimizer.step()
    return min(1, vk.CLIP / (factor.item() + 1e-6))


def test_values_by_hand(job, monkeypatch):
    """The second run's, with torch's AdamW, one gradient at a time; the kinds by their formulas."""
    args, train, val = job
    monkeypatch.setattr(vk, 'CLIP', 0.5)
    values, flat = vk.values_of_runs(args, train, val)
    windows, order = vk.windows_of(args, train, 1)[0], vk.order_of(args, 1)
    model = model_of(vk.initial(args, 1), args)
    optimizer, generator = adam(model, args), torch.Generator().manual_seed(3001)
    fixed, rest = (torch.randint(len(val) - 65, (256,), generator=generator) for _ in range(2))
    wanted, square, average, average_P = torch.zeros(6, 64), 0, None, None
    names = ['dot', 'dot, averaged 0.9', 'update', 'update of average 0.9', 'average of update 0.9', 'update half-way']

    def validation(at):
        return gradient_of(model, val[at[:, None] + torch.arange(65)], args)

    for t in range(2):
        G, before = validation(rest[:32]), validation(fixed)
        each = torch.stack([gradient_of(model, windows[i][None], args) for i in order[t]])
        lr, gradient = vk.lr_of(args, t), gradient_of(model, windows[order[t]], args)
        coef = step(model, optimizer, t, args)

        def P(square):
            return 0.1 / (1 - 0.9 ** (t + 1)) / ((square / (1 - 0.99 ** (t + 1))) ** 0.5 + 1e-8)
        if_next = 0.99 * square + 0.01 * G ** 2
        square = 0.99 * square + 0.01 * (coef * gradient) ** 2
        average = G if t == 0 else 0.9 * average + 0.1 * G
        average_P = P(if_next) * G if t == 0 else 0.9 * average_P + 0.1 * P(if_next) * G
        half_way = P(square) * (before + validation(fixed)) / 2
        rest = torch.randint(len(val) - 65, (256,), generator=generator)
        for row, u in zip(wanted, (G, average, P(if_next) * G, P(if_next) * average, average_P, half_way)):
            row.index_add_(0, order[t], lr * coef / 32 * each @ u)
    assert coef < 1
    for name, row in zip(names, wanted):
        source = 'fixed 256' if name == 'update half-way' else 'anew 32'
        assert close(values[1, vk.KINDS.index((name, source))], row, 1e-3), name
    assert close(vk.evaluate(vk.split(flat[1:], args), val, args)[0], whole(model, val), 1e-6)


def whole(model, val):
    with torch.no_grad():
        return torch.cat([model(val[None, at:at + 64], val[None, at + 1:at + 65])
                          for at in range(0, len(val) - 65, 64)]).double()


def test_trainings_by_hand(job):
    """Each with its own windows, seed and kept windows, more than fit at once."""
    args, train, val = job
    keep = np.random.default_rng(0).random((4, 64)) < 0.5
    keep[3] = True
    tasks = [(0, 0, keep[0]), (1, 0, keep[1]), (0, 7, keep[2]), (1, 1, keep[3])]
    found = vk.train_all(args, train, val, tasks)
    for (run, seed, kept), losses in zip(tasks, found):
        windows, order = vk.windows_of(args, train, run)[0], vk.order_of(args, seed)
        model = model_of(vk.initial(args, seed), args)
        optimizer = adam(model, args)
        for t in range(2):
            gradient_of(model, windows[order[t][torch.from_numpy(kept)[order[t]]]], args)
            step(model, optimizer, t, args)
        assert close(losses, whole(model, val), 1e-6)
    assert 0 < abs(vk.train_all(args, train, val, tasks[:1], 1e-3)[0] - found[0]).max() < 0.1


def test_garbled(job):
    args, train, _ = job
    windows, garbled = vk.windows_of(args, train, 0)
    clean, _ = vk.windows_of(SimpleNamespace(**{**vars(args), 'garbled': 0.0}), train, 0)
    changed = (windows != clean).float().mean(1).numpy()
    assert changed[~garbled].max() == 0 and 0.3 < changed[garbled].mean() < 0.7 and 16 < garbled.sum() < 48


def test_what_is_dropped(job, monkeypatch, capsys):
    """The lowest fifth of each kind; the losses are told against the mean of the two random fifths."""
    args, train, _ = job
    values, seen = np.random.default_rng(0).random((2, len(vk.KINDS), 64)), []

    def train_all(args, train, val, tasks):
        seen.extend(tasks)
        return np.array([[run + kept[:32].sum() + seed] for run, seed, kept in tasks]).repeat(40, 1)
    monkeypatch.setattr(vk, 'train_all', train_all)
    monkeypatch.setattr(vk, 'random_windows', lambda *_: torch.zeros(2, 256, dtype=torch.long))
    rows = vk.drop(args, train, torch.zeros(40 * 64 + 2), values)     # 40 validation windows
    assert [row['kind'] for row in rows] == ['all', 'random', 'random again', *(kind for kind, _ in vk.DROP)]
    assert {(run, seed) for run, seed, _ in seen} == {(run, 100 + 10 * run + i) for run in (0, 1) for i in range(5)}
    for i, (run, _, kept) in enumerate(seen):
        if i % 8 == 0:
            assert kept.all()
        elif i % 8 > 2:
            value = values[run, vk.KINDS.index(vk.DROP[i % 8 - 3])]
            assert value[kept].min() > value[~kept].max()
        assert (~kept).sum() == (12 if i % 8 else 0)
    losses = np.array([kept[:32].sum() for _, _, kept in seen]).reshape(10, 8)
    minus = losses - losses[:, 1:3].mean(1, keepdims=True)
    for row, its in zip(rows, minus.T):
        for name in ('minus_random', 'minus_random_apart'):
            assert row[name] == pytest.approx([its.mean(), its.std(ddof=1) / 10 ** 0.5])


def test_the_command(job, tmp_path, fork):
    args, train, val = job
    options = [f'--dataset={args.dataset}', '--size=tiny', '--steps=1', '--visits=1', '--seeds=1', '--halves=5']
    done = subprocess.run([sys.executable, '-W', 'error', SCRIPT, *options, '--other_seed=4', '--garbled=0.3', '--drop',
                           '--at_once=40', '--out=rows.jsonl'], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()]
    assert Counter(row['what'] for row in rows) == {'auc': 38, 'LDS': 38, 'again': 2, 'LDS of the other seed': 38,
                                                    'drop': 8}
    assert all(row['job']['steps'] == 1 and row['job']['garbled'] == 0.3 for row in rows)
    # the LDS by hand
    again = SimpleNamespace(**{**vars(args), **rows[0]['job']})
    values, _ = vk.values_of_runs(again, train, val)
    kept = np.random.default_rng(5000).random((5, 32)) < 0.5
    real = vk.train_all(again, train, val, [(0, 0, half) for half in kept]).mean(1)
    row = rows[38 + vk.KINDS.index(('update', 'anew 8'))]
    own = values[0, vk.KINDS.index(('update', 'anew 8'))]
    assert row['lds'][0] == pytest.approx(spearman([own[~half].sum() for half in kept], real))
    dot = rows[38 + vk.FIRST]
    assert dot['minus_dot'] == [0, 0, 0]
    assert row['minus_dot'][0] == pytest.approx(row['lds'][0] - dot['lds'][0])
    assert row['low'] <= row['high'] and -1 <= row['low']
    by_name = {row['kind']: row for row in rows if row['what'] == 'drop'}
    random = [by_name[name]['loss'] for name in ('random', 'random again')]
    assert by_name['all']['minus_random'][0] == pytest.approx(by_name['all']['loss'] - np.mean(random))
    assert rows[0]['kind'] in done.stdout and 'other seed' in done.stdout
    for more, what in ((['--halves=3'], '--halves=3: must be at least 4'), (['--steps=5', '--visits=3'], '--visits=3'),
                       (['--steps=500'], 'windows of 64'), (['--dataset=nowhere'], 'nowhere'),
                       (['--out=no/rows.jsonl'], 'no/rows.jsonl'), (['--size=2M'], '--size'), (['--out='], 'empty'),
                       (['--visits=32'], '--visits=32'), (['--garbled=1e-9'], 'none or all')):
        failed = fork(tmp_path, *options, *more, script=SCRIPT, tiny_args=False, rc=None)
        assert what in failed.err and failed.err.count('\n') == 1 and any(failed.codes), failed


def test_read_data_wants_characters(job, tmp_path):
    (path, _, _), meta = find_bin(job[0].dataset, 'train')
    for name in ('train', 'val'):
        (tmp_path / f'{name}.bin').write_bytes(path.read_bytes())
    with pytest.raises(SystemExit):
        vk.read_data(SimpleNamespace(dataset=str(tmp_path), windows=4))
