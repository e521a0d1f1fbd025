"""Reserves: every sample once, whatever the replicas' step counts, the restarts and the number of replicas."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.data.errors import DataError
from megatron_edit.data.reserves import Reserve, SamplePool, share_batches


def used_positions(reserve: Reserve, steps: int) -> list[int]:
    return [int(position) for index in range(steps) for position in reserve.batch(index)]


@st.composite
def intervals(draw: st.DrawFn) -> list[tuple[int, int, list[int], bool]]:
    """(replicas, batch of one, share of its reserve in percent that each uses, whether a restart comes before)."""
    plan = []
    for _ in range(draw(st.integers(1, 15))):
        replicas = draw(st.integers(1, 4))
        percents = draw(st.lists(st.integers(0, 100), min_size=replicas, max_size=replicas))
        plan.append((replicas, draw(st.integers(1, 4)), percents, draw(st.booleans())))
    return plan


def run_plan(plan: list[tuple[int, int, list[int], bool]], epoch_size: int | None) -> list[list[int]]:
    """Positions used in each interval. The last counts are handed on as the trainer does."""
    pool = SamplePool(epoch_size, 0)
    last_steps: list[int] | None = None
    consumed, taken = 0, []
    for replicas, batch_size, percents, restarts in plan:
        if restarts:
            state = json.loads(json.dumps(pool.state))
            pool = SamplePool(epoch_size, **state)
            assert pool.state == state
        if last_steps is not None and len(last_steps) != replicas:
            last_steps = None
        assert pool.consumed_samples == consumed
        reserves = pool.deal(replicas, batch_size, left_of_run=120, last_steps=last_steps)
        assert all(reserve.num_batches >= 1 for reserve in reserves)
        steps = [max(1, r.num_batches * percent // 100) for r, percent in zip(reserves, percents, strict=True)]
        taken.append([p for r, n in zip(reserves, steps, strict=True) for p in used_positions(r, n)])
        pool.give_back(reserves, steps)
        consumed += sum(steps) * batch_size
        last_steps = steps
    assert pool.consumed_samples == consumed
    return taken


@settings(max_examples=150, deadline=None)
@given(plan=intervals(), epoch_size=st.one_of(st.none(), st.integers(1, 60)))
def test_every_position_is_used_once(plan: list[tuple[int, int, list[int], bool]], epoch_size: int | None) -> None:
    """Over any step counts, restarts at any meeting, other replicas and batches; none of an epoch before the last."""
    counts: Counter[int] = Counter()
    for used in run_plan(plan, epoch_size):
        counts.update(used)
        assert max(counts.values()) == 1
        if epoch_size is None:
            continue
        last = max(counts) // epoch_size
        unused = [position for position in range(last * epoch_size) if position not in counts]
        assert unused == [], "an epoch was left behind unfinished"


@settings(max_examples=100, deadline=None)
@given(
    replicas=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    train_samples=st.integers(1, 300),
    percents=st.lists(st.integers(1, 100), min_size=40, max_size=40),
)
def test_no_more_is_dealt_than_the_run_needs(
    replicas: int, batch_size: int, train_samples: int, percents: list[int]
) -> None:
    """Rounded up to one batch for each replica; so the run ends, and overshoots by less than that."""
    pool, last_steps, draws = SamplePool(None, 0), None, itertools.cycle(percents)
    while pool.consumed_samples < train_samples:
        before = pool.consumed_samples
        reserves = pool.deal(replicas, batch_size, left_of_run=train_samples - before, last_steps=last_steps)
        dealt = sum(reserve.num_batches * batch_size for reserve in reserves)
        assert dealt < train_samples - before + replicas * batch_size
        last_steps = [max(1, reserve.num_batches * next(draws) // 100) for reserve in reserves]
        pool.give_back(reserves, last_steps)
    assert pool.consumed_samples < train_samples + replicas * batch_size


def test_unused_positions_go_back_to_the_front_in_order() -> None:
    pool = SamplePool(1000, 40)
    first = pool.deal(2, 4, left_of_run=10_000, last_steps=[4, 2])
    assert [reserve.ranges for reserve in first] == [(range(40, 64),), (range(64, 76),)], "6 and 3 batches of 4"
    pool.give_back(first, [6, 1])
    assert pool.state == {"frontier": 68, "ranges": []}, "the end of the last reserve makes no hole"
    second = pool.deal(2, 4, left_of_run=10_000, last_steps=[6, 1])
    assert [reserve.num_batches for reserve in second] == [9, 2]
    pool.give_back(second, [3, 2])
    assert pool.state == {"frontier": 112, "ranges": [[80, 104]]}
    third = pool.deal(2, 4, left_of_run=10_000, last_steps=[3, 2])
    assert [reserve.ranges for reserve in third] == [(range(80, 100),), (range(100, 104), range(112, 120))]
    assert third[1].batch(1).tolist() == [112, 113, 114, 115]
    assert third[1].batch(0).dtype == np.int64


def test_first_reserves_share_what_is_left_of_the_epoch() -> None:
    pool = SamplePool(100, 10)
    assert [r.ranges for r in pool.deal(2, 4, left_of_run=10_000, last_steps=None)] == [
        (range(10, 54),), (range(54, 98),)
    ]  # fmt: skip


def test_the_end_of_an_epoch_is_dealt_one_batch_each() -> None:
    """Less than a batch for each replica is left: exactly one each, across the end, so all of the epoch is used."""
    pool = SamplePool(100, 93)
    reserves = pool.deal(2, 4, left_of_run=10_000, last_steps=[9, 3])
    assert [reserve.ranges for reserve in reserves] == [(range(93, 97),), (range(97, 101),)]
    pool = SamplePool(100, 92)  # exactly a batch each: nothing of the next epoch
    assert sum(r.num_batches for r in pool.deal(2, 4, left_of_run=10_000, last_steps=[9, 3])) == 2


@pytest.mark.parametrize(
    ("room", "last_steps", "expected"),
    [
        (100, [31, 10], [47, 15]),  # x 1.5, rounded up
        (100, [1, 1], [2, 2]),
        (20, [30, 10], [15, 5]),  # not enough for that: in the same proportion, so that all end together
        (3, [1000, 1, 1], [1, 1, 1]),
        (5, [1000, 1, 1], [3, 1, 1]),
        (7, [10, 10], [4, 3]),
        (11, None, [5, 5]),
    ],
)
def test_shares(room: int, last_steps: list[int] | None, expected: list[int]) -> None:
    assert share_batches(room, len(expected), last_steps) == expected


@settings(max_examples=300, deadline=None)
@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=6), extra=st.integers(0, 30_000))
def test_shares_fill_the_room_and_never_more(counts: list[int], extra: int) -> None:
    room = len(counts) + extra
    shares = share_batches(room, len(counts), counts)
    assert min(shares) >= 1 and sum(shares) == min(room, sum(-(-3 * n // 2) for n in counts))


def test_a_damaged_state_is_named() -> None:
    for ranges in ([[5, 3]], [[2, 4], [3, 6]], [[8, 12]]):
        with pytest.raises(DataError, match="before 10"):
            SamplePool(100, 10, ranges)
