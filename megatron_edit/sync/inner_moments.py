"""Adam's moments of a module's shard, in the inner optimizer's own tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_edit.sync.modules import MegatronOptimizer, ModuleShard

MOMENTS = ("exp_avg", "exp_avg_sq")


class InnerMoments:
    """Reads and writes them by module; where the optimizer has made no step there are none."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    def of(self, module: ModuleShard) -> Iterator[tuple[torch.Tensor, torch.Tensor | float]]:
        """Of each slice in turn both moments, flat fp32, with the share 1 - beta^t that t steps have filled of each.

        Where the optimizer counts on the device the share stays there, 0-d fp64: the host does not wait.
        """
        for piece in module.slices:
            for part in self._optimizer.chained_optimizers:
                state = part.optimizer.state.get(piece.optimizer_parameter, {})
                if all(name in state for name in MOMENTS):
                    group = part.optimizer.param_groups[0]  # all have one beta, and a step of their own or this one's
                    steps = state.get("step", group.get("step", 0))
                    steps = steps.double().clamp(min=1.0) if isinstance(steps, torch.Tensor) else max(float(steps), 1.0)
                    for name, beta in zip(MOMENTS, group["betas"], strict=True):
                        yield state[name].view(-1), 1 - beta**steps

    def zero_(self, module: ModuleShard) -> None:
        """Both := 0."""
        for moment, _ in self.of(module):
            moment.zero_()

    def read(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """flat [2 numel] fp32 := both without their bias towards 0, in the order of `of`.

        Replicas may have taken different numbers of steps: the moments of one would be wrong for the count of another.
        """
        moments = list(self.of(module))
        for (moment, share), view in zip(moments, flat.split([m.numel() for m, _ in moments]), strict=True):
            torch.div(moment, share, out=view)

    def write(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """Both := flat [2 numel], as `read` gave it, with the bias of this replica's own step count."""
        moments = list(self.of(module))
        for (moment, share), view in zip(moments, flat.split([m.numel() for m, _ in moments]), strict=True):
            torch.mul(view, share, out=moment)
