"""The sync that a change of the number of replicas makes necessary in the middle of an interval.

Every new replica reads the local states of all old ones, shard by shard, and computes what they would have agreed on
(arXiv 2412.07210): a live sync's decision (`sync.decide`) and update (`sync.outer_update`), with sums in place of
collectives. A sync that was under way is applied first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.in_flight import SavedInFlight
from megatron_edit.checkpoint.torch_dist import ShardedTensor, read_tensors
from megatron_edit.checkpoint.training_state import TrainingState, local_key
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.detector import DetectorVerdict
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState


@torch.no_grad()
def sync_of_saved_replicas(
    state: TrainingState,
    folder: Path,
    group: dist.ProcessGroup,
    replicas: list[dict[str, Any]],
    decider: Decider,
    in_flight: SavedInFlight,
    outer: OuterState | None,
) -> DetectorVerdict:
    """Moves the loaded anchor and outer momentum in `outer`, whole tensors, by one sync of the saved `replicas`.

    Of a method without an anchor there is no `outer`, and the masters become the mean. Reads each old replica twice,
    and holds one of them and the average beside the state. `decider`: of the old replicas. Returns the verdict on them.
    Collective over `group`.
    """
    modules, fleet = state.sync.modules, state.sync.fleet
    progress = _Progress(state, folder, group, in_flight, outer)
    squares = torch.zeros(len(replicas), len(modules), dtype=torch.float64, device=state.mesh.platform.device)  # [R, M]
    for replica in range(len(replicas)):
        for module, delta in zip(modules, progress.of(replica), strict=True):
            squares[replica, module.index] = module.counted_square_sum(delta)
    if state.mesh.norm_group.size() > 1:
        dist.all_reduce(squares, group=state.mesh.norm_group)
    ids, columns = range(len(replicas)), range(len(modules))
    updates = torch.tensor([[_updates(state, replicas, i, module, in_flight) for module in modules] for i in ids])
    decision = decider.decide(0, 0, columns, squares.sqrt().cpu(), updates, ids)

    averaged = [torch.zeros_like(delta) for delta in progress.deltas]
    for replica in range(len(replicas)):
        for module, delta in zip(modules, progress.of(replica), strict=True):
            weight = float(decision.weights[replica, module.index])
            if weight > 0:  # never 0 x its values: they may be NaN
                averaged[module.index].add_(delta.mul_(weight))
    for module in modules:
        average = None if decision.rolled_back[module.index] else averaged[module.index]
        if outer is not None:
            _move_anchor(state, module, outer, in_flight, average, float(replicas[0]["inner_lr"]))
        elif average is not None:
            fleet.transport.broadcast(average)
            module.write_masters(average)
    return decision.verdict


class _Progress:
    """What each saved replica would bring to the sync, one after the other in `deltas`, [numel] fp32 of each module."""

    def __init__(
        self,
        state: TrainingState,
        folder: Path,
        group: dist.ProcessGroup,
        in_flight: SavedInFlight,
        outer: OuterState | None,
    ) -> None:
        self._state, self._folder, self._group = state, folder, group
        self._in_flight, self._outer = in_flight, outer
        device = state.mesh.platform.device
        self.deltas = [torch.empty(m.numel, dtype=torch.float32, device=device) for m in state.sync.modules]

    def of(self, replica: int) -> list[torch.Tensor]:
        """Masters of the saved replica - anchor, or - its masters when a sync under way set out. Collective."""
        modules, tensors = self._state.sync.modules, list[ShardedTensor](self._in_flight.at_launch(replica))
        for module, flat in zip(modules, self.deltas, strict=True):
            tensors += self._state.whole_module(module, flat.zero_(), partial(local_key, replica, "param"))
        read_tensors(self._folder, tensors, self._group)
        for module, flat in zip(modules, self.deltas, strict=True):
            base = self._in_flight.base(module.index, replica)
            if base is not None:
                flat.sub_(base)
            elif self._outer is not None:
                flat.sub_(self._outer.anchor(module))
                self._outer.release(module)
        return self.deltas


def _updates(
    state: TrainingState, replicas: list[dict[str, Any]], replica: int, module: ModuleShard, in_flight: SavedInFlight
) -> int:
    """Updates of a saved replica that the last sync of `module` does not hold."""
    since: list[int] = replicas[replica]["updates_since_sync"]  # of each fragment
    known = since[module.fragment] if len(since) == state.sync.trigger.num_fragments else max(since)
    return 0 if in_flight.drops_progress(module.index, replica) else known


def _move_anchor(
    state: TrainingState,
    module: ModuleShard,
    outer: OuterState,
    in_flight: SavedInFlight,
    average: torch.Tensor | None,
    inner_lr: float,
) -> None:
    """By the average under way, then by that of the saved replicas (None: it is rolled back)."""
    update, index = state.sync.update, module.index
    if (before := in_flight.average(index)) is not None:
        update(module, outer, before, in_flight.inner_lr(index))
    if average is not None:
        update(module, outer, average, inner_lr)
    anchor, momentum, _ = outer.update(module)
    for moved in (anchor, momentum):  # bit-equal in all replicas even where kernels round differently
        state.sync.fleet.transport.broadcast(moved)
    outer.updated(module)
    outer.release(module)
