"""
GPT-2 as plain PyTorch modules, and how each layer's backward pass yields per-sample gradient dot products ("ghost").
This file knows nothing of ranks, devices or training loops.

Sources: the GPT-2 paper (Radford et al. 2019) and its released weights, whose parameter names are kept; rotary
positions: RoFormer (Su et al. 2021); FLOPs per token: appendix B of PaLM (Chowdhery et al. 2022); ghost: Data Shapley
in One Training Run (arXiv:2406.11011).

Shapes at line ends: B samples, T tokens, C = n_embd, H heads, D = C/H, V = vocab_size.
"""
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import GhostLinear, HeadLoss, fast, linear_dots


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
    rope: bool = False         # rotary positions in place of learned ones
    qk_norm: bool = False      # queries and keys of length sqrt(D)


def matmul_dtype(x):
    """The dtype in which a matmul of x is computed here: x's own, or under autocast the lower one."""
    device_type = x.device.type
    if x.dtype == torch.float32 and not x.is_meta and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def low(x):
    """x as autocast would pass it to a matmul; in a custom autograd.Function we have to do that ourselves."""
    return x.to(matmul_dtype(x))


def initialise(weight, std=0.02):
    if not weight.is_meta:      # there torch would import its compiler first
        nn.init.normal_(weight, std=std)


# ---- layers, each with its ghost branch ------------------------------------------------------------------------------
# Ghost mode asks for every sample i: what is <grad l_i, G>, with l_i the sample's loss and G the gradient of a
# validation loss? Compute sample i with the parameters theta + s_i G, where s_i is a number that is always 0. Nothing
# changes, but by the chain rule d l_i / d s_i = <grad l_i, G>: the answer is the gradient of s, and autograd gives it.
# A layer y = f(x; theta) is linear in its parameters, so moving s_i moves y at token t by f(x_it; G). Its share of the
# answer is the sum over t of dy_it . f(x_it; G), with dy the gradient that the backward pass brings to y. Tap returns
# this sum as the gradient of s, and dy as the gradient of y: .grad is what it is without ghost.
# G lies beside each parameter, as ghost_weight and ghost_bias. Each parameter has its own row of s, (B,), so that its
# share can be told apart. Layers get `rows`, {name of a parameter: its row}; None: ghost is off.

class Tap(torch.autograd.Function):
    """
    Returns y (B,...,n) = f(x; w, b) unchanged. Its backward pass gives the rows s_w and s_b, (B,), their gradients:
    <a sample's gradient of w, G_w> and <a sample's gradient of b, G_b>. eps: of a LayerNorm.
    """

    @staticmethod
    def forward(ctx, y, kind, eps, x, G_w, G_b, s_w, s_b):
        ctx.kind, ctx.eps = kind, eps
        ctx.save_for_backward(x, G_w, G_b)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, G_w, G_b = ctx.saved_tensors
        acc = torch.promote_types(dy.dtype, torch.float32)      # the dtype to sum in
        if ctx.kind == 'linear':
            ds_w = linear_dots(dy, x, G_w)
        else:
            if ctx.kind == 'embedding':     # x: token ids (B,T), or positions (T,) that all samples share
                f = F.embedding(x, G_w)
            else:                           # 'layernorm': the normalised x, times G
                f = F.layer_norm(x.to(acc), G_w.shape, G_w.to(acc), eps=ctx.eps)
            # summed over n first: torch.compile joins that with the layer's own backward pass
            ds_w = (dy.to(acc) * f.to(acc)).sum(-1).flatten(1).sum(-1)
        ds_b = None
        if G_b is not None:
            ds_b = dy.flatten(1, -2).sum(1, dtype=acc) @ G_b.to(acc)
        return dy, None, None, None, None, None, ds_w, ds_b


def row(layer, kind, rows):
    """The row (B,) of the layer's 'weight' or 'bias', among those it was called with."""
    name = f'{layer.ghost_name}.{kind}'
    if not isinstance(rows, dict) or name not in rows:
        raise ValueError(f'ghost: {name} is not among the rows that its layer was called with')
    return rows[name]


def tap(layer, kind, y, x, rows):
    """The layer's output y (B,...,n), whose backward pass now also takes the layer's dots."""
    s_w, s_b, G_b = row(layer, 'weight', rows), None, getattr(layer, 'ghost_bias', None)
    if G_b is not None:
        s_b = row(layer, 'bias', rows)
    if y.dim() < 3 or len(y) != len(s_w):
        raise ValueError(f'ghost: {layer.ghost_name}.weight makes {tuple(y.shape)}, not (B,...,n) with B={len(s_w)}')
    return Tap.apply(y, kind, getattr(layer, 'eps', None), x, layer.ghost_weight, G_b, s_w, s_b)


class Linear(nn.Linear):
    def reset_parameters(self):
        initialise(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x, rows=None):
        if rows is None:
            return F.linear(x, self.weight, self.bias)
        if x.dim() != 3 or not fast(low(x)):
            return tap(self, 'linear', F.linear(x, self.weight, self.bias), x, rows)
        y = GhostLinear.apply(low(x), self.weight, self.ghost_weight, row(self, 'weight', rows))    # (B,T,n)
        if self.bias is not None:   # theta + s G as it stands: s is 0, and its gradient the bias' dot
            s = row(self, 'bias', rows)[:, None].expand(x.shape[:2])                                # (B,T)
            y = y + (self.bias + s[..., None] * self.ghost_bias).to(y.dtype)
        return y


class Embedding(nn.Embedding):
    def reset_parameters(self):
        initialise(self.weight)

    def forward(self, idx, rows=None):
        y = F.embedding(idx, self.weight)
        return y if rows is None else tap(self, 'embedding', y, idx, rows)


class LayerNorm(nn.LayerNorm):
    def forward(self, x, rows=None):
        # a GPU's autocast would cast x so too; a CPU's would not, and sum the weight's gradient in bfloat16
        y = F.layer_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.bias, self.eps)
        return y if rows is None else tap(self, 'layernorm', y, x, rows)


# ---- the transformer -------------------------------------------------------------------------------------------------

def rotary_tables(T, D):
    """(2,T,D) float32: cosines and signed sines of the angles by which rotate() turns D numbers, at each position."""
    frequencies = 10000 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)          # (D/2,) radians per token
    angles = torch.arange(T)[:, None] * frequencies                                   # (T,D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).float()


def rotate(x, turns):
    """x (B,T,n,H,D) with its pairs turned: q . k then depends on how far apart the two tokens are, not on where."""
    cos, sin = turns[:, :, None, None]                                                # (T,1,1,D) each
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin      # a pair: a number of the first half, the one D/2 behind it


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout, self.qk_norm = config.n_head, config.dropout, config.qk_norm
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, rows=None, cache=None, turns=None):
        B, T, C = x.shape
        qkv = self.c_attn(x, rows).view(B, T, 3, self.n_head, C // self.n_head)       # (B,T,3,H,D)
        if self.qk_norm or turns is not None:
            qk, v = qkv.split((2, 1), 2)                                              # (B,T,2,H,D), (B,T,1,H,D)
            q, k = self.prepare(qk, turns).permute(2, 0, 3, 1, 4)                     # (B,H,T,D) each
            v = v.squeeze(2).transpose(1, 2)                                          # (B,H,T,D)
        else:
            q, k, v = qkv.permute(2, 0, 3, 1, 4)                                      # (B,H,T,D) each
        if cache is not None:       # [k, v] of the tokens before; empty at the first call
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        # a single new token may look at every cached one, so only a whole sequence needs the causal mask
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)     # (B,H,T,D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y, rows), self.dropout, self.training)

    def prepare(self, qk, turns):
        """Queries and keys (B,T,2,H,D), normalised and turned: both together, for compile to make one kernel."""
        y = qk.to(torch.promote_types(qk.dtype, torch.float32))
        if self.qk_norm:
            y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        if turns is not None:
            y = rotate(y, turns)
        return y.to(qk.dtype)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gelu, self.dropout = config.gelu, config.dropout
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, rows=None):
        x = F.gelu(self.c_fc(x, rows), approximate=self.gelu)                         # (B,T,4C)
        return F.dropout(self.c_proj(x, rows), self.dropout, self.training)


class Block(nn.Module):
    recompute = None        # torch's checkpoint(), set by GPT.recompute(); called from this class, it can be compiled

    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rows=None, cache=None, turns=None):
        # rows: named from the block on, so that all blocks are one graph; turns: rotary_tables(), None without rope
        if self.recompute is None:
            return self.compute(x, rows, cache, turns)
        return self.recompute(self.compute, x, rows, cache, turns)

    def compute(self, x, rows, cache, turns):
        x = x + self.attn(self.ln_1(x, rows), rows, cache, turns)
        x = x + self.mlp(self.ln_2(x, rows), rows)
        return x


def rows_of(module, table):
    """{name of a parameter within the module: its row (B,)}; table: the P rows of s, or None without ghost."""
    if table is None:
        return None
    return {name: table[number] for name, number in module.ghost_rows.items()}


class GPT(nn.Module):
    """GPT-2. model(idx, targets) gives the loss of each sample, model(idx) the logits of the token that comes next."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            fits = math.ceil(config.n_embd / config.n_head) * config.n_head
            raise ValueError(f'n_embd={config.n_embd} is not divisible by n_head={config.n_head}: n_embd={fits} is')
        if config.rope and config.n_embd // config.n_head % 2:
            raise ValueError(f'rope=True turns pairs, and n_embd / n_head = {config.n_embd // config.n_head} is odd: '
                             f'n_embd={config.n_embd + config.n_head} fits')
        self.config = config
        self.transformer = nn.ModuleDict(dict(wte=Embedding(config.vocab_size, config.n_embd)))
        if not config.rope:
            self.transformer.wpe = Embedding(config.block_size, config.n_embd)
        self.transformer.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.rope:
            self.register_buffer('turns', torch.empty(2, config.block_size, config.n_embd // config.n_head),
                                 persistent=False)
        self.tie()
        for block in self.transformer.h:   # each block adds twice to the residual stream: keep its variance near 1
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                initialise(projection.weight, std=0.02 / math.sqrt(2 * config.n_layer))

    def tie(self):
        """
        One tensor embeds tokens and scores them, and the tables of rotary positions hold their values; call again after
        whatever replaces parameters or buffers.
        """
        if self.config.rope:
            self.turns.copy_(rotary_tables(*self.turns.shape[1:]))
        self.lm_head.weight = self.transformer.wte.weight
        if hasattr(self.lm_head, 'ghost_weight'):
            self.lm_head.ghost_weight = self.transformer.wte.ghost_weight

    def forward(self, idx, targets=None, s=None, cache=None):
        """
        idx (B,T) int64 token ids, T <= block_size.
        targets (B,T) int64: returns the mean token loss of each sample, (B,) nats, at least float32.
        No targets: returns the logits after the last token, (B,V).
        s (P,B) zeros that require grad, P = the number of parameters (tied ones once), or a list of P rows: after
        backward, s.grad[p, i] is <gradient of parameter p from sample i's share of the loss, ghost_p>.
        cache: [k, v] of each block, see generate(); empty lists at the first call.
        """
        past = 0        # tokens before idx, whose keys and values are cached
        if cache and cache[0]:
            past = cache[0][0].size(2)
        pos = torch.arange(past, past + idx.size(1), device=idx.device)               # (T,)
        table = s.unbind(0) if isinstance(s, torch.Tensor) else s                     # P rows (B,)
        rows = rows_of(self, table)     # of the layers outside the blocks
        x = self.transformer.wte(idx, rows)                                           # (B,T,C)
        turns = None
        if self.config.rope:
            turns = self.turns[:, past:past + idx.size(1)]                            # (2,T,D)
        else:
            # positions are expanded before the tap, since their dy has to stay per sample
            p = F.embedding(pos, self.transformer.wpe.weight).expand(len(idx), -1, -1)      # (B,T,C)
            if rows is not None:
                p = tap(self.transformer.wpe, 'embedding', p, pos, rows)
            x = x + p
        if matmul_dtype(x) == torch.bfloat16:
            x = x.to(torch.bfloat16)    # a bfloat16 residual stream halves its traffic
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            x = block(x, rows_of(block, table), None if cache is None else cache[i], turns)
        if targets is None:
            return self.lm_head(self.transformer.ln_f(x[:, -1]))                      # (B,V)
        return self.loss(x, targets, rows)

    def loss(self, x, targets, rows=None):
        """x (B,T,C) of the last block, targets (B,T): the mean token loss of each sample, (B,)."""
        x = low(self.transformer.ln_f(x, rows))
        if fast(x) and torch.is_grad_enabled():
            G, s = None, None
            if rows is not None:
                G, s = self.lm_head.ghost_weight, row(self.lm_head, 'weight', rows)
            return HeadLoss.apply(x, self.lm_head.weight, targets, G, s)
        logits = self.lm_head(x, rows)                                                # (B,T,V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)      # (B*T,V)
        return F.cross_entropy(logits, targets.flatten(), reduction='none').view(targets.shape).mean(1)

    def add_ghost(self):
        """
        Register a frozen `ghost_<name>` of the same shape beside every parameter, to hold the validation gradient.
        Call before compiling, wrapping or building an optimizer. Returns the names of the rows of s, tied parameters
        once. Raises ValueError naming a parameter whose dots would be missing or wrong.
        """
        params = dict(self.named_parameters())
        number = {p: i for i, p in enumerate(params.values())}
        for module in self, *self.transformer.h:    # a layer's name starts at its block, or outside them at the model
            named = module.named_parameters(remove_duplicate=False)     # both names of a tied parameter have its row
            module.ghost_rows = {name: number[p] for name, p in named if not name.startswith('transformer.h.')}
            for name, layer in module.named_modules():
                layer.ghost_name = name
        ghosts = {p: nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in params.values()}
        for path, module in self.named_modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if type(module) not in (Linear, Embedding, LayerNorm):
                    raise ValueError(f'ghost: {path}.{name} is of {type(module).__name__}: use the layers of model.py')
                if not p.requires_grad:
                    raise ValueError(f'ghost: {path}.{name} is frozen')
                module.register_parameter(f'ghost_{name}', ghosts[p])
        self.check_ghost(params)
        return list(params)

    @torch.enable_grad()
    def check_ghost(self, names):
        """
        Raises ValueError naming a parameter that forward() uses without its row, as a layer called without `rows`
        does: its dots would be wrong, and nothing would show it. So forward() runs once on a few tokens (on the meta
        device, as in train.py, that computes nothing), and autograd's graph must use a row as often as its parameter.
        """
        params, device = dict(self.named_parameters()), self.lm_head.weight.device
        B, T = 7, min(2, self.config.block_size)    # B unlike other sizes, so that none is taken for it
        idx = torch.zeros(B, T, dtype=torch.long, device=device)
        rows = [torch.zeros(B, device=device, requires_grad=True) for _ in names]
        with torch.random.fork_rng([device] if device.type == 'cuda' else []):      # dropout leaves no trace
            losses = self(idx, idx, rows)
        uses, seen, todo = Counter(), {None}, [losses.grad_fn]
        while todo:     # walk the graph from the loss back to the parameters and rows, its leaves
            for source, _ in todo.pop().next_functions:
                uses[getattr(source, 'variable', None)] += 1        # None: not a leaf
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        for name, s in zip(names, rows):
            used, used_row = uses[params[name]], uses[s]
            if used != used_row or used == 0:
                raise ValueError(f'ghost: forward() uses {name} {used} times, and its row {used_row} times; '
                                 'use it by its layer alone, called with `rows`, or remove it if it has no use')

    def recompute(self, selective):
        """
        From now on the blocks forget their forward pass but for its input, and compute it again in the backward pass:
        less memory, a third more work. selective: the results of matmuls and attention are kept too. Call before
        compiling or wrapping.
        """
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        options = {}
        if selective:
            kept = ['mm', 'addmm', 'bmm'] + [f'_scaled_dot_product_{kind}' for kind in (
                'flash_attention', 'efficient_attention', 'cudnn_attention', 'flash_attention_for_cpu')]
            kept = [getattr(torch.ops.aten, name).default for name in kept]
            options['context_fn'] = partial(create_selective_checkpoint_contexts, kept)
        for block in self.transformer.h:
            block.recompute = partial(checkpoint, use_reentrant=False, **options)

    def param_groups(self, weight_decay, muon=False):
        """
        AdamW's two groups, each parameter in exactly one: matrices and embeddings decay, biases and norms do not.
        muon: the blocks' matrices come in a group of their own, the first, which muon.py knows by its muon=True.
        """
        params = [p for p in self.parameters() if p.requires_grad]   # tied ones come once; ghost_* are frozen
        groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                  {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
        if muon:
            matrices = {p for p in self.transformer.h.parameters() if p.dim() == 2}
            decaying = groups[0]['params']
            groups[0]['params'] = [p for p in decaying if p not in matrices]
            groups.insert(0, {'params': [p for p in decaying if p in matrices], 'weight_decay': weight_decay,
                              'muon': True})
        return groups

    def num_params(self, positions=True):
        """Number of parameters, tied ones once, ghost_* not at all; positions=False leaves out wpe."""
        n = sum(p.numel() for p in self.parameters() if p.requires_grad)
        if positions or self.config.rope:
            return n
        return n - self.transformer.wpe.weight.numel()

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
        for step in range(max_new_tokens):
            if idx.size(1) > block_size:    # the window slides, every position changes, nothing cached is of use
                logits = self(idx[:, -block_size:])
            elif cache and cache[0]:
                logits = self(idx[:, -1:], cache=cache)
            else:
                logits = self(idx, cache=cache)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))      # (B,V)
            if step == 0 and not logits.isfinite().all():       # once: a GPU would be waited for each time
                raise ValueError('the logits are not finite: the weights hold NaN, or are too large for this dtype')
            if vocab_size is not None:
                logits[:, vocab_size:] = -torch.inf
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                probs = _probabilities(logits / temperature, top_k, top_p)
                new = torch.multinomial(probs, 1, generator=generator)                # (B,1)
            idx = torch.cat((idx, new), 1)
        return idx[:, 1:] if empty else idx


def _probabilities(logits, top_k, top_p):   # (B,V) -> (B,V)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        p, order = probs.sort(descending=True)
        beyond = p.cumsum(-1) - p >= top_p      # a token stays while those before it have not reached top_p
        beyond[:, 0] = False                    # the first always: in float32 a tiny top_p is 0
        p[beyond] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, p)
    return probs
