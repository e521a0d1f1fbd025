"""The outer optimizers: how the averaged pseudo gradient moves the anchor. In place, on flat fp32 shards."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def nesterov_step_(
    anchor: Tensor,
    outer_momentum: Tensor,
    averaged_delta: Tensor,
    beta: Tensor | float,
    outer_lr: float,
    outer_momentum_coefficient: float,
) -> None:
    """One step of Nesterov momentum on the pseudo gradient g = -beta Dbar (arXiv 2412.07210):
    m <- mu m + g ; theta <- theta - eta (g + mu m).

    Equal to torch.optim.SGD(nesterov=True, dampening=0), and with mu = 0 to plain SGD.
    Not to be called on a rollback: anchor and momentum then stay as they are.

    anchor          fp32 [N], theta, changed in place
    outer_momentum  fp32 [N], m, changed in place; zeros before the first step
    averaged_delta  fp32 [N], Dbar = sum_i w_i (theta_i - theta). OVERWRITTEN: it serves as scratch, so that
                    nothing of size N is allocated; its contents mean nothing afterwards
    beta            clip coefficient, a number, or a 0-d tensor on the shards' device for which the host does
                    not wait
    """
    assert anchor.shape == outer_momentum.shape == averaged_delta.shape, "shards of different sizes"
    pseudo_gradient = averaged_delta.mul_(-beta)
    outer_momentum.mul_(outer_momentum_coefficient).add_(pseudo_gradient)
    pseudo_gradient.add_(outer_momentum, alpha=outer_momentum_coefficient)
    anchor.sub_(pseudo_gradient, alpha=outer_lr)
