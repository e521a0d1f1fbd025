"""The global order: permutations, blends, independence of layout. Field report B35."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.data import long_blend
from megatron_edit.data.errors import DataError
from megatron_edit.data.long_blend import LongBlend
from megatron_edit.data.order import (
    SampleOrder,
    evaluation_order,
    integer_weights,
    microbatch_positions,
    permute,
    replica_positions,
    round_keys,
)

sizes_lists = st.lists(st.integers(1, 60), min_size=1, max_size=6)
seeds = st.integers(0, 2**40)
FROZEN_SINGLE = [3, 0, 1, 9, 8, 7, 5, 6, 2, 4, 8, 6, 9, 7, 2, 5, 4, 0, 3, 1]
FROZEN_BLEND = [12, 11, 1, 6, 10, 4, 9, 5, 2, 13, 7, 8, 0, 9, 8, 3, 5, 10, 2, 11]


def span(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64)


def shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    return permute(span(0, size), size, np.tile(round_keys(seed, 0, epoch), (size, 1)))


@given(size=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 100))
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(size, seed, epoch)) == list(range(size))


def test_every_order_of_a_few_samples_occurs_and_none_is_favoured() -> None:
    """Each sample comes at each place about equally often: within 5 standard deviations of 4,000 epochs."""
    for size in (2, 3, 4, 7):
        orders = [tuple(shuffled(size, 1, epoch)) for epoch in range(4000)]
        if size <= 4:
            assert len(set(orders)) == {2: 2, 3: 6, 4: 24}[size]
        deviation = (4000 / size * (1 - 1 / size)) ** 0.5
        for place in range(size):
            counts = Counter(order[place] for order in orders)
            assert all(abs(counts[sample] - 4000 / size) < 5 * deviation for sample in range(size))


@given(sizes=sizes_lists, seed=seeds, epoch=st.integers(0, 5))
def test_each_epoch_holds_every_sample_once(sizes: list[int], seed: int, epoch: int) -> None:
    order, total = SampleOrder(sizes, seed=seed), sum(sizes)
    draws = [order[k] for k in range(epoch * total, (epoch + 1) * total)]
    assert sorted(draws) == [(d, s) for d, size in enumerate(sizes) for s in range(size)]
    assert order.unique_prefix() == total


def test_orders_differ_between_epochs_and_seeds_and_repeat() -> None:
    """B35: two epochs of 7 samples, and 100 samples wanted from 7."""
    order = SampleOrder([50], seed=3)
    first, second = ([order[k] for k in range(start, start + 50)] for start in (0, 50))
    assert first != second and sorted(first) == sorted(second)
    assert [SampleOrder([50], seed=3)[k] for k in range(50)] == first
    assert [SampleOrder([50], seed=4)[k] for k in range(50)] != first
    counts = Counter(int(i) for i in SampleOrder([7], seed=0).sample_ids(span(0, 100)))
    assert set(counts) == set(range(7)) and max(counts.values()) - min(counts.values()) <= 1


def test_the_order_is_fixed_for_good() -> None:
    """A resumed run must meet the order it began with, also after an upgrade of this program or of numpy."""
    assert SampleOrder([10], seed=1234).sample_ids(span(0, 20)).tolist() == FROZEN_SINGLE
    blend = SampleOrder([5, 9], ["0.3", "0.7"], seed=1234)
    assert blend.sample_ids(span(0, 20)).tolist() == FROZEN_BLEND


@given(
    weights=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 40), min_size=8, max_size=8),
    seed=seeds,
)
@settings(deadline=None)
def test_blend_keeps_weights_at_every_prefix(weights: list[int], sizes: list[int], seed: int) -> None:
    """Within one sample, over two and a half periods; and each dataset goes through epochs of its own."""
    sizes = sizes[: len(weights)]
    order = SampleOrder(sizes, weights, seed=seed)
    length = 5 * sum(weights) // 2
    datasets, samples = order.lookup(span(0, length))
    for dataset, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        mine = datasets == dataset
        ideal = weight * span(1, length + 1) / sum(weights)
        assert np.abs(np.cumsum(mine) - ideal).max() < 1
        drawn = samples[mine]
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[start : start + size]) == list(range(size))
    prefix = order.unique_prefix()
    ids = order.sample_ids(span(0, prefix + 1))
    assert len(set(ids[:-1])) == prefix and ids[-1] in ids[:-1]


@given(st.lists(st.floats(1e-9, 1), min_size=2, max_size=5))
def test_weights_are_kept_exactly(weights: list[float]) -> None:
    shares = integer_weights(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    for share, asked in zip(shares, weights, strict=True):
        assert Fraction(share, sum(shares)) == Fraction(str(asked)) / total


any_weight = st.floats(-9, 0).map(lambda exponent: 10**exponent) | st.sampled_from([1e-9, 1e-6, 0.1, 1 / 3, 0.5, 1.0])


@settings(max_examples=40)
@given(
    weights=st.lists(any_weight, min_size=1, max_size=12),
    start=st.integers(0, 300),
    seed=seeds,
)
def test_any_weights_are_kept_at_every_prefix(weights: list[float], start: int, seed: int) -> None:
    """From 1e-9 to 1: within one sample at every prefix, over the borders of blocks; each dataset's draws in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_blend, "BLOCK", 64)
        blend = LongBlend(integer_weights([*weights, 0.123456789123]))
        total = sum(blend.weights)
        count = 2000
        datasets, draws = blend.lookup(span(0, count))
        for dataset, weight in enumerate(blend.weights):
            mine = datasets == dataset
            drawn = np.cumsum(mine).tolist()
            error = [abs(drawn[k] * total - weight * (k + 1)) for k in range(count)]
            assert max(error) < total
            assert draws[mine].tolist() == list(range(int(mine.sum())))
        fresh = LongBlend(blend.weights).lookup(span(start, start + 70))  # found without what comes before
        assert (fresh[0] == datasets[start : start + 70]).all() and (fresh[1] == draws[start : start + 70]).all()


def test_small_weights_come_when_their_turn_is() -> None:
    """However far: weights rounded to multiples of 2**-20 would be off by several draws here."""
    weights = [1e-6, 0.3, 0.123456789]
    blend = LongBlend(integer_weights(weights))
    end = 10**7 // long_blend.BLOCK
    state = blend._state(end)
    for count, weight in zip(state, weights, strict=True):
        exact = Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights)
        assert abs(count - exact * end * long_blend.BLOCK) < 1


def test_first_repeat_in_a_long_blend() -> None:
    weights = [0.123456789, 0.2, 0.3333333]
    order = SampleOrder([1000, 60_000, 50_000], weights, seed=2)
    prefix = order.unique_prefix()
    ids = order.sample_ids(span(0, prefix + 1))
    assert len(set(ids[:-1].tolist())) == prefix and ids[-1] in set(ids[:-1].tolist())
    assert abs(prefix - 1000 / (0.123456789 / sum(weights))) < 10
    sizes = [3_000_017, 501, 77]  # weights by size: all end together
    assert evaluation_order(sizes, None).unique_prefix() == sum(sizes)
    assert [order.unique_prefix(limit) for limit in (1, prefix, prefix + 1, 10**9)] == [1, prefix, prefix, prefix]
    order = SampleOrder(sizes, sizes, seed=3)
    ids = order.sample_ids(span(sum(sizes) - 5, sum(sizes) + 100_000))
    again = SampleOrder(sizes, sizes, seed=3).sample_ids(span(sum(sizes) + 90_000, sum(sizes) + 100_000))
    assert (ids[-10_000:] == again).all() and len(set(ids[5:].tolist())) == 100_000


def test_blend_with_a_long_period() -> None:
    weights = [0.123456789, 0.2, 0.3333333]
    datasets, _ = SampleOrder([5, 6, 7], weights).lookup(span(0, 200_000))
    for dataset, weight in enumerate(weights):
        ideal = weight / sum(weights) * span(1, 200_001)
        assert np.abs(np.cumsum(datasets == dataset) - ideal).max() < 1


def test_weights_are_exact_decimals() -> None:
    assert integer_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert integer_weights(["30", "70"]) == (3, 7)
    assert integer_weights([Fraction(1, 3), Fraction(2, 3)]) == (1, 2)


@given(
    sizes=sizes_lists,
    weighted=st.booleans(),
    seed=seeds,
    start=st.integers(0, 10**15),
    count=st.integers(1, 50),
)
@settings(deadline=None)
def test_random_access_equals_slices(sizes: list[int], weighted: bool, seed: int, start: int, count: int) -> None:
    """Sample k is the same asked alone, in a slice, or in any order; far beyond the first epoch too."""
    order = SampleOrder(sizes, list(range(1, len(sizes) + 1)) if weighted else None, seed=seed)
    datasets, samples = order.lookup(span(start, start + count))
    backwards = order.lookup(span(start, start + count)[::-1])
    assert (backwards[0][::-1] == datasets).all() and (backwards[1][::-1] == samples).all()
    for k in (0, count // 2, count - 1):
        assert order[start + k] == (datasets[k], samples[k])


def test_large_corpora_need_no_table() -> None:
    order = SampleOrder([10**12, 10**10], seed=5)
    ids = order.sample_ids(span(10**12, 10**12 + 1000))
    assert len(set(ids)) == 1000 and ids.max() < 10**12 + 10**10
    assert (ids > 5 * 10**11).sum() > 400, "spread over the corpus"


layouts = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))


@given(layout=layouts, consumed=st.integers(0, 1000), replica_microbatches=st.integers(1, 3))
def test_layouts_cut_the_global_batch_without_gap(
    layout: tuple[int, int, int], consumed: int, replica_microbatches: int
) -> None:
    num_replicas, shard_size, micro = layout
    batch_size = num_replicas * shard_size * micro * replica_microbatches
    taken: list[int] = []
    for replica in range(num_replicas):
        batch = replica_positions(consumed, batch_size, num_replicas, replica)
        cuts = [microbatch_positions(batch, micro, shard_size, rank) for rank in range(shard_size)]
        in_order = [k for m in range(replica_microbatches) for rank in range(shard_size) for k in cuts[rank][m]]
        assert in_order == list(batch), "microbatch by microbatch, shard rank by shard rank"
        taken += in_order
    assert taken == list(range(consumed, consumed + batch_size)), "replica by replica"


def test_batches_of_changing_size_use_each_sample_once() -> None:
    """Batch size, replicas and shards change twice; positions go on from the consumed count."""
    order, consumed, seen = SampleOrder([48], seed=9), 0, []
    for batch_size, replicas, iterations in [(8, 2, 2), (12, 3, 2), (4, 1, 2)]:
        for _ in range(iterations):
            for replica in range(replicas):
                positions = replica_positions(consumed, batch_size, replicas, replica)
                seen += order.sample_ids(np.array(positions)).tolist()
            consumed += batch_size
    assert consumed == 48 and sorted(seen) == list(range(48))


def test_sizes_that_do_not_divide_name_the_numbers() -> None:
    with pytest.raises(DataError, match=r"10 is not a multiple of 3 replicas; 9 would work"):
        replica_positions(0, 10, 3, 0)
    with pytest.raises(DataError, match=r"10, is not a multiple of --micro-batch-size 4 x 2 .*; 8 would work"):
        microbatch_positions(range(10), 4, 2, 0)


@pytest.mark.parametrize("weights", [["nan", 1], [0, 1], [-1, 2], ["x", 1], [float("inf"), 1], [1]])
def test_unusable_weights_are_refused(weights: list[float | str]) -> None:
    with pytest.raises(DataError):
        SampleOrder([4, 4], weights)


def test_order_without_samples_is_refused() -> None:
    for sizes in ([], [0], [0, 0]):
        with pytest.raises(DataError, match="needs samples"):
            SampleOrder(sizes)
    with pytest.raises(DataError, match="dataset 1 of the blend has a weight but no sample"):
        SampleOrder([3, 0], [1, 1])


def test_evaluation_order_is_file_order_and_mixes_corpora() -> None:
    assert evaluation_order([5], None).sample_ids(span(0, 5)).tolist() == [0, 1, 2, 3, 4]
    order = evaluation_order([4, 2], None)
    datasets, samples = order.lookup(span(0, 6))
    assert sorted(zip(datasets, samples, strict=True)) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert sorted(datasets[:3]) == [0, 0, 1], "in proportion from the start"
    assert order.unique_prefix() == 6
    assert evaluation_order([4, 0], None).unique_prefix() == 4
