"""Collectives between replicas. Big messages on the sync group, small ones on a group of their own.

A message is a sum over the replicas, in place. In fp32 it is one all-reduce; compressed (`compression.py`) or with a
sign consensus (`reducers.py`) it is a chain of collectives with arithmetic between them. On CUDA the chain is put on
the current stream, and the host goes on. On a CPU one thread runs it, so that it too runs beside the computation; all
messages then go through that thread, in order of issue, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.platform.base import Platform
from megatron_edit.sync.compression import Codec, CompressedSum
from megatron_edit.sync.event import Handle
from megatron_edit.sync.reducers import consensus_average


class _Queued:
    """A chain that the thread runs."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class SyncTransport:
    """What crosses the sync group. `codec`: None for fp32. `consensus`: "none", or how signs are voted on."""

    may_lose_messages: bool = False

    def __init__(
        self,
        platform: Platform,
        sync_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        *,
        codec: Codec | None = None,
        consensus: str = "none",
    ) -> None:
        self.platform = platform
        self.codec = codec
        self.consensus = consensus
        self.num_replicas, self.replica = sync_group.size(), sync_group.rank()
        self._sync_group = sync_group
        self._control_group = control_group
        self._thread: ThreadPoolExecutor | None = None
        if (codec is not None or consensus != "none") and platform.name == "cpu" and self.num_replicas > 1:
            self._thread = ThreadPoolExecutor(1, "sync-transport")

    def all_reduce(self, flat: torch.Tensor) -> Handle | None:
        """Sum of flat [n] over the replicas, in place, without waiting; None where nothing travels."""
        if flat.numel() == 0 or self.num_replicas == 1:
            return None
        if self._thread is not None:
            return self._queue(lambda: dist.all_reduce(flat, group=self._sync_group))
        return dist.all_reduce(flat, group=self._sync_group, async_op=True)

    def weighted_sum(
        self, flat: torch.Tensor, weight: float, error: torch.Tensor | None, *, exact: int = 0
    ) -> list[Handle | None]:
        """flat [n] := sum over the replicas of weight x flat, without waiting; what to wait for.

        A replica of weight 0 sends zeros, never 0 x its values: they may be NaN. `error` [n]: what compression has not
        yet sent of this rank's earlier messages; changed in place. With a consensus the average is over the replicas
        that agree, element by element. The last `exact` elements are never compressed: tensor parallel ranks hold the
        same there, beside neighbours that differ, and must get the same.
        """
        if self.consensus != "none":
            return [self._chain(lambda: self._agreeing_average(flat, weight))]
        if weight > 0:
            flat.mul_(weight)
        else:
            flat.zero_()
        if self.codec is None:
            return [self.all_reduce(flat)]
        assert error is not None
        codec, cut = self.codec, flat.numel() - exact
        compressed, owed = flat[:cut], error[:cut]
        return [
            self._chain(lambda: self._compressed_sum(codec, compressed, owed, sends=weight > 0)),
            self.all_reduce(flat[cut:]),
        ]

    def message_bytes(self, numel: int, exact: int = 0) -> int:
        """Bytes that `weighted_sum` of [numel] puts into its collectives on this rank."""
        if self.num_replicas == 1:
            return 0
        if self.consensus != "none":  # votes, values, and who agreed
            return 12 * numel
        return 4 * numel if self.codec is None else self.codec.payload_bytes(numel - exact) + 4 * exact

    def broadcast(self, flat: torch.Tensor) -> None:
        """flat [n] := that of replica 0; blocking."""
        if flat.numel() and self.num_replicas > 1:
            self._run(lambda: dist.broadcast(flat, group_src=0, group=self._sync_group))

    def all_gather_parts(self, part: torch.Tensor) -> torch.Tensor:
        """[R k] from each replica's part [k]; blocking."""
        if self.num_replicas == 1 or part.numel() == 0:
            return part.clone()
        parts = [torch.empty_like(part) for _ in range(self.num_replicas)]
        self._run(lambda: dist.all_gather(parts, part, group=self._sync_group))
        return torch.cat(parts)

    def all_gather(self, vector: torch.Tensor) -> torch.Tensor:
        """[R, n] on the CPU from each replica's vector [n]; blocking: the slowest replica decides when."""
        assert vector.device.type == "cpu"
        rows = [torch.empty_like(vector) for _ in range(self._control_group.size())]
        dist.all_gather(rows, vector, group=self._control_group)
        return torch.stack(rows)

    # ---- chains ------------------------------------------------------------------------------------------------------

    def _agreeing_average(self, flat: torch.Tensor, weight: float) -> None:
        consensus_average(flat, weight, self.consensus, self._sum)

    def _sum(self, flat: torch.Tensor) -> None:
        if self.num_replicas > 1:
            dist.all_reduce(flat, group=self._sync_group)

    def _compressed_sum(self, codec: Codec, flat: torch.Tensor, error: torch.Tensor, *, sends: bool) -> None:
        """Two stages: each replica's part of every chunk to the chunk's owner, the sum of the chunk back to all."""
        message = CompressedSum(codec, flat, error, self.num_replicas, self.replica, sends=sends)
        received = torch.empty_like(message.to_owners)
        if self.num_replicas > 1:
            dist.all_to_all_single(received, message.to_owners, group=self._sync_group)
        else:
            received.copy_(message.to_owners)
        own = message.sum_of_own_chunk(received)
        gathered = [torch.empty_like(own) for _ in range(self.num_replicas)]
        if self.num_replicas > 1:
            dist.all_gather(gathered, own, group=self._sync_group)
        else:
            gathered = [own]
        message.write_result(gathered)

    def _chain(self, chain: Callable[[], None]) -> Handle | None:
        if self._thread is not None:
            return self._queue(chain)
        chain()  # CUDA: put on the current stream; one replica: nothing travels
        return None

    def _queue(self, chain: Callable[[], Any]) -> Handle:
        assert self._thread is not None

        def run() -> None:
            with torch.no_grad():
                chain()

        return _Queued(self._thread.submit(run))

    def _run(self, collective: Callable[[], Any]) -> None:
        """Now; behind what the thread has been given, if there is one."""
        if self._thread is None:
            collective()
        else:
            self._queue(collective).wait()
