"""Plain, DDP, FSDP2 and HSDP train the same model, whatever the options, and stay in step when something goes wrong."""
import os
import re

import pytest
import torch
from conftest import ckpt_of, log_of, record
from modes_helper import (
    FOUR,
    GHOST,
    MODES,
    QUICK,
    SMALL,
    TIED,
    bare_run,
    far,
    launch,
    long_run,
    read_dots,
    same,
    weights,
)

from model import GPT, GPTConfig


@pytest.fixture
def run(fork, tmp_path_factory):
    return lambda mode: long_run(fork, tmp_path_factory, mode)


@pytest.fixture
def bare(fork, tmp_path_factory):
    return lambda mode: bare_run(fork, tmp_path_factory, mode)


# ---- the same training -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('mode', FOUR[1:])
def test_every_mode_trains_as_plain(run, mode):
    """20 steps: accumulation, clipping (the norm is above grad_clip=0.5 throughout), weight decay."""
    (steps, evals), (steps1, evals1) = log_of(run(mode)), log_of(run('plain'))
    assert steps.keys() == steps1.keys() == set(range(20)) and evals.keys() == evals1.keys() == {0, 10, 20}
    worst = max(abs(steps[i][k] / steps1[i][k] - 1) for i in steps for k in ('loss', 'grad_norm'))
    worst_eval = max(abs(evals[i][k] / evals1[i][k] - 1) for i in evals for k in ('train_loss', 'val_loss'))
    distance = far(*(weights(run(m) / 'ckpt_dcp' / 'step_20') for m in (mode, 'plain')))
    print(f'{mode}: losses and norms {worst:.1e}, evaluations {worst_eval:.1e}, weights {distance:.1e}')
    record(mode, 'losses, norms', max(worst, worst_eval)), record(mode, 'weights', distance)
    assert min(s['grad_norm'] for s in steps1.values()) > 0.5
    assert worst < 2e-6 and worst_eval < 2e-6 and distance < 5e-5


def test_one_rank_of_fsdp_is_plain_bit_for_bit(bare, fork, tmp_path):
    fork(tmp_path, *SMALL, '--use_fsdp=True', '--max_iters=12', nproc=1)
    assert same(ckpt_of(tmp_path / 'out')['model'], ckpt_of(bare('plain'))['model'])


@pytest.mark.parametrize('mode', FOUR)
def test_same_seed_same_weights_and_what_each_rank_holds(mode, fork, tmp_path):
    """With learning rate 0 the weights stay those of the plain model of the same seed; the tied ones are one tensor."""
    args = '--n_embd=128', '--max_iters=1', '--learning_rate=0', '--min_lr=0', *QUICK
    out = launch(fork, tmp_path, mode, *args, after=TIED).out
    c = ckpt_of(tmp_path / 'out')
    torch.manual_seed(c['config']['seed'])
    assert same(c['model'], GPT(GPTConfig(**c['model_args'])).state_dict())
    count = int(re.search(r'([\d,]+) parameters', out)[1].replace(',', ''))
    shards = 2 if 'sdp' in mode else 1
    line = next(line for line in out.splitlines() if 'parameters' in line and 'DDP' in line)
    numbers = [float(x) for x in re.findall(r'(\d+\.\d+)', line)]
    unit = count * 4 / 2**20
    expected = [unit / shards, unit / shards, 2 * unit / shards, unit, unit, 2 * unit]
    assert numbers == pytest.approx(expected, rel=0.05, abs=0.06), line


COUNT_UNITS = """
import torch.distributed.fsdp as f
shard, units = f.fully_shard, []
def counting(modules, **options):
    units.append(len(modules) if isinstance(modules, list) else 0)
    return shard(modules, **options)
f.fully_shard = counting
"""


@pytest.mark.parametrize('least,units', [(0, [1, 1, 1]), (20000, [2, 1]), (10**9, [3])])
def test_grouping(fork, tmp_path, run, least, units):
    """A block of 32 dimensions has 12,352 parameters."""
    result = launch(
        fork,
        tmp_path,
        'fsdp2',
        f'--fsdp_min_num_params={least}',
        '--max_iters=2',
        *QUICK,
        before=COUNT_UNITS,
        after="print('units', units)",
    )
    assert f'units {units + [0]}' in result.out
    assert log_of(tmp_path / 'out')[0][1]['loss'] == pytest.approx(log_of(run('plain'))[0][1]['loss'], rel=2e-6)


@pytest.mark.parametrize(
    'mode,args',
    [
        ('ddp2', ['--fsdp_activation_checkpointing=full']),
        ('ddp2', ['--fsdp_activation_checkpointing=selective']),
        ('fsdp2', ['--fsdp_activation_checkpointing=full']),
        ('fsdp2', ['--fsdp_activation_checkpointing=selective', '--fsdp_reshard_after_forward=False']),
        ('fsdp4', ['--fsdp_cpu_offload=True']),
        ('hsdp4', ['--fsdp_cpu_offload=True', '--fsdp_activation_checkpointing=full']),
    ],
)
def test_options_change_nothing(fork, tmp_path, bare, mode, args):
    launch(fork, tmp_path, mode, '--max_iters=4', *args, *QUICK)
    a, b = log_of(tmp_path / 'out')[0], log_of(bare('plain'))[0]
    assert max(abs(a[i][k] / b[i][k] - 1) for i in a for k in ('loss', 'grad_norm')) < 2e-6


def test_checkpointing_recomputes(fork, tmp_path):
    """A block runs forward once a micro-batch without, twice with 'full'; 'selective' does not repeat the matmuls. The
    numbers stay what they are."""
    counts, steps = {}, {}
    for kind in ('False', 'full', 'selective'):
        before = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    n = {'addmm': 0, 'mm': 0, 'gelu': 0}
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.overloadpacket.__name__
        if name in self.n:
            self.n[name] += 1
        return f(*args, **(kwargs or {}))
"""
        before += '\ncount = Count(); count.__enter__()\n'
        result = fork(
            tmp_path,
            *SMALL,
            '--bias=True',
            '--max_iters=2',
            '--batch_size=4',
            '--gradient_accumulation_steps=1',
            *QUICK,
            f'--fsdp_activation_checkpointing={kind}',
            f'--out_dir={kind}',
            before=before,
            after="count.__exit__(None, None, None); print('COUNT', count.n['addmm'], count.n['gelu'])",
        )
        counts[kind] = [int(x) for x in re.search(r'COUNT (\d+) (\d+)', result.out).groups()]
        steps[kind] = log_of(tmp_path / kind)[0]
        for i, k in ((0, 'loss'), (0, 'grad_norm'), (1, 'loss'), (1, 'grad_norm')):
            assert abs(steps[kind][i][k] / steps['False'][i][k] - 1) < 2e-6
    (matmuls, gelus), full, selective = counts['False'], counts['full'], counts['selective']
    again = 3 * 2  # blocks x micro-batches
    assert full[1] == gelus + again and selective[1] == gelus + again
    assert full[0] == matmuls + 4 * again - again or full[0] == matmuls + 4 * again  # the last one may be skipped
    assert selective[0] == matmuls


@pytest.mark.parametrize(
    'mode,dtype,tolerance',
    [
        ('plain', 'bfloat16', 1e-3),
        ('plain', 'float16', 1e-3),
        ('ddp2', 'bfloat16', 1e-3),
        ('fsdp2', 'bfloat16', 1e-3),
        ('hsdp4', 'float16', 1e-3),
    ],
)
def test_half_precision(fork, tmp_path, bare, mode, dtype, tolerance):
    launch(fork, tmp_path, mode, '--max_iters=4', f'--dtype={dtype}', *QUICK)
    a, b = log_of(tmp_path / 'out')[0], log_of(bare('plain'))[0]
    errors = [abs(a[i][k] / b[i][k] - 1) for i in a for k in ('loss', 'grad_norm')]
    assert 1e-7 < max(errors) < tolerance
    assert all(v.dtype == torch.float32 for v in ckpt_of(tmp_path / 'out')['model'].values())


AT_SAVING = """
import ctypes, psutil, torch.distributed.checkpoint.state_dict as sd
ctypes.CDLL(None).mallopt(-3, 65536)    # M_MMAP_THRESHOLD: a tensor that is freed goes back to the system
get, at_saving = sd.get_model_state_dict, []
def recorded(*args, **kwargs):
    at_saving.append(psutil.Process().memory_info().rss)
    with open('/proc/self/clear_refs', 'w') as f:
        f.write('5')        # the peak counts from here
    return get(*args, **kwargs)
sd.get_model_state_dict = recorded
"""
GREW = """
with open('/proc/self/status') as f:
    peak = next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM'))
print('GREW', g['rank'], peak - at_saving[0], flush=True)
"""


@pytest.mark.skipif(not os.access('/proc/self/clear_refs', os.W_OK), reason='needs /proc')
def test_gathering_takes_one_copy_of_host_memory(fork, tmp_path):
    """While FSDP saves one file, rank 0 takes as much memory as the file has bytes, and the other rank none of it."""
    args = '--n_embd=512', '--n_layer=4', '--max_iters=1', '--gradient_accumulation_steps=2', *QUICK
    out = launch(fork, tmp_path, 'fsdp2', *args, before=AT_SAVING, after=GREW).out
    size = os.path.getsize(tmp_path / 'out' / 'ckpt.pt')
    grew = [int(re.search(rf'GREW {rank} (\d+)', out)[1]) / size for rank in (0, 1)]
    assert 0.9 < grew[0] < 1.1 and grew[1] < 0.1


# ---- a step that is not finite ---------------------------------------------------------------------------------------
INF = """
import os, torch
clip, calls, here = torch.nn.utils.clip_grad_norm_, 0, os.environ.get('RANK', '0') == {rank!r}
def clip_with_inf(parameters, *args, **kwargs):
    global calls
    parameters, calls = list(parameters), calls + 1
    if calls == 3 and here:
        g = parameters[0].grad
        (g.to_local() if hasattr(g, 'to_local') else g)[0] = torch.inf
    return clip(parameters, *args, **kwargs)
torch.nn.utils.clip_grad_norm_ = clip_with_inf
"""
INF_LOSS = """
import os, torch, model
forward, clip = model.GPT.forward, torch.nn.utils.clip_grad_norm_
steps, here = 0, os.environ.get('RANK', '0') == {rank!r}
def counting_clip(*args, **kwargs):
    global steps
    steps += 1
    return clip(*args, **kwargs)
def forward_with_inf(self, *args, **kwargs):
    global here
    inject = here and self.training and steps == 2
    here = here and not inject      # in the first micro-batch only
    return forward(self, *args, **kwargs) * (torch.inf if inject else 1)
torch.nn.utils.clip_grad_norm_, model.GPT.forward = counting_clip, forward_with_inf
"""


@pytest.mark.parametrize('mode,inject', [('hsdp4', 'gradient'), ('fsdp2', 'loss')])
def test_inf_on_one_rank_makes_all_skip(fork, tmp_path, mode, inject):
    """Of plain training and DDP test_train.py and test_ddp.py say the same."""
    nproc = MODES[mode][0] or 1
    # of the third step: in one rank's gradient, or in the loss of one of its micro-batches
    before = (INF if inject == 'gradient' else INF_LOSS).format(rank=str(nproc - 1))
    args = ['--max_iters=5', '--check_sync_interval=1', *QUICK]
    launch(fork, tmp_path, mode, *args, '--on_nonfinite=skip', '--out_dir=a', before=before)
    steps, c = log_of(tmp_path / 'a')[0], ckpt_of(tmp_path / 'a')
    assert steps.keys() == set(range(5))
    finite = [all(abs(steps[i][k] or float('inf')) < 1e9 for k in ('loss', 'grad_norm')) for i in range(5)]
    assert finite == [True, True, False, True, True]
    assert {float(s['step']) for s in c['optimizer']['state'].values()} == {4.0}
    assert all(w.isfinite().all() for w in c['model'].values())
    result = launch(fork, tmp_path, mode, *args, '--out_dir=b', before=before, rc=1, patient=True)
    assert result.codes == [1] * nproc
    assert 'step 2' in result.out + result.err and 'skip' in result.out + result.err
    assert not (tmp_path / 'b' / 'ckpt.pt').exists()


OVERFLOW = """
import os, torch
step, calls, here = torch.amp.GradScaler.unscale_, 0, os.environ.get('RANK', '0') == {rank!r}
def overflow(self, optimizer):
    global calls
    calls += 1
    if calls == 3 and here:
        g = optimizer.param_groups[0]['params'][0].grad
        (g.to_local() if hasattr(g, 'to_local') else g)[0] = torch.inf
    return step(self, optimizer)
torch.amp.GradScaler.unscale_ = overflow
"""


@pytest.mark.parametrize('mode,then', [('ddp2', 'fsdp2'), ('hsdp4', 'plain')])
def test_loss_scale_is_the_same_on_every_rank(fork, tmp_path, mode, then):
    """An overflow that only one rank sees: all skip, all halve the scale, and go on in step, in another mode too."""
    nproc = MODES[mode][0]
    result = launch(
        fork,
        tmp_path,
        mode,
        '--dtype=float16',
        '--max_iters=5',
        '--check_sync_interval=1',
        *QUICK,
        before=OVERFLOW.format(rank=str(nproc - 1)),
        after="print('scale', g['scaler'].get_scale())",
    )
    assert re.findall(r'scale ([\d.]+)$', result.out, re.M) == ['32768.0'] * nproc
    c = ckpt_of(tmp_path / 'out')
    assert {float(s['step']) for s in c['optimizer']['state'].values()} == {4.0}
    assert c['scaler']['scale'] == 32768.0
    result = launch(
        fork,
        tmp_path,
        then,
        '--dtype=float16',
        '--max_iters=6',
        '--init_from=resume',
        *QUICK,
        after="print('scale', g['scaler'].get_scale())",
    )
    assert 'scale 32768.0' in result.out


def test_replicas_that_differ_are_found(fork, tmp_path):
    """In DDP: test_ddp.py."""
    before = INF.format(rank='1').replace('= torch.inf', '+= 0.1').replace('calls == 3', 'calls == 2')
    args = '--max_iters=5', '--check_sync_interval=1', *QUICK
    result = launch(fork, tmp_path, 'hsdp4', *args, before=before, rc=1, patient=True)
    assert 'step 2' in result.out + result.err and 'transformer.wte.weight' in result.out + result.err
    assert result.codes == [1] * 4


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    'nproc,args,named',
    [
        (2, ['--use_fsdp=True', '--fsdp_replicate=3'], 'fsdp_replicate=3'),
        (2, ['--use_fsdp=True', '--fsdp_replicate=0'], 'fsdp_replicate=0'),
        (None, ['--fsdp_activation_checkpointing=some'], 'fsdp_activation_checkpointing'),
        (None, ['--fsdp_min_num_params=-1'], 'fsdp_min_num_params=-1'),
        (None, ['--keep_checkpoints=-1'], 'keep_checkpoints=-1'),
    ],
)
def test_refused(fork, tmp_path, nproc, args, named):
    """More of them: test_wrong_settings_are_named of test_train.py, and test_ddp.py."""
    assert named in fork(tmp_path, *args, nproc=nproc, rc=2, patient=True)


# ---- compile: 20 s each, so last -------------------------------------------------------------------------------------
@pytest.mark.parametrize('mode', ['plain', 'fsdp2'])
def test_compile(fork, tmp_path, mode):
    """With ghost, the same numbers, keys and, in its dots, values."""
    launch(
        fork,
        tmp_path,
        mode,
        '--n_layer=1',
        *GHOST,
        '--max_iters=3',
        '--compile=True',
        *QUICK,
        '--out_dir=a',
        warn=False,
    )
    launch(fork, tmp_path, mode, '--n_layer=1', *GHOST, '--max_iters=3', *QUICK, '--out_dir=b')
    (a, _), (b, _) = log_of(tmp_path / 'a'), log_of(tmp_path / 'b')
    assert max(abs(a[i][k] / b[i][k] - 1) for i in range(3) for k in ('loss', 'grad_norm')) < 2e-6
    assert ckpt_of(tmp_path / 'a')['model'].keys() == ckpt_of(tmp_path / 'b')['model'].keys()
    a, b = (read_dots(tmp_path / x)['dot_product'][0] for x in 'ab')
    assert (a - b).abs().max() < 1e-6 * b.abs().max()
