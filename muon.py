"""
Muon (Keller Jordan 2024, https://kellerjordan.github.io/posts/muon): a step of momentum for a matrix, with all singular
values of the step made about 1. Embeddings, head, norms and biases keep AdamW, in the same optimizer object, so that
checkpoints and loss scaling see one. torch.optim.Muon does the same in one process; on the shards of FSDP2 it computes
in bfloat16 something else than on the whole matrix, and here every mode has to make the same step.
"""
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw


def orthogonal(X, steps=5):
    """
    X (n,m) -> U V^T of its singular value decomposition X = U S V^T, with 0.7 to 1.2 in place of ones. Newton-Schulz:
    each step takes every singular value x to a x + b x^3 + c x^5. These coefficients lift small ones fastest, for which
    they give up the exact 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = X.size(0) > X.size(1)
    if tall:                # X X^T is then the smaller product
        X = X.T
    X = X / X.norm().clamp(min=1e-7)    # no singular value above 1
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


class Muon(torch.optim.Optimizer):
    """Muon for the groups with muon=True, AdamW for the others. Parameters and gradients may be DTensors, the shards of
    FSDP2; and with several ranks, all hold the same gradients or shards of the same, and all call step()."""

    def __init__(self, groups, lr, betas, fused, momentum=0.95, eps=1e-8):
        super().__init__(groups, dict(lr=lr, betas=betas, fused=fused, momentum=momentum, eps=eps, weight_decay=0.0,
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
        """The ranks take turns: each makes one of the next `world` matrices orthogonal, and gives it to the others."""
        rank, world = 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        params = sorted(params, key=lambda p: p.numel())    # of about one size in each turn, so that no rank waits long
        for i in range(0, len(params), world):
            turn = params[i:i + world]
            wholes = [self.direction(p, group['momentum']) for p in turn]
            if rank < len(turn):
                wholes[rank] = orthogonal(wholes[rank]).contiguous()
            for source, (p, whole) in enumerate(zip(turn, wholes)):
                if world > 1:
                    dist.broadcast(whole, source)
                if isinstance(p, DTensor):      # this rank's shard of it
                    whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                # 0.2 is about the size of AdamW's steps, entry by entry, so that one learning rate serves both
                size = 0.2 * math.sqrt(max(p.shape))
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(whole.to(p.dtype), alpha=-group['lr'] * size)

    def direction(self, p, momentum):
        """Where Nesterov's momentum points for a parameter: the whole matrix (n,m), in the dtype to multiply in."""
        state = self.state[p]
        if not state:
            state['momentum_buffer'] = torch.zeros_like(p)
        mean = state['momentum_buffer'].lerp_(p.grad, 1 - momentum)
        ahead = p.grad.lerp(mean, momentum)
        # a GPU is several times faster in bfloat16; float32 elsewhere, where modes are compared to the last digits
        ahead = ahead.to(torch.bfloat16 if p.is_cuda else torch.float32)
        return ahead.full_tensor() if isinstance(ahead, DTensor) else ahead
