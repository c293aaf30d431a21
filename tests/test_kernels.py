"""kernels.py against plain autograd: on a GPU, or without one in Triton's interpreter."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernels
import model
from kernels import GhostLinear, HeadLoss
from model import GPT, GPTConfig

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
needs_triton = pytest.mark.skipif(kernels.triton is None, reason='triton is not installed')


def batch(rows, length, vocab):
    """Inputs and targets as train.py passes them: two views of the same tokens, neither contiguous."""
    tokens = torch.randint(0, vocab, (rows, length + 1), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@needs_triton
def test_cross_entropy_kernel():
    torch.manual_seed(0)
    _, y = batch(3, 8, 70)
    z = torch.randn(3, 8, 70, device=DEVICE).bfloat16()
    exact = z.double().requires_grad_()
    losses = F.cross_entropy(exact.flatten(0, 1), y.flatten(), reduction='none').view(3, 8)
    losses.sum().backward()
    got = torch.ops.flatgpt.cross_entropy_(z, y)
    assert (got - losses).abs().max() < 2e-6
    assert (z.double() - exact.grad).abs().max() < 2**-8       # half a bfloat16 step below 1


@needs_triton
@pytest.mark.parametrize('rows', [1, 5, 8, 9])
def test_sum_and_dots_kernel(rows):
    torch.manual_seed(0)
    dw, G = torch.randn(rows, 33, 65, device=DEVICE).bfloat16(), torch.randn(33, 65, device=DEVICE)
    total, part = torch.ops.flatgpt.sum_and_dots(dw, G)
    assert relative(total, dw.double().sum(0)) < 1e-6
    exact = (dw.double() * G.double()).flatten(1)
    assert (part.sum(1) - exact.sum(1)).abs().max() < 1e-6 * exact.abs().sum(1).max()


@pytest.mark.parametrize('ghost', [False, True])
@pytest.mark.parametrize('chunk', [8, 16, 1000])
def test_head_in_chunks_is_the_plain_head(monkeypatch, chunk, ghost):
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, 'HEAD_ROWS', chunk)
    x, w, G = (torch.randn(*s, dtype=torch.float64) for s in ((5, 8, 6), (11, 6), (11, 6)))
    y = torch.randint(0, 11, (5, 9))[:, 1:]
    grads = []
    for fast in (False, True):
        x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        s = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        if fast:
            losses = HeadLoss.apply(x_, w_, y, G if ghost else None, s if ghost else None)
        else:
            logits = F.linear(x_, w_) + s[:, None, None] * F.linear(x_, G)
            losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='none').view(5, 8).mean(1)
        (losses.mean() / 3).backward()
        grads.append((losses, x_.grad, w_.grad, s.grad if ghost else losses))
    for plain, chunked in zip(*grads):
        assert (plain - chunked).abs().max() < 1e-14


def test_unequal_weights_of_the_losses_are_no_wrong_gradient():
    x, w = torch.randn(2, 4, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    HeadLoss.apply(x, w, torch.randint(0, 11, (2, 4)), None, None)[0].backward()
    assert w.grad.isnan().all()


def test_ghost_linear_is_the_linear_with_dots():
    torch.manual_seed(0)
    x, w, G, dy = (torch.randn(*s, dtype=torch.float64) for s in ((3, 7, 5), (4, 5), (4, 5), (3, 7, 4)))
    grads = []
    for fast in (False, True):
        x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        s = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        y = GhostLinear.apply(x_, w_, G, s) if fast else F.linear(x_, w_) + s[:, None, None] * F.linear(x_, G)
        y.backward(dy)
        grads.append((y, x_.grad, w_.grad, s.grad))
    for plain, fused in zip(*grads):
        assert (plain - fused).abs().max() < 1e-13


def test_ghost_leaves_float32_gradients_alone():
    """To the bit on a CPU; on a card within the rounding of other kernels."""
    (X, Y), grads = batch(6, 32, 96), []
    for ghost in (False, True):
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=96))
        names = gpt.add_ghost() if ghost else []
        gpt.to(DEVICE).tie()
        for name, p in gpt.named_parameters():
            if 'ghost_' in name:
                p.data.normal_()
        s = torch.zeros(len(names), 6, device=DEVICE, requires_grad=True) if ghost else None
        gpt(X, Y, s).mean().backward()
        grads.append([p.grad for p in gpt.parameters() if p.requires_grad])
    limit = 1e-6 if DEVICE == 'cuda' else 0
    assert max(relative(b, a) for a, b in zip(*grads)) <= limit


@needs_triton
@pytest.mark.parametrize('bias', [False, True])
def test_a_whole_step_through_the_kernels(monkeypatch, bias):
    """Loss, gradients and dots of the fast path in bfloat16 are as near float32's as the plain path's in bfloat16."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, bias=bias)).to(DEVICE)
    names = gpt.add_ghost()
    gpt.to(DEVICE).tie()
    for name, p in gpt.named_parameters():
        if 'ghost_' in name:
            p.data.normal_()
    X, Y = batch(6, 16, 64)

    def step(low, fast):
        for module in (model, kernels):
            monkeypatch.setattr(module, 'fast', lambda x: fast and x.dtype == torch.bfloat16)
        gpt.zero_grad(set_to_none=True)
        s = torch.zeros(len(names), 6, device=DEVICE, requires_grad=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            losses = gpt(X, Y, s)
        losses.mean().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in gpt.parameters() if p.requires_grad])
        return losses.detach().float(), gradient, s.grad.sum(0)

    exact, plain, fast = step(False, False), step(True, False), step(True, True)
    assert not torch.equal(plain[1], fast[1])       # the other path was taken
    for e, p, f in zip(exact, plain, fast):
        assert relative(f, e) < 2 * relative(p, e) + 1e-3, (relative(f, e), relative(p, e))
