"""How an averaged pseudo gradient moves the anchor: clip, then the method's outer step. One code path for a live sync
and for the sync of saved replicas that a change of their number makes necessary (`checkpoint/resize.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_edit.config.resolved import ResolvedEdit
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer import OUTER_STEPS, OuterSettings
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.penalty import clip_coefficient
from megatron_edit.tables.methods import Method


class OuterUpdate:
    """norm_group: ranks of one replica whose shards make up a module's norm."""

    def __init__(self, config: ResolvedEdit, method: Method, norm_group: dist.ProcessGroup) -> None:
        self._config, self._method, self._norm_group = config, method, norm_group

    def __call__(
        self, module: ModuleShard, outer: OuterState, averaged: torch.Tensor, inner_lr: float
    ) -> torch.Tensor:
        """Anchor and outer momentum of `module` in `outer` change in place; `outer.updated` is to follow.

        `averaged` [numel] fp32 is overwritten. Returns the clip coefficient, 0-d fp64 on the device; the host does not
        wait for it.
        """
        config = self._config
        outer_lr, outer_momentum = config.outer_lr_and_momentum
        beta = self._clip_coefficient(module, averaged)
        anchor, momentum, part = outer.update(module)
        settings = OuterSettings(
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            inner_lr=inner_lr,
            gap_penalty=config.edit_co2_gap_penalty,
            momentum_clip=config.edit_co2_momentum_clip,
        )
        OUTER_STEPS[self._method.outer_step](anchor, momentum, averaged[part], beta, settings)
        return beta

    def _clip_coefficient(self, module: ModuleShard, averaged: torch.Tensor) -> torch.Tensor:
        phi = self._config.edit_pseudo_grad_clip
        if not phi:
            return torch.ones((), dtype=torch.float64, device=averaged.device)
        squares = module.counted_square_sum(averaged)
        if self._norm_group.size() > 1:
            dist.all_reduce(squares, group=self._norm_group)
        return clip_coefficient(squares.sqrt(), phi)
