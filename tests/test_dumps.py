"""Gradient dumps written by train.py: the same in every mode, equal to autograd, complete or absent."""

import os

import pytest
import torch
from conftest import log_of, record
from modes_helper import (
    DUMP,
    FOUR,
    MODES,
    SMALL,
    bare_run,
    gradients,
    launch,
    long_run,
    model_of,
    read_dcp,
    read_dots,
    relative,
    same,
    windows,
)
from safetensors import safe_open

STEPS = (0, 4, 8, 12, 16)


def dump_of(out, step):
    return read_dcp(out / 'gradient_dumper' / f'step{step}' / 'sharded')


@pytest.fixture
def run(fork, tmp_path_factory):
    return lambda mode: long_run(fork, tmp_path_factory, mode)


@pytest.mark.parametrize('mode', FOUR)
def test_sharded_dump_equals_autograd(run, tiny, mode):
    out = run(mode)
    assert sorted(os.listdir(out / 'gradient_dumper')) == sorted(f'step{s}' for s in STEPS)
    for step in (0, 12):
        folder = out / 'gradient_dumper' / f'step{step}' / 'sharded'
        model, offsets = model_of(out, step), read_dots(out)['offset'][step]
        grads, files = dump_of(out, step), sorted(os.listdir(folder))
        assert files[0] == '.metadata' and files[1] == '__0_0.distcp'
        assert grads.keys() == dict(model.named_parameters()).keys()  # the tied embedding once, no ghost_*
        assert all(g.dtype == torch.float32 for g in grads.values())
        exact = gradients(model, *windows(tiny, offsets, 16))
        assert record(mode, 'gradients', relative(grads, exact)) < 1e-6
        if mode.startswith('fsdp'):  # each rank its own shard, none gathered
            sizes = [(folder / f'__{rank}_0.distcp').stat().st_size for rank in range(MODES[mode][0])]
            assert max(sizes) < 1.3 * sum(sizes) / len(sizes)


@pytest.mark.parametrize('mode', FOUR[1:])
def test_first_gradients_equal_plains(run, mode):
    assert relative(dump_of(run(mode), 0), dump_of(run('plain'), 0)) < 1e-6
    for step in STEPS[1:]:  # the weights have come apart by rounding
        assert relative(dump_of(run(mode), step), dump_of(run('plain'), step)) < 1e-4


@pytest.mark.parametrize('mode', FOUR)
def test_sampled_dump_is_the_first_rows(run, fork, tmp_path, tmp_path_factory, mode):
    launch(
        fork,
        tmp_path,
        mode,
        '--max_iters=6',
        '--grad_dump=True',
        '--grad_dump_save_first_n=20',
        '--grad_dump_start_step=0',
        '--grad_dump_step_interval=4',
        '--grad_dump_end_step=4',
        '--eval_iters=1',
    )
    dumper = tmp_path / 'out' / 'gradient_dumper'
    assert sorted(os.listdir(dumper)) == ['step0', 'step4']
    for step in (0, 4):
        whole = dump_of(run(mode), step)    # with fewer rows than 20 in one, and in the shards of others
        assert os.listdir(dumper / f'step{step}') == ['sampled']
        assert sorted(os.listdir(dumper / f'step{step}' / 'sampled')) == sorted(
            f'{name}_first{min(20, len(g))}.safetensors' for name, g in whole.items()
        )
        for name, g in whole.items():
            path = dumper / f'step{step}' / 'sampled' / f'{name}_first{min(20, len(g))}.safetensors'
            with safe_open(path, 'pt') as f:
                assert list(f.keys()) == ['gradient']
                assert torch.equal(f.get_tensor('gradient'), g[:20])
    # training is bitwise unchanged; by sharded dumps too, as test_ghost.py finds
    steps, bare = (log_of(o)[0] for o in (tmp_path / 'out', bare_run(fork, tmp_path_factory, mode)))
    for step in range(6):
        assert [steps[step][k] for k in ('loss', 'grad_norm')] == [bare[step][k] for k in ('loss', 'grad_norm')]


KILL_IN_DUMP = """
import os, signal, sys, torch.distributed.checkpoint as dcp
sys.stderr = open(os.devnull, 'w')   # the others tell that the killed rank is gone
save = dcp.save
def dying_save(*args, **kwargs):
    if 'step3' in str(kwargs.get('checkpoint_id')):
        if {when!r} == 'begin' and os.environ.get('RANK', '0') == {rank!r}:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*args, **kwargs)
        if {when!r} == 'end' and os.environ.get('RANK', '0') == {rank!r}:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    return save(*args, **kwargs)
dcp.save = dying_save
"""


@pytest.mark.parametrize('mode,rank,when', [('plain', '0', 'end'), ('fsdp2', '1', 'begin'), ('ddp2', '0', 'end')])
def test_kill_during_a_dump_leaves_no_half_step(run, fork, tmp_path, mode, rank, when):
    args = ['--grad_dump=True', '--checkpoint_interval=2', '--max_iters=6', '--eval_iters=1']
    launch(fork, tmp_path, mode, *args, rc=-9, before=KILL_IN_DUMP.format(rank=rank, when=when))
    dumper = tmp_path / 'out' / 'gradient_dumper'
    complete = {p.name: (p / 'sharded' / '.metadata').stat().st_ino for p in dumper.iterdir() if p.suffix != '.tmp'}
    assert sorted(complete) == ['step0', 'step1', 'step2']
    launch(fork, tmp_path, mode, *args, '--init_from=resume')
    assert sorted(os.listdir(dumper)) == [f'step{s}' for s in range(6)]
    for name, inode in complete.items():  # step 2 ran again, its dump was complete and stays
        assert (dumper / name / 'sharded' / '.metadata').stat().st_ino == inode
    for step in (0, 4):
        assert same(dump_of(tmp_path / 'out', step), dump_of(run(mode), step))


def test_killed_sampled_dump(fork, tmp_path):
    args = ['--grad_dump=True', '--grad_dump_save_first_n=2', '--max_iters=2', '--eval_iters=1']
    kill = """
import os, signal
rename, count = os.replace, 0
def dying(*args):
    global count
    count += 'sampled' in str(args[0])
    os.kill(os.getpid(), signal.SIGKILL) if count == 9 else rename(*args)
os.replace = dying
"""
    launch(fork, tmp_path, 'plain', *args, rc=-9, before=kill)
    assert not [p for p in (tmp_path / 'out' / 'gradient_dumper').iterdir() if p.suffix != '.tmp']
    launch(fork, tmp_path, 'plain', *args, '--init_from=auto')
    assert sorted(os.listdir(tmp_path / 'out' / 'gradient_dumper')) == ['step0', 'step1']
    names = os.listdir(tmp_path / 'out' / 'gradient_dumper' / 'step1' / 'sampled')
    assert len(names) == 21 and all(name.endswith('.safetensors') for name in names)


@pytest.mark.parametrize(
    'mode,dtype,tolerance',
    [('plain', 'float16', 5e-3), ('fsdp2', 'float16', 5e-3), ('ddp2', 'bfloat16', 3e-2), ('fsdp2', 'bfloat16', 3e-2)],
)
def test_half_precision_is_unscaled(run, fork, tmp_path, mode, dtype, tolerance):
    launch(fork, tmp_path, mode, *DUMP, '--max_iters=1', '--eval_iters=1', f'--dtype={dtype}')
    grads, exact = dump_of(tmp_path / 'out', 0), dump_of(run('plain'), 0)
    print(relative(grads, exact))
    assert 1e-6 < relative(grads, exact) < tolerance
    assert all(g.dtype == torch.float32 for g in grads.values())


def test_clipping_and_accumulation_do_not_show(run, fork, tmp_path):
    """Before clipping: the norm of the dump is the one in the log; and one micro-batch of 16 gives what 8 of 2 give."""
    out = run('plain')
    dots = read_dots(out)
    for step in STEPS:
        norm = torch.cat([g.flatten().double() for g in dump_of(out, step).values()]).norm()
        assert norm > 0.5 and abs(norm / dots['grad_norm'][step] - 1) < 2e-6
    launch(
        fork,
        tmp_path,
        'plain',
        *DUMP,
        '--max_iters=1',
        '--eval_iters=1',
        '--batch_size=16',
        '--gradient_accumulation_steps=1',
    )
    assert relative(dump_of(tmp_path / 'out', 0), dump_of(out, 0)) < 1e-6


@pytest.mark.parametrize(
    'args,named',
    [
        (['--grad_dump_step_interval=0'], 'grad_dump_step_interval=0'),
        (['--grad_dump_start_step=-1'], 'grad_dump_start_step=-1'),
        (['--grad_dump_start_step=5', '--grad_dump_end_step=4'], 'grad_dump_end_step=4'),
        (['--grad_dump_start_step=20'], 'max_iters=20 is 19'),
        (['--grad_dump_end_step=-1'], 'grad_dump_end_step=-1'),
        (['--grad_dump_save_first_n=0'], 'grad_dump_save_first_n=0'),
        (['--grad_dump_save_first_n=2.5'], 'grad_dump_save_first_n'),
        (['--grad_dump_step_interval=x'], 'grad_dump_step_interval'),
    ],
)
def test_named_errors(fork, tmp_path, args, named):
    assert named in fork(tmp_path, *SMALL, '--grad_dump=True', *args, rc=2)
