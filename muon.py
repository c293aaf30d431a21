"""
Muon (Keller Jordan 2024, https://kellerjordan.github.io/posts/muon): a step of momentum for a matrix, with all singular
values of the step made about 1. Embeddings, head, norms and biases keep AdamW, in the same optimizer object, so that
checkpoints and loss scaling see one. torch.optim.Muon does the same in one process, a matrix at a time; on the shards
of FSDP2 it computes in bfloat16 something else than on the whole matrix, and here every mode has to make the same step.
"""
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

# Matrices of one shape are multiplied so many at a time: fewer leave most of a GPU idle. A product may round otherwise
# in a batch of another size. So batches are cut from the list of parameters, whatever the mode, and ranks share out
# whole batches: that makes the step bit for bit the same in every mode.
BATCH = 12
MOMENTUM = 0.95     # of Muon
EPS = 1e-8          # of AdamW


def orthogonal(X, steps=5):
    """
    X (k,n,m), k matrices -> of each U V^T of its singular value decomposition X = U S V^T, with 0.7 to 1.2 in place of
    ones. Newton-Schulz: each step takes every singular value x to a x + b x^3 + c x^5. These coefficients lift small
    ones fastest, for which they give up the exact 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = X.size(1) > X.size(2)
    if tall:                # X X^T is then the smaller product
        X = X.mT
    X = X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp(min=1e-7)   # no singular value above 1
    for _ in range(steps):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=b, alpha=c)     # b A + c A A: the sum is part of the product's kernel
        X = torch.baddbmm(X, A, X, beta=a)              # a X + A X
    return X.mT.contiguous() if tall else X


def scale_of(shape):
    """What an orthogonal matrix of this shape is multiplied by: its entries then have a root mean square of 0.2, about
    that of AdamW's steps, so that one learning rate serves both."""
    return 0.2 * math.sqrt(max(shape))


class Muon(torch.optim.Optimizer):
    """
    Muon for the groups with muon=True, AdamW for the others. Parameters and gradients may be DTensors, sharded by rows
    as FSDP2 does it. With several ranks, all hold the same gradients or shards of the same, and all call step().
    """

    def __init__(self, groups, lr, betas, fused):
        super().__init__(groups, dict(lr=lr, betas=betas, fused=fused, momentum=MOMENTUM, eps=EPS, weight_decay=0.0,
                                      muon=False))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            if group['muon']:
                self.step_muon(group, params)
            else:
                self.step_adamw(group, params)

    def step_adamw(self, group, params):
        """As torch.optim.AdamW does it, with the same state."""
        for p in params:
            if not self.state[p]:
                self.state[p].update(step=torch.zeros((), device=p.device if group['fused'] else 'cpu'),
                                     exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        steps, means, squares = ([self.state[p][key] for p in params] for key in ('step', 'exp_avg', 'exp_avg_sq'))
        beta1, beta2 = group['betas']
        adamw(params, [p.grad for p in params], means, squares, [], steps, fused=group['fused'], amsgrad=False,
              beta1=beta1, beta2=beta2, lr=group['lr'], weight_decay=group['weight_decay'], eps=group['eps'],
              maximize=False)

    def step_muon(self, group, params):
        """Batches of matrices of one shape; a batch for each rank at a time."""
        batches = []
        for shape in dict.fromkeys(p.shape for p in params):
            alike = [p for p in params if p.shape == shape]
            batches += [alike[i:i + BATCH] for i in range(0, len(alike), BATCH)]
        sharded, ranks = any(isinstance(p, DTensor) for p in params), None
        if sharded:     # the ranks that hold one copy of the model together; otherwise all share the work
            ranks = params[0].device_mesh.get_group(params[0].device_mesh.ndim - 1)
        world = dist.get_world_size(ranks) if dist.is_initialized() else 1
        for i in range(0, len(batches), world):
            some = batches[i:i + world]
            ahead = [stack(self.momentum(group, batch)) for batch in some]
            if sharded:
                steps = of_shards(ahead, [batch[0].shape for batch in some], ranks)
            else:
                steps = of_copies(ahead, world)
            for batch, step in zip(some, steps):
                weights = [local(p) for p in batch]
                torch._foreach_mul_(weights, 1 - group['lr'] * group['weight_decay'])
                step = step.to(weights[0].dtype).unbind()
                torch._foreach_add_(weights, step, alpha=-group['lr'] * scale_of(batch[0].shape))

    def momentum(self, group, params):
        """Where Nesterov's momentum points for each parameter: what this rank holds of that."""
        for p in params:
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        gradients, means = [local(p.grad) for p in params], [local(self.state[p]['momentum_buffer']) for p in params]
        torch._foreach_lerp_(means, gradients, 1 - group['momentum'])
        return torch._foreach_lerp(gradients, means, group['momentum'])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stack(matrices):
    """k matrices (n,m) as one (k,n,m): in bfloat16 on a GPU, which is several times faster in it, and in float32
    elsewhere, where modes are compared to the last digits."""
    return torch.stack(matrices).to(torch.bfloat16 if matrices[0].is_cuda else torch.float32)


def of_copies(ahead, world):
    """ahead: a batch (k,n,m) for each of the first ranks, the same on all. Each rank makes its own batch orthogonal,
    and all get all of them."""
    rank = dist.get_rank() if world > 1 else 0
    if rank < len(ahead):
        ahead[rank] = orthogonal(ahead[rank])
    if world > 1:
        for owner, batch in enumerate(ahead):
            dist.broadcast(batch, owner)
    return ahead


def of_shards(ahead, shapes, ranks):
    """ahead: the rows (k,rows,m) that this rank holds of a batch for each of the first ranks; shapes: the (n,m) of
    their matrices. Each rank gets its batch whole, makes it orthogonal and gives the rows back to their ranks."""
    rank, world = dist.get_rank(ranks), dist.get_world_size(ranks)
    nothing, idle = (0,), world - len(ahead)        # idle: ranks without a batch
    there = ahead + [ahead[0].new_empty(nothing)] * idle
    back = [ahead[0].new_empty(nothing)] * world
    if rank < len(ahead):
        n, m = shapes[rank]
        most = math.ceil(n / world)
        rows = [max(0, min(most, n - most * r)) for r in range(world)]      # the last ranks may hold fewer, or none
        parts = exchange(there, [(len(ahead[rank]), held, m) for held in rows], ranks)
        back = orthogonal(torch.cat(parts, 1)).split(rows, 1)
    else:
        exchange(there, [nothing] * world, ranks)
    return exchange(back, [batch.shape for batch in ahead] + [nothing] * idle, ranks)[:len(ahead)]


def exchange(parts, shapes, ranks):
    """parts[r] is for rank r. Returns what comes from each of the ranks, of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat([part.flatten() for part in parts]), sizes,
                           [part.numel() for part in parts], group=ranks)
    return [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes)]
