"""Where in the steps the averages of a sync travel and are applied: one class for each way, found by `build_placement`.

    Blocking    after the step, module by module, waiting for each
    InForward   in the forward pass of the next step, the next modules' messages under way while one computes (EDiT)
    Delayed     set out after the step, applied so many steps later (Streaming DiLoCo with a delay)
    NextRound   travel during the whole next interval and are applied at the next sync (CO2)

A placement is given syncs that are decided, and owns their modules until they are updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from megatron_edit.config.schema import EditConfig
from megatron_edit.sync.averages import ModuleAverages
from megatron_edit.sync.event import Pending, SyncEvent
from megatron_edit.sync.modules import ModuleShard, ReplicaDataParallel
from megatron_edit.sync.trigger import StepTrigger, Trigger
from megatron_edit.tables.methods import Method
from megatron_edit.tables.timetable import Timetable

UnderWay = list[tuple[SyncEvent, list[Pending]]]


class Placement(ABC):
    """One for a whole run.

    finished   completed syncs are added to it, in order
    under_way  syncs that a `drain` leaves alone, oldest first, each with its modules: what a checkpoint stores
    """

    def __init__(self, averages: ModuleAverages, finished: list[SyncEvent]) -> None:
        self.averages = averages
        self.finished = finished
        self.under_way: UnderWay = []

    def launched_at_once(self, num_modules: int) -> int:
        """How many of a sync's modules set out as soon as it is decided: their pseudo gradients are kept for it."""
        return 0

    @abstractmethod
    def begin(self, event: SyncEvent, pending: list[Pending]) -> None:
        """A sync has been decided: `pending`, its modules that lie on this rank, in forward order (none: [])."""

    def after_step(self, step: int) -> None:  # noqa: B027  most have nothing to do
        """`step` (counted over the run) has ended, before a sync is decided after it."""

    def drain(self) -> None:  # noqa: B027
        """Completes a sync that the next forward pass would complete."""

    def apply_all(self) -> None:
        """Applies everything that is under way, now."""
        self.drain()
        waiting = [module for _, pending in self.under_way for module in pending]
        for module in sorted(waiting, key=lambda pending: pending.module):  # one order on all ranks
            self.averages.apply(module)
        for event, _ in self.under_way:
            self._finish(event)
        self.under_way = []

    def for_last_sync(self) -> Placement:
        """The placement of the one more sync that ends a run."""
        return Blocking(self.averages, self.finished)

    def take_up(self, event: SyncEvent, pending: list[Pending]) -> None:
        """Adds a sync that was under way when a checkpoint was written; `apply_all` follows where it cannot stay so."""
        self.under_way.append((event, pending))

    @abstractmethod
    def buffers_at_once(self, fragments: Sequence[Sequence[int]], with_moments: bool) -> list[list[int]]:
        """Sets of buffers that are out at the same time, as sizes; the pool must hold each. Pure.

        fragments     sizes of the modules of each fragment, in forward order
        with_moments  Adam's moments of a module travel with it: twice its size more
        """

    def _finish(self, event: SyncEvent) -> None:
        assert event.modules_left == 0, "a module of this sync has not been updated"
        self.finished.append(event)


def _messages(sizes: Sequence[int], with_moments: bool) -> list[int]:
    return [*sizes, *(2 * size for size in sizes)] if with_moments else list(sizes)


class Blocking(Placement):
    """The naive twin of `InForward`: the same two calls for each module, one after the other."""

    def begin(self, event: SyncEvent, pending: list[Pending]) -> None:
        """See Placement."""
        for module in pending:
            self.averages.launch(module)
            self.averages.apply(module)
        self._finish(event)

    def buffers_at_once(self, fragments: Sequence[Sequence[int]], with_moments: bool) -> list[list[int]]:
        """See Placement."""
        return [_messages([size], with_moments) for fragment in fragments for size in fragment]


class InForward(Placement):
    """Layer by layer in the forward pass of the next step (arXiv 2412.07210).

    As the forward pass reaches a module its sync is completed, and `prefetch_depth` modules after it are launched: by
    count, not by what has arrived, so that all ranks of a group launch in one order. The bucket groups call `complete`
    and `launch_after`.
    """

    def __init__(
        self,
        averages: ModuleAverages,
        finished: list[SyncEvent],
        chunks: Sequence[ReplicaDataParallel],
        prefetch_depth: int,
    ) -> None:
        super().__init__(averages, finished)
        self._chunks = chunks
        self._prefetch_depth = prefetch_depth
        self._event: SyncEvent | None = None
        self._pending: dict[int, Pending] = {}  # not yet updated, by module
        self._order: list[Pending] = []  # of the sync in progress
        self._launched = 0  # so many of them are
        for module in averages.modules:
            module.bucket_group.sync = self

    def launched_at_once(self, num_modules: int) -> int:
        """See Placement."""
        return self._prefetch_depth + 1

    def begin(self, event: SyncEvent, pending: list[Pending]) -> None:
        """See Placement."""
        assert self._event is None, "the sync before has not been drained"
        self._event, self._order, self._launched = event, pending, 0
        self._pending = {module.module: module for module in pending}
        self._launch_first(self._prefetch_depth + 1)

    def launch_after(self, module: ModuleShard, *, computes: bool) -> None:
        """Launch the modules after `module`; one more when `module` computes now instead of the one before it."""
        if self._launched < len(self._order):
            self._launch_first(self._up_to(module) + self._prefetch_depth + int(computes))

    def complete(self, module: ModuleShard) -> None:
        """The update of `module`; nothing to do unless its sync is due now."""
        pending = self._pending.pop(module.index, None)
        if pending is None:
            return
        self._launch_first(self._up_to(module))
        self.averages.apply(pending, in_forward=True)
        self._finish_if_done()

    def after_step(self, step: int) -> None:
        """A sync none of whose modules lies here ends with the forward pass all the same."""
        self._finish_if_done()

    def drain(self) -> None:
        """See Placement."""
        if self._pending:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        self._finish_if_done()

    def _up_to(self, module: ModuleShard) -> int:
        return bisect_right(self._order, module.index, key=lambda pending: pending.module)

    def _launch_first(self, count: int) -> None:
        """Launch the first `count` modules of the order, those that are not yet: one order on all ranks of a group."""
        while self._launched < min(count, len(self._order)):
            self.averages.launch(self._order[self._launched], applied_soon=True)
            self._launched += 1
            if self._launched < len(self._order):
                self.averages.prefetch(self.averages.modules[self._order[self._launched].module])

    def _finish_if_done(self) -> None:
        if self._event is not None and not self._event.modules_left:
            self._finish(self._event)
            self._event = None

    def buffers_at_once(self, fragments: Sequence[Sequence[int]], with_moments: bool) -> list[list[int]]:
        """See Placement."""
        sets, ahead = [], self._prefetch_depth + 1
        for sizes in fragments:
            kept = _messages(sizes[:ahead], with_moments)
            sets += [[*kept, size] for size in sizes[ahead:]]  # norms of the others
            sets += [_messages(sizes[i : i + ahead], with_moments) for i in range(len(sizes))]
        return sets


class Delayed(Placement):
    """Applied `delay` steps after the launch, by step count and not by arrival (arXiv 2501.18512).

    timetable  when each fragment sets out; its interval is not below the delay
    """

    def __init__(
        self, averages: ModuleAverages, finished: list[SyncEvent], delay: int, timetable: Timetable
    ) -> None:
        super().__init__(averages, finished)
        self._delay, self._timetable = delay, timetable

    def launched_at_once(self, num_modules: int) -> int:
        """See Placement."""
        return num_modules

    def begin(self, event: SyncEvent, pending: list[Pending]) -> None:
        """See Placement."""
        event.apply_after = event.decision.iteration + self._delay
        for module in pending:
            self.averages.launch(module)
        self.under_way.append((event, pending))

    def after_step(self, step: int) -> None:
        """Applies the syncs whose time has come."""
        for event, pending in [entry for entry in self.under_way if entry[0].apply_after == step]:
            for module, following in pairwise([*pending, None]):
                assert module is not None
                if following is not None:
                    self.averages.prefetch(self.averages.modules[following.module], momentum=True)
                self.averages.apply(module)
            self.under_way = [entry for entry in self.under_way if entry[0] is not event]
            self._finish(event)

    def buffers_at_once(self, fragments: Sequence[Sequence[int]], with_moments: bool) -> list[list[int]]:
        """With each message the masters when it was launched."""
        starts, sets, interval = self._timetable.offsets, [], self._timetable.interval
        for start in starts:
            under_way = [f for f, other in enumerate(starts) if (start - other) % interval < self._delay]
            sets.append([size for f in under_way for size in 2 * list(fragments[f])])
        return sets


class NextRound(Placement):
    """This round's average sets out, the last one is applied, all go on from the anchor (CO2, arXiv 2401.16265)."""

    def begin(self, event: SyncEvent, pending: list[Pending]) -> None:
        """See Placement."""
        last_round = {module.module: module for _, modules in self.under_way for module in modules}
        for module in pending:
            self.averages.launch(module)
            if module.module in last_round:
                self.averages.apply(last_round[module.module])
            else:
                self.averages.go_on_from_anchor(self.averages.modules[module.module])
        for before, _ in self.under_way:
            self._finish(before)
        self.under_way = [(event, pending)]

    def for_last_sync(self) -> Placement:
        """The last round is one like the others; `apply_all` ends it."""
        return self

    def buffers_at_once(self, fragments: Sequence[Sequence[int]], with_moments: bool) -> list[list[int]]:
        """The average of the last round is applied module by module as this round's sets out."""
        sizes = [size for fragment in fragments for size in fragment]
        return [[*sizes, size] for size in sizes]


def build_placement(
    config: EditConfig,
    method: Method,
    averages: ModuleAverages,
    finished: list[SyncEvent],
    chunks: Sequence[ReplicaDataParallel],
    trigger: Trigger,
) -> Placement:
    """The one that the method and --edit-sync-placement and --edit-sync-delay ask for."""
    if config.edit_sync_delay:
        assert isinstance(trigger, StepTrigger), "a delay is counted in steps"
        return Delayed(averages, finished, config.edit_sync_delay, trigger.timetable)
    if method.placement == "round":
        return NextRound(averages, finished)
    if config.edit_sync_placement == "forward":
        return InForward(averages, finished, chunks, config.edit_prefetch_depth)
    return Blocking(averages, finished)
