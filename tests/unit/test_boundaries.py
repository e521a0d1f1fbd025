"""Where boundaries lie, with equal and with unequal steps: a run's counts, without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.sync.event import Meeting
from megatron_edit.train.boundaries import EqualSteps, UnequalSteps
from megatron_edit.train.checkpointing import Position
from megatron_edit.train.pace import Pace


class Feed:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.is_empty = False
        self.asked: list[Any] = []
        self.state = {"frontier": 0, "ranges": []}

    def deal(self, train_samples: int) -> None:
        self.asked.append(("deal", train_samples))

    def give_back(self, steps: tuple[int, ...]) -> None:
        self.asked.append(("give back", steps))


class Trigger:
    """A clock that says what it is told to."""

    def __init__(self, steps: int = 0, steps_since_sync: int = 0) -> None:
        self.steps, self.steps_since_sync = steps, steps_since_sync
        self.is_time, self.restarts = False, 0

    def wants_sync(self) -> bool:
        return self.is_time

    def restart_clock(self) -> None:
        self.restarts += 1


def engine_of(trigger: Trigger, *, synchronous: bool = False) -> Any:
    return SimpleNamespace(trigger=trigger, synchronous=synchronous, config=SimpleNamespace(edit_min_total_steps=9))


def pace_of(iteration: int = 0) -> Pace:
    fleet: Any = SimpleNamespace(num_replicas=2, replica=0)
    return Pace(iteration=iteration, consumed_samples=8 * iteration, fleet=fleet, batch=BatchSchedule.constant(8))


def stop(requested: bool = False) -> Any:
    return SimpleNamespace(requested=requested)


def decision(index: int, iteration: int) -> Any:
    return SimpleNamespace(index=index, iteration=iteration)


def unequal(engine: Any, pace: Pace, feed: Feed, *, asks: bool = True, said: list[str] | None = None) -> UnequalSteps:
    say = (said if said is not None else []).append
    return UnequalSteps(engine, pace, feed, train_samples=64, position=Position(), asks=asks, say=say)  # type: ignore


def test_equal_steps_meet_after_each() -> None:
    """Of a run that unequal steps have begun: this replica has taken 7 steps in the first 5 iterations."""
    pace, feed = pace_of(5), Feed()
    boundaries = EqualSteps(engine_of(Trigger(steps=7)), pace, feed, train_iters=7)  # type: ignore[arg-type]
    for iteration in (6, 7):
        assert not boundaries.is_end
        boundaries.begin()
        assert not boundaries.asks_for_sync(stop(requested=True)), "that is agreed on at a boundary"
        assert boundaries.after_step(Meeting(1, (1, 1), averaged=True))
        assert pace.iteration == iteration == boundaries.iteration_of(decision(1, iteration + 2))
    assert boundaries.is_end and boundaries.at_sync is None
    assert boundaries.reserves is None and feed.asked == []


def test_equal_steps_keep_what_unequal_ones_have_left() -> None:
    pace = pace_of()
    for _ in range(3):
        pace.step()
    pace.meet((3, 2))  # 20 samples: 2 iterations of 8 and 4 samples
    boundaries = EqualSteps(engine_of(Trigger(steps=3)), pace, Feed(), train_iters=7)  # type: ignore[arg-type]
    boundaries.after_step(None)
    reserves = boundaries.reserves
    assert reserves is not None and (reserves["samples_beyond_iteration"], reserves["replica_steps"]) == (4, [4, 3])


def test_unequal_steps_meet_when_a_sync_is_decided() -> None:
    pace, feed, trigger, said = pace_of(), Feed(), Trigger(), []  # type: ignore[var-annotated]
    boundaries = unequal(engine_of(trigger), pace, feed, said=said)
    boundaries.begin()
    assert (feed.asked, trigger.restarts) == ([("deal", 64)], 1)
    assert not boundaries.after_step(None)
    assert pace.iteration == 0 and pace.own_step == 1
    assert boundaries.after_step(Meeting(1, (2, 4), averaged=True))
    assert feed.asked[1:] == [("give back", (2, 4))] and (pace.iteration, pace.consumed_samples) == (3, 24)
    assert boundaries.at_sync is True and said == []

    boundaries.begin()
    assert boundaries.after_step(Meeting(2, (1, 1), averaged=False))
    assert boundaries.at_sync is False
    assert said == ["sync 2 at iteration 4: put off, all replicas together have taken fewer than "
                    "--edit-min-total-steps 9"]  # fmt: skip
    assert boundaries.iteration_of(decision(1, 2)) == 3, "where the replicas met, not its own steps"
    assert boundaries.iteration_of(decision(3, 9)) == 4, "the last sync of a run is not a meeting"
    assert not boundaries.is_end
    boundaries.begin()
    boundaries.after_step(None)
    boundaries.after_step(Meeting(3, (2, 6), averaged=True))
    assert boundaries.is_end and pace.consumed_samples == 64


@pytest.mark.parametrize("reason", ["the time is over", "a stop", "the reserve is used up"])
def test_what_makes_a_replica_ask(reason: str) -> None:
    feed, trigger = Feed(), Trigger()
    leader, other = (unequal(engine_of(trigger), pace_of(), feed, asks=asks) for asks in (True, False))
    assert not leader.asks_for_sync(stop())
    trigger.is_time, feed.is_empty = reason == "the time is over", reason == "the reserve is used up"
    assert leader.asks_for_sync(stop(reason == "a stop"))
    assert not other.asks_for_sync(stop(reason == "a stop")), "one rank of a replica asks for it"


def test_the_warm_up_of_unequal_steps_takes_equal_ones() -> None:
    pace, feed, trigger = pace_of(), Feed(), Trigger()
    engine = engine_of(trigger, synchronous=True)
    boundaries = unequal(engine, pace, feed)
    for iteration in (1, 2):
        boundaries.begin()
        feed.is_empty = True
        assert not boundaries.asks_for_sync(stop(requested=True))
        engine.synchronous = iteration == 1  # the second step is the last of the warm-up
        assert boundaries.after_step(None) and pace.iteration == iteration
    assert feed.asked == [] and pace.last_steps is None
    boundaries.begin()
    assert feed.asked == [("deal", 64)] and boundaries.reserves is not None


def test_steps_of_an_interval_that_another_method_began_are_not_counted_again() -> None:
    pace, feed = pace_of(6), Feed()
    boundaries = unequal(engine_of(Trigger(steps=6, steps_since_sync=2)), pace, feed)
    for steps, counted in (((3, 5), (1, 3)), ((1, 2), (1, 2))):
        boundaries.begin()
        assert boundaries.after_step(Meeting(1, steps, averaged=True))
        assert feed.asked[-1] == ("give back", counted)
