"""Collectives between replicas. Big messages on the sync group, small ones on a group of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.platform.base import Platform


class SyncTransport:
    """What crosses the sync group, counted in bytes and in exposed time."""

    def __init__(
        self, platform: Platform, sync_group: dist.ProcessGroup, control_group: dist.ProcessGroup
    ) -> None:
        self.platform = platform
        self._sync_group = sync_group
        self._control_group = control_group
        self._waits: list[tuple[Any, Any]] = []
        self._bytes = 0

    def all_reduce(self, flat: torch.Tensor) -> dist.Work | None:
        """Sum of flat [n] over the replicas, in place, without waiting; None where nothing travels."""
        if flat.numel() == 0 or self._sync_group.size() == 1:
            return None
        self._bytes += flat.numel() * flat.element_size()
        return dist.all_reduce(flat, group=self._sync_group, async_op=True)

    def broadcast(self, flat: torch.Tensor) -> None:
        """flat [n] := that of replica 0; blocking."""
        if flat.numel() and self._sync_group.size() > 1:
            dist.broadcast(flat, group_src=0, group=self._sync_group)

    def all_gather(self, vector: torch.Tensor) -> torch.Tensor:
        """[R, n] on the CPU from each replica's vector [n]; blocking: the slowest replica decides when."""
        assert vector.device.type == "cpu"
        rows = [torch.empty_like(vector) for _ in range(self._control_group.size())]
        dist.all_gather(rows, vector, group=self._control_group)
        return torch.stack(rows)

    def add_exposed(self, start: Any, end: Any) -> None:
        """Counts the time between two events of the computing stream as exposed."""
        self._waits.append((start, end))

    def take_traffic(self) -> tuple[int, float]:
        """(bytes sent into all-reduces, exposed milliseconds) since the last call; waits for the device."""
        self.platform.synchronize()
        traffic = self._bytes, sum(start.elapsed_time(end) for start, end in self._waits)
        self._bytes, self._waits = 0, []
        return traffic
