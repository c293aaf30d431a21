"""Ghost mode: dot products against brute-force autograd, the same in every mode, and training left as it was."""

import json
from functools import partial

import pytest
import torch
from conftest import ckpt_of, log_of, record, write_dataset
from modes_helper import (
    FOUR,
    GHOST,
    bare_run,
    far,
    gradients,
    launch,
    long_run,
    model_of,
    read_dots,
    read_full,
    same,
    weights,
    windows,
)
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model import GPT, GPTConfig, LayerNorm, Linear

T, V = 12, 23


# ---- model.py in float64, against autograd sample by sample ----------------------------------------------------------
def small_gpt(bias=True, dropout=0.0, ghost=True, noise=0.1):
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=V, bias=bias, dropout=dropout)
    ).double()
    with torch.no_grad():
        for p in model.parameters():  # away from the zeros and ones of a new model
            p.add_(noise * torch.randn_like(p))
    names = model.add_ghost() if ghost else None
    return model, names


def batch(n, seed, vocab=V):
    tokens = torch.randint(0, vocab, (n, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def trainable(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def set_ghost(model, val):
    """The gradient of the validation loss into ghost_*; returns it."""
    model.eval()
    G = gradients(model, *val)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:
                p.copy_(G[name.replace('ghost_', '')])
    model.train()
    return G


def dots_of(model, names, X, Y, accumulation=1, seed=7):
    """(P, B) dots in natural units, as train.py takes them; .grad is left as plain training leaves it."""
    torch.manual_seed(seed)
    found = []
    for x, y in zip(X.chunk(accumulation), Y.chunk(accumulation)):
        zeros = torch.zeros(len(names), len(x), dtype=torch.float64, requires_grad=True)
        (model(x, y, zeros).mean() / accumulation).backward()
        found.append(zeros.grad * len(x) * accumulation)
    return torch.cat(found, 1)


def brute(model, G, X, Y, accumulation=1, seed=7):
    """The same by one autograd.grad per sample, with the same dropout masks."""
    torch.manual_seed(seed)
    params, rows = trainable(model), []
    for x, y in zip(X.chunk(accumulation), Y.chunk(accumulation)):
        for loss in model(x, y):
            g = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
            rows.append(torch.stack([(a * G[n]).sum() for n, a in zip(params, g)]))
    return torch.stack(rows, 1)


def agree(found, exact, tolerance=1e-10):
    """Every parameter and the total, relative to the largest value of each."""
    assert found.shape == exact.shape
    worst = ((found - exact).abs().amax(1) / exact.abs().amax(1)).max().item()
    total = ((found.sum(0) - exact.sum(0)).abs().max() / exact.sum(0).abs().max()).item()
    print(f'worst parameter {worst:.1e}, total {total:.1e}')
    record('plain' if tolerance > 1e-8 else 'float64', 'ghost dots', max(worst, total))
    assert worst < tolerance and total < tolerance


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('accumulation', [1, 3])
@pytest.mark.parametrize('rows', [1, 4])
@pytest.mark.parametrize('dropout', [0.0, 0.2])
def test_float64_against_brute_force(bias, accumulation, rows, dropout):
    model, names = small_gpt(bias, dropout)
    (X, Y), val = batch(6, 1), batch(rows, 2)
    G = set_ghost(model, val)
    assert names == list(trainable(model))
    exact, found = brute(model, G, X, Y, accumulation), dots_of(model, names, X, Y, accumulation)
    agree(found, exact)
    # the weight gradient is bitwise that of a model without ghost
    plain, _ = small_gpt(bias, dropout, ghost=False)
    plain.train()
    torch.manual_seed(7)
    for x, y in zip(X.chunk(accumulation), Y.chunk(accumulation)):
        (plain(x, y).mean() / accumulation).backward()
    assert all(torch.equal(p.grad, plain.get_parameter(n).grad) for n, p in trainable(model).items())


def test_tied_cross_terms():
    """wte's row holds embedding x embedding, head x head and both cross terms: <a + b, A + B>."""
    model, names = small_gpt()
    (X, Y), val = batch(5, 1), batch(3, 2)
    G = set_ghost(model, val)

    def halves(x, y):  # d loss / d wte by its use as embedding, and by its use as head
        untied = GPT(model.config).double()
        untied.load_state_dict({n: w for n, w in model.state_dict().items() if 'ghost_' not in n})
        untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
        return torch.autograd.grad(untied(x, y).mean(), (untied.transformer.wte.weight, untied.lm_head.weight))

    (A, B), found = halves(*val), dots_of(model, names, X, Y)[names.index('transformer.wte.weight')]
    assert (A + B - G['transformer.wte.weight']).abs().max() < 1e-14
    for i in range(5):
        a, b = halves(X[i : i + 1], Y[i : i + 1])
        cross = (a * B).sum() + (b * A).sum()
        assert abs(found[i] - ((a * A).sum() + (b * B).sum() + cross)) < 1e-10 * found[i].abs()
        assert cross.abs() > 1e-3 * found[i].abs()  # or this would prove nothing


@pytest.mark.parametrize('selective', [False, True])
def test_activation_checkpointing_does_not_count_twice(selective):
    model, names = small_gpt(dropout=0.2)
    (X, Y), val = batch(6, 1), batch(4, 2)
    G = set_ghost(model, val)
    exact = brute(model, G, X, Y)
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    options = {'context_fn': partial(create_selective_checkpoint_contexts, kept)} if selective else {}
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    agree(dots_of(model, names, X, Y), exact)


def test_one_sgd_step_lowers_the_validation_loss_as_promised():
    model, names = small_gpt(noise=0.02)
    (X, Y), val = batch(6, 1, 5), batch(4, 2, 5)  # few characters: something to learn that carries over
    set_ghost(model, val)
    promised = dots_of(model, names, X, Y).sum() / 6
    start = {n: p.detach().clone() for n, p in trainable(model).items()}
    errors = []
    with torch.no_grad():
        before = model(*val).mean()
        for lr in (1e-1, 1e-2, 1e-3, 1e-4):
            for n, p in trainable(model).items():
                p.copy_(start[n] - lr * p.grad)
            errors.append(abs((model(*val).mean() - before) / (-lr * promised) - 1).item())
    print(errors)
    assert errors[2] < 1e-3 and errors[0] > errors[1] > errors[2] > errors[3]


def test_only_model_py_s_layers_are_covered():
    model, _ = small_gpt(ghost=False)
    model.transformer.h[1].mlp.extra = torch.nn.Conv1d(16, 16, 1)
    with pytest.raises(ValueError, match=r'transformer\.h\.1\.mlp\.extra\.weight.*Conv1d'):
        model.add_ghost()
    model, _ = small_gpt(ghost=False)
    model.transformer.h[0].mlp.gain = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match=r'transformer\.h\.0\.mlp\.gain'):
        model.add_ghost()
    model, _ = small_gpt(ghost=False)
    model.transformer.wpe.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r'transformer\.wpe\.weight is frozen'):
        model.add_ghost()


# What a fork may change. Each takes a model of two blocks, changes it, and passes rows on or forgets to.
def replace_forward(module, forward):
    """module.forward(...) becomes forward(module, the former forward, ...)."""
    module.forward = partial(forward, module, module.forward)


def norm_after_embeddings(model, with_rows):
    model.transformer.ln_e = LayerNorm(16, eps=0.1)
    def forward(wte, former, idx, rows=None):
        return model.transformer.ln_e(former(idx, rows), rows if with_rows else None)
    replace_forward(model.transformer.wte, forward)


def linear_in_the_blocks(model, with_rows):
    for block in model.transformer.h:
        block.mlp.extra = Linear(16, 16)
        def forward(mlp, former, x, rows=None):
            return former(x, rows) + mlp.extra(x, rows if with_rows else None)
        replace_forward(block.mlp, forward)


def linear_in_one_block(model, with_rows):
    mlp = model.transformer.h[1].mlp
    mlp.extra = Linear(16, 16)
    def forward(mlp, former, x, rows=None):
        return former(x, rows) + mlp.extra(x, rows if with_rows else None)
    replace_forward(mlp, forward)


def linear_used_twice(model, with_rows):
    def forward(mlp, former, x, rows=None):
        return former(former(x, rows), rows if with_rows else None)
    replace_forward(model.transformer.h[0].mlp, forward)


def norms_of_heads(model, with_rows):
    """Per-head features, (B,T,H,D), as norms of queries and keys have them."""
    attn = model.transformer.h[0].attn
    attn.ln_q, attn.linear_q = LayerNorm(8), Linear(8, 8)
    def forward(c_attn, former, x, rows=None):
        q, kv = former(x, rows).view(*x.shape[:2], 6, 8).split((2, 4), 2)
        q = attn.linear_q(attn.ln_q(q, rows if with_rows else None), rows if with_rows else None)
        return torch.cat((q, kv), 2).flatten(2)
    replace_forward(attn.c_attn, forward)


def untied_head(model, with_rows):
    model.lm_head.weight = torch.nn.Parameter(model.transformer.wte.weight.detach() * 2)
    if not with_rows:
        replace_forward(model.lm_head, lambda head, former, x, rows=None: former(x))


def blocks_share_their_mlp(model, with_rows):
    first, second = model.transformer.h
    second.mlp = first.mlp
    if not with_rows:
        replace_forward(second, lambda block, former, x, rows=None, *others: former(x, None, *others))


def norms_share_their_weight(model, with_rows):
    for block in model.transformer.h:
        block.ln_2.weight = block.ln_1.weight
        if not with_rows:
            replace_forward(block.ln_2, lambda norm, former, x, rows=None: former(x))


FORKS = {norm_after_embeddings: 'transformer.ln_e.weight', linear_in_the_blocks: 'transformer.h.0.mlp.extra.weight',
         linear_in_one_block: 'transformer.h.1.mlp.extra.weight', linear_used_twice: 'transformer.h.0.mlp.c_fc.weight',
         norms_of_heads: 'transformer.h.0.attn.ln_q.weight', untied_head: 'lm_head.weight',
         blocks_share_their_mlp: 'transformer.h.0.mlp.c_fc.weight',
         norms_share_their_weight: 'transformer.h.0.ln_1.weight'}


def forked(fork, with_rows):
    model, _ = small_gpt(ghost=False)
    fork(model, with_rows)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.double().parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize('fork', FORKS)
def test_a_fork_that_passes_rows_on_has_autograds_dots(fork):
    model = forked(fork, True)
    names = model.add_ghost()
    assert names == list(trainable(model)) and FORKS[fork] in names
    (X, Y), val = batch(2, 1), batch(3, 2)      # as many samples as heads: sums over the wrong dimension would fit
    G = set_ghost(model, val)
    agree(dots_of(model, names, X, Y), brute(model, G, X, Y), 1e-12)


@pytest.mark.parametrize('fork', FORKS)
def test_a_fork_that_forgets_rows_is_refused(fork):
    with pytest.raises(ValueError, match=FORKS[fork].replace('.', r'\.')):
        forked(fork, False).add_ghost()


def table_instead_of_rows(model):
    """GPT.forward's `s` passed on, where the layers expect rows."""
    def forward(norm, former, x, rows=None):
        return former(x, torch.stack(list(rows.values())))
    replace_forward(model.transformer.ln_f, forward)


def weight_without_its_layer(model):
    def forward(mlp, former, x, rows=None):
        return former(x, rows) + 0.01 * x @ mlp.c_proj.weight @ mlp.c_fc.weight
    replace_forward(model.transformer.h[1].mlp, forward)


def time_before_samples(model):
    def forward(norm, former, x, rows=None):
        return former(x.transpose(0, 1), rows).transpose(0, 1)
    replace_forward(model.transformer.ln_f, forward)


def tokens_in_a_row(model):
    def forward(mlp, former, x, rows=None):
        return former(x.flatten(0, 1), rows).view(x.shape)
    replace_forward(model.transformer.h[1].mlp, forward)


def positions_without_samples(model):
    def forward(wte, former, idx, rows=None):
        return former(idx, rows) + model.transformer.wpe(torch.arange(idx.size(1), device=idx.device), rows)
    replace_forward(model.transformer.wte, forward)


def layer_without_use(model):
    model.transformer.h[1].unused = Linear(16, 16)


def layer_of_a_block_outside(model):
    def forward(wte, former, idx, rows=None):
        return model.transformer.h[1].ln_1(former(idx, rows), rows)
    replace_forward(model.transformer.wte, forward)


@pytest.mark.parametrize('fork, name', [
    (table_instead_of_rows, 'transformer.ln_f.weight'), (weight_without_its_layer, 'transformer.h.1.mlp.c_fc.weight'),
    (time_before_samples, 'transformer.ln_f.weight'), (tokens_in_a_row, 'mlp.c_fc.weight'),
    (positions_without_samples, 'transformer.wpe.weight'), (layer_without_use, 'transformer.h.1.unused.weight'),
    (layer_of_a_block_outside, 'ln_1.weight')])
def test_a_fork_whose_dots_would_be_wrong_is_refused(fork, name):
    model, _ = small_gpt(ghost=False)
    fork(model.double())
    with pytest.raises(ValueError, match=name.replace('.', r'\.')):
        model.double().add_ghost()


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_add_ghost_changes_nothing_else(device):
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=V, dropout=0.2))
    model.transformer.h[0].register_buffer('table', torch.ones(3))
    before = {n: (p, p.clone()) for n, p in model.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    with torch.no_grad():       # no matter what surrounds it
        model.add_ghost()
    assert torch.equal(generator, torch.get_rng_state())
    now = model.state_dict(keep_vars=True)
    for name, (p, value) in before.items():
        assert now[name] is p and p.grad is None
        assert device == 'meta' or torch.equal(p, value)
    assert model.lm_head.weight is model.transformer.wte.weight and model.training
    frozen = {name.replace('ghost_', '') for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == set(trainable(model))


def test_all_blocks_compile_to_one_graph():
    from torch._dynamo.testing import CompileCounter
    counter = CompileCounter()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=4, n_head=2, n_embd=16, block_size=16, vocab_size=V))
    names = model.add_ghost()
    for block in model.transformer.h:
        block.compile(dynamic=False, fullgraph=True, backend=counter)
    X, Y = batch(3, 1)
    for _ in range(2):
        model(X, Y, torch.zeros(len(names), 3, requires_grad=True)).mean().backward()
    assert counter.frame_count == 1


def test_uncovered_layer_is_refused_at_start(fork, tmp_path):
    before = """
import model, torch
init = model.MLP.__init__
def with_more(self, config):
    init(self, config)
    self.extra = torch.nn.Linear(4, 4)
model.MLP.__init__ = with_more
"""
    line = fork(tmp_path, *GHOST, rc=2, before=before)
    assert 'transformer.h.0.mlp.extra' in line and 'Linear' in line


# ---- train.py --------------------------------------------------------------------------------------------------------
@pytest.fixture
def run(fork, tmp_path_factory):
    return lambda mode: long_run(fork, tmp_path_factory, mode)


def close(a, b, tolerance, mode=None):
    """Two (S, ...) tables, relative to the largest value of each step; a mode's dots go into the table of them all."""
    assert a.shape == b.shape
    worst = ((a - b).abs().flatten(1).amax(1) / b.abs().flatten(1).amax(1)).max().item()
    print(f'{worst:.1e}')
    if mode:
        record(mode, 'ghost dots', worst)
    return worst < tolerance


@pytest.mark.parametrize('mode', FOUR)
def test_files(run, tiny, mode):
    out = run(mode)
    assert sorted(p.name for p in (out / 'grad_dotprods').iterdir()) == [
        'iter_000004.safetensors',
        'iter_000008.safetensors',
        'iter_000010.safetensors',
        'iter_000012.safetensors',
        'iter_000016.safetensors',
        'iter_000020.safetensors',
        'valset.safetensors',
    ]
    dots, names = read_dots(out, names=True)
    kinds = {k: (tuple(v.shape), v.dtype) for k, v in dots.items()}
    S, B, P = 20, 16, len(names)
    assert kinds == {
        'dot_product': ((S, B), torch.float32),
        'offset': ((S, B), torch.int64),
        'loss': ((S, B), torch.float32),
        'iter': ((S,), torch.int64),
        'dot_product_per_param': ((S, P, B), torch.float32),
        **{k: ((S,), torch.float32) for k in ('lr', 'clip_coef', 'val_loss', 'grad_norm')},
    }
    assert dots['iter'].tolist() == list(range(S))
    assert names == list(trainable(model_of(out)))
    assert close(dots['dot_product_per_param'].sum(1), dots['dot_product'], 1e-6)
    steps, _ = log_of(out)
    for s in range(S):
        assert abs(dots['loss'][s].mean() / steps[s]['loss'] - 1) < 1e-6
        assert abs(dots['grad_norm'][s] / steps[s]['grad_norm'] - 1) < 1e-6
        assert abs(dots['lr'][s] / steps[s]['lr'] - 1) < 1e-6
        assert abs(dots['clip_coef'][s] / min(1, 0.5 / steps[s]['grad_norm']) - 1) < 1e-5
    # an offset leads to the sample's text, whose loss under the weights of the step is the one recorded
    model = model_of(out, 12, torch.float32)
    with torch.no_grad():
        assert (model(*windows(tiny, dots['offset'][12], 16)) - dots['loss'][12]).abs().max() < 1e-5


@pytest.mark.parametrize('step', [0, 12])
def test_values_equal_brute_force(run, tiny, step):
    out = run('plain')
    model, dots = model_of(out, step or None), read_dots(out)
    valset = load_file(out / 'grad_dotprods' / 'valset.safetensors')
    val = valset['tokens'][:, :-1], valset['tokens'][:, 1:]
    assert all(torch.equal(a, b) for a, b in zip(val, windows(tiny, valset['offset'], 16, 'val.bin')))
    assert abs(model(*val).mean().item() - dots['val_loss'][step]) < 1e-5
    exact = brute(model, gradients(model, *val), *windows(tiny, dots['offset'][step], 16))
    agree(dots['dot_product_per_param'][step].double(), exact, 3e-6)


@pytest.mark.parametrize('mode', FOUR[1:])
def test_every_mode_equals_plain(run, mode):
    a, b = read_dots(run(mode)), read_dots(run('plain'))
    assert torch.equal(a['offset'], b['offset'])
    assert same(*(load_file(run(m) / 'grad_dotprods' / 'valset.safetensors') for m in (mode, 'plain')))
    for name in ('dot_product', 'dot_product_per_param', 'loss', 'val_loss'):
        assert close(a[name][:1].view(1, -1), b[name][:1].view(1, -1), 1e-6), name
        assert close(a[name].view(20, -1), b[name].view(20, -1), 2e-6, mode), name  # weights apart by rounding


@pytest.mark.parametrize('mode', FOUR)
def test_training_is_unchanged(run, fork, tmp_path_factory, mode):
    """Weights after 12 steps with ghost and gradient dumps, and without."""
    a = read_full(bare_run(fork, tmp_path_factory, mode) / 'ckpt.pt')
    b = weights(run(mode) / 'ckpt_dcp' / 'step_12')
    b = {f'model.{k}': v for k, v in b.items()}
    a = {k: v for k, v in a.items() if k in b}
    assert same(a, b) if 'sdp' not in mode else far(a, b) < 1e-6


@pytest.mark.parametrize(
    'mode,args,tolerance',
    [
        ('plain', ['--fsdp_activation_checkpointing=full'], 1e-6),
        ('ddp2', ['--fsdp_activation_checkpointing=selective'], 1e-6),
        ('fsdp2', ['--fsdp_activation_checkpointing=full', '--fsdp_min_num_params=20000'], 1e-6),
        ('plain', ['--dtype=bfloat16'], 1e-2),
        ('fsdp2', ['--dtype=bfloat16'], 1e-2),
        ('ddp2', ['--dtype=float16'], 1e-2),
        ('plain', ['--gradient_accumulation_steps=1', '--batch_size=16'], 1e-6),
    ],
)
def test_value_does_not_depend_on_how(run, fork, tmp_path, mode, args, tolerance):
    launch(fork, tmp_path, mode, *GHOST, *args, '--max_iters=1', '--eval_iters=1')
    a, b = read_dots(tmp_path / 'out'), read_dots(run('plain'))
    assert close(a['dot_product'], b['dot_product'][:1], tolerance)


def test_intervals_and_resampling(fork, tmp_path):
    launch(
        fork,
        tmp_path,
        'plain',
        '--use_ghost=True',
        '--ghost_interval=3',
        '--ghost_save_interval=4',
        '--ghost_val_resample=True',
        '--max_iters=10',
        '--eval_iters=1',
        '--ghost_val_batch_size=6',
    )
    folder = tmp_path / 'out' / 'grad_dotprods'
    files = {p.name: load_file(p) for p in folder.iterdir() if p.name != 'valset.safetensors'}
    assert {n: f['iter'].tolist() for n, f in files.items()} == {
        'iter_000004.safetensors': [0, 3],
        'iter_000008.safetensors': [6],
        'iter_000010.safetensors': [9],
    }
    dots = read_dots(tmp_path / 'out')
    assert 'dot_product_per_param' not in dots
    assert dots['val_offset'].shape == (4, 6) and len(dots['val_offset'].unique(dim=0)) == 4


@pytest.mark.parametrize('mode', ['plain', 'ddp2', 'fsdp2'])
def test_with_dropout(fork, tmp_path, mode):
    """The validation pass runs without dropout, and leaves the masks of training as they were."""
    args = ['--dropout=0.3', '--max_iters=3', '--eval_iters=1']
    launch(fork, tmp_path, mode, *args, '--use_ghost=True', '--out_dir=ghost')
    launch(fork, tmp_path, mode, *args, '--out_dir=bare')
    a, b = (read_full(tmp_path / x / 'ckpt.pt') for x in ('ghost', 'bare'))
    assert same(a, b) if mode != 'fsdp2' else far(a, b) < 1e-6
    valset = load_file(tmp_path / 'ghost' / 'grad_dotprods' / 'valset.safetensors')
    with torch.no_grad():
        loss = model_of_seed(tmp_path / 'ghost')(valset['tokens'][:, :-1], valset['tokens'][:, 1:]).mean().item()
    assert abs(read_dots(tmp_path / 'ghost')['val_loss'][0] - loss) < 1e-5


def test_fixed_validation_batch_is_fixed(run, tiny):
    """val_loss belongs to one batch throughout: at step 16 that of valset.safetensors under the weights of step 16."""
    out = run('plain')
    valset = load_file(out / 'grad_dotprods' / 'valset.safetensors')
    with torch.no_grad():
        loss = model_of(out, 16)(valset['tokens'][:, :-1], valset['tokens'][:, 1:]).mean().item()
    assert abs(read_dots(out)['val_loss'][16] - loss) < 1e-5


@pytest.mark.parametrize('mode', ['plain', 'fsdp2'])
def test_float16_scores_whatever_its_loss_scale(fork, tmp_path, mode):
    """A scale that doubles after every step is at its limit most of the time: values are finite all the same."""
    double = 'import functools; torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, growth_interval=1)'
    args = ('--max_iters=25', '--eval_interval=1000', '--eval_iters=1', '--lr_decay_iters=25', '--dtype=float16',
            '--gradient_accumulation_steps=2')
    result = launch(fork, tmp_path, mode, *GHOST, *args, before=double, after="print('SCALE', g['scaler'].get_scale())")
    steps, updates = ckpt_of(tmp_path / 'out')['iter_num'], ckpt_of(tmp_path / 'out')['optimizer']['state']
    taken = int(next(iter(updates.values()))['step'])
    assert 0 < taken < steps == 25 and 'not scored' not in result.out       # some steps did overflow
    dots = read_dots(tmp_path / 'out')['dot_product']
    assert len(dots) == taken and dots.isfinite().all()


def test_ghost_val_dataset(fork, tmp_path, tiny, tmp_path_factory):
    other = tmp_path_factory.mktemp('data') / 'other'  # another text in the same characters
    write_dataset(other, (tiny / 'input.txt').read_text()[::-1])
    launch(
        fork, tmp_path, 'plain', '--use_ghost=True', f'--ghost_val_dataset={other}', '--max_iters=2', '--eval_iters=1'
    )
    valset = load_file(tmp_path / 'out' / 'grad_dotprods' / 'valset.safetensors')
    x, y = windows(other, valset['offset'], 16, 'val.bin')
    assert torch.equal(valset['tokens'], torch.cat((x, y[:, -1:]), 1))
    # by a name that other scripts find it by from anywhere
    launch(fork, other.parent, 'plain', *GHOST, '--ghost_val_dataset=other', '--max_iters=1', '--eval_iters=1')
    config = json.loads((other.parent / 'out' / 'config.json').read_text())
    assert config['ghost_val_dataset'] == str(other)
    exact = brute(
        model_of_seed(tmp_path / 'out'),
        gradients(model_of_seed(tmp_path / 'out'), x, y),
        *windows(tiny, read_dots(tmp_path / 'out')['offset'][0], 16),
    ).sum(0)
    assert close(read_dots(tmp_path / 'out')['dot_product'][:1].double(), exact[None], 3e-6)


def test_ghost_val_dataset_of_unknown_tokens(fork, tmp_path, tiny, tmp_path_factory):
    """nanoGPT's folders may record no tokenizer: then the ids are taken for the same."""
    other = tmp_path_factory.mktemp('data') / 'other'
    write_dataset(other, (tiny / 'input.txt').read_text()[::-1])
    (other / 'meta.json').unlink()
    launch(fork, tmp_path, 'plain', *GHOST, f'--ghost_val_dataset={other}', '--max_iters=1', '--eval_iters=1')
    assert len(read_dots(tmp_path / 'out')['dot_product']) == 1


def model_of_seed(out):
    """The model before the first step of a run saved as one file."""
    c = torch.load(out / 'ckpt.pt', weights_only=True)
    torch.manual_seed(c['config']['seed'])
    return GPT(GPTConfig(**c['model_args'])).double().eval()


def test_a_default_that_fits(fork, tmp_path):
    done = fork(tmp_path, '--use_ghost=True', '--batch_size=3', '--max_iters=1', '--eval_iters=1', nproc=2)
    assert 'ghost_val_batch_size is 4 ' not in done.out      # 2 a rank
    done = fork(tmp_path, '--use_ghost=True', '--batch_size=3', '--max_iters=1', '--eval_iters=1', '--out_dir=one')
    assert 'ghost_val_batch_size is 6 here, the next above 4 that fits' in done.out
    assert json.loads((tmp_path / 'one' / 'config.json').read_text())['ghost_val_batch_size'] == 6
    assert load_file(tmp_path / 'one' / 'grad_dotprods' / 'valset.safetensors')['offset'].shape == (6,)


def test_refusals(fork, tmp_path, tmp_path_factory):
    other = write_dataset(tmp_path_factory.mktemp('data') / 'digits', '0123456789 ' * 500)
    assert 'tokenizer' in fork(tmp_path, '--use_ghost=True', f'--ghost_val_dataset={other}', rc=2)
    line = fork(
        tmp_path,
        '--use_ghost=True',
        '--ghost_val_batch_size=6',
        '--gradient_accumulation_steps=4',
        rc=2,
        nproc=4,
        patient=True,
    )
    assert 'ghost_val_batch_size=6 must' in line and line.endswith(': --ghost_val_batch_size=8')
    line = fork(tmp_path, '--use_ghost=True', '--ghost_val_batch_size=6', rc=2)     # of micro-batches of 4
    assert line.endswith(': --ghost_val_batch_size=8')
    assert 'nowhere' in fork(tmp_path, '--use_ghost=True', '--ghost_val_dataset=nowhere', rc=2)
    for name in ('ghost_interval', 'ghost_save_interval', 'ghost_val_batch_size'):
        assert f'{name}=0' in fork(tmp_path, '--use_ghost=True', f'--{name}=0', rc=2)


KILL_AT_STEP = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
sys.stderr = open(os.devnull, 'w')   # the others tell that the killed rank is gone
count = 0
def hook(optimizer, args, kwargs):
    global count
    count += 1
    if count == {n} and os.environ.get('RANK', '0') == {rank!r}:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(hook)
"""


@pytest.mark.parametrize('mode,rank', [('plain', '0'), ('ddp2', '1')])
def test_kill_and_resume_neither_lose_nor_double(run, fork, tmp_path, mode, rank):
    """Killed in step 10, after the file of steps 6 to 8 and a checkpoint at 8: what is in a file stays, none twice."""
    args = [
        *GHOST,
        '--ghost_save_interval=3',
        '--checkpoint_interval=4',
        '--max_iters=14',
        '--eval_interval=100',
        '--eval_iters=1',
    ]
    launch(fork, tmp_path, mode, *args, rc=-9, before=KILL_AT_STEP.format(n=11, rank=rank))
    assert read_dots(tmp_path / 'out')['iter'].tolist() == list(range(9))
    # other intervals from here on, so that no file takes the name of one that goes
    launch(fork, tmp_path, mode, *args, '--ghost_save_interval=5', '--init_from=resume')
    dots, unbroken = read_dots(tmp_path / 'out'), read_dots(run(mode))
    assert all(torch.equal(dots[k], unbroken[k][:14]) for k in unbroken)
    assert not list((tmp_path / 'out' / 'grad_dotprods').glob('*.tmp'))
