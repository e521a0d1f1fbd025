"""One sync from its decision to its last update: what the replicas agreed on, and what became of it.

M: modules of this rank's stage. R: replicas. Modules whose sync was not due have columns of False and zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_edit.sync.detector import DetectorVerdict


@dataclass(frozen=True)
class SyncDecision:
    """What all replicas know of one sync before any parameter travels."""

    index: int  # 1 for the first sync
    iteration: int  # optimizer steps of this replica before it
    due: torch.Tensor  # [M] bool: modules that take part
    norms: torch.Tensor  # [R, M] fp64, G of arXiv 2412.07210; without an anchor the norms of the parameters
    steps: torch.Tensor  # [R, M] int64: updates of the module since it was last synchronised
    verdict: DetectorVerdict
    weights: torch.Tensor  # [R, M] fp64, 0 where left out
    rolled_back: torch.Tensor  # [M] bool: every replica left out

    @property
    def num_replicas(self) -> int:
        """R, of this sync."""
        return self.norms.shape[0]

    @property
    def stepped(self) -> torch.Tensor:
        """bool [R]: the replica made a step that counts in some module."""
        return self.steps.gt(0).any(dim=1)


@dataclass(frozen=True)
class SyncResult:
    """One completed sync, as this rank saw it."""

    decision: SyncDecision
    clip_coefficients: torch.Tensor  # [M] fp64; 1 where rolled back or not due
    bytes_sent: int
    exposed_ms: float
    total_ms: float  # from the decision to the last module's update


@dataclass(frozen=True)
class Meeting:
    """All replicas have met: a sync was decided (or, too early for it, put off), and these are its step counts."""

    index: int  # of the sync, 1 for the first
    steps: tuple[int, ...]  # [R] iterations of each replica since the meeting before, or since the warm-up ended
    averaged: bool  # False: fewer steps than --edit-min-total-steps, the replicas go on as they are


@dataclass
class SyncEvent:
    """A sync in progress. It ends after the same step on all ranks, also where none of its modules lies."""

    decision: SyncDecision
    decided_at: Any  # event of the computing stream
    clip_coefficients: list[torch.Tensor]  # [M] 0-d fp64 each
    apply_after: int | None = None  # with a delay: the step after which they are updated
    inner_lr: float = 0.0  # of the step before it
    modules_left: int = 0
    bytes_sent: int = 0
    exposed: list[tuple[Any, Any]] = field(default_factory=list)  # pairs of events
    updated_at: Any = None  # event after the last module's update

    def result(self) -> SyncResult:
        """What is left of it; the device must have finished."""
        last = self.updated_at or self.decided_at
        return SyncResult(
            decision=self.decision,
            clip_coefficients=torch.stack([beta.cpu() for beta in self.clip_coefficients]),
            bytes_sent=self.bytes_sent,
            exposed_ms=sum(start.elapsed_time(end) for start, end in self.exposed),
            total_ms=self.decided_at.elapsed_time(last),
        )


class MessageLostError(RuntimeError):
    """A message will not arrive, and the job goes on without it. A static job's collectives end the job instead."""


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """It has arrived afterwards: for the host on a CPU, for the current stream on CUDA.

        Raises MessageLostError, where its carrier `may_lose_messages`.
        """


class Carrier(Protocol):
    """What a message was launched on: a transport (`transport.py`)."""

    may_lose_messages: bool


@dataclass
class Pending:
    """State of one module between the decision and its update.

    `buffer` [numel] fp32: this replica's weighted pseudo gradient, then the average over the replicas (without an
    anchor: of the parameters). `at_launch` [numel] fp32: the masters when it was launched, kept with a delay only.
    `carrier`: what it was launched on, which stays in use for it whoever the replicas are by then.
    `owed_before` [numel] fp32: the error feedback before the launch, kept where the message may be lost.
    """

    module: int  # its index
    event: SyncEvent
    weight: float  # of this replica
    rolled_back: bool
    kept: bool  # this replica is in the average
    buffer: torch.Tensor | None = None
    at_launch: torch.Tensor | None = None
    moments: torch.Tensor | None = None  # [2 numel] fp32, on its way to the average of Adam's moments
    handles: list[Handle | None] = field(default_factory=list)
    carrier: Carrier | None = None  # before the launch, or nothing was to be sent: None
    updates: int = 0  # of this replica that the message holds
    owed_before: torch.Tensor | None = None
    lost: bool = False

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that it holds and gives back when it ends."""
        held = (self.buffer, self.at_launch, self.moments, self.owed_before)
        return [buffer for buffer in held if buffer is not None]

    def arrived(self) -> bool:
        """Waits for what is on its way; on CUDA for the current stream, not the host. False: some of it is lost."""
        for handle in self.handles:
            if handle is not None:
                try:
                    handle.wait()
                except MessageLostError:
                    self.lost = True
        self.handles = []
        return not self.lost
