"""Each placement launches and applies the modules of a sync where it says, in one order, once. No process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.sync.event import Pending, SyncEvent
from megatron_edit.sync.placements import Blocking, Delayed, InForward, NextRound, Placement
from megatron_edit.tables.timetable import Timetable

M = 4


class Averages:
    """Notes what it is told, as (what, module)."""

    def __init__(self) -> None:
        self.modules: Any = [SimpleNamespace(index=m, bucket_group=SimpleNamespace()) for m in range(M)]
        self.calls: list[tuple[str, int]] = []

    def launch(self, pending: Pending, *, applied_soon: bool = False) -> None:
        self.calls.append(("launch", pending.module))

    def apply(self, pending: Pending, *, in_forward: bool = False) -> bool:
        self.calls.append(("apply", pending.module))
        pending.event.modules_left -= 1
        return True

    def go_on_from_anchor(self, module: Any) -> None:
        self.calls.append(("from anchor", module.index))

    def prefetch(self, module: Any, *, momentum: bool = False) -> None:
        pass

    def take(self) -> list[tuple[str, int]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class Chunk:
    """A forward pass that asks for its modules one after the other."""

    def __init__(self, averages: Averages) -> None:
        self.modules = averages.modules

    def start_param_sync(self, force_sync: bool = False) -> None:
        for module in self.modules:
            module.bucket_group.sync.complete(module)
            module.bucket_group.sync.launch_after(module, computes=False)


def sync(iteration: int, *modules: int) -> tuple[SyncEvent, list[Pending]]:
    decision: Any = SimpleNamespace(index=iteration, iteration=iteration)
    event = SyncEvent(decision, None, [torch.ones(()) for _ in range(M)], modules_left=len(modules))
    return event, [Pending(m, event, weight=0.5, rolled_back=False, kept=True) for m in modules]


def both(*modules: int) -> list[tuple[str, int]]:
    return [(what, m) for m in modules for what in ("launch", "apply")]


def launches(*modules: int) -> list[tuple[str, int]]:
    return [("launch", m) for m in modules]


def applies(*modules: int) -> list[tuple[str, int]]:
    return [("apply", m) for m in modules]


def test_blocking_does_one_module_after_the_other() -> None:
    averages, finished = Averages(), list[SyncEvent]()
    placement = Blocking(averages, finished)  # type: ignore[arg-type]
    event, pending = sync(4, 0, 1, 2, 3)
    placement.begin(event, pending)
    assert averages.take() == both(0, 1, 2, 3) and finished == [event] and placement.under_way == []


class TestInForward:
    def make(self, depth: int = 1) -> tuple[InForward, Averages, list[SyncEvent], Chunk]:
        averages, finished = Averages(), list[SyncEvent]()
        chunk: Any = Chunk(averages)
        return InForward(averages, finished, [chunk], depth), averages, finished, chunk  # type: ignore[arg-type]

    def test_modules_are_launched_ahead_of_the_one_that_computes(self) -> None:
        placement, averages, finished, chunk = self.make()
        event, pending = sync(4, 0, 1, 2, 3)
        assert placement.launched_at_once(M) == 2
        placement.begin(event, pending)
        assert averages.take() == launches(0, 1)
        chunk.start_param_sync()
        assert averages.take() == [
            *applies(0), *applies(1), *launches(2), *applies(2), *launches(3), *applies(3)
        ]  # fmt: skip
        assert finished == [event]
        chunk.start_param_sync()  # recompute, or the next forward pass
        assert averages.take() == [] and finished == [event]

    def test_modules_that_are_not_due_are_passed_by(self) -> None:
        placement, averages, finished, chunk = self.make()
        event, pending = sync(4, 1, 3)
        placement.begin(event, pending)
        chunk.start_param_sync()
        assert averages.take() == [*launches(1, 3), *applies(1, 3)] and finished == [event]

    def test_a_sync_without_modules_here_ends_after_the_next_step(self) -> None:
        placement, averages, finished, chunk = self.make()
        event, pending = sync(4)
        placement.begin(event, pending)
        chunk.start_param_sync()
        assert finished == []
        placement.after_step(5)
        assert finished == [event] and averages.take() == []

    def test_drain_and_the_last_sync(self) -> None:
        placement, averages, finished, _ = self.make(depth=64)
        event, pending = sync(4, 0, 1, 2, 3)
        placement.begin(event, pending)
        assert averages.take() == launches(0, 1, 2, 3)
        placement.drain()
        assert averages.take() == applies(0, 1, 2, 3) and finished == [event] and placement.under_way == []
        assert isinstance(placement.for_last_sync(), Blocking)


def test_delayed_applies_by_step_count() -> None:
    averages, finished = Averages(), list[SyncEvent]()
    placement = Delayed(averages, finished, 2, Timetable(4, 2))  # type: ignore[arg-type]
    first, second = sync(4, 0, 1), sync(6, 2, 3)
    placement.begin(*first)
    assert averages.take() == launches(0, 1) and placement.launched_at_once(2) == 2
    placement.drain()
    placement.after_step(5)
    assert averages.take() == [] and placement.under_way == [first]
    placement.after_step(6)
    placement.begin(*second)
    assert averages.take() == [*applies(0, 1), *launches(2, 3)] and finished == [first[0]]
    placement.apply_all()
    assert averages.take() == applies(2, 3) and finished == [first[0], second[0]] and placement.under_way == []


def test_delayed_syncs_are_applied_by_module_when_all_are() -> None:
    averages, finished = Averages(), list[SyncEvent]()
    placement = Delayed(averages, finished, 3, Timetable(4, 2))  # type: ignore[arg-type]
    late, early = sync(2, 2, 3), sync(4, 0, 1)
    placement.begin(*late)
    placement.begin(*early)
    averages.take()
    placement.apply_all()
    assert averages.take() == applies(0, 1, 2, 3) and finished == [late[0], early[0]]


def test_next_round_applies_the_round_before() -> None:
    averages, finished = Averages(), list[SyncEvent]()
    placement = NextRound(averages, finished)  # type: ignore[arg-type]
    first, second = sync(4, 0, 1), sync(8, 0, 1)
    placement.begin(*first)
    assert averages.take() == [("launch", 0), ("from anchor", 0), ("launch", 1), ("from anchor", 1)]
    placement.after_step(5)
    placement.drain()
    placement.begin(*second)
    assert averages.take() == both(0, 1) and finished == [first[0]] and placement.under_way == [second]
    assert placement.for_last_sync() is placement
    placement.apply_all()
    assert averages.take() == applies(0, 1) and finished == [first[0], second[0]]


def test_what_a_checkpoint_left_under_way_is_applied_by_any_placement() -> None:
    for kind in (Blocking, NextRound):
        averages, finished = Averages(), list[SyncEvent]()
        placement: Placement = kind(averages, finished)  # type: ignore[arg-type]
        one, other = sync(4, 0, 2), sync(5, 1, 3)
        placement.take_up(*one)
        placement.take_up(*other)
        placement.apply_all()
        assert averages.take() == applies(0, 1, 2, 3) and finished == [one[0], other[0]]


@pytest.mark.parametrize(("delay", "expected"), [(2, [[10, 10], [20, 20]]), (3, [[10, 10, 20, 20]] * 2)])
def test_buffers_of_delayed_fragments(delay: int, expected: list[list[int]]) -> None:
    """Interval 4, two fragments, launched at 0 and 2: a delay of 3 has both under way, one of 2 has not."""
    placement = Delayed(Averages(), [], delay, Timetable(4, 2))  # type: ignore[arg-type]
    assert placement.buffers_at_once([[10], [20]], False) == expected


def test_buffers_of_the_others() -> None:
    averages: Any = Averages()
    assert Blocking(averages, []).buffers_at_once([[1, 2]], True) == [[1, 2], [2, 4]]
    assert NextRound(averages, []).buffers_at_once([[1, 2]], False) == [[1, 2, 1], [1, 2, 2]]
    assert InForward(averages, [], [], 0).buffers_at_once([[1, 2]], False) == [[1, 2], [1], [2]]
