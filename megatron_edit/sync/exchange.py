"""What the replicas tell each other when a sync is due: norms and step counts, in one small message.

Weights, flags and rollbacks of every module follow from it on every rank alike (`decide.py`), before any parameter
travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_edit.config.schema import EditConfig
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.averages import ModuleAverages
from megatron_edit.sync.buffers import BufferPool
from megatron_edit.sync.counts import SyncCounts
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.event import Meeting, Pending, SyncDecision, SyncEvent
from megatron_edit.sync.fleet import Fleet
from megatron_edit.sync.inner_moments import InnerMoments
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.tied import COPIES_DIFFER, TiedCopies
from megatron_edit.tables.methods import Method


class NonFiniteSyncError(RuntimeError):
    """Every replica is non-finite in a module, and the method keeps no anchor to go back to."""


@dataclass
class Outcome:
    """What the replicas have learnt.

    anchors_apart  [R] relative distance between the two copies of a tied matrix's anchor, see `tied.py`
    event          None when the sync was put off
    pending        its modules on this rank
    """

    meeting: Meeting
    anchors_apart: list[float]
    event: SyncEvent | None = None
    pending: list[Pending] = field(default_factory=list)


class Exchange:
    """Measures this rank's modules and agrees with the other replicas on a sync."""

    def __init__(
        self,
        config: EditConfig,
        method: Method,
        mesh: Mesh,
        fleet: Fleet,
        averages: ModuleAverages,
        outer_state: OuterState,
        buffers: BufferPool,
        inner_moments: InnerMoments,
        counts: SyncCounts,
        decider: Decider,
        tied: TiedCopies,
    ) -> None:
        self._config, self._method, self._mesh, self._fleet = config, method, mesh, fleet
        self._averages, self._outer, self._buffers = averages, outer_state, buffers
        self._inner_moments, self._counts, self._decider = inner_moments, counts, decider
        self._tied = tied
        self._modules = averages.modules

    def agree(
        self, modules: list[ModuleShard], index: int, iteration: int, *, steps: int, keep: int, always: bool
    ) -> Outcome:
        """The decision on sync `index` of `modules`, after this replica's step `iteration`.

        `steps`: of this replica since the last meeting. The pseudo gradients of the first `keep` modules are kept: they
        are launched at once. `always`: also with fewer steps than --edit-min-total-steps. Collective over the replicas;
        raises NonFiniteSyncError.
        """
        decided_at = self._mesh.platform.record_event()
        norms, buffers, apart = self._measure(modules, keep)
        since = [float(self._counts.since(module.position)) for module in modules]
        total = float(iteration - self._counts.steps_at_average)
        mine = torch.cat([norms, torch.tensor([*since, apart, total, float(steps)], dtype=torch.float64)])
        if modules or not self._method.equal_steps:
            gathered = self._fleet.transport.all_gather(mine)  # [R, 2 m + 3]
        else:  # this stage has no part in it, and need not wait for the other replicas
            gathered = mine.expand(self._fleet.num_replicas, -1)
        norms, updates = gathered[:, : len(modules)], gathered[:, len(modules) : -3].long()
        enough = always or int(gathered[:, -2].sum()) >= self._config.edit_min_total_steps
        meeting = Meeting(index, tuple(int(count) for count in gathered[:, -1]), averaged=enough)
        anchors_apart = gathered[:, -3].tolist()
        if not enough:
            self._buffers.give_back(*buffers)
            return Outcome(meeting, anchors_apart)
        columns = [module.index for module in modules]
        decision = self._decider.decide(index, iteration, columns, norms, updates, self._fleet.ids)
        self._refuse_without_anchor(decision)
        self.zero_moments_of_non_finite(decision)
        ones = [torch.ones((), dtype=torch.float64) for _ in self._modules]
        event = SyncEvent(decision, decided_at, ones, inner_lr=self._counts.inner_lr, modules_left=len(modules))
        return Outcome(meeting, anchors_apart, event, self._pending(event, modules, buffers))

    def _pending(
        self, event: SyncEvent, modules: list[ModuleShard], buffers: list[torch.Tensor]
    ) -> list[Pending]:
        decision, replica = event.decision, self._fleet.replica
        return [
            Pending(
                module.index,
                event,
                weight=float(decision.weights[replica, module.index]),
                rolled_back=bool(decision.rolled_back[module.index]),
                kept=not bool(decision.verdict.left_out[replica, module.index]),
                buffer=buffers[at] if at < len(buffers) else None,
                updates=int(decision.steps[replica, module.index]),
            )
            for at, module in enumerate(modules)
        ]

    def _measure(self, modules: list[ModuleShard], keep: int) -> tuple[torch.Tensor, list[torch.Tensor], float]:
        """(norms [m] fp64 on the CPU, pseudo gradients of the first `keep` modules [numel] fp32 each, how far the
        anchors of a tied matrix were apart)."""
        squares, buffers, differ, apart = [], [], False, 0.0
        for position, module in enumerate(modules):
            if position + 1 < len(modules):
                self._outer.prefetch(modules[position + 1])
            if self._tied.is_copy(module):
                anchor = self._outer.anchor(module) if self._method.has_anchor else None
                differ, apart = self._tied.compare(anchor, self._outer, self._buffers)
            buffer = self._averages.pseudo_gradient(module)
            squares.append(module.counted_square_sum(buffer))
            if position < keep:
                buffers.append(buffer)
            else:
                self._buffers.give_back(buffer)
            self._outer.release(module)
        if not squares:
            return torch.zeros(0, dtype=torch.float64), [], 0.0
        total = torch.stack(squares)  # [m]
        if self._mesh.norm_group.size() > 1:
            dist.all_reduce(total, group=self._mesh.norm_group)
        norms = total.sqrt().cpu()
        for position, module in enumerate(modules):
            if self._tied.is_copy(module):
                larger = self._tied.larger(norms[position])  # on both stages, whatever is known here
                norms[position] = COPIES_DIFFER if differ else larger
        return norms, buffers, apart

    def _refuse_without_anchor(self, decision: SyncDecision) -> None:
        if self._method.has_anchor:
            return
        for m in (decision.rolled_back & decision.verdict.non_finite.any(dim=0)).nonzero().flatten().tolist():
            copies = " (or its two copies differ)" if self._tied.is_copy(self._modules[m]) else ""
            raise NonFiniteSyncError(
                f"sync {decision.index}: {self._modules[m].key} is not finite in any replica that made a step{copies}, "
                f"and --edit-method {self._method.name} keeps no anchor to go back to: resume from the last checkpoint"
            )

    def zero_moments_of_non_finite(self, decision: SyncDecision) -> None:
        """Inner moments of this replica's non-finite modules := 0, or its next step is non-finite again (ours)."""
        for module in self._modules:
            if decision.verdict.non_finite[self._fleet.replica, module.index] and decision.due[module.index]:
                self._inner_moments.zero_(module)
