"""The step trigger: which steps are synchronous, when the anchor is set, when syncs are due, and resuming."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.sync.trigger import StepDecision, StepTrigger, TimeTrigger, Trigger


def sync_steps(trigger: Trigger, steps: int) -> list[int]:
    """Steps, of the next `steps`, after which a sync is due."""
    return [decision.step for decision in (trigger.advance() for _ in range(steps)) if decision.sync_due]


def test_interval_128_without_warmup_has_its_third_sync_at_iteration_384() -> None:
    trigger = StepTrigger(128)
    decisions = [trigger.advance() for _ in range(400)]
    assert [(d.syncs, d.step) for d in decisions if d.sync_due] == [(1, 128), (2, 256), (3, 384)]
    assert not any(d.synchronous or d.set_anchor for d in decisions)


def test_warmup_4_interval_4_over_24_steps() -> None:
    trigger = StepTrigger(4, warmup_steps=4)
    decisions = []
    for step in range(1, 25):
        assert trigger.in_warmup == (step <= 4)
        decisions.append(trigger.advance())
    assert [d.step for d in decisions] == list(range(1, 25))
    assert [d.step for d in decisions if d.synchronous] == [1, 2, 3, 4]
    assert [d.step for d in decisions if d.set_anchor] == [4]
    assert [d.step for d in decisions if d.sync_due] == [8, 12, 16, 20, 24]


def test_interval_1_is_a_sync_after_every_local_step() -> None:
    assert sync_steps(StepTrigger(1, warmup_steps=2), 6) == [3, 4, 5, 6]


def test_without_warmup_the_first_step_is_local_and_no_step_sets_the_anchor() -> None:
    trigger = StepTrigger(2)
    assert not trigger.in_warmup
    assert trigger.advance() == StepDecision(1, synchronous=False, set_anchor=False, due=(), syncs=0)


def test_a_warmup_without_end_is_the_baseline() -> None:
    trigger = StepTrigger(1, warmup_steps=None)
    decisions = [trigger.advance() for _ in range(50)]
    assert trigger.in_warmup and all(d.synchronous for d in decisions)
    assert not any(d.set_anchor or d.sync_due for d in decisions)


@given(interval=st.integers(1, 7), warmup=st.integers(0, 9), saved_at=st.integers(0, 20))
def test_a_resumed_trigger_decides_as_one_that_was_not_stopped(
    interval: int, warmup: int, saved_at: int
) -> None:
    straight, first, second = (StepTrigger(interval, warmup) for _ in range(3))
    for _ in range(saved_at):
        straight.advance()
        first.advance()
    second.load_state_dict(first.state_dict())
    assert second.in_warmup == straight.in_warmup
    assert [second.advance() for _ in range(20)] == [straight.advance() for _ in range(20)]


def test_restart_at_16_keeps_the_plan() -> None:
    first = StepTrigger(4, warmup_steps=4)
    assert sync_steps(first, 16) == [8, 12, 16]
    resumed = StepTrigger(4, warmup_steps=4)
    resumed.load_state_dict(first.state_dict())
    assert not resumed.in_warmup and sync_steps(resumed, 8) == [20, 24]
    assert resumed.syncs == 5


def test_another_interval_is_counted_from_the_same_origin() -> None:
    first = StepTrigger(4, warmup_steps=2)
    assert sync_steps(first, 8) == [6]
    resumed = StepTrigger(3, warmup_steps=2)
    resumed.load_state_dict(first.state_dict())
    assert sync_steps(resumed, 7) == [11, 14]


@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_a_baseline_checkpoint_goes_on_with_local_steps_at_once(warmup: int) -> None:
    baseline = StepTrigger(1, warmup_steps=None)
    for _ in range(10):
        baseline.advance()
    resumed = StepTrigger(4, warmup_steps=warmup)
    resumed.load_state_dict(baseline.state_dict())
    assert not resumed.in_warmup and sync_steps(resumed, 8) == [14, 18]


def test_a_longer_warmup_goes_on_when_the_saved_run_was_still_in_it() -> None:
    first = StepTrigger(4, warmup_steps=6)
    first.advance()
    resumed = StepTrigger(4, warmup_steps=8)
    resumed.load_state_dict(first.state_dict())
    decisions = [resumed.advance() for _ in range(11)]
    assert [d.step for d in decisions if d.set_anchor] == [8]
    assert [d.step for d in decisions if d.sync_due] == [12]


@pytest.mark.parametrize("warmup", [6, None])
def test_replicas_that_already_differ_do_not_go_back_into_warmup(warmup: int | None) -> None:
    local = StepTrigger(4, warmup_steps=2)
    for _ in range(5):
        local.advance()
    resumed = StepTrigger(4, warmup_steps=warmup)
    with pytest.raises(ValueError, match=r"at step 2 and is at step 5.*2 steps would work"):
        resumed.load_state_dict(local.state_dict())
    assert resumed.steps == 0 and resumed.in_warmup


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0; try"):
        StepTrigger(0)
    with pytest.raises(ValueError, match="got -1; try"):
        StepTrigger(4, warmup_steps=-1)


def test_fragments_are_due_at_their_offsets_and_counted_each() -> None:
    trigger = StepTrigger(4, warmup_steps=1, num_fragments=3)
    due = {d.step - 1: d.due for d in (trigger.advance() for _ in range(13)) if d.due}
    assert due == {1: (1,), 2: (2,), 4: (0,), 5: (1,), 6: (2,), 8: (0,), 9: (1,), 10: (2,), 12: (0,)}
    assert [trigger.count_of(f, step + 1) for step, (f,) in due.items()] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_with_more_fragments_than_steps_several_share_a_step() -> None:
    trigger = StepTrigger(2, num_fragments=5)
    assert [trigger.advance().due for _ in range(4)] == [(3, 4), (0, 1, 2)] * 2
    assert trigger.syncs == 4


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_clock_asks_once_the_time_is_over_and_starts_anew() -> None:
    clock = Clock()
    trigger = TimeTrigger(10.0, clock=clock)
    for now, wants in ((105.0, False), (109.9, False), (110.0, True)):
        clock.now = now
        assert trigger.wants_sync() is wants
        assert trigger.advance(asked=wants).due == ((0,) if wants else ())
    trigger.restart_clock()
    clock.now = 119.0
    assert not trigger.wants_sync()
    assert (trigger.syncs, trigger.steps_since_sync) == (1, 0)


def test_a_clock_that_jumps_back_costs_a_step_and_not_a_hang() -> None:
    clock = Clock()
    trigger = TimeTrigger(10.0, clock=clock)
    clock.now = 106.0
    assert not trigger.wants_sync()
    clock.now = -5000.0
    assert not trigger.wants_sync()
    clock.now = -4996.0
    assert trigger.wants_sync(), "6 seconds before the jump and 4 after it"


def test_in_the_warm_up_no_clock_asks_and_its_end_starts_it() -> None:
    clock = Clock()
    trigger = TimeTrigger(10.0, warmup_steps=2, clock=clock)
    clock.now = 150.0
    assert not trigger.wants_sync()
    assert [trigger.advance().set_anchor for _ in range(2)] == [False, True]
    clock.now = 159.0
    assert not trigger.wants_sync()
