"""scripts/train_parallel.py trains as plain train.py at every mesh, and each goes on from the other's checkpoints."""
import json
import os
import shutil

import pytest
import torch
from conftest import ROOT, TINY, log_of, record
from modes_helper import far, read_dcp, relative, weights

PARALLEL = os.path.join(ROOT, 'scripts', 'train_parallel.py')
# 4 blocks for 4 stages, 4 heads for 4 tensor ranks; 16 samples per step; a gradient norm above grad_clip
SETTINGS = [*TINY, *('--n_layer=4 --n_head=4 --n_embd=32 --block_size=16 --batch_size=2 --gradient_accumulation_steps=4 '
                     '--weight_decay=0.1 --grad_clip=0.5 --bias=True').split()]
LONG = '--checkpoint_format=sharded --checkpoint_interval=1'.split()
MESHES = {      # name: (ranks, settings)
    'tp2': (2, '--tensor_parallel=2'),
    'cp2': (2, '--context_parallel=2'),
    'pp2': (2, '--pipeline_parallel=2'),
    'fsdp2': (2, ''),
    'tp2 fsdp2': (4, '--tensor_parallel=2'),
}


@pytest.fixture(scope='module')
def launch(fork, tiny, tmp_path_factory):
    """launch(cwd, mesh, *args): a mesh of MESHES, or 'plain': train.py."""
    folder = tmp_path_factory.mktemp('data') / 'even'       # 64 token ids, so that 2 and 4 ranks can share them
    shutil.copytree(tiny, folder)
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, 'vocab_size': 64}))

    def run(cwd, mesh, *args, **options):
        argv = [f'--dataset={folder}', *SETTINGS]
        if mesh == 'plain':
            return fork(cwd, *argv, *args, tiny_args=False, **options)
        ranks, flags = MESHES[mesh]
        return fork(cwd, *argv, *flags.split(), *args, nproc=ranks, script=PARALLEL, tiny_args=False, **options)
    return run


@pytest.fixture(scope='module')
def plain(launch, tmp_path_factory):
    """out_dir of train.py's 20 steps."""
    cwd = tmp_path_factory.mktemp('plain')
    launch(cwd, 'plain', *LONG)
    return cwd / 'out'


def compare(name, out, plain):
    """Worst differences of a run's 20 steps from plain's: losses and norms, evaluations, first gradients, weights."""
    (steps, evals), (steps1, evals1) = log_of(out), log_of(plain)
    assert steps.keys() == steps1.keys() == set(range(20)) and evals.keys() == evals1.keys() == {0, 10, 20}
    loss = max(abs(steps[i][k] / steps1[i][k] - 1) for i in steps for k in ('loss', 'grad_norm'))
    evaluation = max(abs(evals[i][k] / evals1[i][k] - 1) for i in evals for k in ('train_loss', 'val_loss'))
    first = [{k: v for k, v in read_dcp(run / 'ckpt_dcp' / 'step_1').items() if k.endswith('.exp_avg')}
             for run in (out, plain)]       # the first gradient, clipped, times 1 - beta1
    gradient = relative(*first)
    weight = far(*(weights(run / 'ckpt_dcp' / 'step_20') for run in (out, plain)))
    print(f'{name}: losses and norms {loss:.1e}, evaluations {evaluation:.1e}, first gradients {gradient:.1e}, '
          f'weights {weight:.1e}')
    record(name, 'losses, norms', max(loss, evaluation)), record(name, 'weights', weight)
    assert min(s['grad_norm'] for s in steps1.values()) > 0.5
    assert loss < 2e-6 and evaluation < 2e-6 and gradient < 1e-6 and weight < 5e-5


@pytest.mark.parametrize('mesh', MESHES)
def test_every_mesh_trains_as_plain(launch, plain, mesh, tmp_path):
    launch(tmp_path, mesh, *LONG)
    compare(mesh, tmp_path / 'out', plain)
