"""train.py on two ranks of one machine, by gloo on the CPU, and against one process."""
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ENV, TINY, TRAIN, ckpt_of, log_of, record
from test_train import BARE, DROPOUT, KILL, POISON, at_step, in_evaluation, nan_loss, same_run, same_weights

MICRO = '--batch_size=2', '--gradient_accumulation_steps=4'     # two micro-batches on each of two ranks


def on_rank_1(code):
    return 'if os.environ["RANK"] == "1":\n' + ''.join('    ' + line + '\n' for line in code.splitlines())


def close(a, b, first=0):
    """Losses to 2e-6 and weights to 5e-5: what the order of summation may change."""
    (steps, evals), (steps_b, evals_b) = log_of(a), log_of(b)
    assert steps.keys() == steps_b.keys() and evals.keys() == evals_b.keys()
    for i in steps:
        record('ddp2', 'losses, norms', abs(steps[i]['loss'] / steps_b[i]['loss'] - 1))
        assert steps[i]['loss'] == pytest.approx(steps_b[i]['loss'], rel=2e-6) and steps[i]['lr'] == steps_b[i]['lr']
        assert steps[i]['tokens'] == steps_b[i]['tokens']
        assert steps[i]['grad_norm'] == pytest.approx(steps_b[i]['grad_norm'], rel=1e-4)
    for i in evals:
        for k in ('train_loss', 'val_loss'):
            assert evals[i][k] == pytest.approx(evals_b[i][k], rel=2e-6)
    assert evals[0]['val_loss'] == pytest.approx(evals_b[0]['val_loss'], rel=1e-6)     # of the same weights
    a, b = ckpt_of(a), ckpt_of(b)
    assert a['iter_num'] == b['iter_num'] and a['model'].keys() == b['model'].keys()
    for k, v in a['model'].items():
        record('ddp2', 'weights', (v - b['model'][k]).abs().max().item())
        assert torch.allclose(v, b['model'][k], rtol=0, atol=5e-5), k


@pytest.fixture(scope='module')
def pair(fork, tmp_path_factory):
    """The same 20 steps in one process (`one`) and on two ranks (`two`)."""
    cwd = tmp_path_factory.mktemp('pair')
    (cwd / 'one.txt').write_text(fork(cwd, '--out_dir=one').out)
    (cwd / 'two.txt').write_text(fork(cwd, '--out_dir=two', '--check_sync_interval=5', nproc=2).out)
    return cwd


def test_two_ranks_equal_one_process(pair):
    close(pair / 'two', pair / 'one')
    out = (pair / 'two.txt').read_text()
    assert re.search(r'DDP, 2 x cpu', out) and re.search(r'4 x block 32 x 1 .*x 2 .*= 256\b', out)
    assert len(re.findall(r'^step 3: loss', out, re.M)) == 1     # one rank speaks
    assert ckpt_of(pair / 'two')['optimizer']['state'].keys() == ckpt_of(pair / 'one')['optimizer']['state'].keys()


def test_two_ranks_equal_one_process_otherwise(fork, tmp_path):
    """With accumulation, in epochs, and with fewer evaluation batches than ranks."""
    args = *MICRO, '--data_order=epoch', '--eval_iters=1', '--eval_interval=5'
    fork(tmp_path, '--out_dir=one', *args)
    fork(tmp_path, '--out_dir=two', *args, nproc=2)
    close(tmp_path / 'two', tmp_path / 'one')


def test_one_rank_equals_one_process(fork, pair, tmp_path):
    fork(tmp_path, '--out_dir=a', nproc=1)
    same_run(tmp_path / 'a', pair / 'one')


@pytest.mark.parametrize('first, second', [(None, 2), (2, None)])
def test_resuming_at_another_world_size(fork, pair, tmp_path, first, second):
    fork(tmp_path, '--out_dir=a', '--max_iters=10', nproc=first)
    fork(tmp_path, '--out_dir=a', '--init_from=resume', nproc=second)
    close(tmp_path / 'a', pair / 'one')


def test_killed_and_resumed_run_equals_an_unbroken_one(fork, tmp_path):
    """One rank is killed in step 7, the last checkpoint is of step 6; then a signal reaches one rank in step 11."""
    args = DROPOUT, *MICRO, '--data_order=epoch', '--checkpoint_interval=3'
    fork(tmp_path, '--out_dir=whole', *args, nproc=2)
    fork(tmp_path, '--out_dir=a', *args, nproc=2, rc=-9, before=on_rank_1(at_step(7, KILL)))
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 6
    done = fork(tmp_path, '--out_dir=a', '--init_from=resume', *args, nproc=2, rc=143, patient=True,
                before=on_rank_1(at_step(5, 'os.kill(os.getpid(), signal.SIGTERM)')))
    assert done.codes == [143, 143] and ckpt_of(tmp_path / 'a')['iter_num'] == 12
    fork(tmp_path, '--out_dir=a', '--init_from=resume', *args, nproc=2)
    same_run(tmp_path / 'a', tmp_path / 'whole')


@pytest.mark.parametrize('mode', [[], ['--use_fsdp=True']])
def test_signal_to_one_rank_in_an_evaluation_ends_it_on_all(fork, tmp_path, mode):
    done = fork(tmp_path, '--out_dir=a', *mode, nproc=2, rc=143, patient=True, before=on_rank_1(in_evaluation(4 + 1)))
    assert done.codes == [143, 143] and ckpt_of(tmp_path / 'a')['iter_num'] == 10
    assert list(log_of(tmp_path / 'a')[1]) == [0]


def test_sigterm_to_torchrun_saves(fork, tiny, tmp_path):
    argv = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', TRAIN,
            f'--dataset={tiny}', *TINY, '--out_dir=a',
            '--max_iters=1000000', '--eval_interval=1000000']
    log = tmp_path / 'a' / 'log.jsonl'
    with open(tmp_path / 'output', 'w') as output, subprocess.Popen(argv, cwd=tmp_path, env=ENV, stdout=output,
                                                                    stderr=output) as run:
        deadline = time.monotonic() + 120
        while run.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.read_text().count('\n') > 5:
                break
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        run.wait(120)
    done = ckpt_of(tmp_path / 'a')['iter_num']
    assert list(log_of(tmp_path / 'a')[0]) == list(range(done)) and done >= 4, (tmp_path / 'output').read_text()
    fork(tmp_path, '--out_dir=a', '--init_from=resume', f'--max_iters={done + 2}', nproc=2)
    assert ckpt_of(tmp_path / 'a')['iter_num'] == done + 2


def test_accumulation_must_be_divisible(fork, tmp_path):
    line = fork(tmp_path, '--gradient_accumulation_steps=3', nproc=2, rc=2)
    assert all(word in line for word in ('gradient_accumulation_steps=3', '2', '--gradient_accumulation_steps=4')), line


@pytest.mark.parametrize('args', [['--block_size=100000'], ['--dataset=nowhere'],
                                  ['--init_from=resume', '--out_dir=nothing'], ['--backend=nccl'], ['--n_head=3']])
def test_a_fault_is_told_once_and_all_ranks_end(fork, tmp_path, args):
    fork(tmp_path, *args, nproc=2, rc=2, patient=True)


def test_gradients_are_exchanged_in_the_last_micro_batch_only(fork, tmp_path):
    record = '''
wrapped, flags = [], []
DDP = torch.nn.parallel.DistributedDataParallel
real_init, real_backward = DDP.__init__, torch.Tensor.backward
def init(self, *a, **k):
    real_init(self, *a, **k)
    wrapped.append(self)
def backward(*a, **k):
    flags.append(wrapped[0].require_backward_grad_sync)
    real_backward(*a, **k)
DDP.__init__, torch.Tensor.backward = init, backward
'''
    fork(tmp_path, '--out_dir=a', *BARE, '--batch_size=1', '--gradient_accumulation_steps=6', '--max_iters=3', nproc=2,
         before=record,
         after='assert flags[-9:] == [False, False, True] * 3, flags')


@pytest.mark.parametrize('args', [[], ['--use_ghost=True']])
def test_there_is_one_copy_of_the_gradients(fork, tmp_path, args):
    """From the second step on each lies in DDP's buckets, where it lay before, in every forward pass too."""
    before = '''
import model
forward, places = model.GPT.forward, []
def looking(self, *a, **k):
    if self.training and not a[0].is_meta:
        places.append([p.grad.data_ptr() for p in self.parameters() if p.requires_grad and p.grad is not None])
    return forward(self, *a, **k)
model.GPT.forward = looking
'''
    after = "assert len(places) == 7 and places[1] and all(p == places[1] for p in places[1:]), places"
    fork(tmp_path, *MICRO, '--out_dir=a', '--max_iters=3', *args, nproc=2, before=before, after=after)


@pytest.mark.parametrize('before', [at_step(5, POISON), nan_loss(5)], ids=['gradient', 'loss'])
def test_nonfinite_on_one_rank(fork, tmp_path, before):
    """What one rank alone sees stops all, or is skipped by all."""
    done = fork(tmp_path, '--out_dir=a', '--checkpoint_interval=1', nproc=2, rc=1, patient=True,
                before=on_rank_1(before))
    assert done.codes == [1, 1] and len(re.findall(r'step 5\b.*nan', done.out + done.err)) == 1
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 5
    fork(tmp_path, '--out_dir=b', '--max_iters=6', '--on_nonfinite=skip', '--check_sync_interval=1', nproc=2,
         patient=True, before=on_rank_1(before))
    same_weights({**ckpt_of(tmp_path / 'a'), 'iter_num': 6}, ckpt_of(tmp_path / 'b'))


@pytest.mark.parametrize('change', ['p[0] += 1e-6', 'p.copy_(p.roll(1, 0))'], ids=['value', 'place'])
def test_replicas_that_differ_are_found(fork, tmp_path, change):
    spoil = f'p = p.detach(); {change}'
    done = fork(tmp_path, '--out_dir=a', '--check_sync_interval=2', '--checkpoint_interval=1', nproc=2, rc=1,
                patient=True, before=on_rank_1(at_step(3, spoil)))
    assert done.codes == [1, 1] and re.search(r'step 4\b.*transformer.h.0.attn.c_attn.weight', done.out + done.err)
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 3


def test_a_bad_token_that_one_rank_meets_is_named(fork, tmp_path):
    """Beyond what is looked at when loading, ids are checked as they are read."""
    spoil = '''
real, reads = numpy.fromfile, [0]
def fromfile(*a, **k):
    ids = real(*a, **k)
    reads[0] += len(ids) == 33
    return ids + 200 if reads[0] > 40 else ids
numpy.fromfile = fromfile
'''
    done = fork(tmp_path, '--out_dir=a', nproc=2, rc=None, before=on_rank_1(spoil))
    assert done.codes[0] and done.codes[1] == 2 and len(re.findall(r'^train.py: .*train.bin.* 2\d\d', done.err,
                                                                   re.M)) == 1, done.err
