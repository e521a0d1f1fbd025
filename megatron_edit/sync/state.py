"""All that a sync carries from step to step: what a checkpoint reads and writes, and its only door to the sync.

    counts, trigger    numbers                                        decider.detector   [R, M] statistics
    outer              anchor and outer momentum                      errors             what compression owes
    under_way          averages that are not yet applied (a delay, or CO2)

To load: `outer_to_load` and `errors_to_load` are read into, `load` takes the numbers, then `resume`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_edit.config.resolved import ResolvedEdit
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.buffers import BufferPool
from megatron_edit.sync.counts import SyncCounts
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.error_feedback import ErrorFeedback
from megatron_edit.sync.event import Pending, SyncEvent
from megatron_edit.sync.fleet import Fleet
from megatron_edit.sync.modules import GradientReducer, ModuleShard, ReplicaDataParallel
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.outer_update import OuterUpdate
from megatron_edit.sync.placements import Placement, UnderWay
from megatron_edit.sync.trigger import Trigger
from megatron_edit.tables.methods import Method


class SyncState:
    """The state of one rank's modules. The engine changes it; a checkpoint reads it between two steps, drained."""

    def __init__(
        self,
        config: ResolvedEdit,
        method: Method,
        mesh: Mesh,
        fleet: Fleet,
        chunks: list[ReplicaDataParallel],
        modules: list[ModuleShard],
        trigger: Trigger,
        counts: SyncCounts,
        decider: Decider,
        outer_state: OuterState,
        update: OuterUpdate,
        errors: ErrorFeedback,
        placement: Placement,
        buffers: BufferPool,
        reducer: GradientReducer,
    ) -> None:
        self.config, self.method, self.mesh, self.fleet = config, method, mesh, fleet
        self.chunks, self.modules = chunks, modules
        self.trigger, self.counts, self.decider = trigger, counts, decider
        self.outer, self.update, self.errors = outer_state, update, errors
        self.reducer = reducer
        self._placement, self._buffers = placement, buffers

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

    def outer_to_load(self) -> OuterState:
        """Anchor and outer momentum as whole tensors to be read into; `outer.take` is to follow."""
        if not self.outer.exists:
            self.outer.allocate()
        return self.outer.whole()

    def errors_to_load(self) -> list[torch.Tensor]:
        """[numel] of each module, to be read into; [] without compression."""
        self.errors.allocate()
        return self.errors.tensors

    # ---- numbers ---------------------------------------------------------------------------------------------------

    @property
    def detectors(self) -> dict[str, torch.Tensor]:
        """`AnomalyDetector.state_dict`."""
        return self.decider.detector.state_dict()

    def decider_of(self, num_replicas: int) -> Decider:
        """A decider of this run's settings for the replicas of another one, ids 0 to `num_replicas` - 1."""
        return Decider(self.config, self.method, range(num_replicas), len(self.modules))

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

    def numbers(self) -> dict[str, Any]:
        """What is the same in all replicas, as JSON."""
        return {
            "trigger": self.trigger.state_dict(),
            "has_anchor": self.has_anchor,
            "has_errors": bool(self.errors.tensors),
            "edit_modules": self.config.edit_modules,
        }

    def replica_numbers(self) -> dict[str, Any]:
        """What each replica counts for itself, as JSON; `load` takes it up by the same names."""
        return {
            "updates_since_sync": self.counts.of_fragments,
            "steps_since_average": self.steps_since_average,
            "inner_lr": self.counts.inner_lr,
        }

    def load(
        self,
        trigger: dict[str, int | None],
        *,
        detectors: dict[str, torch.Tensor] | None = None,
        updates_since_sync: Sequence[int] = (),
        steps_since_average: int = 0,
        inner_lr: float = 0.0,
    ) -> None:
        """Takes up saved numbers. `detectors`: their state for this stage's modules; None leaves them as they are.

        Raises ValueError as `Trigger.load_state_dict` does.
        """
        self.trigger.load_state_dict(trigger)
        if detectors is not None:
            self.decider.detector.load_state_dict(detectors)
        self.counts.restart(list(updates_since_sync) or [0])
        self.counts.steps_at_average = self.trigger.steps - steps_since_average
        self.counts.inner_lr = inner_lr

    # ---- under way -------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> UnderWay:
        """Syncs whose averages are not yet applied, oldest first, each with its modules on this rank."""
        return self._placement.under_way

    def _take_up(self, event: SyncEvent, pending: list[Pending]) -> None:
        event.modules_left = len(pending)
        for module in pending:
            if not module.rolled_back:
                shard = self.modules[module.module]
                event.bytes_sent += self.fleet.transport.message_bytes(shard.numel, shard.num_duplicated)
        self._placement.take_up(event, pending)

    # ---- beginning -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new run begins, in its warm-up or after it. Collective over the replicas."""
        self.reducer.enabled = self.trigger.in_warmup and self.fleet.num_replicas > 1
        if not self.trigger.in_warmup:
            self.leave_warmup()

    def leave_warmup(self) -> None:
        """anchor := parameters, those of replica 0 everywhere: bit-equal even where kernels round differently."""
        self.reducer.enabled = False
        self.counts.launched(range(self.trigger.num_fragments))
        self.counts.steps_at_average = self.trigger.steps
        if self.method.has_anchor and not self.outer.exists:
            self.outer.allocate()
        self.errors.allocate()
        for module in self.modules:
            flat = self._buffers.take(module.numel)
            module.copy_masters_to(flat)
            self.fleet.transport.broadcast(flat)
            module.write_masters(flat)
            if self.method.has_anchor:
                self.outer.set_anchor(module, flat)
            self._buffers.give_back(flat)
        self._allocate_buffers()

    @torch.no_grad()
    def resume(
        self,
        *,
        has_anchor: bool = False,
        under_way: Iterable[tuple[SyncEvent, list[Pending]]] = (),
        apply_now: bool = False,
    ) -> None:
        """Goes on when a checkpoint has been read into the masters and this state. Collective over all ranks.

        has_anchor  an anchor was among it. Without one, outside the warm-up, the masters become it
        under_way   syncs that it has left under way, oldest first, each with its modules on this rank in forward order
        apply_now   their averages are applied at once
        """
        self.reducer.enabled = self.trigger.in_warmup and self.fleet.num_replicas > 1
        if not self.trigger.in_warmup:
            if self.method.has_anchor and not has_anchor:
                self.leave_warmup()
            else:
                self.errors.allocate()
                self._allocate_buffers()
        for event, pending in under_way:
            self._take_up(event, pending)
        if apply_now:
            self._placement.apply_all()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def _allocate_buffers(self) -> None:
        """All that a sync takes, now: so the memory is known from the start, and no step allocates."""
        sizes = [
            [module.numel for module in self.modules if module.fragment == fragment]
            for fragment in range(self.trigger.num_fragments)
        ]
        with_moments = self.config.edit_inner_moments == "average"
        for sizes_at_once in self._placement.buffers_at_once(sizes, with_moments):
            self._buffers.hold_at_once(sizes_at_once)
