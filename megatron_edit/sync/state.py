"""All that a sync carries from step to step: what a checkpoint reads and writes, and its only door to the sync.

    counts, trigger    numbers                                        decider.detector   [R, M] statistics
    outer              anchor and outer momentum                      errors             what compression owes
    under_way          averages that are not yet applied (a delay, or CO2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_edit.config.schema import EditConfig
from megatron_edit.sync.counts import SyncCounts
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.error_feedback import ErrorFeedback
from megatron_edit.sync.event import Pending, SyncEvent
from megatron_edit.sync.fleet import Fleet
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.placements import Placement, UnderWay
from megatron_edit.sync.trigger import Trigger
from megatron_edit.tables.methods import Method


class SyncState:
    """The state of one rank's modules. The engine changes it; a checkpoint reads it between two steps, drained."""

    def __init__(
        self,
        config: EditConfig,
        method: Method,
        fleet: Fleet,
        modules: list[ModuleShard],
        trigger: Trigger,
        counts: SyncCounts,
        decider: Decider,
        outer_state: OuterState,
        errors: ErrorFeedback,
        placement: Placement,
    ) -> None:
        self.config, self.method, self.fleet = config, method, fleet
        self.modules = modules
        self.trigger, self.counts, self.decider = trigger, counts, decider
        self.outer, self.errors = outer_state, errors
        self._placement = placement

    # ---- tensors ---------------------------------------------------------------------------------------------------

    @property
    def has_anchor(self) -> bool:
        """Whether there is an anchor now."""
        return self.outer.exists

    @property
    def anchor(self) -> list[torch.Tensor]:
        """[numel] fp32 of each module, [] in the warm-up. Of `co2-sharded` a gathered copy, collective."""
        return self.outer.anchors

    @property
    def outer_momentum(self) -> list[torch.Tensor]:
        """As `anchor`."""
        return self.outer.momenta

    def allocate(self) -> None:
        """Anchor, outer momentum and errors exist afterwards, where the method has them: to be read into."""
        if self.method.has_anchor and not self.outer.exists:
            self.outer.allocate()
        self.errors.allocate()

    # ---- numbers ---------------------------------------------------------------------------------------------------

    @property
    def steps_since_average(self) -> int:
        """Steps of this replica since its last sync that averaged something."""
        return self.trigger.steps - self.counts.steps_at_average

    @property
    def schedule_of_syncs(self) -> list[Any]:
        """What decides when a module is due again: with another one, averages under way cannot stay there."""
        config = self.config
        return [self.method.trigger, config.edit_sync_interval, self.trigger.num_fragments, config.edit_sync_delay]

    @property
    def replicas_agree(self) -> bool:
        """Whether all replicas hold the same parameters once a due sync is completed, and nothing else is under way.

        The same on every rank.
        """
        if self.trigger.in_warmup:
            return True
        return self.trigger.num_fragments == 1 and self.trigger.steps_since_sync == 0 and not self.under_way

    def load(
        self,
        trigger: dict[str, int | None],
        *,
        detector: dict[str, torch.Tensor] | None = None,
        updates_since_sync: Sequence[int] = (),
        steps_since_average: int = 0,
    ) -> None:
        """Takes up saved numbers. `detector`: its state for this stage's modules; None leaves it as it is.

        Raises ValueError as `Trigger.load_state_dict` does.
        """
        self.trigger.load_state_dict(trigger)
        if detector is not None:
            self.decider.detector.load_state_dict(detector)
        self.counts.restart(list(updates_since_sync) or [0])
        self.counts.steps_at_average = self.trigger.steps - steps_since_average

    # ---- under way -------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> UnderWay:
        """Syncs whose averages are not yet applied, oldest first, each with its modules on this rank."""
        return self._placement.under_way

    def take_up(self, event: SyncEvent, pending: dict[int, Pending]) -> None:
        """Adds a sync that a checkpoint has left under way: its modules, by index."""
        event.modules_left = len(pending)
        for index, module in pending.items():
            if not module.rolled_back:
                shard = self.modules[index]
                event.bytes_sent += self.fleet.transport.message_bytes(shard.numel, shard.num_duplicated)
        self._placement.take_up(event, [pending[index] for index in sorted(pending)])

    def apply_under_way(self) -> None:
        """Applies every average that is under way, now."""
        self._placement.apply_all()
