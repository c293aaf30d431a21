"""Which kind of value says what a window did for a run? Many kinds, held against hundreds of trainings.

python scripts/value_kinds.py [--dataset=shakespeare_char] [--size=0.8M] [--learning_rate=1.5e-3] [--visits=4]
    [--steps=500] [--seeds=2] [--halves=200] [--other_seed=N] [--garbled=SHARE] [--drop] [--at_once=N] [--device=auto]
    [--out=FILE]

Trains --seeds models on random windows of a dataset of characters, each window seen --visits times, and sums several
kinds of value for each window. Then trains again on random halves of the windows, with the same start and order: a
window that is left out does not enter its batch. Prints for each kind the linear datamodeling score (LDS: Spearman's
correlation over the halves of the validation loss with the sum of the values of what was left out), and the difference
to `dot` with 32 fixed validation windows, with 95% intervals over halves. docs/values.md has what came out.

Kinds, in nats. g: the window's gradient; G: the validation loss's, before the step; P: AdamW's factor.
  dot                     lr * clip_coef * <g, G> / 32, as scripts/data_value.py has it
  dot, averaged 0.9       with G averaged over the steps so far, with this decay
  update                  with P G in place of G; v in P as if the validation batch were the next
  update of average 0.9   with P times the averaged G; also 0.97
  average of update 0.9   with P G averaged
  update half-way         with the step's own P, times the mean of G before and after it
  effect                  exact to first order: with G after the step, carried back through AdamW and clipping
Validation windows: 8, 32 or 256, fixed or drawn anew in each step; for the last two kinds 256 fixed ones.

--other_seed: N halves of each run again, with the same start disturbed by 1e-6, and with another start and order.
--garbled: this share of the windows gets random characters; adds the AUC of each kind, clean against garbled.
--drop: also trains without the fifth that some kinds find worst, without a random fifth, and on all; 5 seeds a run.
--size: 0.8M, 10.7M, or tiny, to try it on a CPU. --at_once: trainings at a time; fewer take less memory.
--out: adds the results to FILE, one JSON object a line.

The model is model.py's GPT without biases, written again for many models at once: each parameter is a stack and each
matmul a batched one, so one GPU does hundreds of trainings in a minute. A test holds it against model.py.
"""
import math
import sys
import time
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import fail     # before torch: it makes Ctrl-C one line

import numpy as np
import torch
import torch.nn.functional as F

from data.bins import append_rows, check_tokens, find_bin
from scripts.common import (auc, bootstrap, choose_device, lr_at, must_be_one_process,
                            must_be_writable, must_have_memory, note, one_line_parser, printing, spearman)

T, B = 64, 32                                   # tokens a window, windows a step
BETA1, BETA2, EPS, DECAY, CLIP = 0.9, 0.99, 1e-8, 0.1, 1.0
SIZES = {'0.8M': (4, 4, 128), '10.7M': (6, 6, 384), 'tiny': (2, 2, 32)}       # layers, heads, width
AT_ONCE = {'0.8M': 256, '10.7M': 64, 'tiny': 32}
VAL_WINDOWS = [f'{how} {n}' for how in ('fixed', 'anew') for n in (8, 32, 256)]
BEFORE = ['dot', 'dot, averaged 0.9', 'update', 'update of average 0.9', 'update of average 0.97',
          'average of update 0.9']              # what is known before the step
AFTER = ['update half-way', 'effect']
KINDS = [(kind, val_windows) for kind in BEFORE for val_windows in VAL_WINDOWS]
KINDS += [(kind, 'fixed 256') for kind in AFTER]
FIRST = KINDS.index(('dot', 'fixed 32'))        # what the others are compared with
DROP = [('dot', 'fixed 32'), ('dot', 'anew 32'), ('update', 'anew 32'), ('update of average 0.97', 'anew 32'),
        ('update of average 0.97', 'fixed 256')]


# ---- the stacked model: M models, W weights each ---------------------------------------------------------------------
def shapes(args):
    """{name: shape} of one model's parameters, in the order in which they lie in its row of W weights."""
    layers, _, C = SIZES[args.size]
    found = {'wte': (args.vocab, C), 'wpe': (T, C)}
    for i in range(layers):
        found |= {f'{i}.ln_1': (C,), f'{i}.attn': (C, 3 * C), f'{i}.attn.proj': (C, C),
                  f'{i}.ln_2': (C,), f'{i}.fc': (C, 4 * C), f'{i}.fc.proj': (4 * C, C)}
    return found | {'ln_f': (C,)}


def initial(args, seed):
    """(W,): weights at the start."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for name, shape in shapes(args).items():
        std = 0.02
        if name.endswith('proj'):
            std /= math.sqrt(2 * SIZES[args.size][0])
        if len(shape) == 1:
            parts.append(torch.ones(shape))
        else:
            parts.append(torch.randn(shape, generator=generator) * std)
    return torch.cat([part.flatten() for part in parts])


def decays(args):
    """(W,): AdamW's decay of each weight."""
    return torch.cat([torch.full((math.prod(shape),), DECAY if len(shape) > 1 else 0.0)
                      for shape in shapes(args).values()]).to(args.device)


def split(flat, args):
    """(M,W) -> {name: (M, *shape)}, views of it."""
    named = shapes(args)
    parts = flat.split([math.prod(shape) for shape in named.values()], 1)
    return {name: part.view(len(flat), *shape) for (name, shape), part in zip(named.items(), parts)}


def losses(params, windows, size, low=False):
    """params {name: (M, *shape)}, windows (M,n,T+1) -> (M,n), mean nats per token. low: matmuls in bfloat16."""
    layers, H, C = SIZES[size]
    M, n, _ = windows.shape
    inputs, targets, vocab = windows[..., :-1], windows[..., 1:], params['wte'].size(1)
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=low):
        rows = inputs + vocab * torch.arange(M, device=windows.device)[:, None, None]   # each model's own part of wte
        x = F.embedding(rows, params['wte'].reshape(M * vocab, C)).view(M, n * T, C) + params['wpe'].repeat(1, n, 1)
        for i in range(layers):
            y = F.layer_norm(x, (C,)) * params[f'{i}.ln_1'][:, None]                    # (M,n*T,C)
            qkv = torch.bmm(y, params[f'{i}.attn']).view(M * n, T, 3, H, C // H)
            y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)     # (M*n,H,T,C/H)
            x = x + torch.bmm(y.transpose(1, 2).reshape(M, n * T, C), params[f'{i}.attn.proj'])
            y = F.layer_norm(x, (C,)) * params[f'{i}.ln_2'][:, None]
            y = F.gelu(torch.bmm(y, params[f'{i}.fc']), approximate='tanh')             # (M,n*T,4C)
            x = x + torch.bmm(y, params[f'{i}.fc.proj'])
        x = F.layer_norm(x, (C,)) * params['ln_f'][:, None]
        logits = torch.bmm(x, params['wte'].transpose(1, 2))                            # (M,n*T,vocab)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(-1, vocab)
    return F.cross_entropy(logits, targets.reshape(-1), reduction='none').view(M, n, T).mean(2)


def gradients(flat, windows, args, shares=1.0, low=False):
    """(M,W): the gradient of each model's loss, summed over its windows (M,n,T+1), each times its share (M,n)."""
    params = {name: p.detach().requires_grad_() for name, p in split(flat, args).items()}
    loss = (losses(params, windows, args.size, low) * shares).sum()
    found = torch.autograd.grad(loss, list(params.values()))
    return torch.cat([g.flatten(1) for g in found], 1)


# ---- a step of AdamW, and G carried back through it ------------------------------------------------------------------
def clip(gradient):
    """The factor (M,1) that brings gradients (M,W) to the norm CLIP at most."""
    return (CLIP / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)


def factor(square, t):
    """P: by what AdamW multiplies an entry of the gradient in step t, if that makes its average square this."""
    return (1 - BETA1) / (1 - BETA1 ** (t + 1)) / ((square / (1 - BETA2 ** (t + 1))).sqrt() + EPS)


def adamw(flat, gradient, mean, square, t, lr, decay):
    """Weights, mean and square (M,W) after step t with a clipped gradient; decay (W,)."""
    mean, square = mean.lerp(gradient, 1 - BETA1), square.lerp(gradient * gradient, 1 - BETA2)
    return flat * (1 - lr * decay) - lr / (1 - BETA1) * mean * factor(square, t), mean, square


def effect_vector(gradient, mean, square, t, G_after):
    """u (M,W): lr * clip_coef * <g_i, u> / B is minus the derivative of the validation loss after step t by sample i's
    weight. gradient: the batch's mean before clipping; mean, square: after the step; G_after: the gradient there."""
    clip_coef, correction = clip(gradient), 1 - BETA2 ** (t + 1)
    root = (square / correction).sqrt()
    by_square = mean / (1 - BETA1 ** (t + 1)) * (1 - BETA2) * clip_coef * gradient / correction
    u = (factor(square, t) - by_square / (root * (root + EPS) ** 2 + 1e-30)) * G_after
    direction = gradient / gradient.norm(dim=1, keepdim=True)
    along = direction * (direction * u).sum(1, keepdim=True)
    return torch.where(clip_coef < 1, u - along, u)     # clipping takes away what only lengthens the gradient


# ---- the data of a run -----------------------------------------------------------------------------------------------
def windows_of(args, train, run):
    """Windows (N,T+1) of train, and which of them are garbled, bool (N,)."""
    generator = torch.Generator().manual_seed(1000 + run)
    at = torch.randperm((len(train) - 1) // T, generator=generator)[:args.windows] * T
    windows = train[at[:, None] + torch.arange(T + 1)]
    garbled = torch.rand(args.windows, generator=generator) < args.garbled
    share = torch.rand(args.windows, 1, generator=generator)        # of a garbled window's characters
    replaced = (torch.rand(windows.shape, generator=generator) < share) & garbled[:, None]
    anything = torch.randint(args.vocab, windows.shape, generator=generator)
    return torch.where(replaced, anything, windows), garbled.numpy()


def order_of(args, seed):
    """(steps,B): the windows of each step, by number."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return torch.cat([torch.randperm(args.windows, generator=generator) for _ in range(args.visits)]).view(-1, B)


def start_of(args, train, runs, seeds):
    """Of each model's run and seed: windows (M,N,T+1), order (M,steps,B) and the weights at the start (M,W)."""
    windows = {run: windows_of(args, train, run)[0] for run in set(runs)}
    order = {seed: order_of(args, seed) for seed in set(seeds)}
    weights = {seed: initial(args, seed) for seed in set(seeds)}
    return (torch.stack([windows[run] for run in runs]).to(args.device),
            torch.stack([order[seed] for seed in seeds]).to(args.device),
            torch.stack([weights[seed] for seed in seeds]).to(args.device))


def batch_of(windows, chosen):
    """The windows (M,B,T+1) of the numbers chosen (M,B)."""
    return windows.gather(1, chosen[..., None].expand(-1, -1, T + 1))


def random_windows(val, generators):
    """Where 256 validation windows begin, for each generator: (R,256)."""
    return torch.stack([torch.randint(len(val) - T - 1, (256,), generator=g) for g in generators])


def lr_of(args, t):
    return lr_at(dict(learning_rate=args.learning_rate, min_lr=args.learning_rate / 10, decay_lr=True, scale_lr=False,
                      warmup_iters=max(1, args.steps // 10), lr_decay_iters=args.steps), t)


# ---- values, and trainings -------------------------------------------------------------------------------------------
def validation_gradients(flat, val, fixed, anew, args):
    """(R,6,W) in the order of VAL_WINDOWS: mean gradients over the first 8, 32 and 256 of the windows that begin at
    fixed (R,256), and of those at anew (R,256)."""
    windows = val[torch.cat((fixed, anew))[..., None] + torch.arange(T + 1)].to(flat.device)        # (2R,256,T+1)
    both, total, found = torch.cat((flat, flat)), 0, []
    for first, end in ((0, 8), (8, 32), (32, 256)):
        total = total + gradients(both, windows[:, first:end], args)
        found.append(total / end)
    return torch.cat(torch.stack(found, 1).chunk(2), 1)


def values_of_runs(args, train, val):
    """Train all R runs at once: values (R,kinds,N), and the weights at the end (R,W)."""
    runs = range(args.seeds)
    windows, order, flat = start_of(args, train, runs, runs)
    generators = [torch.Generator().manual_seed(3000 + run) for run in runs]
    fixed = random_windows(val, generators)
    decay, mean, square = decays(args), torch.zeros_like(flat), torch.zeros_like(flat)
    values = torch.zeros(args.seeds, len(KINDS), args.windows, device=args.device)
    G = validation_gradients(flat, val, fixed, random_windows(val, generators), args)
    f256 = VAL_WINDOWS.index('fixed 256')
    G_9, G_97, PG_9 = G, G, None                                                # averages
    for t in range(args.steps):
        chosen, lr = order[:, t], lr_of(args, t)
        samples = batch_of(windows, chosen).view(-1, 1, T + 1)                  # (R*B,1,T+1)
        copies = flat.repeat_interleave(B, 0)                                   # a model per sample, so (R*B,W)
        per_sample = gradients(copies, samples, args).view(args.seeds, B, -1)
        gradient = per_sample.mean(1)                                           # (R,W)
        clip_coef = clip(gradient)
        P = factor(BETA2 * square[:, None] + (1 - BETA2) * G * G, t)            # (R,6,W)
        G_9, G_97, PG = G_9.lerp(G, 0.1), G_97.lerp(G, 0.03), P * G
        PG_9 = PG if t == 0 else PG_9.lerp(PG, 0.1)
        vectors = [G, G_9, PG, P * G_9, P * G_97, PG_9]                         # BEFORE
        flat, mean, square = adamw(flat, clip_coef * gradient, mean, square, t, lr, decay)
        before, G = G, validation_gradients(flat, val, fixed, random_windows(val, generators), args)
        half_way = factor(square, t) * (before[:, f256] + G[:, f256]) / 2
        effect = effect_vector(gradient, mean, square, t, G[:, f256])
        vectors = torch.cat([*vectors, half_way[:, None], effect[:, None]], 1)  # (R,kinds,W)
        torch.set_float32_matmul_precision('highest')                           # the dots without TF32
        dots = torch.bmm(vectors, per_sample.transpose(1, 2)) * clip_coef[..., None] * lr / B       # (R,kinds,B)
        torch.set_float32_matmul_precision('high')
        values.scatter_add_(2, chosen[:, None].expand(-1, len(KINDS), -1), dots)
    return values.cpu().numpy(), flat


def evaluate(params, val, args, low=False):
    """(M,n): the losses of all validation windows, one behind the other."""
    windows = val[torch.arange(0, len(val) - T - 1, T)[:, None] + torch.arange(T + 1)].to(args.device)
    M = len(params['wte'])
    with torch.no_grad():
        found = [losses(params, some.expand(M, *some.shape), args.size, low) for some in windows.split(64)]
    return torch.cat(found, 1).cpu().double().numpy()


def train_once(args, train, val, tasks, noise):
    """Train a model for each task (run whose windows, seed of start and order, kept windows bool (N,)), all at once; a
    step's mean is over the kept ones. noise: added to the start. Returns the losses (tasks, validation windows)."""
    low = args.device == 'cuda' and args.size == '10.7M'
    runs, seeds, keep = zip(*tasks)
    windows, order, flat = start_of(args, train, runs, seeds)
    keep = torch.tensor(np.array(keep)).to(args.device)                         # (M,N)
    flat += noise * torch.randn_like(flat)
    decay, mean, square = decays(args), torch.zeros_like(flat), torch.zeros_like(flat)
    for t in range(args.steps):
        chosen = order[:, t]                                                    # (M,B)
        kept = keep.gather(1, chosen)
        shares = kept / kept.sum(1, keepdim=True).clamp(min=1)
        gradient = gradients(flat, batch_of(windows, chosen), args, shares, low)
        flat, mean, square = adamw(flat, clip(gradient) * gradient, mean, square, t, lr_of(args, t), decay)
    return evaluate(split(flat, args), val, args, low)


def train_all(args, train, val, tasks, noise=0.0):
    """train_once for all tasks, args.at_once at a time."""
    found, began = [], time.perf_counter()
    for i in range(0, len(tasks), args.at_once):
        found.append(train_once(args, train, val, tasks[i:i + args.at_once], noise))
        note(f'{min(i + args.at_once, len(tasks))} of {len(tasks)} trained, {time.perf_counter() - began:.0f} s')
    return np.concatenate(found)


# ---- what comes out --------------------------------------------------------------------------------------------------
def score(what, sums, real):
    """Print the LDS of each kind, of sums (R,kinds,halves), by the real losses (R,halves); returns its rows."""
    lds, rows = spearman(sums, real[:, None]), []                               # (R,kinds)
    intervals, difference_intervals = bootstrap(sums, real, FIRST, draws=400)
    differences = (lds - lds[:, FIRST, None]).mean(0)
    print(f'\n{what}: {real.shape[1]} halves of each of {len(real)} runs, losses {real.mean():.4f}, standard '
          f'deviation {real.std(1).mean():.4f}')
    print(f'{"kind":<24}{"windows":<12}{"LDS":>6}  {"95% interval":<18}minus dot, fixed 32')
    for k, (kind, val_windows) in enumerate(KINDS):
        mean, (low, high), (below, above) = lds[:, k].mean(), intervals[:, k], difference_intervals[:, k]
        print(f'{kind:<24}{val_windows:<12}{mean:>6.3f}  {f"{low:.3f} to {high:.3f}":<18}'
              f'{differences[k]:+.3f} ({below:+.3f} to {above:+.3f})')
        rows.append(dict(what=what, kind=kind, windows=val_windows, lds=lds[:, k].tolist(), mean=mean, low=low,
                         high=high, minus_dot=[differences[k], below, above]))
    return rows


def find_garbled(values, garbled):
    """Print the AUC of each kind, of values (R,kinds,N) and garbled, bool (R,N); returns its rows."""
    print(f'\n{"kind":<24}{"windows":<12}AUC, clean against garbled')
    rows = []
    for k, (kind, val_windows) in enumerate(KINDS):
        each = [auc(v[k, ~bad], v[k, bad]) for v, bad in zip(values, garbled)]
        print(f'{kind:<24}{val_windows:<12}{np.mean(each):.3f}')
        rows.append(dict(what='auc', kind=kind, windows=val_windows, auc=each))
    return rows


def drop(args, train, val, values):
    """Print the loss after training without the worst fifth; returns its rows."""
    N, tasks, generator = args.windows, [], np.random.default_rng(7)
    names = [('all', ''), ('random', ''), ('random again', ''), *DROP]
    for run in range(args.seeds):
        for seed in range(100 + 10 * run, 105 + 10 * run):
            kept = [np.ones(N, bool), *(generator.permutation(N) >= N // 5 for _ in range(2))]
            for kind in DROP:
                rank = np.argsort(np.argsort(values[run, KINDS.index(kind)]))
                kept.append(rank >= N // 5)
            tasks += [(run, seed, its) for its in kept]
    found = train_all(args, train, val, tasks).reshape(args.seeds, 5, len(names), -1)           # (R,5,names,n)
    fixed = random_windows(val, [torch.Generator().manual_seed(3000 + run) for run in range(args.seeds)])
    gap = (torch.arange(0, len(val) - T - 1, T) - fixed[..., None]).abs()       # (R,256,n)
    apart = (gap > T).all(1).numpy()[:, None, None]                             # (R,1,1,n): share no token with fixed
    parts = [('', np.ones_like(apart))]
    if apart.any(-1).all():
        parts.append(('_apart', apart))
    print(f'\nwithout the worst fifth, {args.seeds} x 5 seeds; in brackets: over validation windows apart from the '
          f'fixed ones\n{"by":<24}{"windows":<12}{"loss":>6}  minus a random fifth, standard error')
    rows = []
    for i, (kind, val_windows) in enumerate(names):
        row, line = dict(what='drop', kind=kind, windows=val_windows), f'{kind:<24}{val_windows:<12}'
        for name, where in parts:
            loss = found.mean(-1, where=where)                                  # (R,5,names)
            minus = loss[..., i] - loss[..., 1:3].mean(-1)
            error = minus.std(ddof=1) / math.sqrt(minus.size)
            row |= {f'loss{name}': loss[..., i].mean(), f'minus_random{name}': [minus.mean(), error]}
            cell = f'{minus.mean():+.4f} +- {error:.4f}'
            line += f' ({cell})' if name else f'{loss[..., i].mean():.4f}  {cell}'
        rows.append(row)
        print(line)
    return rows


# ---- the command -----------------------------------------------------------------------------------------------------
def settings():
    """The command's arguments, checked."""
    parser = one_line_parser(__doc__, '[--dataset=NAME] [--size=0.8M|10.7M|tiny] [--drop] [--SETTING=VALUE ...]')
    parser.add_argument('--out', metavar='FILE')
    parser.add_argument('--drop', action='store_true')
    defaults = dict(dataset='shakespeare_char', size='0.8M', device='auto', learning_rate=1.5e-3, garbled=0.0, visits=4,
                    steps=500, seeds=2, halves=200, other_seed=0, at_once=0)
    for name, default in defaults.items():
        parser.add_argument(f'--{name}', metavar='VALUE', type=type(default), default=default)
    args = parser.parse_args()

    def require(right, message):
        if not right:
            parser.error(message)
    require(args.size in SIZES, f'--size={args.size}: one of {", ".join(SIZES)}')
    require(0 < args.learning_rate < math.inf, f'--learning_rate={args.learning_rate}: must be a number above 0')
    require(0 <= args.garbled < 1, f'--garbled={args.garbled}: must be at least 0 and below 1')
    for name, low in (('visits', 1), ('steps', 1), ('seeds', 1), ('halves', 4), ('at_once', 0)):
        value = getattr(args, name)
        require(low <= value < 2**31, f'--{name}={value}: must be at least {low} and below {2**31}')
    require(args.other_seed == 0 or 4 <= args.other_seed <= args.halves,
            f'--other_seed={args.other_seed}: must be 0, or from 4 to --halves={args.halves}')
    args.windows, rest = divmod(args.steps * B, args.visits)
    require(rest == 0 and args.windows >= 5, f'--steps={args.steps} of {B} windows and --visits={args.visits}: the '
            'windows must be a whole number, and at least 5')
    args.device, _ = choose_device(args.device, 'float32')
    args.at_once = args.at_once or AT_ONCE[args.size]
    return args


def read_data(args):
    """The tokens of train and val, int64. Sets args.vocab, the number of characters."""
    tokens = []
    for name in ('train', 'val'):
        found, meta = find_bin(args.dataset, name)
        if not isinstance(meta.get('tokenizer'), dict):
            fail(f'{found[0]} is not of characters: name a dataset of data/shakespeare_char/prepare.py or the like')
        check_tokens(found, meta, T + 1, meta['vocab_size'])
        tokens.append(torch.from_numpy(np.fromfile(*found[:2]).astype(np.int64)))
    there = (len(tokens[0]) - 1) // T
    if there < args.windows:
        fail(f'--steps={args.steps} with --visits={args.visits} need {args.windows:,} windows of {T} tokens, '
             f'{args.dataset} has {there:,}: more visits or fewer steps')
    args.vocab = meta['vocab_size']
    return tokens


def main():
    must_be_one_process()
    args = settings()
    runs, (train, val) = range(args.seeds), read_data(args)
    of_a_run = args.halves * (200 + 5 * args.windows) + 8 * args.steps * B + args.windows * (8 * T + 4 * len(KINDS))
    must_have_memory(args.seeds * of_a_run,
                     f'--seeds={args.seeds} with --halves={args.halves} and --steps={args.steps}')
    garbled = np.stack([windows_of(args, train, run)[1] for run in runs])       # (R,N)
    if args.garbled and (garbled.all(1) | ~garbled.any(1)).any():
        fail(f'--garbled={args.garbled}: in one of the runs none or all of {args.windows:,} windows are garbled')
    if args.out is not None:
        must_be_writable(args.out)

    def save(rows):     # at once, so that it stays if the rest fails
        if args.out:
            job = {name: value for name, value in vars(args).items() if name not in ('out', 'at_once', 'drop')}
            append_rows(args.out, [{**row, 'job': job} for row in rows])

    torch.set_float32_matmul_precision('high')
    values, flat = values_of_runs(args, train, val)
    own = evaluate(split(flat, args), val, args).mean(1)
    print(f'{args.size}, learning rate {args.learning_rate:g}, {args.steps} steps, {args.windows:,} windows; '
          f'validation loss of each run {" ".join(f"{loss:.4f}" for loss in own)}')
    if args.garbled:
        save(find_garbled(values, garbled))
    kept = np.stack([np.random.default_rng(5000 + run).random((args.halves, args.windows)) < 0.5 for run in runs])

    def losses_of(halves, first_seed=0, noise=0.0):
        """(R,halves): the loss after training on the first halves of each run, with a seed of its own."""
        tasks = [(run, first_seed + run, half) for run in runs for half in kept[run, :halves]]
        return train_all(args, train, val, tasks, noise).mean(1).reshape(args.seeds, halves)
    real = losses_of(args.halves)
    sums = values @ (~kept).transpose(0, 2, 1).astype(np.float32)               # (R,kinds,halves)
    save(score('LDS', sums, real))
    n = args.other_seed
    if n > 0:
        for name, first_seed, noise in (('same seed, disturbed', 0, 1e-6), ('other seed', 500, 0.0)):
            again = losses_of(n, first_seed, noise)
            each = spearman(real[:, :n], again)
            print(f'\nthe same {n} halves again, {name}: correlation of the losses', *each.round(4))
            save([dict(what='again', kind=name, spearman=each.tolist())])
        save(score('LDS of the other seed', sums[..., :n], again))
    if args.drop:
        save(drop(args, train, val, values))


if __name__ == '__main__':
    with printing():
        main()
