"""Plain, DDP, FSDP2 and HSDP train the same model, go on from each other's checkpoints, and survive what kills them."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ENV, TINY, TRAIN, ckpt_of, free_port, full_disk, log_of, record
from modes_helper import (
    GHOST,
    MODES,
    SHARDED,
    SMALL,
    bare_run,
    far,
    launch,
    long_run,
    model_of,
    read_dcp,
    read_dots,
    read_full,
    same,
    weights,
)

FORMATS = ('full', 'sharded')
QUICK = ['--eval_interval=100', '--eval_iters=1']


@pytest.fixture
def run(fork, tmp_path_factory):
    return lambda mode: long_run(fork, tmp_path_factory, mode)


@pytest.fixture
def bare(fork, tmp_path_factory):
    return lambda mode: bare_run(fork, tmp_path_factory, mode)


# ---- the same training -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('mode', [m for m in MODES if m != 'plain'])
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


@pytest.mark.parametrize('mode', MODES)
def test_same_seed_same_weights(run, mode, fork, tmp_path):
    """With learning rate 0 the weights stay those of the plain model of the same seed."""
    launch(fork, tmp_path, mode, '--max_iters=1', '--learning_rate=0', '--min_lr=0', *QUICK)
    model = ckpt_of(tmp_path / 'out')['model']
    assert same(model, model_of(run('plain'), dtype=torch.float32).state_dict())


def test_one_rank_of_fsdp_is_plain_bit_for_bit(bare, fork, tmp_path):
    fork(tmp_path, *SMALL, '--use_fsdp=True', '--max_iters=12', nproc=1)
    assert same(ckpt_of(tmp_path / 'out')['model'], ckpt_of(bare('plain'))['model'])


@pytest.mark.parametrize('mode', MODES)
def test_what_each_rank_holds(bare, mode, fork, tmp_path):
    out = launch(fork, tmp_path, mode, '--n_embd=128', '--max_iters=0', *QUICK).out
    count = int(re.search(r'([\d,]+) parameters', out)[1].replace(',', ''))
    shards = 1 if mode in ('plain', 'ddp2', 'ddp4') else 4 if mode == 'fsdp4' else 2
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
        ('plain', ['--fsdp_activation_checkpointing=full']),
        ('ddp2', ['--fsdp_activation_checkpointing=full']),
        ('fsdp2', ['--fsdp_activation_checkpointing=full']),
        ('plain', ['--fsdp_activation_checkpointing=selective']),
        ('ddp2', ['--fsdp_activation_checkpointing=selective']),
        ('fsdp2', ['--fsdp_activation_checkpointing=selective']),
        ('fsdp2', ['--fsdp_cpu_offload=True']),
        ('hsdp4', ['--fsdp_cpu_offload=True', '--fsdp_activation_checkpointing=full']),
        ('fsdp2', ['--fsdp_reshard_after_forward=False']),
    ],
)
def test_options_change_nothing(fork, tmp_path, bare, mode, args):
    launch(fork, tmp_path, mode, '--max_iters=4', *args, *QUICK)
    a, b = log_of(tmp_path / 'out')[0], log_of(bare('plain'))[0]
    assert max(abs(a[i][k] / b[i][k] - 1) for i in a for k in ('loss', 'grad_norm')) < 2e-6


def test_checkpointing_recomputes(fork, tmp_path):
    """A block runs forward once a micro-batch without, twice with 'full'; 'selective' does not repeat the matmuls."""
    counts = {}
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
            '--max_iters=1',
            '--batch_size=4',
            '--gradient_accumulation_steps=2',
            *QUICK,
            f'--fsdp_activation_checkpointing={kind}',
            f'--out_dir={kind}',
            before=before,
            after="count.__exit__(None, None, None); print('COUNT', count.n['addmm'], count.n['gelu'])",
        )
        counts[kind] = [int(x) for x in re.search(r'COUNT (\d+) (\d+)', result.out).groups()]
    (matmuls, gelus), full, selective = counts['False'], counts['full'], counts['selective']
    again = 3 * 2  # blocks x micro-batches
    assert full[1] == gelus + again and selective[1] == gelus + again
    assert full[0] == matmuls + 4 * again - again or full[0] == matmuls + 4 * again  # the last one may be skipped
    assert selective[0] == matmuls


@pytest.mark.parametrize('mode', ['plain', 'ddp2', 'fsdp2', 'hsdp4'])
@pytest.mark.parametrize('dtype,tolerance', [('bfloat16', 1e-3), ('float16', 1e-3)])
def test_half_precision(fork, tmp_path, bare, mode, dtype, tolerance):
    launch(fork, tmp_path, mode, '--max_iters=4', f'--dtype={dtype}', *QUICK)
    a, b = log_of(tmp_path / 'out')[0], log_of(bare('plain'))[0]
    errors = [abs(a[i][k] / b[i][k] - 1) for i in a for k in ('loss', 'grad_norm')]
    assert 1e-7 < max(errors) < tolerance
    assert all(v.dtype == torch.float32 for v in ckpt_of(tmp_path / 'out')['model'].values())


# ---- one checkpoint for every mode -----------------------------------------------------------------------------------
KEEP_LOADED = """
import os, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
watch = None
def whole(x):
    return x.full_tensor() if hasattr(x, 'full_tensor') else x
def hook(optimizer, args, kwargs):      # before the first step after loading, which itself takes one at rate 0
    global watch
    if watch and optimizer.param_groups[0]['lr'] > 0:
        path, watch = watch, None
        state = [[whole(p.detach()).clone(), *(whole(v).clone() for _, v in sorted(optimizer.state[p].items()))]
                 for g in optimizer.param_groups for p in g['params']]
        if os.environ.get('RANK', '0') == '0':
            torch.save(state, path)
register_optimizer_step_pre_hook(hook)
for port, watch, *more in {jobs!r}:
    os.environ['MASTER_PORT'] = port    # a fast rank must not find the store of the job before
    sys.argv = [*{argv!r}, *more]
    if watch != {jobs!r}[-1][1]:    # the last one is the run that this code precedes
        runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture(scope='session')
def resumed():
    return {}


def resume_all(fork, tiny, target, run, bare, factory, resumed):
    """Every checkpoint of step 12 continued in one mode: {(mode, format): folder with out/ and loaded.pt}."""
    if target not in resumed:
        nproc, flags = MODES[target]
        jobs, found, cwd = [], {}, factory.mktemp(target)
        for source in MODES:
            for form in FORMATS:
                folder = found[source, form] = cwd / f'{source}_{form}'
                if form == 'full':
                    shutil.copytree(bare(source), folder / 'out')
                else:
                    shutil.copytree(run(source) / 'ckpt_dcp' / 'step_12', folder / 'out' / 'ckpt_dcp' / 'step_12')
                # the same mode goes on to the end, another one for two steps; and saves in the other form
                jobs.append(
                    [
                        free_port(),
                        str(folder / 'loaded.pt'),
                        f'--out_dir={folder / "out"}',
                        f'--max_iters={20 if source == target else 16}',
                        f'--checkpoint_format={FORMATS[form == "full"]}',
                    ]
                )
        resumed[target] = found
        argv = [TRAIN, f'--dataset={tiny}', *TINY, *SMALL, *flags, *QUICK, '--init_from=resume']
        fork(
            cwd, *argv[1:], *jobs[-1][2:], nproc=nproc, before=KEEP_LOADED.format(jobs=jobs, argv=argv), tiny_args=False
        )
    return resumed[target]


def in_order(tensors):
    """A checkpoint's state as KEEP_LOADED lists it: matrices, then vectors, each with its optimizer state by key."""
    names = [k[6:] for k in tensors if k.startswith('model.')]
    return {
        n: [tensors[f'model.{n}'], *(tensors[f'optimizer.state.{n}.{k}'] for k in ('exp_avg', 'exp_avg_sq', 'step'))]
        for n in names
    }


@pytest.mark.parametrize('target', MODES)
@pytest.mark.parametrize('source', MODES)
@pytest.mark.parametrize('form', FORMATS)
def test_resume(fork, tiny, tmp_path_factory, run, bare, resumed, source, form, target):
    folder = resume_all(fork, tiny, target, run, bare, tmp_path_factory, resumed)[source, form]
    saved = in_order(
        read_full(bare(source) / 'ckpt.pt') if form == 'full' else read_dcp(run(source) / 'ckpt_dcp' / 'step_12')
    )
    names = [n for n, _ in model_of(run('plain')).named_parameters()]
    names = [n for n in names if saved[n][0].dim() == 2] + [n for n in names if saved[n][0].dim() == 1]
    loaded = torch.load(folder / 'loaded.pt', weights_only=True)
    assert len(loaded) == len(saved) == len(names)
    for name, tensors in zip(names, loaded):
        assert len(tensors) == 4 and all(torch.equal(a, b) for a, b in zip(tensors, saved[name])), name
    last = 20 if source == target else 16
    end = {
        k: v
        for k, v in (
            read_dcp(folder / 'out' / 'ckpt_dcp' / f'step_{last}')
            if form == 'full'
            else read_full(folder / 'out' / 'ckpt.pt')
        ).items()
        if k.startswith('model.')
    }
    unbroken = {f'model.{k}': v for k, v in weights(run(target) / 'ckpt_dcp' / f'step_{last}').items()}
    if source == target and (form == 'sharded' or same_training(run, bare, target)):
        assert same(end, unbroken)
    assert record(target, 'resumed weights', far(end, unbroken)) < 5e-5
    steps, whole = log_of(folder / 'out')[0], log_of(run(target))[0]
    assert max(abs(steps[i][k] / whole[i][k] - 1) for i in range(12, last) for k in ('loss', 'grad_norm')) < 5e-6


def same_training(run, bare, mode):
    """Whether the run with ghost and the one without are the same so far: then their continuations are."""
    a, b = read_full(bare(mode) / 'ckpt.pt'), read_dcp(run(mode) / 'ckpt_dcp' / 'step_12')
    assert same(a, b) or mode not in ('plain', 'ddp2', 'ddp4')
    return same(a, b)


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


@pytest.mark.parametrize('mode', MODES)
def test_one_file_looks_the_same_from_every_mode(run, bare, mode):
    def shape(x):
        if isinstance(x, dict):
            return {k: shape(v) for k, v in x.items()}
        return (tuple(x.shape), x.dtype) if hasattr(x, 'shape') else type(x)

    a, b = ckpt_of(bare(mode)), ckpt_of(bare('plain'))
    assert list(a['model']) == list(b['model']) == list(model_of(run('plain')).state_dict())
    assert shape(a) == shape(b)
    assert a['best_val_loss'] == pytest.approx(b['best_val_loss'], rel=2e-6)
    assert a['best_val_loss'] == min(e['val_loss'] for e in log_of(bare(mode))[1].values())
    stored = a['model']['transformer.wte.weight'], a['model']['lm_head.weight']
    assert stored[0].data_ptr() == stored[1].data_ptr()  # once
    assert (
        os.path.getsize(bare(mode) / 'ckpt.pt')
        < 1.2 * 12 * sum(v.numel() for k, v in a['model'].items() if k != 'lm_head.weight') + 50000
    )
    keys = set(read_dcp(run(mode) / 'ckpt_dcp' / 'step_12'))
    assert keys == set(read_full(bare(mode) / 'ckpt.pt'))
    assert not [k for k in keys if 'ghost' in k or 'orig_mod' in k or k.startswith('module')]


def test_tie_and_dropout_survive_resume(fork, tmp_path):
    """Still one tensor after wrapping and loading; masks are those of the unbroken run."""
    args = ['--dropout=0.2', *QUICK]
    tie = """
m = g['raw_model']
assert m.lm_head.weight is m.transformer.wte.weight
assert sum(p is m.lm_head.weight for group in g['opt'].param_groups for p in group['params']) == 1
"""
    for mode in ('plain', 'ddp2', 'fsdp2'):
        launch(fork, tmp_path, mode, *args, '--max_iters=4', f'--out_dir={mode}_whole', after=tie)
        launch(fork, tmp_path, mode, *args, '--max_iters=2', f'--out_dir={mode}')
        launch(fork, tmp_path, mode, *args, '--max_iters=4', f'--out_dir={mode}', '--init_from=resume', after=tie)
        assert same(ckpt_of(tmp_path / mode)['model'], ckpt_of(tmp_path / f'{mode}_whole')['model'])


@pytest.mark.parametrize('mode', ['plain', 'ddp2', 'fsdp2', 'hsdp4'])
def test_async_equals_sync_and_old_ones_go(run, fork, tmp_path, mode):
    """Saved in the background while training goes on: each is the state of its step."""
    args = [SHARDED, '--checkpoint_async=True', '--checkpoint_interval=4', '--eval_iters=3']
    result = launch(fork, tmp_path, mode, *args, '--max_iters=20', '--keep_checkpoints=2')
    assert len(re.findall(r'waited \d+\.\d\d s', result.out)) == 6  # every 4 steps, and the best of step 10
    folders = {p.name for p in (tmp_path / 'out' / 'ckpt_dcp').iterdir()}
    assert folders == {'step_16', 'step_20'}
    for folder in folders:
        a, b = read_dcp(tmp_path / 'out' / 'ckpt_dcp' / folder), read_dcp(run(mode) / 'ckpt_dcp' / folder)
        assert same(a, b) if 'sdp' not in mode else far(a, b) < 1e-6


def test_best_is_kept(fork, tmp_path):
    """The rate rises until the loss does too: the best one stays beside the newest, and resuming takes the newest."""
    args = [
        SHARDED,
        '--keep_checkpoints=1',
        '--eval_interval=2',
        '--eval_iters=3',
        '--learning_rate=0.3',
        '--min_lr=0.3',
        '--warmup_iters=200',
        '--max_iters=12',
        '--lr_decay_iters=12',
    ]
    launch(fork, tmp_path, 'fsdp2', *args[:-2], '--max_iters=2', args[-1])
    mine = tmp_path / 'out' / 'ckpt_dcp' / 'step_2_mine'  # none of ours: left alone
    shutil.copytree(mine.with_name('step_2'), mine)
    launch(fork, tmp_path, 'fsdp2', *args, '--init_from=resume')
    shutil.rmtree(mine)
    evals = log_of(tmp_path / 'out')[1]
    best = min((i for i in evals if i), key=lambda i: evals[i]['val_loss'])
    assert best < 12 and evals[best]['val_loss'] < evals[0]['val_loss']
    assert {p.name for p in (tmp_path / 'out' / 'ckpt_dcp').iterdir()} == {f'step_{best}', 'step_12'}
    result = launch(fork, tmp_path, 'plain', *args, '--init_from=resume', '--max_iters=13')
    assert 'at step 12' in result.out


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


@pytest.mark.parametrize(
    'mode,inject',
    [
        ('plain', 'gradient'),
        ('ddp2', 'gradient'),
        ('fsdp2', 'gradient'),
        ('hsdp4', 'gradient'),
        ('plain', 'loss'),
        ('ddp2', 'loss'),
        ('fsdp2', 'loss'),
    ],
)
def test_inf_on_one_rank_makes_all_skip(fork, tmp_path, mode, inject):
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


@pytest.mark.parametrize('mode', ['plain', 'ddp2', 'fsdp2', 'hsdp4'])
def test_loss_scale_is_the_same_on_every_rank(fork, tmp_path, mode):
    """An overflow that only one rank sees: all skip, all halve the scale, and go on in step."""
    nproc = MODES[mode][0] or 1
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
        'plain' if nproc > 1 else 'fsdp2',
        '--dtype=float16',
        '--max_iters=6',
        '--init_from=resume',
        *QUICK,
        after="print('scale', g['scaler'].get_scale())",
    )
    assert 'scale 32768.0' in result.out


def test_replicas_that_differ_are_found(fork, tmp_path):
    for mode in ('ddp2', 'hsdp4'):
        before = INF.format(rank='1').replace('= torch.inf', '+= 0.1').replace('calls == 3', 'calls == 2')
        result = launch(
            fork,
            tmp_path,
            mode,
            '--max_iters=5',
            '--check_sync_interval=1',
            *QUICK,
            f'--out_dir={mode}',
            before=before,
            rc=1,
            patient=True,
        )
        assert 'step 2' in result.out + result.err and 'transformer.wte.weight' in result.out + result.err
        assert result.codes == [1] * MODES[mode][0]


# ---- kills -----------------------------------------------------------------------------------------------------------
KILL_IN_SAVE = """
import os, signal, sys, torch, torch.distributed.checkpoint as dcp
sys.stderr = open(os.devnull, 'w')   # the others tell that the killed rank is gone
from torch.distributed.checkpoint import FileSystemWriter
count, here = 0, os.environ.get('RANK', '0') == {rank!r}
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def dying(f):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if count == 2 and here:
            if {half!r}:
                with open(args[1] if not hasattr(args[1], 'write') else args[1].name, 'ab') as file:
                    file.write(b'half')
            die()
        return f(*args, **kwargs)
    return wrapped
if {form!r} == 'full':
    torch.save = dying(torch.save)
else:
    FileSystemWriter.write_data = dying(FileSystemWriter.write_data)
"""


@pytest.mark.parametrize(
    'mode,form,rank',
    [
        ('plain', 'full', '0'),
        ('fsdp2', 'full', '0'),
        ('ddp2', 'sharded', '1'),
        ('fsdp2', 'async', '1'),
        ('plain', 'async', '0'),
    ],
)
def test_kill_in_a_save(run, fork, tmp_path, mode, form, rank):
    """Dying in the second save leaves the first one loadable, and resuming from it ends as if nothing had happened."""
    args = ['--checkpoint_interval=4', '--max_iters=12', '--eval_iters=3', *GHOST]
    args += [] if form == 'full' else [SHARDED, f'--checkpoint_async={form == "async"}']
    launch(fork, tmp_path, mode, *args, rc=-9, before=KILL_IN_SAVE.format(rank=rank, form=form, half=form == 'full'))
    result = launch(fork, tmp_path, mode, *args, '--init_from=auto')
    assert 'at step 4' in result.out
    out = tmp_path / 'out'
    end = read_full(out / 'ckpt.pt') if form == 'full' else read_dcp(out / 'ckpt_dcp' / 'step_12')
    assert same(end, read_dcp(run(mode) / 'ckpt_dcp' / 'step_12'))
    assert not list(out.glob('**/*.tmp'))
    assert read_dots(out)['iter'].tolist() == list(range(12))


WRAPPER = """
import os, signal, sys, runpy
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from torch.optim.optimizer import register_optimizer_step_pre_hook
steps = 0
def hook(*args):
    global steps
    steps += 1
    if steps == 7 and os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(hook)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def torchrun(cwd, *args, nproc, restarts=0, script=TRAIN, wrapper=()):
    argv = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        f'--nproc_per_node={nproc}',
        f'--max-restarts={restarts}',
        *wrapper,
        script,
        *args,
    ]
    return subprocess.run(argv, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=120)


def test_a_full_disk_is_told_by_the_ranks(train, fork, tmp_path):
    """One line from each, no traceback of theirs; the checkpoint before stays, and the run goes on from it."""
    args = SMALL + ['--use_fsdp=True', SHARDED, '--checkpoint_interval=2', *QUICK]
    fork(tmp_path, *args, '--max_iters=2', nproc=2)
    with full_disk(60_000):
        err = train(tmp_path, *args, '--max_iters=4', '--init_from=resume', nproc=2, rc=1).err
    said = [line for line in err.splitlines() if 'train.py: ' in line]
    assert said and all('make room' in line for line in said) and 'inline_container' not in err, err
    fork(tmp_path, *args, '--max_iters=4', '--init_from=auto', nproc=2)
    assert list(log_of(tmp_path / 'out')[0]) == [0, 1, 2, 3]


def test_torchrun_restarts_by_itself(run, tiny, tmp_path):
    """A rank killed in step 6: without restarts the job fails; with them it goes on from step 4 to the unbroken end."""
    (tmp_path / 'wrapper.py').write_text(WRAPPER)
    args = [
        f'--dataset={tiny}',
        *TINY,
        *SMALL,
        *MODES['fsdp2'][1],
        '--max_iters=12',
        '--checkpoint_interval=4',
        SHARDED,
        '--init_from=auto',
        *GHOST,
    ]
    done = torchrun(tmp_path, *args, nproc=2, restarts=1, wrapper=['wrapper.py'])
    assert done.returncode == 0, done.stderr
    assert 'ckpt_dcp/step_4 at step 4' in done.stdout
    assert same(weights(tmp_path / 'out' / 'ckpt_dcp' / 'step_12'), weights(run('fsdp2') / 'ckpt_dcp' / 'step_12'))
    steps, _ = log_of(tmp_path / 'out')
    assert steps.keys() == set(range(12))
    start = time.monotonic()
    done = torchrun(tmp_path, *args, '--out_dir=other', nproc=2, wrapper=['wrapper.py'])
    assert done.returncode != 0 and time.monotonic() - start < 100
    assert sorted(p.name for p in (tmp_path / 'other' / 'ckpt_dcp').iterdir() if p.is_dir()) == ['step_4']


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    'nproc,args,named',
    [
        (None, ['--use_fsdp=True'], 'torchrun'),
        (None, ['--fsdp_replicate=2'], 'fsdp_replicate=2'),
        (2, ['--use_fsdp=True', '--fsdp_replicate=3'], 'fsdp_replicate=3'),
        (2, ['--use_fsdp=True', '--fsdp_replicate=0'], 'fsdp_replicate=0'),
        (None, ['--fsdp_cpu_offload=True'], 'use_fsdp=True'),
        (None, ['--checkpoint_async=True'], 'checkpoint_format=sharded'),
        (None, ['--checkpoint_format=dcp'], 'checkpoint_format'),
        (None, ['--fsdp_activation_checkpointing=some'], 'fsdp_activation_checkpointing'),
        (None, ['--fsdp_min_num_params=-1'], 'fsdp_min_num_params=-1'),
        (None, ['--keep_checkpoints=-1'], 'keep_checkpoints=-1'),
        (2, ['--gradient_accumulation_steps=3'], 'gradient_accumulation_steps=3'),
        (2, ['--backend=nccl'], 'nccl'),
        (None, ['--init_from=resume'], 'out'),
        (2, ['--init_from=resume'], 'out'),
    ],
)
def test_refused(fork, tmp_path, nproc, args, named):
    assert named in fork(tmp_path, *args, nproc=nproc, rc=2, patient=True)


# ---- compile: 45 s each, so last -------------------------------------------------------------------------------------
@pytest.mark.parametrize('mode', ['plain', 'fsdp2'])
def test_compile(bare, run, fork, tmp_path, mode):
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
