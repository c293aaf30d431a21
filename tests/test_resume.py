"""Plain, DDP, FSDP2 and HSDP go on from each other's checkpoints, and survive what kills them."""
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ENV, FULL_DISK, TINY, TRAIN, ckpt_of, free_port, log_of, record
from modes_helper import (
    FOUR,
    GHOST,
    MODES,
    QUICK,
    SHARDED,
    SMALL,
    TIED,
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

import checkpoint

FORMATS = ('full', 'sharded')


@pytest.fixture
def run(fork, tmp_path_factory):
    return lambda mode: long_run(fork, tmp_path_factory, mode)


@pytest.fixture
def bare(fork, tmp_path_factory):
    return lambda mode: bare_run(fork, tmp_path_factory, mode)


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
        for source in FOUR:
            for form in FORMATS:
                folder = found[source, form] = cwd / f'{source}_{form}'
                if form == 'full':
                    shutil.copytree(bare(source), folder / 'out')
                else:
                    shutil.copytree(run(source) / 'ckpt_dcp' / 'step_12', folder / 'out' / 'ckpt_dcp' / 'step_12')
                # saves in the other form
                jobs.append(
                    [
                        free_port(),
                        str(folder / 'loaded.pt'),
                        f'--out_dir={folder / "out"}',
                        '--max_iters=16',
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


@pytest.mark.parametrize('target', FOUR)
@pytest.mark.parametrize('source', FOUR)
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
    end = {
        k: v
        for k, v in (
            read_dcp(folder / 'out' / 'ckpt_dcp' / 'step_16')
            if form == 'full'
            else read_full(folder / 'out' / 'ckpt.pt')
        ).items()
        if k.startswith('model.')
    }
    unbroken = {f'model.{k}': v for k, v in weights(run(target) / 'ckpt_dcp' / 'step_16').items()}
    if source == target and (form == 'sharded' or same_training(run, bare, target)):
        assert same(end, unbroken)
    assert record(target, 'resumed weights', far(end, unbroken)) < 5e-5
    steps, whole = log_of(folder / 'out')[0], log_of(run(target))[0]
    assert max(abs(steps[i][k] / whole[i][k] - 1) for i in range(12, 16) for k in ('loss', 'grad_norm')) < 5e-6


def same_training(run, bare, mode):
    """Whether the run with ghost and the one without are the same so far: then their continuations are."""
    a, b = read_full(bare(mode) / 'ckpt.pt'), read_dcp(run(mode) / 'ckpt_dcp' / 'step_12')
    assert same(a, b) or mode not in ('plain', 'ddp2', 'ddp4')
    return same(a, b)


@pytest.mark.parametrize('mode', FOUR)
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
    """Still one tensor after wrapping and loading; masks are those of the unbroken run. Plain: test_train.py."""
    for mode in ('ddp2', 'fsdp2'):
        args = '--dropout=0.2', '--gradient_accumulation_steps=2', *QUICK
        launch(fork, tmp_path, mode, *args, '--max_iters=4', f'--out_dir={mode}_whole')
        launch(fork, tmp_path, mode, *args, '--max_iters=2', f'--out_dir={mode}')
        launch(fork, tmp_path, mode, *args, '--max_iters=4', f'--out_dir={mode}', '--init_from=resume', after=TIED)
        assert same(ckpt_of(tmp_path / mode)['model'], ckpt_of(tmp_path / f'{mode}_whole')['model'])


@pytest.mark.parametrize('mode', ['plain', 'ddp2', 'hsdp4'])
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


def test_a_kill_while_old_ones_go(tmp_path, monkeypatch):
    """What is left has a name that the next resume deletes, and counts as no checkpoint."""
    for step in 1, 2:
        (tmp_path / f'step_{step}').mkdir()
        (tmp_path / f'step_{step}' / '.metadata').touch()

    def die(path):
        raise KeyboardInterrupt
    monkeypatch.setattr(checkpoint.shutil, 'rmtree', die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.keep_newest(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {'step_1.tmp', 'step_2'}


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


@pytest.mark.parametrize('mode,form,rank', [
    ('fsdp2', 'full', '0'), ('ddp2', 'sharded', '1'), ('fsdp2', 'async', '1'), ('plain', 'async', '0')])
def test_kill_in_a_save(run, fork, tmp_path, mode, form, rank):
    """Dying in the second save leaves the first one loadable, and resuming from it ends as if nothing had happened.
    Plain and one file: test_train.py."""
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


def test_a_full_disk_is_told_by_the_ranks(fork, tmp_path):
    """One line from each, no traceback; the checkpoint before stays, and the run goes on from it."""
    pytest.importorskip('resource')
    args = SMALL + ['--use_fsdp=True', SHARDED, '--checkpoint_interval=2', *QUICK]
    fork(tmp_path, *args, '--max_iters=2', nproc=2)
    result = fork(tmp_path, *args, '--max_iters=4', '--init_from=resume', nproc=2, rc=1, patient=True,
                  before=FULL_DISK.format(size=60_000))
    said = [line for line in result.err.splitlines() if 'train.py: ' in line]
    assert said and all('make room' in line for line in said) and 'inline_container' not in result.err, result.err
    assert 'Traceback' not in result.err and result.codes == [1, 1]
    fork(tmp_path, *args, '--max_iters=4', '--init_from=auto', nproc=2)
    assert list(log_of(tmp_path / 'out')[0]) == [0, 1, 2, 3]


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


def test_torchrun_restarts_by_itself(run, tiny, tmp_path):
    """A rank killed in step 6: torchrun ends the other, which waits for it, and both go on from step 4 to the unbroken
    end. (Without --max-restarts the job ends there: torchrun's own.)"""
    (tmp_path / 'wrapper.py').write_text(WRAPPER)
    argv = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '--max-restarts=1',
            'wrapper.py', TRAIN, f'--dataset={tiny}', *TINY, *SMALL, *MODES['fsdp2'][1], '--max_iters=12',
            '--checkpoint_interval=4', SHARDED, '--init_from=auto', *GHOST]
    start = time.monotonic()
    done = subprocess.run(argv, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and time.monotonic() - start < 200, done.stderr
    assert 'ckpt_dcp/step_4 at step 4' in done.stdout
    assert same(weights(tmp_path / 'out' / 'ckpt_dcp' / 'step_12'), weights(run('fsdp2') / 'ckpt_dcp' / 'step_12'))
    steps, _ = log_of(tmp_path / 'out')
    assert steps.keys() == set(range(12))


def test_what_a_checkpoint_says_of_another_folder_or_text(tmp_path):
    """The best loss on other validation tokens is no measure; and a renamed step_N is refused, since those that the run
    writes later would count as older and be deleted."""
    from checkpoint import choose_start
    from model import GPT, GPTConfig
    from scripts.export import export
    args = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=10, bias=False)
    meta = {'vocab_size': 10, 'splits': {'train': {'tokens': 90}, 'val': {'tokens': 20, 'sha256': 'a'}}}
    torch.save({'model': GPT(GPTConfig(**args)).state_dict(), 'optimizer': {}, 'model_args': args,
                'iter_num': 3, 'best_val_loss': 1.5, 'config': {}, 'meta': meta, 'samples_seen': 12},
               tmp_path / 'ckpt.pt')

    def start(out_dir, init_from='resume', overwrite=False, **splits):
        config = dict(init_from=init_from, out_dir=str(out_dir), optimizer='adamw', new_tokenizer=False, dataset='x',
                      overwrite=overwrite, eval_only=False)
        return choose_start(config, set(), {**meta, 'splits': {**meta['splits'], **splits}})
    assert start(tmp_path)['best_val_loss'] == 1.5
    assert start(tmp_path, train={'tokens': 80})['best_val_loss'] == 1.5
    assert start(tmp_path, val={'tokens': 20, 'sha256': 'b'})['best_val_loss'] == float('inf')
    export(str(tmp_path), str(tmp_path / 'hf'), 'hf')
    with pytest.raises(ValueError, match="hf/config.json is no run's"):     # a new run there would destroy it
        start(tmp_path / 'hf', init_from=str(tmp_path / 'hf'), overwrite=True)
    export(str(tmp_path), str(tmp_path / 'parts'), 'sharded')
    assert start(tmp_path / 'parts')['resumed_from'].endswith('step_3')
    os.rename(tmp_path / 'parts/ckpt_dcp/step_3', tmp_path / 'parts/ckpt_dcp/step_99')
    with pytest.raises(ValueError, match='step_99 holds step 3'):
        start(tmp_path / 'parts')
