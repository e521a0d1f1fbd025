"""Adam's moments of a module's shard, in the inner optimizer's own tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_edit.sync.modules import ModuleShard

MOMENTS = ("exp_avg", "exp_avg_sq")


class InnerMoments:
    """Reads and writes them by module; where the optimizer has made no step there are none."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    def of(self, module: ModuleShard) -> Iterator[torch.Tensor]:
        """Of each slice in turn both moments, flat, fp32."""
        for piece in module.slices:
            for part in self._optimizer.chained_optimizers:
                state = part.optimizer.state.get(piece.optimizer_parameter, {})
                if all(name in state for name in MOMENTS):
                    yield from (state[name].view(-1) for name in MOMENTS)

    def zero_(self, module: ModuleShard) -> None:
        """Both := 0."""
        for moment in self.of(module):
            moment.zero_()

    def read(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """flat [2 numel] fp32 := both, in the order of `of`."""
        moments = list(self.of(module))
        if moments:
            torch.cat(moments, out=flat)

    def write(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """Both := flat [2 numel], as `read` gave it."""
        moments = list(self.of(module))
        for moment, value in zip(moments, flat.split([moment.numel() for moment in moments]), strict=True):
            moment.copy_(value)
