"""
scripts/train_parallel.py trains as plain train.py at every mesh, and each goes on from the other's checkpoints. Here a
few meshes; all of them, for some minutes: python -m pytest tests/parallel_sweep.py
"""
import json
import os
import shutil

import pytest
from conftest import ROOT, TINY, log_of, record
from modes_helper import far, read_dcp, read_full, relative, weights

PARALLEL = os.path.join(ROOT, 'scripts', 'train_parallel.py')
# 4 blocks for 4 stages, 4 heads for 4 ranks; 8 samples per step in 4 micro-batches; a gradient norm above grad_clip
SETTINGS = [*TINY, *('--n_layer=4 --n_head=4 --n_embd=32 --block_size=16 --batch_size=2 --weight_decay=0.1 '
                     '--gradient_accumulation_steps=4 --grad_clip=0.5 --bias=True --checkpoint_format=sharded '
                     '--eval_interval=20 --decay=wsd').split()]
SIZES = dict(tp='--tensor_parallel', cp='--context_parallel', pp='--pipeline_parallel', hsdp='--fsdp_replicate')
INTERLEAVED = '--pipeline_schedule=interleaved'


def mesh_flags(mesh):
    """(ranks, settings) of a mesh as 'tp2 pp2i fsdp2' names it; i: interleaved; hsdp2: two copies."""
    ranks, flags = 1, []
    for word in mesh.split():
        kind, size = word.rstrip('0123456789i'), word.strip('abcdefghijklmnopqrstuvwxyz')
        ranks *= int(size)
        if kind in SIZES:
            flags.append(f'{SIZES[kind]}={size}')
        if word.endswith('i'):
            flags.append(INTERLEAVED)
    return ranks, flags


def with_ids(vocab_size, tiny, folder):
    """A copy of the dataset tiny, whose record says so many token ids."""
    shutil.copytree(tiny, folder)
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, 'vocab_size': vocab_size}))
    return folder


@pytest.fixture(scope='module')
def launch(fork, tiny, tmp_path_factory):
    """launch(cwd, mesh, *args): train_parallel.py at a mesh, or train.py for 'plain'."""
    folder = with_ids(64, tiny, tmp_path_factory.mktemp('data') / 'even')       # 2, 4 and 8 ranks can share them

    def run(cwd, mesh, *args, **options):
        argv = [f'--dataset={folder}', *SETTINGS]
        if mesh == 'plain':
            return fork(cwd, *argv, *args, tiny_args=False, **options)
        ranks, flags = mesh_flags(mesh)
        return fork(cwd, *argv, *flags, *args, nproc=ranks, script=PARALLEL, tiny_args=False, **options)
    return run


@pytest.fixture(scope='module')
def chain(launch, tmp_path_factory):
    """A function that holds a mesh against plain training. A mesh goes on from the first step of the one before it, the
    first mesh from train.py's, which is one file."""
    plain = tmp_path_factory.mktemp('plain') / 'out'
    launch(plain.parent, 'plain', '--max_iters=1', '--checkpoint_format=full')
    before = {'out': shutil.copytree(plain, tmp_path_factory.mktemp('step') / 'out')}
    launch(plain.parent, 'plain', '--init_from=resume')

    def run(mesh):
        first, long = (tmp_path_factory.mktemp('run') / 'out' for _ in range(2))
        launch(first.parent, mesh, '--max_iters=1')
        shutil.copytree(before['out'], long)
        launch(long.parent, mesh, '--init_from=resume')
        compare(mesh, first, long, plain)
        before['out'] = first
        return long
    run.plain, run.before = plain, before
    return run


def compare(mesh, first, long, plain):
    (steps, evals), (steps1, evals1) = log_of(long), log_of(plain)
    assert steps.keys() == steps1.keys() == set(range(20)) and evals.keys() == evals1.keys() == {0, 1, 20}
    steps[0], evals[0] = log_of(first)[0][0], log_of(first)[1][0]       # its own
    loss = max(abs(steps[i][k] / steps1[i][k] - 1) for i in steps for k in ('loss', 'grad_norm'))
    evaluation = max(abs(evals[i][k] / evals1[i][k] - 1) for i in evals for k in ('train_loss', 'val_loss'))
    moments = [{k: v for k, v in tensors.items() if k.endswith('.exp_avg')}     # first gradient, clipped, x (1 - beta1)
               for tensors in (read_dcp(first / 'ckpt_dcp' / 'step_1'), read_full(plain / 'ckpt.pt'))]
    gradient = relative(*moments)
    weight = far(*(weights(out / 'ckpt_dcp' / 'step_20') for out in (long, plain)))
    print(f'\n{mesh}: losses and norms {loss:.1e}, evaluations {evaluation:.1e}, first gradients {gradient:.1e}, '
          f'weights {weight:.1e}')
    record(mesh, 'losses, norms', max(loss, evaluation)), record(mesh, 'weights', weight)
    assert min(s['grad_norm'] for s in steps1.values()) > 0.5
    assert loss < 2e-6 and evaluation < 2e-6 and gradient < 1e-6 and weight < 5e-5


@pytest.mark.parametrize('mesh', ['pp2i', 'cp2', 'tp2 fsdp2'])
def test_every_mesh_trains_as_plain(chain, mesh):
    chain(mesh)


def test_weights_whose_loss_is_not_finite_are_not_saved(launch, tmp_path):
    done = launch(tmp_path, 'pp2', '--learning_rate=1e18', '--decay_lr=False', '--checkpoint_interval=1',
                  '--eval_interval=1000', rc=1)
    assert 'these weights are not saved' in done.out and not (tmp_path / 'out' / 'ckpt_dcp').exists()


def test_train_goes_on_from_a_mesh(chain, launch):
    out = chain.before['out']
    launch(out.parent, 'plain', '--init_from=resume')
    assert far(weights(out / 'ckpt_dcp' / 'step_20'), weights(chain.plain / 'ckpt_dcp' / 'step_20')) < 5e-5
    assert log_of(out)[0][19]['loss'] == pytest.approx(log_of(chain.plain)[0][19]['loss'], rel=2e-6)


# Every mask, and how many bytes each operation of the training step allocates.
WATCH = '''
import torch.nn.functional as F
from torch.profiler import profile
dropout, masks = F.dropout, []
def watched(x, p, training):
    if training and not masks:      # not earlier: torch could not move the model then
        seen.__enter__()
    y = dropout(x, p, training)
    if training and x.is_leaf is False:
        masks.append(hash(tuple((y == 0).flatten().tolist())))
    return y
F.dropout, seen = watched, profile(profile_memory=True)
'''
TELL = '''
seen.__exit__(None, None, None)
same = [p.to_local().double().sum().item().hex() for n, p in g['params'].items() if '.ln_' in n or '.wpe.' in n]
with open(f'rank{rank}', 'w') as file:
    json.dump([masks, same, [[event.name, event.self_cpu_memory_usage] for event in seen.events()]], file)
'''


def test_dropout_and_the_logits_of_tensor_parallel(launch, tiny, tmp_path):
    """Masks differ from rank to rank; what both ranks have whole stays the same; whole logits exist nowhere."""
    data = with_ids(4096, tiny, tmp_path / 'data')
    launch(tmp_path, 'tp2', f'--dataset={data}', '--batch_size=4', '--gradient_accumulation_steps=1', '--dropout=0.2',
           '--max_iters=1', '--eval_iters=1', before=WATCH, after=TELL, warn=False)
    (masks, same, allocated), (masks1, same1, _) = (json.loads((tmp_path / f'rank{i}').read_text()) for i in (0, 1))
    assert len(masks) == len(masks1) == 9               # embedding and two per block
    assert len(set(masks + masks1)) == len(masks + masks1)
    assert len(same) == 18 + 1 and same == same1        # weights and biases of 9 norms; positions
    logits = 4 * 16 * 4096 * 4      # bytes of all
    assert logits // 2 in [size for _, size in allocated]
    assert not [(name, size) for name, size in allocated if size >= logits]


COUNT = '''
import torch
from torch._dynamo.testing import CompileCounter
counter, compiled = CompileCounter(), torch.compile
torch.compile = lambda function, **options: compiled(function, backend=counter, **options)
'''


@pytest.mark.parametrize('recompute', ['False', 'full'])
def test_all_blocks_are_compiled_as_one(launch, tmp_path, recompute):
    """Above eight of a kind torch.compile would give up, and the others would run without it."""
    done = launch(tmp_path, 'fsdp1', '--compile=True', f'--fsdp_activation_checkpointing={recompute}',
                  '--max_iters=1', '--eval_iters=1', before=COUNT,
                  after='print("compiled", counter.frame_count)', warn=False)
    assert int(done.out.split()[-1]) == 4       # a block, and the head with the loss: evaluating and training


TRACED = '''
import torch
compiled = torch.compile
torch.compile = lambda function, **options: compiled(function, backend='aot_eager', **options)
'''


@pytest.mark.parametrize('mesh, recompute, before', [
    ('tp2', 'full', TRACED), ('cp2', 'selective', TRACED), ('pp2', 'False', TRACED), *[('cp2', 'False', '')] * 2])
def test_compiled_blocks_train_as_plain(launch, tmp_path, mesh, recompute, before):
    """Traced and differentiated only, without generated code; the last with it, and once more when it is cached."""
    flags = ('--n_layer=2', '--bias=False', '--max_iters=4', '--eval_iters=1')
    launch(tmp_path, 'plain', *flags, '--out_dir=plain')
    launch(tmp_path, mesh, *flags, '--compile=True', f'--fsdp_activation_checkpointing={recompute}', '--out_dir=out',
           warn=False, before=before)
    got, want = (log_of(tmp_path / name)[0] for name in ('out', 'plain'))
    for key in ('loss', 'grad_norm'):
        assert [got[i][key] for i in range(4)] == pytest.approx([want[i][key] for i in range(4)], rel=2e-6)


SIGNAL = f"""
import os, signal, sys
sys.path.insert(0, {ROOT!r})
import data.bins
read, left = data.bins.sample_offsets, [1]
def at_step_1(order, seed, step, *rest):
    if step == 1 and os.environ['RANK'] == '1' and left:
        left.pop()
        os.kill(os.getpid(), signal.SIGTERM)
    return read(order, seed, step, *rest)
data.bins.sample_offsets = at_step_1
"""


def test_a_signal_to_one_rank_stops_all_after_the_step(launch, tmp_path):
    done = launch(tmp_path, 'tp2', '--eval_interval=100', '--checkpoint_interval=100', before=SIGNAL, rc=143)
    assert 'stopped by a signal after 2 steps; --init_from=auto goes on from there' in done.out
    assert os.listdir(tmp_path / 'out' / 'ckpt_dcp') == ['step_2']


@pytest.mark.parametrize('mesh,args,words', [
    ('fsdp1', ['--use_ghost=True'], 'use_ghost=True: this script takes only False; train.py takes others'),
    ('fsdp1', ['--grad_dump=True'], 'grad_dump=True: this script takes only False'),
    ('fsdp1', ['--checkpoint_format=full'], "checkpoint_format='full': this script takes only 'sharded'"),
    ('fsdp1', ['--tensor_parallel=2'], 'the world size=1 is not a multiple of'),
    ('fsdp1', [INTERLEAVED], 'needs --pipeline_parallel=2'),
    ('tp2', ['--n_head=1'], 'n_head=1 is not a multiple of tensor_parallel = 2'),
    ('cp2', ['--block_size=18'], 'block_size=18 is not a multiple of'),
    ('pp2', ['--gradient_accumulation_steps=3'], 'gradient_accumulation_steps=3 is not a multiple of'),
    ('pp2i', ['--n_layer=3'], 'n_layer=3 is less than the 4 stages'),
])
def test_what_does_not_go_together_is_refused_in_one_line(launch, tmp_path, mesh, args, words):
    assert words in launch(tmp_path, mesh, *args, rc=2)


def test_started_without_torchrun(launch, fork, tmp_path):
    assert 'start by torchrun' in fork(tmp_path, script=PARALLEL, tiny_args=False, rc=2)
