"""
GPT-2 as plain PyTorch modules, and how each layer's backward yields per-sample gradient dot products ("ghost").
This file knows nothing of ranks, devices or training loops.

Sources: the GPT-2 paper (Radford et al. 2019) and its released weights, whose parameter names are kept;
FLOPs per token: appendix B of PaLM (Chowdhery et al. 2022); ghost: Data Shapley in One Training Run (arXiv:2406.11011).

Shapes at line ends: B samples, T tokens, C = n_embd, H heads, D = C/H, V = vocab_size.
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import cross_entropy_grad, fast, linear_dots, weight_grad



@dataclass
class GPTConfig:
    block_size: int = 1024     # longest context, tokens
    vocab_size: int = 50304    # rows of the embedding: GPT-2's 50257 padded to a multiple of 64, which the GPU prefers
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0       # probability
    bias: bool = True          # in Linears and LayerNorms, as GPT-2 has it; False is a little faster and no worse
    gelu: str = 'tanh'         # 'tanh' as GPT-2 was trained | 'none': the exact form


def low(x):
    """x as autocast would pass it to a matmul; custom Functions have to see to that themselves."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if x.dtype == torch.float32 and torch.is_autocast_enabled(kind) else x


# ---- layers, each with its ghost branch ------------------------------------------------------------------------------
# Ghost mode answers: what is <grad l_i, G> for every sample i, with G the gradient of a validation loss? Give sample i
# the parameters theta + s_i G with s_i = 0; then d l_i / d s_i is the answer. Each layer y = f(x; theta) is linear in
# its parameters, so its share of that derivative is sum_t dy_it . f(x_it; G): the backward pass has all it takes, and
# hands it out as the gradient of s. No hooks, no per-sample gradients in memory, and .grad is what it always was.
# A layer's `s` is an iterator over zeros (B,), one per parameter in the order of named_parameters(); None: ghost off.

class Tap(torch.autograd.Function):
    """The identity on y (B,T,n) = f(x; w, b), whose backward adds the gradients of s_w and s_b (each (B,))."""

    @staticmethod
    def forward(ctx, y, kind, x, G_w, G_b, s_w, s_b):
        ctx.save_for_backward(x, G_w, G_b)
        ctx.kind = kind
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, G_w, G_b = ctx.saved_tensors
        acc = torch.promote_types(dy.dtype, torch.float32)
        if ctx.kind == 'linear':
            ds_w = linear_dots(dy, x, G_w)
        else:   # embedding: x is token ids (B,T), or positions (T,) that all samples share; layernorm: normalised x * G
            f = F.embedding(x, G_w) if ctx.kind == 'embedding' else F.layer_norm(x.to(acc), G_w.shape, G_w.to(acc))
            ds_w = (dy.to(acc) * f.to(acc)).sum(-1).sum(-1)     # rows first: compiled, that joins the layer's backward
        ds_b = None if G_b is None else dy.sum(1, dtype=acc) @ G_b.to(acc)
        return dy, None, None, None, None, ds_w, ds_b


class GhostLinear(torch.autograd.Function):
    """x (B,T,m) @ w.T, whose backward takes the dots from the very products that make the weight gradient."""

    @staticmethod
    def forward(ctx, x, w, G, s):
        ctx.dtype, w = w.dtype, w.to(x.dtype)
        ctx.save_for_backward(x, w, G)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w, G = ctx.saved_tensors
        dw, dots = weight_grad(dy, x, G)
        return dy @ w, dw.to(ctx.dtype), None, dots


HEAD_ROWS = 16384   # of logits at a time: fewer save memory, more save additions to the head's gradient


class HeadLoss(torch.autograd.Function):
    """
    x (B,T,C), w (V,C), y (B,T) -> the mean loss of each sample, (B,). Takes the gradients in the forward pass,
    HEAD_ROWS rows at a time, so that the logits (B,T,V), the largest tensor of all, never exist as a whole.
    The gradients are right for the sum or the mean of the losses; unequal weights would give NaN.
    """

    @staticmethod
    def forward(ctx, x, w, y, G, s):
        ctx.dtype, w = w.dtype, w.to(x.dtype)
        n = max(1, HEAD_ROWS // (1 if G is None else 2) // x.size(1))
        losses, dx, dw, dots = [], [], 0, []
        for x_n, y_n in zip(x.split(n), y.split(n)):
            loss, dz = cross_entropy_grad(F.linear(x_n, w), y_n)
            dw_n, dots_n = weight_grad(dz, x_n, G)
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
        return (dx * g).to(dx.dtype), (dw * g).to(ctx.dtype), None, None, None if dots is None else dots * g


def tap(module, kind, y, x, s):
    G_b = getattr(module, 'ghost_bias', None)
    return Tap.apply(y, kind, x, module.ghost_weight, G_b, next(s), None if G_b is None else next(s))


def initialise(weight, std=0.02):
    if not weight.is_meta:      # there torch would import its compiler first
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    def reset_parameters(self):
        initialise(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x, s=None):
        if s is None or not fast(low(x)):
            y = F.linear(x, self.weight, self.bias)
            return y if s is None else tap(self, 'linear', y, x, s)
        y = GhostLinear.apply(low(x), self.weight, self.ghost_weight, next(s))
        if self.bias is not None:   # s is 0, so it adds nothing: but its gradient is the bias' dot
            y = y + (self.bias + next(s)[:, None].expand(x.shape[:2])[..., None] * self.ghost_bias).to(y.dtype)
        return y


class Embedding(nn.Embedding):
    def reset_parameters(self):
        initialise(self.weight)

    def forward(self, idx, s=None):
        y = F.embedding(idx, self.weight)
        return y if s is None else tap(self, 'embedding', y, idx, s)


class LayerNorm(nn.LayerNorm):
    def forward(self, x, s=None):
        # a GPU's autocast would cast x so too; a CPU's would not, and sum the weight's gradient in bfloat16
        y = F.layer_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.bias, self.eps)
        return y if s is None else tap(self, 'layernorm', y, x, s)


# ---- the transformer -------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, s=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x, s).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)     # (B,H,T,D)
        if cache is not None:   # (k, v) of the tokens before; None inside: this is the first call
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        # one new token may look at every cached one, so only a whole sequence needs the causal mask
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=T > 1)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y, s), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gelu, self.dropout = config.gelu, config.dropout
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, s=None):
        x = F.gelu(self.c_fc(x, s), approximate=self.gelu)   # (B,T,4C)
        return F.dropout(self.c_proj(x, s), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, s=None, cache=None):   # s: a tuple, this block's rows of the ghost table
        s = None if s is None else iter(s)
        x = x + self.attn(self.ln_1(x, s), s, cache)
        x = x + self.mlp(self.ln_2(x, s), s)
        if s is not None and next(s, None) is not None:
            raise RuntimeError('ghost: a layer of this block has parameters but was called without s')
        return x


class GPT(nn.Module):
    """
    GPT-2 with tied embeddings. `forward(idx, targets)` gives the training loss, `forward(idx)` the next token's logits.

    >>> model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=256))
    """

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f'n_embd {config.n_embd} is not divisible by n_head {config.n_head}')
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=Embedding(config.vocab_size, config.n_embd),
            wpe=Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=LayerNorm(config.n_embd, bias=config.bias)))
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        for block in self.transformer.h:   # each block adds twice to the residual stream: keep its variance near 1
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                initialise(projection.weight, std=0.02 / math.sqrt(2 * config.n_layer))

    def tie(self):
        """One tensor embeds tokens and scores them; call again after whatever replaces parameters."""
        self.lm_head.weight = self.transformer.wte.weight
        if hasattr(self.lm_head, 'ghost_weight'):
            self.lm_head.ghost_weight = self.transformer.wte.ghost_weight

    def forward(self, idx, targets=None, s=None, cache=None):
        """
        idx (B,T) int64 token ids, T <= block_size.
        targets (B,T) int64: returns the mean token loss of each sample, (B,) nats, at least float32.
        No targets: returns the logits after the last token, (B,V).
        s (P,B) zeros that require grad, P = the number of parameters (tied ones once): after backward, s.grad[p, i] is
        <gradient of parameter p from sample i's share of the loss, ghost_p>. cache: as generate() makes it.
        """
        h, L = self.transformer.h, self.config.n_layer
        past = cache[0][0].size(2) if cache and cache[0] else 0
        pos = torch.arange(past, past + idx.size(1), device=idx.device)               # (T,)
        s_wte = s_wpe = s_ln_f = s_head = None
        s_h = [None] * L
        if s is not None:    # rows as named_parameters() orders them: wte, wpe, the blocks, ln_f; the head is wte again
            rows, top = s.unbind(0), 3 + self.config.bias
            n = (len(rows) - top) // L
            s_wte, s_wpe, s_ln_f, s_head = iter(rows[:1]), iter(rows[1:2]), iter(rows[2 - top:]), iter(rows[:1])
            s_h = [rows[2 + i * n:2 + (i + 1) * n] for i in range(L)]
        x = self.transformer.wte(idx, s_wte)                                          # (B,T,C)
        # positions are expanded before the tap, since their dy has to stay per sample
        p = F.embedding(pos, self.transformer.wpe.weight).expand(len(idx), -1, -1)
        x = x + (p if s is None else tap(self.transformer.wpe, 'embedding', p, pos, s_wpe))
        if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype) if dtype == torch.bfloat16 else x   # a bfloat16 residual stream halves its traffic
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(h):
            x = block(x, s_h[i], None if cache is None else cache[i])
        if targets is None:
            return self.lm_head(self.transformer.ln_f(x[:, -1]))                      # (B,V)
        return self.loss(x, targets, s_ln_f, s_head)

    def loss(self, x, targets, s_ln_f=None, s_head=None):
        """x (B,T,C) of the last block, targets (B,T): the mean token loss of each sample, (B,)."""
        x, G = low(self.transformer.ln_f(x, s_ln_f)), None if s_head is None else self.lm_head.ghost_weight
        if fast(x) and torch.is_grad_enabled():
            return HeadLoss.apply(x, self.lm_head.weight, targets, G, None if G is None else next(s_head))
        logits = self.lm_head(x, s_head)                                              # (B,T,V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction='none').view(targets.shape).mean(1)

    def add_ghost(self):
        """
        Register a frozen `ghost_<name>` of the same shape beside every parameter, to hold the validation gradient.
        Call before compiling, wrapping or building an optimizer. Returns the names of the ghost table's rows, tied
        parameters once. Raises ValueError naming a layer whose dot products model.py does not know how to compute.
        """
        names = [name for name, _ in self.named_parameters()]
        ghosts = {}
        for name, module in self.named_modules():
            own = list(module.named_parameters(recurse=False))
            if own and type(module) not in (Linear, Embedding, LayerNorm):
                raise ValueError(f'ghost does not cover {name} ({type(module).__name__}); use the layers of model.py')
            for k, p in own:
                ghosts.setdefault(p, nn.Parameter(torch.zeros_like(p), requires_grad=False))
                module.register_parameter(f'ghost_{k}', ghosts[p])
        return names

    def recompute(self, selective):
        """
        From now on the blocks forget their forward pass but for its input, and compute it again in the backward pass:
        less memory, a third more work. selective: the results of matmuls and attention are kept too. Call before
        compiling or wrapping.
        """
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        options = {}
        if selective:
            attention = [f'_scaled_dot_product_{kind}' for kind in
                         ('flash_attention', 'efficient_attention', 'cudnn_attention', 'flash_attention_for_cpu')]
            kept = [getattr(torch.ops.aten, op).default for op in ('mm', 'addmm', 'bmm', *attention)]
            options['context_fn'] = partial(create_selective_checkpoint_contexts, kept)
        for block in self.transformer.h:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)

    def param_groups(self, weight_decay):
        """AdamW's two groups, each parameter in exactly one: matrices and embeddings decay, biases and norms do not."""
        params = [p for p in self.parameters() if p.requires_grad]   # tied ones come once; ghost_* are frozen
        return [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]

    def num_params(self, positions=True):
        """Number of parameters, tied ones once, ghost_* not at all; positions=False leaves out wpe."""
        n = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return n if positions else n - self.transformer.wpe.weight.numel()

    def flops_per_token(self):
        """FLOPs of forward and backward per token of a full context: 6 N for the weights, 12 L C T for attention."""
        c = self.config
        return 6 * self.num_params(positions=False) + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None, bos=0,
                 generator=None, use_cache=True):
        """
        Continue idx (B,T) int64 by max_new_tokens; returns (B, T + max_new_tokens).
        temperature 0 is greedy. top_k keeps the k likeliest tokens, top_p the fewest whose probabilities reach p.
        vocab_size: ids from here on are padding, never drawn. An empty prompt starts from bos, which is not returned.
        The context is the last block_size tokens. With use_cache each step feeds one token while everything fits.
        """
        if temperature < 0:
            raise ValueError(f'temperature {temperature}: must be >= 0 (0 is greedy)')
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f'top_p {top_p}: must be above 0 and at most 1')
        if top_k is not None and top_k < 1:
            raise ValueError(f'top_k {top_k}: must be at least 1')
        block_size, empty = self.config.block_size, idx.size(1) == 0
        if empty:
            idx = idx.new_full((len(idx), 1), bos)
        cache = [[] for _ in self.transformer.h] if use_cache else None
        for _ in range(max_new_tokens):
            if idx.size(1) > block_size:    # the window slides, every position changes, nothing cached is of use
                logits = self(idx[:, -block_size:])
            else:
                logits = self(idx[:, -1:] if cache and cache[0] else idx, cache=cache)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits[:, vocab_size:] = -torch.inf if vocab_size is not None else logits[:, vocab_size:]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial(_probabilities(logits / temperature, top_k, top_p), 1, generator=generator)
            idx = torch.cat((idx, new), 1)
        return idx[:, 1:] if empty else idx


def _probabilities(logits, top_k, top_p):   # (B,V) -> (B,V)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        p, order = probs.sort(descending=True)
        p[p.cumsum(-1) - p >= top_p] = 0    # a token stays while those before it have not reached top_p
        probs = torch.zeros_like(probs).scatter(-1, order, p)
    return probs
