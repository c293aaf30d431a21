"""scripts/leave_one_out.py: effect against central differences in float64; its step and its dots against train.py's."""
import csv
import os
import shutil
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import ROOT, ckpt_of
from safetensors.torch import load_file

sys.path.insert(0, ROOT)
from model import GPT, GPTConfig  # noqa: E402
from scripts.export import write_sharded  # noqa: E402
from scripts.leave_one_out import clip, effect_vector, gradient_of, loss_of, measure, put, step  # noqa: E402
from weights import read_checkpoint  # noqa: E402

SCRIPT = os.path.join(ROOT, 'scripts', 'leave_one_out.py')
CONFIG = dict(beta1=0.9, beta2=0.95, weight_decay=0.1, learning_rate=0.01, min_lr=0.01, decay_lr=False, warmup_iters=0,
              lr_decay_iters=1, scale_lr=False, gradient_accumulation_steps=1)
needs_muon = pytest.mark.skipif(find_spec('muon') is None, reason='no muon.py')


@pytest.mark.parametrize('grad_clip', [0.05, 0.0])
@pytest.mark.parametrize('muon', [False, pytest.param(True, marks=needs_muon)])
def test_effect_against_central_differences(grad_clip, muon):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=6, vocab_size=11, gelu='none')).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    X, windows = torch.randint(0, 9, (4, 7)), torch.randint(0, 11, (3, 7))      # tokens 9 and 10 are never seen
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: dict(exp_avg=0.01 * torch.randn_like(w), exp_avg_sq=1e-4 * torch.rand_like(w), step=torch.tensor(7.))
             for name, w in weights.items()}
    state['transformer.wte.weight']['exp_avg'][10] = state['transformer.wte.weight']['exp_avg_sq'][10] = 0
    if muon:
        for name, w in weights.items():
            if w.dim() == 2 and '.h.' in name:
                state[name] = dict(momentum_buffer=0.01 * torch.randn_like(w))
    config = {**CONFIG, 'grad_clip': grad_clip}
    per_sample = [gradient_of(model, X[i:i + 1]) for i in range(4)]

    def gradient(i, change):    # of the mean loss of the 4, with the weight of sample i changed
        return {name: sum(g[name] for g in per_sample) / 4 + change * per_sample[i][name] / 4 for name in weights}

    def loss_with(i, change):
        put(model, step(weights, clip(gradient(i, change), grad_clip)[0], state, 0.01, config)[0])
        return loss_of(model, windows)

    loss_with(0, 0.0)
    assert (clip(gradient(0, 0.0), grad_clip)[1] < 1) == (grad_clip > 0)
    u = effect_vector(weights, gradient(0, 0.0), state, 0.01, config, gradient_of(model, windows))
    for i in range(4):
        effect = sum((per_sample[i][name] * u[name]).sum() for name in u).item() / 4
        difference = (loss_with(i, -1e-4) - loss_with(i, 1e-4)) / 2e-4
        assert abs(effect - difference) < 1e-7 * max(abs(effect), 1e-3), (i, effect, difference)
    # measure() puts the same together, and leaves the model as it was
    put(model, weights)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_before = {name: {key: tensor.clone() for key, tensor in s.items()} for name, s in state.items()}
    _, with_all, truth, values = measure(model, state, 7, lambda h: X, windows, 4, [1], config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, state_before[name][key]) for name, s in state.items() for key, tensor in s.items())
    assert abs(with_all[0] - loss_with(0, 0.0)) < 1e-14
    assert abs(truth[3, 0] - (loss_with(3, -1.0) - with_all[0])) < 1e-14
    assert abs(values[3, 2] - effect) < 1e-15


OPTIONS = ['--out_dir=run', '--use_ghost=True', '--ghost_save_interval=1', '--data_order=epoch', '--grad_clip=0.5']


def same_step(folder):
    """Whether step() goes from the checkpoint in folder/before to the one in folder/run, one step of train.py later."""
    checkpoint, after = ckpt_of(folder / 'before'), ckpt_of(folder / 'run')
    scored = load_file(folder / 'run' / 'grad_dotprods' / f'iter_{after["iter_num"]:06d}.safetensors')
    model = GPT(GPTConfig(**checkpoint['model_args']))
    model.load_state_dict(checkpoint['model'])
    tokens = np.fromfile(os.path.join(checkpoint['config']['dataset'], 'train.bin'), '<u2').astype(np.int64)
    batch = torch.from_numpy(np.stack([tokens[o:o + 33] for o in scored['offset'][0]]))
    weights, state = {name: p.detach() for name, p in model.named_parameters()}, checkpoint['optimizer']['state']
    mine, state = step(weights, clip(gradient_of(model, batch), 0.5)[0], state, scored['lr'].item(),
                       checkpoint['config'])
    assert max((mine[name] - after['model'][name]).abs().max() for name in mine) < 2e-6
    for name, s in after['optimizer']['state'].items():
        assert s.keys() == state[name].keys()
        for key, tensor in s.items():
            assert abs(state[name][key] - tensor).max() < 1e-5 * tensor.max(), (name, key)
    return state


@needs_muon
def test_step_of_muon_against_a_run(tmp_path, fork):
    fork(tmp_path, *OPTIONS, '--optimizer=muon', '--max_iters=3')
    shutil.copytree(tmp_path / 'run', tmp_path / 'before')
    fork(tmp_path, *OPTIONS, '--optimizer=muon', '--max_iters=4', '--init_from=resume')
    state = same_step(tmp_path)
    assert sum('momentum_buffer' in s for s in state.values()) == 8


def test_against_a_run(tmp_path, fork):
    """Its dots are those that train.py writes for the step, and its step gives train.py's next weights."""
    fork(tmp_path, *OPTIONS, '--max_iters=6')
    shutil.copytree(tmp_path / 'run', tmp_path / 'before')
    fork(tmp_path, *OPTIONS, '--max_iters=7', '--init_from=resume')
    done = fork(tmp_path, 'before', '--samples=5', '--horizon=1,3', script=SCRIPT, tiny_args=False)
    assert '5 of 8 samples' in done.out and len(done.out.splitlines()) == 6
    scored = load_file(tmp_path / 'run' / 'grad_dotprods' / 'iter_000007.safetensors')
    rows = list(csv.DictReader(open(tmp_path / 'before' / 'leave_one_out' / 'step6.csv', newline='')))
    assert [int(row['offset']) for row in rows] == scored['offset'][0, :5].tolist()
    values = (scored['lr'] * scored['clip_coef'] * scored['dot_product'][0, :5] / 8).tolist()
    np.testing.assert_allclose([float(row['dot']) for row in rows], values, rtol=3e-6)
    truth, effect = (np.array([float(row[name]) for row in rows]) for name in ('truth_1', 'effect'))
    assert np.corrcoef(truth, effect)[0, 1] > 0.95
    assert (tmp_path / 'before' / 'leave_one_out' / 'step6.png').is_file()

    same_step(tmp_path)
    valset = tmp_path / 'run' / 'grad_dotprods' / 'valset.safetensors'
    valset.write_bytes(valset.read_bytes()[:-1])
    for args, what in ((['run/log.jsonl'], 'log.jsonl'), (['before', '--horizon=0'], '--horizon'),
                       (['before', '--windows=0'], '--windows=0'), (['before', '--out='], '--out'),
                       (['run'], 'valset.safetensors: torn')):
        assert what in fork(tmp_path, *args, script=SCRIPT, tiny_args=False, rc=None).err
    valset.rename(tmp_path / 'valset')      # what can't be read is not passed over for other windows
    valset.symlink_to('nowhere')
    assert '(a link that leads nowhere); --win' in fork(tmp_path, 'run', script=SCRIPT, tiny_args=False, rc=2)
    valset.parent.rename(tmp_path / 'ghost')
    valset.parent.symlink_to('nowhere')
    assert 'grad_dotprods: a link that leads now' in fork(tmp_path, 'run', script=SCRIPT, tiny_args=False, rc=1).err
    valset.parent.unlink(), (tmp_path / 'ghost').rename(valset.parent), (tmp_path / 'valset').replace(valset)
    inside = tmp_path / 'run' / 'ckpt_dcp'      # from there, a checkpoint's name alone leads to its run too
    whole = read_checkpoint(str(tmp_path / 'run'))
    (inside / 'step_7').mkdir(parents=True)
    write_sharded(whole, inside / 'step_7')
    assert 'valset.safetensors: torn' in fork(inside, 'step_7', script=SCRIPT, tiny_args=False, rc=2)
    fork(tmp_path, '--out_dir=two', '--max_iters=1', '--gradient_accumulation_steps=1', '--batch_size=2')
    assert 'a step has 2 samples' in fork(tmp_path, 'two', script=SCRIPT, tiny_args=False, rc=2)
    assert 'takes one process' in fork(tmp_path, 'before', nproc=1, script=SCRIPT, tiny_args=False, rc=2)
    last = ckpt_of(tmp_path / 'two')
    last['config'].update(batch_size=4, min_lr=0.0, lr_decay_iters=1, warmup_iters=0)
    torch.save(last, tmp_path / 'two' / 'ckpt.pt')
    assert 'next step, 1, is 0' in fork(tmp_path, 'two', script=SCRIPT, tiny_args=False, rc=2)
    assert not any((tmp_path / name / 'leave_one_out').exists() for name in ('run', 'two'))
    assert 'device=cpu:x: expected' in fork(tmp_path, 'two', '--device=cpu:x', script=SCRIPT, tiny_args=False, rc=2)
