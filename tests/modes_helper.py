"""What the tests of modes, ghost and gradient dumps share: one long run per mode, and how to read what it wrote."""

import json
import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

from conftest import ROOT

sys.path.insert(0, ROOT)
from model import GPT, GPTConfig  # noqa: E402

MODES = {
    'plain': (None, []),
    'ddp2': (2, []),
    'fsdp2': (2, ['--use_fsdp=True']),
    'ddp4': (4, []),
    'fsdp4': (4, ['--use_fsdp=True']),
    'hsdp4': (4, ['--use_fsdp=True', '--fsdp_replicate=2']),
}
FOUR = ('plain', 'ddp2', 'fsdp2', 'hsdp4')      # one of each kind: what most tests compare
# 16 samples per step, in 8 micro-batches: two for each of 4 ranks; 3 blocks, so that groups come out uneven
SMALL = (
    '--n_layer=3 --n_embd=32 --block_size=16 --batch_size=2 --gradient_accumulation_steps=8 --weight_decay=0.1 '
    '--grad_clip=0.5'
).split()
GHOST = '--use_ghost=True --ghost_per_param=True'.split()
DUMP = '--grad_dump=True --grad_dump_step_interval=4'.split()
SHARDED = '--checkpoint_format=sharded'
QUICK = ['--eval_interval=100', '--eval_iters=1']
# after a run: the embedding and the head are one tensor, also for the optimizer
TIED = """
m = g['raw_model']
assert m.lm_head.weight is m.transformer.wte.weight
assert sum(p is m.lm_head.weight for group in g['opt'].param_groups for p in group['params']) == 1
"""


def launch(fork, cwd, mode, *args, **options):
    nproc, flags = MODES[mode]
    return fork(cwd, *SMALL, *flags, *args, nproc=nproc, **options)


def once(fork, factory, name, mode, *args):
    """out_dir of a run that this session makes once, for all tests of both its processes."""
    import fcntl        # Windows has none, and no fork either: no test comes here
    base = factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        base = base.parent
    cwd = base / name
    with open(base / f'{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cwd.exists():
            cwd.mkdir()
            launch(fork, cwd, mode, *args)
    return cwd / 'out'


def long_run(fork, factory, mode):
    """out_dir of 20 steps of a mode with ghost, dumps and a sharded checkpoint every 4 steps."""
    return once(fork, factory, f'long_{mode}', mode, *GHOST, *DUMP, SHARDED, '--checkpoint_interval=4')


def bare_run(fork, factory, mode):
    """out_dir of 12 steps of a mode with neither, saved as one file."""
    return once(fork, factory, f'bare_{mode}', mode, '--max_iters=12')


def read_dcp(folder):
    """{key: tensor} of all tensors that a torch.distributed.checkpoint folder holds, by its plain calls."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, 'size')}
    with warnings.catch_warnings():  # that this is a single process
        warnings.simplefilter('ignore')
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def read_full(path):
    """{key: tensor} of a ckpt.pt, the keys as a sharded checkpoint has them."""
    c = torch.load(path, weights_only=True)
    tensors = {f'model.{k}': v for k, v in c['model'].items() if k != 'lm_head.weight'}
    return tensors | {f'optimizer.state.{n}.{k}': v for n, s in c['optimizer']['state'].items() for k, v in s.items()}


def weights(folder):
    """{name: tensor} of the parameters in a sharded checkpoint."""
    return {k[6:]: v for k, v in read_dcp(folder).items() if k.startswith('model.')}


def far(a, b):
    """Largest difference of two {name: tensor}."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def relative(a, b):
    """|a - b| / |b| over all tensors of two {name: tensor} together."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    a, b = (torch.cat([x[k].double().flatten() for k in sorted(x)]) for x in (a, b))
    return ((a - b).norm() / b.norm()).item()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def read_dots(out, names=False):
    """{column: tensor} of all files in grad_dotprods, in order."""
    files = sorted((out / 'grad_dotprods').glob('iter_*.safetensors'))
    columns, parameters = [], None
    for path in files:
        with safe_open(path, 'pt') as f:
            columns.append({k: f.get_tensor(k) for k in f.keys()})
            parameters = json.loads(f.metadata()['parameters'])
            assert columns[-1]['iter'][-1] < int(path.stem[5:])
    columns = {k: torch.cat([c[k] for c in columns]) for k in columns[0]}
    return (columns, parameters) if names else columns


def windows(folder, offsets, T, file='train.bin'):
    """Inputs and targets at token offsets, as the format in meta.json says."""
    meta = json.loads((folder / 'meta.json').read_text())
    tokens = np.fromfile(folder / file, meta['dtype']).astype(np.int64)
    tokens = torch.stack([torch.from_numpy(tokens[o : o + T + 1]) for o in offsets])
    return tokens[:, :-1], tokens[:, 1:]


def model_of(out, step=None, dtype=torch.float64):
    """GPT with the weights of a run's sharded checkpoint; step None: as it was before the first step."""
    config = json.loads((out / 'config.json').read_text())
    state = json.loads((out / 'ckpt_dcp' / f'step_{step or 4}' / 'state.json').read_text())
    torch.manual_seed(config['seed'])
    model = GPT(GPTConfig(**state['model_args']))
    if step:
        missing = model.load_state_dict(weights(out / 'ckpt_dcp' / f'step_{step}'), strict=False)
        assert missing.missing_keys == ['lm_head.weight'] and not missing.unexpected_keys
    return model.to(dtype).eval()


def gradients(model, X, Y):
    """{name: gradient} of the mean loss."""
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
    return dict(zip(names, torch.autograd.grad(model(X, Y).mean(), parameters)))
