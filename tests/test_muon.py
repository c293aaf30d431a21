"""Muon is what its definition says, and the same in every mode; rotary positions and the norm of queries and keys."""
import copy
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, ckpt_of, log_of, record
from modes_helper import FOUR, MODES, QUICK, SHARDED, far, launch, read_dcp, read_full, same

from model import GPT, Block, GPTConfig, rotary_tables, rotate
from muon import Muon, orthogonal

MUON = ['--optimizer=muon']
FAST = [*MUON, '--rope=True', '--qk_norm=True']
BETAS = dict(betas=(0.9, 0.95), fused=True)


# ---- the definition --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('shape', [(24, 24), (24, 72), (96, 24), (1, 40), (40, 1)])
def test_orthogonal(shape):
    """The singular vectors stay, and values that differ by a factor of up to 10 come near 1."""
    torch.manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    S = torch.logspace(0, -1, min(shape), dtype=torch.float64)
    X = 3 * U @ torch.diag(S) @ Vh
    found = U.T @ orthogonal(torch.stack((torch.zeros_like(X), X)))[1] @ Vh.T
    assert (found - torch.diag(found.diag())).abs().max() < 5e-14
    assert 0.68 < found.diag().min() and found.diag().max() < 1.2
    assert not orthogonal(torch.zeros(2, *shape)).any()


@pytest.mark.parametrize('shape', [(24, 24), (24, 72), (96, 24)])
def test_one_process_as_torch(shape):
    """torch.optim.Muon multiplies in bfloat16, so it is near only."""
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs, began = torch.nn.Parameter(ours.detach().clone()), ours.detach().clone()
    a = Muon([{'params': [ours], 'weight_decay': 0.1, 'muon': True}], lr=1e-2, **BETAS)
    b = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn='match_rms_adamw')
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step(), b.step()
    assert torch.allclose(a.state[ours]['momentum_buffer'], b.state[theirs]['momentum_buffer'], rtol=1e-6, atol=1e-8)
    assert (ours - theirs).norm() < 0.02 * (theirs - began).norm()


def test_the_rest_is_adamw_bit_for_bit():
    """A model's embeddings, norms and biases, with the state of torch's own."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, block_size=8, n_layer=2, n_head=2, n_embd=16, bias=True))
    other = copy.deepcopy(model)
    a = Muon(model.param_groups(0.1, muon=True), lr=1e-2, **BETAS)
    b = torch.optim.AdamW(other.param_groups(0.1), lr=1e-2, **BETAS)
    in_groups = [p for group in a.param_groups for p in group['params']]
    assert len(in_groups) == len(set(in_groups)) == len(list(model.parameters()))
    for _ in range(3):
        for p, q in zip(model.parameters(), other.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step(), b.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        if '.h.' in name and p.dim() == 2:
            assert a.state[p].keys() == {'momentum_buffer'} and not torch.equal(p, q), name
        else:
            assert torch.equal(p, q) and same(a.state[p], b.state[q]), name


# ---- every mode ------------------------------------------------------------------------------------------------------
# some matrices have fewer rows than ranks, or a number of rows that the ranks do not divide
UPDATE = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
sys.path.insert(0, {root!r})
import muon
mode = sys.argv[1]
if mode != 'plain':
    dist.init_process_group('gloo')
torch.manual_seed(0)
muon.BATCH = 2
shapes = [(12, 36)] * 7 + [(48, 12)] * 5 + [(13, 7), (1, 9), (12, 36), (9, 1), (16, 16), (3, 20)]
batches, orthogonal = set(), muon.orthogonal
def noted(X):
    assert X.is_contiguous()
    batches.add((*X.shape, X.double().sum().item()))
    return orthogonal(X)
muon.orthogonal = noted
layers = [torch.nn.Linear(m, n) for n, m in shapes]
model = torch.nn.Sequential(*layers)
draws = [[torch.randn_like(p) for p in model.parameters()] for _ in range(3)]
if 'sdp' in mode:
    size = (2, 2) if mode == 'hsdp4' else (dist.get_world_size(),)
    mesh = dist.init_device_mesh('cpu', size, mesh_dim_names=('replicate', 'shard')[-len(size):])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
groups = [dict(params=[l.weight for l in layers], muon=True, weight_decay=0.1), dict(params=[l.bias for l in layers])]
opt = muon.Muon(groups, lr=1e-2, betas=(0.9, 0.95), fused=False)    # a CPU's fused AdamW rounds by places
for draw in draws:
    for p, gradient in zip(model.parameters(), draw):
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = gradient
    opt.step()
whole = {{n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}}
rank, everyones = 0, [batches]
if mode != 'plain':
    rank, everyones = dist.get_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(everyones, batches)
batches = sorted(batch for batch in set().union(*everyones) if batch[0] > 0)
if rank == len(everyones) - 1:
    torch.save((whole, batches), mode + '.pt')
if mode != 'plain':
    dist.barrier()
    dist.destroy_process_group()
"""


def test_same_gradients_same_step(fork, tmp_path):
    """Three steps, bit for bit, of any shape; and no product of a batch that another mode makes in another size: on a
    GPU that might round otherwise, though here it does not."""
    script = tmp_path / 'update.py'
    script.write_text(UPDATE.format(root=ROOT))
    for mode in MODES:
        fork(tmp_path, mode, nproc=MODES[mode][0], script=str(script), tiny_args=False)
        (whole, batches), (expected, expected_batches) = (torch.load(tmp_path / f'{m}.pt') for m in (mode, 'plain'))
        assert same(whole, expected) and batches == expected_batches, mode
    assert {batch[0] for batch in batches} == {1, 2}


@pytest.fixture(scope='module')
def trained(fork, tmp_path_factory):
    """{mode: out_dir} of 20 steps with all three, and a sharded checkpoint after 12."""
    folders = {}
    for mode in FOUR:
        cwd = tmp_path_factory.mktemp(f'muon_{mode}')
        launch(fork, cwd, mode, *FAST, SHARDED, '--checkpoint_interval=12', '--check_sync_interval=5')
        folders[mode] = cwd / 'out'
    return folders


@pytest.mark.parametrize('mode', FOUR[1:])
def test_every_mode_trains_as_plain(trained, mode):
    (steps, evals), (steps1, evals1) = log_of(trained[mode]), log_of(trained['plain'])
    worst = max(abs(steps[i][k] / steps1[i][k] - 1) for i in range(20) for k in ('loss', 'grad_norm'))
    worst = max(worst, *(abs(evals[i][k] / evals1[i][k] - 1) for i in evals1 for k in ('train_loss', 'val_loss')))
    a, b = (read_dcp(trained[m] / 'ckpt_dcp' / 'step_20') for m in (mode, 'plain'))
    distance = far(*({k: v for k, v in tensors.items() if k.startswith('model.')} for tensors in (a, b)))
    print(f'{mode}: losses and norms {worst:.1e}, weights {distance:.1e}')
    record(mode, 'Muon: losses', worst), record(mode, 'Muon: weights', distance)
    assert a.keys() == b.keys() and worst < 2e-6 and distance < 5e-5


LOADED = """
import os, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
kept = []
def whole(x):
    return x.full_tensor() if hasattr(x, 'full_tensor') else x
def hook(opt, args, kwargs):    # loading takes a step too, at rate 0
    if opt.param_groups[0]['lr'] > 0 and not kept:
        for group in opt.param_groups:
            for p in group['params']:
                kept.append([whole(x).detach().clone() for x in (p, *(v for _, v in sorted(opt.state[p].items())))])
        if os.environ.get('RANK', '0') == '0':
            torch.save(kept, 'loaded.pt')
register_optimizer_step_pre_hook(hook)
"""


@pytest.fixture(scope='module')
def stopped(fork, tmp_path_factory):
    """The folder of a plain run that ended after 12 of the 20 steps, as one file."""
    cwd = tmp_path_factory.mktemp('stopped')
    launch(fork, cwd, 'plain', *FAST, *QUICK, '--max_iters=12')
    return cwd / 'out'


@pytest.mark.parametrize('source,target,form', [
    ('plain', 'plain', 'full'), ('plain', 'hsdp4', 'full'), ('ddp2', 'fsdp2', 'sharded'), ('fsdp2', 'plain', 'sharded'),
    ('hsdp4', 'ddp2', 'sharded')])
def test_resume_in_any_mode(fork, tmp_path, trained, stopped, source, target, form):
    """What another mode loads is what was saved, bit for bit, and it goes on as the unbroken run."""
    out, there = tmp_path / 'out', trained[source] / 'ckpt_dcp' / 'step_12'
    if form == 'full':
        shutil.copytree(stopped, out)
        saved = read_full(out / 'ckpt.pt')
    else:
        shutil.copytree(there, out / 'ckpt_dcp' / 'step_12')
        saved = read_dcp(there)
    launch(fork, tmp_path, target, *FAST, *QUICK, '--init_from=resume', '--max_iters=20', before=LOADED)
    keys = {}       # {parameter: its tensor and its state, by the state's names}
    for key in sorted(key for key in saved if key.startswith('optimizer.')):
        name = key.removeprefix('optimizer.state.').rpartition('.')[0]
        keys.setdefault(name, [f'model.{name}']).append(key)
    left = [[saved[key] for key in keys[name]] for name in keys]
    loaded = torch.load(tmp_path / 'loaded.pt')
    assert len(loaded) == len(left)
    for tensors in loaded:
        found = [i for i, other in enumerate(left) if len(other) == len(tensors)
                 and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(tensors, other))]
        assert found, tensors[0].shape
        left.pop(found[0])
    end, whole = read_full(out / 'ckpt.pt'), read_dcp(trained['plain'] / 'ckpt_dcp' / 'step_20')
    assert far(end, whole) < 5e-5
    if source == target == 'plain':
        assert same(end, whole)


def test_float16_and_ghost(fork, tmp_path):
    """A loss scale, and dots beside it, which leave the weights as they are."""
    launch(fork, tmp_path, 'plain', *FAST, *QUICK, '--max_iters=3', '--dtype=float16')
    for name, more in ('a', ['--use_ghost=True', '--grad_dump=True']), ('b', []):
        launch(fork, tmp_path, 'plain', *FAST, *QUICK, *more, '--max_iters=3', f'--out_dir={name}')
    a, b = (read_full(tmp_path / name / 'ckpt.pt') for name in 'ab')
    assert same(a, b)


@pytest.mark.parametrize('args,named', [
    (['--optimizer=sgd'], 'optimizer'), (['--rope=True', '--n_embd=6', '--n_head=2'], 'rope=True')])
def test_refused(fork, tmp_path, args, named):
    assert named in fork(tmp_path, *args, rc=2)


def test_no_offload(fork, tmp_path):
    args = [*MUON, '--use_fsdp=True', '--fsdp_cpu_offload=True']
    assert '--optimizer=adamw' in fork(tmp_path, *args, nproc=1, rc=2)


def test_another_optimizer_or_model_is_not_resumed(fork, tmp_path):
    """Refused in one line; what the model is, a checkpoint prescribes, and its weights alone may start any run."""
    launch(fork, tmp_path, 'plain', *FAST, *QUICK, '--max_iters=2')
    go_on = [*QUICK, '--max_iters=3', '--init_from=resume']
    assert '--optimizer=muon' in launch(fork, tmp_path, 'plain', *go_on, rc=2)
    assert 'rope=False' in launch(fork, tmp_path, 'plain', *MUON, *go_on, '--rope=False', rc=2)
    launch(fork, tmp_path, 'plain', *MUON, *go_on)
    args = ckpt_of(tmp_path / 'out')['model_args']
    assert args['rope'] and args['qk_norm'] and 'transformer.wpe.weight' not in ckpt_of(tmp_path / 'out')['model']
    launch(fork, tmp_path, 'plain', *QUICK, '--max_iters=1', '--init_from=out', '--block_size=8', '--out_dir=other')
    assert ckpt_of(tmp_path / 'other')['model_args']['rope']


def test_not_in_hugging_face_form(fork, tmp_path):
    launch(fork, tmp_path, 'plain', '--rope=True', '--qk_norm=True', *QUICK, '--max_iters=1')
    done = fork(tmp_path, 'out', 'hf', '--to=hf', script=f'{ROOT}/scripts/export.py', tiny_args=False, rc=1)
    assert 'rope and no qk_norm' in done.err and done.err.count('\n') == 1, done.err
    assert not (tmp_path / 'hf').exists()


# ---- rotary positions, the norm of queries and keys ------------------------------------------------------------------
def test_rotation_is_complex_multiplication():
    torch.manual_seed(0)
    T, D = 9, 12
    x = torch.randn(2, T, 2, 3, D, dtype=torch.float64)
    z = torch.complex(x[..., :D // 2], x[..., D // 2:])
    frequencies = torch.tensor([10000 ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    turn = torch.arange(T, dtype=torch.float64)[:, None, None, None] * frequencies
    z = z * torch.polar(torch.ones_like(turn), turn)
    turned = rotate(x, rotary_tables(T, D).double())
    assert (turned - torch.cat((z.real, z.imag), -1)).abs().max() < 1e-6


def test_only_the_distance_counts():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 1, 16, dtype=torch.float64)
    tables = rotary_tables(104, 16).double()

    def score(i, j):
        return (rotate(q, tables[:, i:i + 1]) * rotate(k, tables[:, j:j + 1])).sum()
    assert (score(3, 1) - score(103, 101)).abs() < 1e-6 and (score(3, 1) - score(4, 1)).abs() > 1e-3


@pytest.mark.parametrize('rope,qk_norm', [(True, False), (False, True), (True, True)])
def test_cache_and_window(rope, qk_norm):
    """Token by token as at once, and beyond block_size too; and the norm makes the length of queries immaterial."""
    torch.manual_seed(0)
    args = dict(vocab_size=50, block_size=12, n_layer=2, n_head=2, n_embd=16, rope=rope, qk_norm=qk_norm)
    model = GPT(GPTConfig(**args)).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    idx, cache = torch.randint(50, (2, 12)), [[] for _ in range(2)]
    with torch.no_grad():
        for t in range(12):
            logits = model(idx[:, t:t + 1], cache=cache)
            assert (logits - model(idx[:, :t + 1])).abs().max() < 5e-14
        a, b = (model.generate(idx[:, :3], 20, temperature=0, use_cache=cached) for cached in (True, False))
        assert torch.equal(a, b)
        before = model(idx)
        for block in model.transformer.h:
            block.attn.c_attn.weight[:32] *= 7      # queries and keys
            block.attn.c_attn.bias[:32] *= 7
        assert ((model(idx) - before).abs().max() < 1e-5) == qk_norm


def test_attention_against_the_formula():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=50, block_size=8, n_layer=1, n_head=2, n_embd=16, rope=True, qk_norm=True)
    attn = GPT(config).double().transformer.h[0].attn
    x, turns = torch.randn(2, 8, 16, dtype=torch.float64), rotary_tables(8, 8).double()
    q, k, v = (y.view(2, 8, 1, 2, 8) for y in attn.c_attn(x).chunk(3, -1))
    q, k = (rotate(y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt(), turns) for y in (q, k))
    q, k, v = (y.squeeze(2).transpose(1, 2) for y in (q, k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(torch.ones(8, 8).tril() == 0, -torch.inf)
    expected = F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), attn.c_proj.weight, attn.c_proj.bias)
    assert (attn(x, turns=turns) - expected).abs().max() < 1e-14 * expected.abs().max()


@pytest.mark.parametrize('rope,qk_norm', [(True, False), (False, True), (True, True)])
def test_ghost_is_exact(rope, qk_norm):
    """Every parameter's dots in float64, against each sample's own gradient; off the CPU's fast path too."""
    torch.manual_seed(0)
    args = dict(vocab_size=50, block_size=12, n_layer=2, n_head=2, n_embd=16, rope=rope, qk_norm=qk_norm)
    with torch.device('meta'):
        GPT(GPTConfig(**args)).add_ghost()
    model = GPT(GPTConfig(**args)).double()
    params = {name: p for name, p in model.named_parameters()}
    names, (X, Y) = model.add_ghost(), torch.randint(50, (2, 3, 12))
    G = {name: torch.randn_like(p) for name, p in params.items()}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name.startswith('ghost_'):
                key = next(n for n, q in params.items() if q is getattr(module, name.removeprefix('ghost_')))
                p.data.copy_(G[key])
    s = torch.zeros(len(names), 3, dtype=torch.float64, requires_grad=True)
    model(X, Y, s).sum().backward()
    for i in range(3):
        own = torch.autograd.grad(model(X[i:i + 1], Y[i:i + 1]).sum(), list(params.values()))
        for row, name, gradient in zip(s.grad, names, own):
            expected = (gradient * G[name]).sum()
            assert (row[i] - expected).abs() < 1e-14 * (1 + expected.abs()), name


def test_half_as_float(fork, trained, tmp_path):
    """In bfloat16 the norm and the rotation are computed in float32, and training is about that in float32."""
    torch.manual_seed(0)
    attn, turns = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, qk_norm=True)).attn, rotary_tables(8, 8)
    qk = torch.randn(3, 8, 2, 2, 8).bfloat16()
    assert torch.equal(attn.prepare(qk, turns), attn.prepare(qk.float(), turns).bfloat16())
    assert torch.equal(attn.prepare(qk, None), attn.prepare(qk.float(), None).bfloat16())
    launch(fork, tmp_path, 'plain', *FAST, *QUICK, '--max_iters=3', '--dtype=bfloat16')
    a, b = log_of(tmp_path / 'out')[0], log_of(trained['plain'])[0]
    assert len(a) == 3 and 1e-6 < max(abs(a[i]['loss'] / b[i]['loss'] - 1) for i in a) < 1e-4


def test_compiled():
    """A compiled block gives the same results and gradients."""
    torch.manual_seed(0)
    block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, qk_norm=True))
    found = []
    x, dy, turns = torch.randn(3, 8, 16), torch.randn(3, 8, 16), rotary_tables(8, 8)
    for _ in range(2):
        y = block(x, None, None, turns)
        found.append([y, *torch.autograd.grad((y * dy).sum(), list(block.parameters()))])
        block.compile(dynamic=False)
    for a, b in zip(*found):
        assert (a - b).abs().max() < 2e-6 * (1 + b.abs().max())
