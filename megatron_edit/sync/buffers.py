"""Buffers of the sync, kept for the next one: nothing is allocated in a step once a first sync has been made."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BufferPool:
    """fp32 buffers by size. `taken` and `given back` must match; what is allocated stays allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, numel: int) -> torch.Tensor:
        """[numel] fp32 with any content."""
        free = self._free.get(numel)
        if free:
            return free.pop()
        self.allocated_bytes += 4 * numel
        return torch.empty(numel, dtype=torch.float32, device=self._device)

    def give_back(self, *buffers: torch.Tensor) -> None:
        """The buffers may be taken again."""
        for buffer in buffers:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def hold_at_once(self, sizes: Sequence[int]) -> None:
        """Allocates what it takes to have buffers of all `sizes` out at the same time."""
        self.give_back(*[self.take(size) for size in sizes])
