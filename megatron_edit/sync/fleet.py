"""Who the replicas are now: the one object through which all other code of the sync sees them.

It says only who: ids, own index, epoch, and the transport that reaches them. Others ask when they need it and keep
nothing of the answer, so that another form, whose replicas come and go, changes no caller.
"""

from __future__ import annotations

from typing import Protocol

from megatron_edit.sync.transport import SyncTransport


class Fleet(Protocol):
    """The replicas that a sync is made with."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Who they are, in the order of their indices. A replica that comes back has its old id."""

    @property
    def num_replicas(self) -> int:
        """R."""

    @property
    def replica(self) -> int:
        """Index of this rank's replica among them."""

    @property
    def epoch(self) -> int:
        """Grows with every change of who they are."""

    @property
    def transport(self) -> SyncTransport:
        """Collectives between them. A message under way keeps the one that it was launched on."""


class FixedFleet:
    """The replicas of one job, from its start to its end: `ids` are 0 to R - 1."""

    epoch = 0

    def __init__(self, transport: SyncTransport) -> None:
        self.transport = transport

    @property
    def ids(self) -> tuple[int, ...]:
        """See Fleet."""
        return tuple(range(self.num_replicas))

    @property
    def num_replicas(self) -> int:
        """See Fleet."""
        return self.transport.num_replicas

    @property
    def replica(self) -> int:
        """See Fleet."""
        return self.transport.replica
