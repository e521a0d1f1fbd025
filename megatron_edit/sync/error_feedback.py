"""What compression has not sent yet of each module, carried over to its next sync."""

from __future__ import annotations

import torch

from megatron_edit.sync.modules import ModuleShard


class ErrorFeedback:
    """`compresses`: False: nothing is ever owed."""

    def __init__(self, modules: list[ModuleShard], device: torch.device, *, compresses: bool) -> None:
        self._modules, self._device = modules, device
        self.compresses = compresses
        self.tensors: list[torch.Tensor] = []  # [numel] fp32 of each module; [] before `allocate`

    def allocate(self) -> None:
        """There is a tensor for each module afterwards, zeros where it is new."""
        if self.compresses and not self.tensors:
            self.tensors = [torch.zeros(m.numel, dtype=torch.float32, device=self._device) for m in self._modules]

    def of(self, module: ModuleShard) -> torch.Tensor | None:
        """[numel] fp32, to be changed in place; None without compression."""
        return self.tensors[module.index] if self.tensors else None
