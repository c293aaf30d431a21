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

# Matrices of one shape are multiplied so many at a time: one alone leaves most of a GPU idle. A product may round
# otherwise in a batch of another size. So batches are cut from the list of parameters, whatever the mode, and ranks
# share the work out by whole batches: that makes the step bit for bit the same in every mode.
BATCH = 6
MOMENTUM, EPS = 0.95, 1e-8      # of Muon, and of AdamW


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
        """Matrices of one shape together, as many at a time as make a batch for each rank."""
        for shape in dict.fromkeys(p.shape for p in params):
            alike = [p for p in params if p.shape == shape]
            sharded = isinstance(alike[0], DTensor)
            ranks = None        # who shares the work: all ranks, or those that hold one copy of the model together
            if sharded:
                ranks = alike[0].device_mesh.get_group(alike[0].device_mesh.ndim - 1)
            rank, world = 0, 1
            if dist.is_initialized():
                rank, world = dist.get_rank(ranks), dist.get_world_size(ranks)
            for i in range(0, len(alike), world * BATCH):
                some = alike[i:i + world * BATCH]
                ahead = self.momentum(group, some)
                steps = share_out(ahead, shape, sharded, ranks, rank, world)[:len(some)].to(ahead[0].dtype)
                weights = [local(p) for p in some]
                torch._foreach_mul_(weights, 1 - group['lr'] * group['weight_decay'])
                steps = [step[:len(w)] for step, w in zip(steps, weights)]
                torch._foreach_add_(weights, steps, alpha=-group['lr'] * scale_of(shape))

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


def share_out(ahead, shape, sharded, ranks, rank, world):
    """
    ahead: at most world x BATCH matrices of one shape (n,m), or of each the rows that this rank holds (sharded).
    Returns the same of the matrices made orthogonal, (at least as many, rows, m). Each rank does one batch; they
    exchange their results, and before that their rows.
    """
    n, m = shape
    mine = ahead[rank * BATCH:(rank + 1) * BATCH]       # this rank's batch: the last ranks' may be short, or empty
    # a GPU is several times faster in bfloat16; float32 elsewhere, where modes are compared to the last digits
    dtype = torch.bfloat16 if ahead[0].is_cuda else torch.float32
    if sharded:
        rows = math.ceil(n / world)     # the last shards may have fewer
        X = torch.stack(ahead).to(dtype)
        X = torch.nn.functional.pad(X, (0, 0, 0, rows - X.size(1), 0, world * BATCH - len(X)))
        X = exchange(X, ranks).view(world, BATCH, rows, m)      # from each rank its rows of this rank's batch
        X = X.transpose(0, 1).reshape(BATCH, world * rows, m)
        X[:len(mine), :n] = orthogonal(X[:len(mine), :n].contiguous())
        X = X.view(BATCH, world, rows, m).transpose(0, 1).reshape(world * BATCH, rows, m)
        return exchange(X, ranks)
    X = ahead[0].new_empty(0, n, m, dtype=dtype)
    if len(mine) > 0:
        X = orthogonal(torch.stack(mine).to(dtype))
    if world == 1:
        return X
    results = X.new_empty(len(ahead), n, m)
    results[rank * BATCH:rank * BATCH + len(mine)] = X
    for owner, batch in enumerate(results.split(BATCH)):
        dist.broadcast(batch, owner)
    return results


def exchange(X, ranks):
    """X (world x ..., ...) holds a part for each rank. Returns the parts that the ranks hold for this one."""
    received = torch.empty_like(X)
    dist.all_to_all_single(received, X, group=ranks)
    return received
