"""Counts of a run with unequal steps: iterations, the learning rate's position, intervals that are crossed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.train.pace import Pace


def make(replica: int = 0, num_replicas: int = 2, **options: Any) -> Pace:
    fleet = SimpleNamespace(num_replicas=num_replicas, replica=replica)
    start = {"iteration": 0, "consumed_samples": 0, "batch": BatchSchedule.constant(8)}
    return Pace(fleet=fleet, **{**start, **options})


def take(pace: Pace, steps: list[int], replica: int = 0) -> None:
    for _ in range(steps[replica]):
        pace.step()
    pace.meet(steps)


def test_equal_steps_are_iterations() -> None:
    pace = make()
    crossed = []
    for iteration in range(1, 8):
        assert pace.schedule_samples == 8 * (iteration - 1)
        pace.step()
        pace.meet_after_one_step()
        assert (pace.iteration, pace.consumed_samples, pace.own_step) == (iteration, 8 * iteration, iteration)
        crossed.append(pace.crossed(3))
    assert crossed == [False, False, True, False, False, True, False]
    assert pace.last_steps is None, "the warm-up says nothing of the replicas' speeds"
    assert not pace.crossed(None)


def test_iteration_is_samples_in_global_batches() -> None:
    pace = make()
    seen = []
    for steps in ([5, 2], [7, 2], [1, 1], [9, 3]):
        take(pace, steps)
        seen.append((pace.iteration, pace.consumed_samples, pace.own_step, pace.crossed(5)))
    assert seen == [(3, 28, 5, False), (8, 64, 12, True), (9, 72, 13, False), (15, 120, 22, True)]
    assert all(iteration == samples // 8 for iteration, samples, _, _ in seen)


def test_learning_rate_position_between_and_at_meetings() -> None:
    """S_last + own samples since x all / own in the interval before (R at first), then the agreed total."""
    fast, slow = make(0), make(1)
    for steps in ([6, 2], [3, 3]):
        for replica, pace in enumerate((fast, slow)):
            last = pace.last_steps
            ratio = 2 if last is None else sum(last) / last[replica]
            start = pace.consumed_samples
            for own in range(steps[replica]):
                assert pace.schedule_samples == pytest.approx(start + own * 4 * ratio)
                pace.step()
            pace.meet(steps)
        assert fast.schedule_samples == slow.schedule_samples == fast.consumed_samples
    assert fast.consumed_samples == 4 * 14
    fast.step()
    assert fast.schedule_samples == 4 * 14 + 4 * 6 / 3


def test_state_goes_on() -> None:
    whole, part = make(1), make(1)
    for pace in (whole, part):
        take(pace, [5, 2], replica=1)
    again = make(
        1, iteration=part.iteration, consumed_samples=part.consumed_samples, state=json.loads(json.dumps(part.state))
    )
    for pace in (whole, again):
        take(pace, [4, 3], replica=1)
        pace.step()
    assert (whole.iteration, whole.own_step, whole.schedule_samples) == (
        again.iteration, again.own_step, again.schedule_samples
    )  # fmt: skip


def test_other_replicas_take_up_the_counts() -> None:
    """Rates of replicas that are gone say nothing; iterations never go back when the global batch grows."""
    pace = make()
    take(pace, [5, 2])  # 28 samples: 3 iterations of 8 and 4 samples
    more = make(2, num_replicas=3, batch=BatchSchedule.constant(12), iteration=pace.iteration,
                consumed_samples=pace.consumed_samples, state=pace.state)  # fmt: skip
    assert more.last_steps is None and more.own_step == 5
    more.step()
    assert more.schedule_samples == 28 + 4 * 3
    more.meet([1, 1, 1])
    assert (more.iteration, more.consumed_samples) == (4, 40), "4 + 12 samples are one batch of 12"


def test_counts_of_another_interval_are_refused() -> None:
    pace = make()
    pace.step()
    with pytest.raises(AssertionError):
        pace.meet([2, 1])
