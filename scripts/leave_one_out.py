"""Is a sample's value true of its step? Leaves samples out of one real step, and measures the validation loss after it.

python scripts/leave_one_out.py CHECKPOINT [--samples=32] [--horizon=1] [--windows=32] [--out=FOLDER]
                                [--device=auto]

CHECKPOINT: a run's out_dir, whose newest checkpoint is taken, or one checkpoint, such as OUT_DIR/ckpt_dcp/step_400.
From there the next step is taken with the whole batch, and once for each of its first N samples without that one, whose
weight in the mean gradient is then 0; clipping and the optimizer's step are real. The change of the validation loss is
what the sample did, in nats: after that step and, as with --horizon=1,5,20, after more steps, the same for all.
Validation windows: the fixed ones of a ghost run, or with --windows so many, evenly spread over the validation split.

Three values of each sample are held against it, in nats too (docs/values.md):
  dot      lr * clip_coef * <g_i, G> / B, as scripts/data_value.py has it: plain gradients before the step
  update   the same with G carried back through the optimizer as it is known before the step
  effect   exact to first order: the gradient after the step, carried back through this step's optimizer and clipping
Prints how well they agree, and writes stepN.csv and stepN.png into FOLDER, by default leave_one_out beside the
checkpoint. Computes in float32, without dropout, on one CPU or GPU.
"""
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import fail     # before torch: it makes Ctrl-C one line

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from data.bins import check_tokens, find_bin, open_file, read_tokens, said, sample_offsets
from data.corpus import folder_path
from model import GPT, GPTConfig
from muon import EPS, MOMENTUM, orthogonal, scale_of
from scripts.common import (choose_device, is_there, load_pyplot, lr_at, make_out_folder, must_be_one_process,
                            must_be_writable, must_have_memory, note, one_line_parser, printing, run_tokens, spearman,
                            write_csv, write_picture)
from weights import newest_checkpoint, read_checkpoint

KINDS = 'dot', 'update', 'effect'


# ---- a step of training as pure functions, {name: tensor} to {name: tensor}, through which autograd can go ----------
def clip(gradient, limit):
    """The gradient scaled down to the norm `limit` (0: never), as torch's clip_grad_norm_ does; and the factor, a
    tensor."""
    norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    clip_coef = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
    return {name: g * clip_coef for name, g in gradient.items()}, clip_coef


def step(weights, gradient, state, lr, config):
    """The weights and the optimizer's state after a step with this (clipped) gradient: AdamW's, or Muon's for what has
    a momentum_buffer."""
    after, state_after = {}, {}
    for name, w in weights.items():
        g, s = gradient[name], state[name]
        decay = config['weight_decay'] if w.dim() >= 2 else 0.0
        if 'momentum_buffer' in s:
            mean = s['momentum_buffer'].lerp(g, 1 - MOMENTUM)
            move = scale_of(w.shape) * orthogonal(g.lerp(mean, MOMENTUM)[None])[0]
            state_after[name] = {'momentum_buffer': mean}
        else:
            beta1, beta2, t = config['beta1'], config['beta2'], int(s['step']) + 1
            mean = beta1 * s['exp_avg'] + (1 - beta1) * g
            square = beta2 * s['exp_avg_sq'] + (1 - beta2) * g * g
            # where square is 0, as for tokens never seen, the root has no derivative: there the mean is 0 too
            root = (square / (1 - beta2 ** t)).clamp(min=torch.finfo(g.dtype).tiny).sqrt()
            move = mean / (1 - beta1 ** t) / (root + EPS)
            state_after[name] = {'exp_avg': mean, 'exp_avg_sq': square, 'step': t}
        after[name] = w * (1 - lr * decay) - lr * move
    return after, state_after


def effect_vector(weights, gradient, state, lr, config, G_after):
    """u with <g_i, u> / B = minus the derivative of the validation loss after the step by sample i's weight: minus
    G_after, the gradient there, carried back through the step and clipping. gradient: the batch's mean."""
    leaves = {name: g.detach().clone().requires_grad_() for name, g in gradient.items()}
    with torch.enable_grad():
        after, _ = step(weights, clip(leaves, config['grad_clip'])[0], state, lr, config)
        back = torch.autograd.grad(list(after.values()), list(leaves.values()), list(G_after.values()))
    return {name: -b for name, b in zip(leaves, back)}


def update_vector(G, state, lr, config):
    """G carried back through the optimizer as it is known before the step: times AdamW's factor, with v as if the
    validation batch were the next; for Muon, through the orthogonalisation at the momentum before the step."""
    carried = {}
    for name, s in state.items():
        g = G[name]
        if 'momentum_buffer' in s:
            ahead = (s['momentum_buffer'] * MOMENTUM ** 2).requires_grad_()
            with torch.enable_grad():
                back, = torch.autograd.grad(orthogonal(ahead[None])[0], ahead, g)
            # the gradient itself enters the step with 1 - M^2, since Nesterov's momentum has it twice
            carried[name] = lr * scale_of(g.shape) * (1 - MOMENTUM ** 2) * back
        else:
            beta1, beta2, t = config['beta1'], config['beta2'], int(s['step']) + 1
            square = beta2 * s['exp_avg_sq'] + (1 - beta2) * g * g
            carried[name] = lr * (1 - beta1) / (1 - beta1 ** t) * g / ((square / (1 - beta2 ** t)).sqrt() + EPS)
    return carried


def dot(a, b):
    """<a, b> of two {name: tensor}, summed in float64."""
    return sum((a[name] * b[name]).sum(dtype=torch.float64) for name in a).item()


# ---- the model -------------------------------------------------------------------------------------------------------
def gradient_of(model, windows):
    """{name: gradient of the mean loss} over windows (n, block_size + 1), some thousand tokens at a time."""
    params, total = dict(model.named_parameters()), None
    for part in windows.split(max(1, 8192 // windows.size(1))):
        loss = model(part[:, :-1], part[:, 1:]).sum() / len(windows)
        found = torch.autograd.grad(loss, list(params.values()))
        total = found if total is None else [a + b for a, b in zip(total, found)]
    return dict(zip(params, total))


@torch.no_grad()
def loss_of(model, windows):
    """The mean loss over windows (n, block_size + 1), summed in float64."""
    parts = windows.split(max(1, 8192 // windows.size(1)))
    return sum(model(part[:, :-1], part[:, 1:]).double().sum().item() for part in parts) / len(windows)


@torch.no_grad()
def put(model, weights):
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def losses_after(model, weights, gradient, state, t, batch, windows, horizon, config):
    """The validation loss after so many steps, for each number of steps in horizon: the first, step t, with this mean
    gradient, the others with that of their own batch. batch(h): of step t + h. Leaves the model at the last weights."""
    found = {}
    with torch.no_grad():
        for h in range(max(horizon)):
            if h > 0:
                torch.set_float32_matmul_precision('high')      # TF32 on a GPU, where the truth allows it
                with torch.enable_grad():
                    gradient = gradient_of(model, batch(h))
                torch.set_float32_matmul_precision('highest')
            weights, state = step(weights, clip(gradient, config['grad_clip'])[0], state, lr_at(config, t + h), config)
            put(model, weights)
            if h + 1 in horizon:
                found[h + 1] = loss_of(model, windows)
    return [found[h] for h in horizon]


def measure(model, state, t, batch, windows, samples, horizon, config):
    """
    Leave each of the first `samples` of step t's batch out. Returns (clip_coef, losses with all (horizons,), truth
    (samples, horizons), values (samples, 3) in the order of KINDS), in nats; truth: how much lower the sample makes it.
    batch(h): the windows (B, block_size + 1) of step t + h. The model is at its weights before step t, and comes back
    to them.
    """
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = batch(0)
    lr, B = lr_at(config, t), len(first)
    G, gradient = gradient_of(model, windows), gradient_of(model, first)
    clip_coef = clip(gradient, config['grad_clip'])[1].item()
    losses_after(model, weights, gradient, state, t, batch, windows, [1], config)   # for the weights after the step
    u = effect_vector(weights, gradient, state, lr, config, gradient_of(model, windows))
    update = update_vector(G, state, lr, config)
    with_all = np.array(losses_after(model, weights, gradient, state, t, batch, windows, horizon, config))
    truth, values = [], []
    for i in range(samples):
        put(model, weights)
        g = gradient_of(model, first[i:i + 1])
        values.append([lr * clip_coef * dot(g, G) / B, clip_coef * dot(g, update) / B, dot(g, u) / B])
        without = {name: gradient[name] - g[name] / B for name in g}
        after = losses_after(model, weights, without, state, t, batch, windows, horizon, config)
        truth.append(np.array(after) - with_all)
    put(model, weights)
    return clip_coef, with_all, np.array(truth), np.array(values)


# ---- the command -----------------------------------------------------------------------------------------------------
def draw(path, truth, values, t):
    """Truth against each of the values, all in nats on one scale; the line is where they are equal."""
    plt = load_pyplot(path, required=False)
    if plt is None:
        return
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout='constrained', sharex=True, sharey=True)
    ends = min(truth.min(), values.min()), max(truth.max(), values.max())
    margin = max(0.05 * (ends[1] - ends[0]), 1e-12)
    for ax, kind, value in zip(axes, KINDS, values.T):
        ax.scatter(value, truth, s=14)
        ax.axline((0, 0), slope=1, color='gray', linewidth=0.8, label='equal')
        ax.set(title=f'{kind}: correlation {np.corrcoef(value, truth)[0, 1]:.2f}', xlabel=f'{kind} (nats)')
        ax.ticklabel_format(style='sci', scilimits=(0, 0))
        ax.grid(alpha=0.3)
    axes[0].set(ylabel=f'truth after step {t} (nats)', xlim=(ends[0] - margin, ends[1] + margin),
                ylim=(ends[0] - margin, ends[1] + margin))
    axes[0].legend(fontsize='small')
    write_picture(figure, path)
    plt.close(figure)


def main():
    must_be_one_process()
    usage = 'CHECKPOINT [--samples=N] [--horizon=1,5,20] [--windows=N] [--out=FOLDER] [--device=NAME]'
    parser = one_line_parser(__doc__, usage)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', type=Path)
    parser.add_argument('--samples', metavar='N', type=int, default=32)
    parser.add_argument('--horizon', metavar='H', default='1')
    parser.add_argument('--windows', metavar='N', type=int)
    parser.add_argument('--out', metavar='FOLDER', type=folder_path)
    parser.add_argument('--device', metavar='NAME', default='auto')
    args = parser.parse_args()
    if not all(h.isdecimal() and len(h) < 10 and int(h) > 0 for h in args.horizon.split(',')):
        parser.error(f'--horizon={args.horizon:.40}: expected numbers of steps such as 1,5,20, of at most 9 digits')
    horizon = sorted({1, *map(int, args.horizon.split(','))})
    if args.samples < 3:
        parser.error(f'--samples={args.samples}: must be at least 3')
    if args.windows is not None and args.windows < 1:
        parser.error(f'--windows={args.windows}: must be at least 1')
    device, _ = choose_device(args.device, 'float32')
    source, run = args.checkpoint, args.checkpoint
    whole_path = source.resolve()       # it has parents also where one is inside ckpt_dcp, or took a link to it
    if source.is_file():
        run = source.parent
    elif whole_path.parent.name == 'ckpt_dcp':
        run = whole_path.parent.parent
    else:
        source = newest_checkpoint(source) or source
    checkpoint = read_checkpoint(str(source))
    config, t, state = checkpoint['config'], checkpoint['iter_num'], checkpoint['optimizer'].get('state')
    if not state or 'data_order' not in config:
        fail(f'{source} has no optimizer state of train.py: give a checkpoint of a run')
    train, _ = run_tokens(config, checkpoint['meta'])
    per_step = config['gradient_accumulation_steps'] * config['batch_size']
    samples = min(args.samples, per_step)
    if samples < 3:
        fail(f'{source}: a step has {per_step} samples, and a correlation needs at least 3')
    if lr_at(config, t) == 0:
        fail(f'{source}: the learning rate of its next step, {t}, is 0, so no sample changes anything: give an earlier '
             'checkpoint')
    block, vocab = checkpoint['model_args']['block_size'], checkpoint['model_args']['vocab_size']
    seen = checkpoint.get('samples_seen', t * per_step)

    def offsets_of(h):
        return sample_offsets(config['data_order'], config['seed'], t + h, np.arange(per_step), seen + h * per_step,
                              train[2], block)

    def batch(h):
        return torch.from_numpy(read_tokens(train, offsets_of(h), block + 1, vocab)).to(device)
    batch(0)    # if it can't be read, this is the place to say so
    fixed = run / 'grad_dotprods' / 'valset.safetensors'
    if args.windows is None and is_there(fixed):
        try:
            open_file(fixed).close()        # safetensors' own errors say less
            windows = load_file(fixed)['tokens']
        except (OSError, SafetensorError, KeyError) as error:
            fail(f'{fixed}: torn or not of train.py ({said(error)}); --windows=32 takes others')
    else:
        val, meta = find_bin(config.get('ghost_val_dataset') or config['dataset'], 'val')
        check_tokens(val, meta, block, vocab)
        number = min(args.windows or 32, val[2] - block)
        must_have_memory(16 * number * (block + 1), f'--windows={number}')
        windows = read_tokens(val, np.arange(number) * (val[2] - block) // number, block + 1, vocab)
    windows = torch.from_numpy(windows).long().to(device)
    model = GPT(GPTConfig(**checkpoint['model_args'])).to(device)
    model.load_state_dict(checkpoint['model'])
    state = {name: {key: tensor.to(device) for key, tensor in state[name].items()}
             for name, _ in model.named_parameters()}
    out = args.out or run / 'leave_one_out'
    make_out_folder(out)
    for ending in ('csv', 'png'):
        must_be_writable(out / f'step{t}.{ending}')
    if config['dropout'] > 0:
        note('the run has dropout; here there is none')

    clip_coef, with_all, truth, values = measure(model, state, t, batch, windows, samples, horizon, config)
    rows = [[int(o), *map(float, value), *map(float, true)] for o, value, true in zip(offsets_of(0), values, truth)]
    write_csv(out / f'step{t}.csv', ['offset', *KINDS, *(f'truth_{h}' for h in horizon)], rows)
    draw(out / f'step{t}.png', truth[:, 0], values, t)
    print(f'step {t}: lr {lr_at(config, t):.2e}, clip_coef {clip_coef:.3f}, {samples} of {per_step} samples left out, '
          f'{len(windows)} validation windows')
    print('correlation with the truth, Pearson / Spearman, and the truth\'s own mean and standard deviation in nats')
    print(f'{"steps":>11}' + ''.join(f'{kind:>15}' for kind in KINDS) + f'{"mean":>12}{"std":>10}{"loss":>9}')
    for h, true, loss in zip(horizon, truth.T, with_all):
        cells = [f'{np.corrcoef(value, true)[0, 1]:.2f} / {spearman(value, true):.2f}' for value in values.T]
        print(f'{h:>11}' + ''.join(f'{cell:>15}' for cell in cells)
              + f'{true.mean():>12.2e}{true.std():>10.2e}{loss:>9.4f}')
    print(f'wrote step{t}.csv and, where it could be drawn, step{t}.png into {out}')


if __name__ == '__main__':
    with printing():
        main()
