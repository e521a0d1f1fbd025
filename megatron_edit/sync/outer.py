"""The outer optimizers: how the averaged pseudo gradient moves the anchor. In place, on flat fp32 shards.

All have one signature, `OuterStep`, and are found by the name that a method's row gives (`tables/methods.py`):

    step(anchor, outer_momentum, averaged_delta, beta, settings)

    anchor          fp32 [N], theta, changed in place
    outer_momentum  fp32 [N], m, changed in place; zeros before the first step
    averaged_delta  fp32 [N], Dbar = sum_i w_i (theta_i - theta). OVERWRITTEN: it serves as scratch, so that
                    nothing of size N is allocated; its contents mean nothing afterwards
    beta            the penalty's clip coefficient, which scales Dbar: a number, or a 0-d tensor on the shards' device
                    for which the host does not wait
    settings        numbers of the run, see `OuterSettings`

None is to be called on a rollback: anchor and momentum then stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd


class InnerLearningRateError(ValueError):
    """SlowMo divides by the inner learning rate, and that is 0."""


@dataclass(frozen=True)
class OuterSettings:
    """Numbers of an outer step.

    outer_lr        eta; SlowMo's a
    outer_momentum  mu; SlowMo's and CO2's beta
    inner_lr        gamma, SlowMo only: the inner learning rate of the last step before the sync, above 0
    gap_penalty     Lambda, CO2 only, above 0
    momentum_clip   c, CO2 only: largest absolute value of an element of the momentum; 0 = off
    """

    outer_lr: float
    outer_momentum: float
    inner_lr: float = 0.0
    gap_penalty: float = 1.0
    momentum_clip: float = 0.0


OuterStep = Callable[[Tensor, Tensor, Tensor, Tensor | float, OuterSettings], None]


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

    Equal to torch.optim.SGD(nesterov=True, dampening=0), and with mu = 0 to plain SGD. Tensors: see above. Where torch
    has it, its one kernel for it is used, which reads and writes half as much as the operations one by one.
    """
    if outer_momentum_coefficient > 0 and anchor.numel() and anchor.device.type in ("cpu", "cuda"):
        assert anchor.shape == outer_momentum.shape == averaged_delta.shape, "shards of different sizes"
        if not (anchor.device.type == "cpu" and float(beta) == 1.0):
            averaged_delta.mul_(beta)
        sgd(
            [anchor],
            [averaged_delta],
            [outer_momentum],
            fused=True,
            weight_decay=0.0,
            momentum=outer_momentum_coefficient,
            lr=outer_lr,
            dampening=0.0,
            nesterov=True,
            maximize=True,
        )
        return
    pseudo_gradient = _pseudo_gradient_(anchor, outer_momentum, averaged_delta, beta)
    outer_momentum.mul_(outer_momentum_coefficient).add_(pseudo_gradient)
    pseudo_gradient.add_(outer_momentum, alpha=outer_momentum_coefficient)
    anchor.sub_(pseudo_gradient, alpha=outer_lr)


def nesterov(
    anchor: Tensor, outer_momentum: Tensor, averaged_delta: Tensor, beta: Tensor | float, settings: OuterSettings
) -> None:
    """EDiT, DiLoCo, streaming: `nesterov_step_`."""
    nesterov_step_(anchor, outer_momentum, averaged_delta, beta, settings.outer_lr, settings.outer_momentum)


@torch.no_grad()
def slowmo(
    anchor: Tensor, outer_momentum: Tensor, averaged_delta: Tensor, beta: Tensor | float, settings: OuterSettings
) -> None:
    """SlowMo (arXiv 1910.00643): u <- mu u + (theta - mean)/gamma ; theta <- theta - a gamma u.

    theta - mean = -beta Dbar is the pseudo gradient; u is in units of a gradient, so that a falling inner learning
    rate does not leave the momentum too large. Raises InnerLearningRateError when gamma is not above 0.
    """
    gamma = settings.inner_lr
    if not gamma > 0:
        raise InnerLearningRateError(
            f"slowmo divides by the inner learning rate of the last step before the sync, which is {gamma}; a schedule "
            "that stays above 0 works, for instance --min-lr 1e-6"
        )
    pseudo_gradient = _pseudo_gradient_(anchor, outer_momentum, averaged_delta, beta)
    outer_momentum.mul_(settings.outer_momentum).add_(pseudo_gradient, alpha=1 / gamma)
    anchor.sub_(outer_momentum, alpha=settings.outer_lr * gamma)


@torch.no_grad()
def co2(
    anchor: Tensor, outer_momentum: Tensor, averaged_delta: Tensor, beta: Tensor | float, settings: OuterSettings
) -> None:
    """CO2 (arXiv 2401.16265), D = -beta Dbar: m <- mu m + D/Lambda ; m <- clamp(m, -c, c) ; theta <- theta - eta m.

    The clamped momentum is the one that is kept and applied (ours: in the released code the clip's result is
    dropped). That D is one round old is the engine's doing.
    """
    pseudo_gradient = _pseudo_gradient_(anchor, outer_momentum, averaged_delta, beta)
    outer_momentum.mul_(settings.outer_momentum).add_(pseudo_gradient, alpha=1 / settings.gap_penalty)
    if settings.momentum_clip > 0:
        outer_momentum.clamp_(-settings.momentum_clip, settings.momentum_clip)
    anchor.sub_(outer_momentum, alpha=settings.outer_lr)


OUTER_STEPS: dict[str, OuterStep] = {"nesterov": nesterov, "slowmo": slowmo, "co2": co2}


def _pseudo_gradient_(anchor: Tensor, outer_momentum: Tensor, averaged_delta: Tensor, beta: Tensor | float) -> Tensor:
    """-beta Dbar, in Dbar's own memory."""
    assert anchor.shape == outer_momentum.shape == averaged_delta.shape, "shards of different sizes"
    return averaged_delta.mul_(-beta)
