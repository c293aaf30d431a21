"""model.py in this process: initialisation, groups, FLOPs, generate, and GPT-2's weights against transformers."""
import json
import math
import os
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from kernels import peak_flops  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from weights import load_hf  # noqa: E402

torch.set_num_threads(1)
SHAPE = dict(n_layer=3, n_head=4, n_embd=64, block_size=24, vocab_size=40)


def build(seed=0, spread=0.0, **changes):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for p in model.parameters():    # far from the initial state, where all tokens are alike
            p.add_(spread * torch.randn_like(p))
    return model


@pytest.fixture(scope='module')
def model():
    return build(spread=0.1)


def test_bfloat16_gradients_are_float32s(model):
    """Every parameter's, LayerNorms' too, within a few of bfloat16's roundings."""
    tokens = torch.randint(0, 40, (64, 25), generator=torch.Generator().manual_seed(0))
    grads = []
    for low in (False, True):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=low):
            model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    errors = {name: ((grads[1][name] - g).norm() / g.norm()).item() for name, g in grads[0].items()}
    assert max(errors.values()) < 2e-2, errors


def ids(*shape, seed=1, high=40):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# ---- parameters ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('bias', [False, True])
def test_initialisation(bias):
    model = build(n_embd=128, vocab_size=512, bias=bias)
    names = [n for n, _ in model.named_parameters()]
    assert any(n.endswith('.bias') for n in names) == bias
    for name, p in model.named_parameters():
        if name.endswith('.bias'):
            assert not p.any(), name
        elif 'ln_' in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 3) if name.endswith('c_proj.weight') else 0.02
            assert abs(p.std().item() / std - 1) < 5 / math.sqrt(2 * p.numel()), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
    x, y = ids(8, 24, high=512), ids(8, 24, seed=2, high=512)
    assert model(x, y).mean().item() == pytest.approx(math.log(512), abs=0.1)
    assert not torch.equal(model.lm_head.weight, build(1, n_embd=128, vocab_size=512).lm_head.weight)


def test_head_and_embedding_are_one_tensor(model):
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 'lm_head.weight' in model.state_dict() and 'lm_head.weight' not in dict(model.named_parameters())


@pytest.mark.parametrize('bias', [False, True])
def test_every_parameter_is_in_one_group(bias):
    model = build(bias=bias)
    decaying, others = model.param_groups(0.3)
    assert (decaying['weight_decay'], others['weight_decay']) == (0.3, 0.0)
    names = {p: n for n, p in model.named_parameters()}
    assert sorted(names[p] for g in (decaying, others) for p in g['params']) == sorted(names.values())
    assert {names[p] for p in others['params']} == {n for n in names.values() if n.endswith('.bias') or 'ln_' in n}


def test_flops_and_parameters_by_hand(model):
    L, C, T, V = 3, 64, 24, 40
    N = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C      # GPT-2's, with biases
    assert model.num_params() == N == sum(p.numel() for p in model.parameters())
    assert model.num_params(positions=False) == N - T * C
    heads, size = SHAPE['n_head'], C // SHAPE['n_head']
    assert model.flops_per_token() == 6 * (N - T * C) + 12 * L * heads * size * T    # nanoGPT's estimate
    without = build(bias=False)
    assert without.num_params() == N - L * 11 * C - C
    with torch.device('meta'):
        assert GPT(GPTConfig(vocab_size=50257)).num_params() == 124439808


@pytest.mark.parametrize('name, flops', [
    ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H200', 989e12),
    ('Tesla V100-SXM2-16GB', 125e12), ('Tesla T4', 65e12), ('NVIDIA GeForce RTX 4090', 165e12), ('NVIDIA L4', 121e12),
    ('NVIDIA L40S', 362e12), ('NVIDIA B200', 2250e12), ('NVIDIA A10G', None), ('NVIDIA GeForce RTX 4080 SUPER', 104e12),
    ('NVIDIA GeForce GTX 1080', None), ('Radeon', None), ('', None), ('NVIDIA RTX A4000', None),
    ('NVIDIA RTX A1000', None)])
def test_peak_flops(name, flops):
    assert peak_flops(name) == (flops and pytest.approx(flops, rel=0.08))


def test_heads_must_divide():
    with pytest.raises(ValueError, match='64.*5'):
        build(n_head=5)


# ---- forward ---------------------------------------------------------------------------------------------------------

def test_loss_is_the_cross_entropy_of_the_logits(model):
    x, y = ids(3, 24), ids(3, 24, seed=2)
    with torch.no_grad():
        logits = torch.stack([model(x[:, :t + 1]) for t in range(24)], 1)
        expected = -logits.log_softmax(-1).gather(2, y[..., None]).mean((1, 2))
        assert torch.allclose(model(x, y), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize('kept', [None, False, True], ids=['all', 'full', 'selective'])
def test_blocks_that_recompute_are_compiled_too(kept):
    """All blocks are one graph, whether they keep their forward pass or compute it again."""
    model, idx = build().train(), torch.arange(20).view(2, 10)
    model(idx, idx).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    if kept is not None:
        model.recompute(selective=kept)
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in model.transformer.h:
        block.compile(backend=counter, dynamic=False)
    model(idx, idx).sum().backward()
    assert counter.frame_count == 1
    for p, gradient in zip(model.parameters(), expected):
        assert torch.equal(p.grad, gradient)


def test_no_token_sees_a_later_one(model):
    x = ids(2, 24)
    other = x.clone()
    other[:, 12:] = ids(2, 12, seed=3)
    y = x.clone()
    embedded = []
    hook = model.transformer.ln_f.register_forward_hook(lambda module, args, out: embedded.append(out))
    with torch.no_grad():
        model(x, y), model(other, y)
    hook.remove()
    assert torch.allclose(embedded[0][:, :12], embedded[1][:, :12], atol=1e-6)
    assert not torch.allclose(embedded[0][:, 12:], embedded[1][:, 12:], atol=1e-2)


def test_dropout_only_in_training():
    model = build(spread=0.1, dropout=0.3)
    plain = build(spread=0.1)
    x, y = ids(2, 24), ids(2, 24, seed=2)
    with torch.no_grad():
        assert torch.equal(model(x, y), plain(x, y))
        model.train()
        assert not torch.equal(model(x, y), model(x, y))


def test_attention_dropout_is_on():
    """With the residual dropouts made the identity, what still varies is dropout within attention."""
    model = build(spread=0.1, dropout=0.3).train()
    real = torch.nn.functional.dropout
    torch.nn.functional.dropout = lambda x, *a, **k: x
    try:
        with torch.no_grad():
            assert not torch.equal(model(ids(1, 24), ids(1, 24)), model(ids(1, 24), ids(1, 24)))
    finally:
        torch.nn.functional.dropout = real


# ---- generate --------------------------------------------------------------------------------------------------------

def continuation(model, prompt, n, choose):
    """The plain way: everything anew for each token."""
    idx = prompt
    for _ in range(n):
        with torch.no_grad():
            idx = torch.cat((idx, choose(model(idx[:, -24:]))), 1)
    return idx


@pytest.mark.parametrize('length, n', [(1, 10), (5, 19), (5, 20), (20, 30), (24, 3), (30, 5)])
def test_greedy_with_and_without_cache(model, length, n):
    """Within the context, at its end, beyond it, and with a prompt longer than the context."""
    prompt = ids(3, length)
    expected = continuation(model, prompt, n, lambda logits: logits.argmax(-1, keepdim=True))
    for use_cache in (True, False):
        assert torch.equal(model.generate(prompt, n, temperature=0, use_cache=use_cache), expected)


def test_cached_logits_are_the_same(model):
    x = ids(2, 24)
    for first in (1, 7, 23):
        cache = [[] for _ in model.transformer.h]
        with torch.no_grad():
            got = [model(x[:, :first], cache=cache)] + [model(x[:, t:t + 1], cache=cache) for t in range(first, 24)]
            for t, logits in zip(range(first, 25), got):
                assert torch.allclose(logits, model(x[:, :t]), rtol=0, atol=1e-5)


def test_cache_is_used(model):
    """Each step after the first feeds one token."""
    widths = []
    hook = model.transformer.wte.register_forward_hook(lambda module, args, out: widths.append(args[0].size(1)))
    model.generate(ids(1, 5), 6, temperature=0)
    hook.remove()
    assert widths == [5, 1, 1, 1, 1, 1]


def test_sampling_follows_the_probabilities(model):
    prompt, n = ids(1, 6), 2000
    probs = model(prompt).softmax(-1)[0]

    def frequencies(seed=1, **options):
        drawn = model.generate(prompt.expand(n, -1), 1, generator=torch.Generator().manual_seed(seed), **options)[:, -1]
        return torch.bincount(drawn, minlength=40) / n

    def near(got, expected):    # five standard deviations
        assert ((got - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt() + 1e-9).all()
    with torch.no_grad():
        near(frequencies(), probs)
        near(frequencies(temperature=0.5), (probs.log() / 0.5).softmax(-1))
        top = probs.topk(3).indices
        kept = torch.zeros(40).index_fill(0, top, 1) * probs
        near(frequencies(top_k=3), kept / kept.sum())
        assert frequencies(top_k=1).argmax() == probs.argmax() and frequencies(top_k=1).max() == 1
        near(frequencies(top_k=1000), probs)
        p, order = probs.sort(descending=True)
        few = int((p.cumsum(0) < 0.5).sum()) + 1    # the fewest that reach one half
        kept = torch.zeros(40).index_fill(0, order[:few], 1) * probs
        near(frequencies(top_p=0.5), kept / kept.sum())
        near(frequencies(top_p=1.0), probs)
        assert frequencies(top_p=1e-9).max() == 1
        assert frequencies(top_p=1e-300).max() == 1
    assert torch.equal(frequencies(seed=2), frequencies(seed=2)) and not torch.equal(frequencies(seed=2), frequencies())


def test_generate_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    model.generate(ids(1, 4), 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=5.0), dict(top_k=35), dict(top_p=1.0),
                                     dict(temperature=0, use_cache=False)])
def test_padding_ids_are_never_drawn(options):
    model = build()
    with torch.no_grad():   # the padding would win by far
        model.transformer.wte.weight[30:] = model.transformer.wte.weight[30:] * 100
        model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[35])
    assert (model.generate(ids(50, 3, high=30), 20, temperature=0)[:, 3:] >= 30).any()
    out = model.generate(ids(50, 3, high=30), 20, vocab_size=30, **options)
    assert out.shape == (50, 23) and (out < 30).all()


def test_empty_prompt(model):
    out = model.generate(torch.zeros(2, 0, dtype=torch.long), 6, temperature=0, bos=7)
    assert torch.equal(out, model.generate(torch.full((2, 1), 7), 6, temperature=0)[:, 1:]) and out.shape == (2, 6)


def test_no_new_tokens(model):
    assert torch.equal(model.generate(ids(2, 5), 0), ids(2, 5))


@pytest.mark.parametrize('options', [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)])
def test_generate_refuses(model, options):
    (name, value), = options.items()
    with pytest.raises(ValueError, match=f'{name} {value}'):
        model.generate(ids(1, 3), 2, **options)


# ---- weights in Hugging Face form ------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def hf(tmp_path_factory):
    """(a tiny GPT-2 of transformers, the folder it was saved in)."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=20, vocab_size=50)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():   # large enough for the two forms of GELU to differ by more than rounding
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp('hf')
    theirs.save_pretrained(folder)
    return theirs, folder


def worst(ours, theirs):
    x = ids(4, 20, high=50)
    with torch.no_grad():
        expected = theirs(x).logits
        got = torch.stack([ours(x[:, :t + 1]) for t in range(20)], 1)
    return (got - expected).abs().max().item()


def test_logits_equal_those_of_transformers(hf):
    theirs, folder = hf
    model_args, state = load_hf(folder)
    assert model_args == dict(n_layer=2, n_head=2, n_embd=32, block_size=20, vocab_size=50, bias=True, gelu='tanh')
    ours = GPT(GPTConfig(**model_args)).eval()
    ours.load_state_dict(state)
    assert worst(ours, theirs) < 1e-5
    exact = GPT(GPTConfig(**{**model_args, 'gelu': 'none'})).eval()
    exact.load_state_dict(state)
    assert worst(exact, theirs) > 1e-4     # the test can tell the two forms apart


def copied(folder, tmp_path, **changes):
    config = {**json.loads((folder / 'config.json').read_text()), **changes}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'model.safetensors').write_bytes((folder / 'model.safetensors').read_bytes())
    return tmp_path


def test_the_released_names(hf, tmp_path):
    """GPT-2's own files have no `transformer.` before the names, and masks among the weights."""
    from safetensors.torch import load_file, save_file
    theirs, folder = hf
    copied(folder, tmp_path)
    weights = {k.removeprefix('transformer.'): v for k, v in load_file(folder / 'model.safetensors').items()}
    for i in range(2):
        weights[f'h.{i}.attn.bias'] = torch.ones(20, 20).tril()[None, None]
    weights['wte.weight'] = weights['wte.weight'].half()
    save_file(weights, tmp_path / 'model.safetensors')
    model_args, state = load_hf(tmp_path)
    ours = GPT(GPTConfig(**model_args)).eval()
    ours.load_state_dict(state)
    assert worst(ours, theirs) < 3e-2 and all(v.dtype == torch.float32 for v in state.values())


@pytest.mark.parametrize('changes, word', [
    (dict(activation_function='relu'), 'relu'), (dict(model_type='llama'), 'llama'), (dict(n_layer=3), 'h.2'),
    (dict(n_embd=64), 'does not fit'), (dict(layer_norm_epsilon=1e-6), 'layer_norm_epsilon'),
    (dict(n_inner=100), 'n_inner'),
    (dict(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx'),
    (dict(tie_word_embeddings=False), 'tie_word_embeddings')])
def test_unsupported_folders_are_named(hf, tmp_path, changes, word):
    with pytest.raises(ValueError, match=word):
        load_hf(copied(hf[1], tmp_path, **changes))


@pytest.mark.parametrize('name, change, word', [
    ('lm_head.weight', lambda w: w + 1, 'differs'), ('transformer.wte.weight', lambda w: w * torch.nan, 'NaN'),
    ('transformer.h.0.mlp.c_fc.weight', lambda w: (w * 100).to(torch.int8), 'int8')])
def test_weights_that_mean_something_else(hf, tmp_path, name, change, word):
    """A head of its own, though config.json says that it is tied; NaN; a quantized layer."""
    from safetensors.torch import load_file, save_file

    from weights import read_checkpoint
    copied(hf[1], tmp_path)
    weights = load_file(tmp_path / 'model.safetensors')
    weights[name] = change(weights.get(name, weights['transformer.wte.weight']))
    save_file(weights, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match=word):
        read_checkpoint(str(tmp_path))


def test_no_text_from_weights_that_hold_nan():
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=10))
    model.transformer.h[0].mlp.c_fc.weight.data.fill_(torch.nan)
    for temperature in (0, 1):
        with pytest.raises(ValueError, match='NaN'):
            model.generate(torch.zeros(1, 1, dtype=torch.long), 2, temperature)


def test_incomplete_folders(hf, tmp_path):
    with pytest.raises(ValueError, match='config.json'):
        load_hf(tmp_path)
    copied(hf[1], tmp_path)
    (tmp_path / 'model.safetensors').write_bytes(b'')
    with pytest.raises(ValueError, match='model.safetensors'):
        load_hf(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    with pytest.raises(ValueError, match='model.safetensors'):
        load_hf(tmp_path)
    copied(hf[1], tmp_path)
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(ValueError):
        load_hf(tmp_path)
