"""
What is written for GPUs: two Triton kernels, each beside its plain form, what model.py does with them, and peak rates.
Shapes as in model.py: B samples, T tokens, C = n_embd, V = vocab_size; a Linear maps m features to n.
"""
import re

import torch
import torch.nn.functional as F
from torch.library import triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:     # not on every platform; each kernel has a plain form beside it
    triton = None


# ---- two Triton kernels: torch.compile would read and write these large tensors more often ---------------------------

def fast(x):
    """Whether the kernels apply to x: bfloat16 on a GPU. All else takes the plain forms, the tests' measure."""
    return triton is not None and x.is_cuda and x.dtype == torch.bfloat16


if triton:
    @triton.jit
    def _cross_entropy(z, y, loss, V, BLOCK: tl.constexpr):     # one program per token reads z twice, writes it once
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        target, cols = tl.load(y + row), tl.arange(0, BLOCK)
        at_target = tl.load(z + target).to(tl.float32)
        top, total = -float('inf'), 0.0
        for i in range(0, V, BLOCK):
            a = tl.load(z + i + cols, mask=i + cols < V, other=-float('inf')).to(tl.float32)
            new = tl.maximum(top, tl.max(a))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(a - new))
            top = new
        lse = top + tl.log(total)
        tl.store(loss + row, lse - at_target)
        for i in range(0, V, BLOCK):
            a = tl.load(z + i + cols, mask=i + cols < V, other=0.0).to(tl.float32)
            tl.store(z + i + cols, tl.exp(a - lse) - tl.where(i + cols == target, 1.0, 0.0), mask=i + cols < V)

    @triton_op('flatgpt::cross_entropy_', mutates_args={'z'})
    def cross_entropy_(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:   # (B,T,V), (B,T) -> (B,T); z: its gradient
        y = y.contiguous()      # targets come as a view into the tokens, and the kernel counts rows
        loss = torch.empty(y.shape, device=z.device, dtype=torch.float32)
        wrap_triton(_cross_entropy)[(y.numel(),)](z, y, loss, z.size(-1), BLOCK=16384, num_warps=16)
        return loss

    @triton.jit
    def _sum_and_dots(dw, G, total, part, B, n, BB: tl.constexpr, BN: tl.constexpr):    # one program per BN weights
        cols, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BB)
        g = tl.load(G + cols, mask=cols < n, other=0.0).to(tl.float32)
        acc = tl.zeros((BB, BN), tl.float32)
        for i in range(0, B, BB):
            at = dw + (i + rows).to(tl.int64)[:, None] * n + cols[None, :]
            a = tl.load(at, mask=(i + rows < B)[:, None] & (cols < n)[None, :], other=0.0).to(tl.float32)
            acc += a
            tl.store(part + (i + rows) * tl.num_programs(0) + tl.program_id(0), tl.sum(a * g[None, :], 1),
                     mask=i + rows < B)
        tl.store(total + cols, tl.sum(acc, 0), mask=cols < n)

    @triton_op('flatgpt::sum_and_dots', mutates_args={})
    def sum_and_dots(dw: torch.Tensor, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # dw (B,n,m), G (n,m) -> the sum over samples (n,m), and the dots with G (B,blocks), to be summed over blocks
        dw, G, blocks = dw.contiguous(), G.contiguous(), triton.cdiv(G.numel(), 1024)
        total = torch.empty(G.shape, device=G.device, dtype=torch.float32)
        part = torch.empty((len(dw), blocks), device=G.device, dtype=torch.float32)
        wrap_triton(_sum_and_dots)[(blocks,)](dw, G, total, part, len(dw), G.numel(), BB=8, BN=1024, num_warps=4)
        return total, part


def cross_entropy_grad(z, y):
    """z (B,T,V) logits, y (B,T) -> the losses (B,T), and their gradients (B,T,V): the kernel's overwrite z."""
    if fast(z):
        return cross_entropy_(z, y), z
    a = z.to(torch.promote_types(z.dtype, torch.float32))
    lse = a.logsumexp(-1, keepdim=True)                                         # (B,T,1)
    losses = (lse - a.gather(-1, y[..., None])).squeeze(-1)
    hit = torch.arange(a.size(-1), device=a.device) == y[..., None]             # (B,T,V), True at the target
    return losses, ((a - lse).exp() - hit.to(a.dtype)).to(z.dtype)


def weight_grad(dy, x, G=None):
    """dy (B,T,n), x (B,T,m), G (n,m) -> sum_i dy_i^T x_i (n,m) and, given G, the dots <dy_i^T x_i, G> (B,)."""
    if G is not None and fast(dy):
        dw = torch.bmm(dy.transpose(1, 2), x)   # (B,n,m): every sample's own gradient, which the kernel reads once
        dw, part = sum_and_dots(dw, G)
        return dw, part.sum(1)
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    return dw, None if G is None else linear_dots(dy, x, G)


def linear_dots(dy, x, G):
    """dy (B,...,n), x (B,...,m), G (n,m) -> sum_t dy_t . (G x_t) of each sample, (B,), by the lesser of n, m."""
    acc, G, x = torch.promote_types(dy.dtype, torch.float32), G.to(dy.dtype), x.to(dy.dtype)
    if G.size(0) > G.size(1):
        a, b = dy @ G, x                # (B,...,m)
    else:
        a, b = F.linear(x, G), dy       # (B,...,n)
    return (a.to(acc) * b.to(acc)).sum(-1).flatten(1).sum(-1)


# ---- what model.py calls: a Linear with its ghost dots, and the head with the loss -----------------------------------

class GhostLinear(torch.autograd.Function):
    """x (B,T,m) @ w.T, whose backward pass takes the dots from the same products that make the weight's gradient."""

    @staticmethod
    def forward(ctx, x, w, G, s):
        ctx.dtype = w.dtype
        w = w.to(x.dtype)
        ctx.save_for_backward(x, w, G)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w, G = ctx.saved_tensors
        dw, dots = weight_grad(dy, x, G)
        return dy @ w, dw.to(ctx.dtype), None, dots


HEAD_ROWS = 16384   # tokens whose logits exist at a time: fewer need less memory, but more additions to dw


class HeadLoss(torch.autograd.Function):
    """
    x (B,T,C), w (V,C), y (B,T) -> the mean loss of each sample, (B,). It computes the gradients in the forward pass,
    HEAD_ROWS tokens at a time, so that the logits (B,T,V), the largest tensor of all, never exist as a whole.
    The gradients are right for the sum or the mean of the losses; unequal weights would give NaN. G None: no ghost.
    """

    @staticmethod
    def forward(ctx, x, w, y, G, s):
        ctx.dtype = w.dtype
        w = w.to(x.dtype)
        tokens = HEAD_ROWS if G is None else HEAD_ROWS // 2
        n = max(1, tokens // x.size(1))                             # samples at a time
        losses, dx, dw, dots = [], [], 0, []
        for x_n, y_n in zip(x.split(n), y.split(n)):
            loss, dz = cross_entropy_grad(F.linear(x_n, w), y_n)    # (n,T), (n,T,V)
            dw_n, dots_n = weight_grad(dz, x_n, G)                  # (V,C), (n,)
            losses.append(loss.mean(1))
            dx.append(dz @ w)
            dw = dw + dw_n.to(loss.dtype)
            dots.append(dots_n)
        ctx.save_for_backward(torch.cat(dx), dw, None if G is None else torch.cat(dots))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, g):
        dx, dw, dots = ctx.saved_tensors
        g = torch.where(g.min() == g.max(), g[0], torch.nan) / dx.size(1)
        ds = None if dots is None else dots * g
        return (dx * g).to(dx.dtype), (dw * g).to(ctx.dtype), None, None, ds


# ---- speed of light --------------------------------------------------------------------------------------------------

# dense bfloat16 FLOP/s (float16 before Ampere), from the vendors' datasheets; the first name found in the device's wins
PEAK_FLOPS = {
    'B200': 2250e12, 'GH200': 989e12, 'H200': 989e12, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12,
    'H800': 989e12, 'A100': 312e12, 'A800': 312e12, 'L40S': 362e12, 'L40': 181e12, 'L4': 121e12, 'A40': 150e12,
    'A30': 165e12, 'A10': 125e12, 'A6000': 155e12, 'RTX 6000 Ada': 364e12, 'V100': 125e12, 'T4': 65e12,
    'RTX 5090': 210e12, 'RTX 4090': 165e12, 'RTX 4080': 97e12, 'RTX 3090': 71e12, 'RTX 3080': 60e12}


def peak_flops(device_name):
    """Peak FLOP/s of a card by its name as torch.cuda.get_device_name() gives it; None if unknown."""
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf'\b{name}\b', device_name)), None)
