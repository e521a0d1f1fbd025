"""The loader: what each rank gets, in every layout; threads change nothing; errors arrive with their cause."""

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.data.datasets import MockDataset, Sample, SplitDatasets
from megatron_edit.data.errors import DataError, LoaderError
from megatron_edit.data.loader import Microbatch, MicrobatchLoader, RankPlace, ReserveLoader, evaluation_batches
from megatron_edit.data.reserves import Reserve

SEQ = 4


class NumberedDataset:
    """Sample i holds i everywhere, so that a batch shows which samples it is made of."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self.size
        ids = torch.full((SEQ,), self.first + index, dtype=torch.int64)
        return {
            "tokens": ids,
            "labels": ids.clone(),
            "loss_mask": torch.ones(SEQ),
            "position_ids": torch.arange(SEQ),
        }


class FailingDataset(NumberedDataset):
    def __init__(self, size: int, bad: int) -> None:
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index: int) -> Sample:
        if index == self.bad:
            raise OSError(5, "Input/output error")
        return super().__getitem__(index)


def make_loader(
    split: SplitDatasets, place: RankPlace, batch: int, consumed: int = 0, workers: int = 0, seed: int = 7
) -> MicrobatchLoader:
    return MicrobatchLoader(
        split.datasets,
        split.training_order(seed),
        consumed_samples=consumed,
        place=place,
        batch=BatchSchedule.constant(batch),
        num_workers=workers,
    )


def ids_of(microbatches: list[Microbatch]) -> list[int]:
    return [int(i) for microbatch in microbatches for i in microbatch["tokens"][:, 0]]


def all_places(num_replicas: int, shard_size: int, micro: int) -> list[RankPlace]:
    return [RankPlace(num_replicas, r, shard_size, s, micro) for r in range(num_replicas) for s in range(shard_size)]


@pytest.mark.parametrize(
    ("num_replicas", "shard_size", "micro"), [(1, 1, 2), (2, 1, 4), (2, 2, 2), (4, 1, 1), (1, 3, 4)]
)
def test_ranks_share_out_the_global_batch(num_replicas: int, shard_size: int, micro: int) -> None:
    split = SplitDatasets((NumberedDataset(100),))
    order = split.training_order(7)
    for iteration, expected in enumerate(np.arange(72).reshape(3, 24)):
        taken: dict[int, list[int]] = {}
        for place in all_places(num_replicas, shard_size, micro):
            loader = make_loader(split, place, 24, consumed=24 * iteration)
            microbatches, replica_ids = loader.next_batch()
            assert len(microbatches) == 24 // (num_replicas * shard_size * micro)
            for microbatch in microbatches:
                assert set(microbatch) == {"tokens", "labels", "loss_mask", "position_ids"}
                assert all(tensor.shape == (micro, SEQ) for tensor in microbatch.values())
            taken.setdefault(place.replica, []).extend(ids_of(microbatches))
            assert len(replica_ids) == 24 // num_replicas
            slice_of_replica = expected.reshape(num_replicas, -1)[place.replica]
            assert replica_ids == order.sample_ids(slice_of_replica).tolist()
            assert set(ids_of(microbatches)) <= set(replica_ids)
            assert loader.state == {"consumed_samples": 24 * (iteration + 1)}
        for replica, ids in taken.items():
            assert sorted(ids) == sorted(order.sample_ids(expected.reshape(num_replicas, -1)[replica]).tolist())


def test_microbatches_and_shards_do_not_change_a_replicas_samples() -> None:
    """Microbatch m of all shard ranks together is the m-th run of the replica's slice."""
    split = SplitDatasets((NumberedDataset(64),))
    loaders = [make_loader(split, place, 8) for place in all_places(1, 2, 2)]
    batches = [loader.next_batch() for loader in loaders]
    woven = [i for m in range(2) for microbatches, _ in batches for i in ids_of([microbatches[m]])]
    assert woven == batches[0][1] == batches[1][1]


def test_restart_with_another_layout_goes_on() -> None:
    """Every sample of an epoch once, over a restart with other replicas, shards and batch size."""
    split = SplitDatasets((NumberedDataset(30), NumberedDataset(18, first=30)))
    seen: list[int] = []
    consumed = 0
    for batch, (replicas, shards, micro), iterations in [(12, (3, 1, 2), 2), (8, (2, 2, 1), 3)]:
        loaders = [
            make_loader(split, place, batch, consumed, workers=1) for place in all_places(replicas, shards, micro)
        ]
        for _ in range(iterations):
            for loader in loaders:
                seen += ids_of(loader.next_batch()[0])
        consumed = loaders[0].consumed_samples
        for loader in loaders:
            loader.close()
    assert consumed == 48 and sorted(seen) == list(range(48))


phases = st.tuples(
    st.sampled_from([1, 2, 3]),  # replicas
    st.sampled_from([1, 2]),  # shards
    st.sampled_from([1, 2]),  # micro-batch size
    st.integers(1, 3),  # microbatches
    st.integers(0, 4),  # iterations
    st.sampled_from([0, 1, 3]),  # threads that read ahead
)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    weights=st.none() | st.lists(st.floats(1e-9, 1), min_size=3, max_size=3),
    plan=st.lists(phases, min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_sample_once_over_epochs_resizes_and_restarts(
    sizes: list[int], weights: list[float] | None, plan: list[tuple[int, ...]], seed: int
) -> None:
    """A run that is stopped after any step and goes on in another layout reads the one order, position by position:
    no sample is left out or repeated, whatever the epochs that it crosses."""
    starts = np.cumsum([0, *sizes])
    datasets = tuple(NumberedDataset(size, int(start)) for size, start in zip(sizes, starts, strict=False))
    shares = None if weights is None else tuple(Fraction(str(weight)) for weight in weights[: len(sizes)])
    split = SplitDatasets(datasets, shares)
    consumed, read = 0, list[int]()
    for replicas, shards, micro, microbatches, iterations, workers in plan:
        batch = replicas * shards * micro * microbatches
        loaders = [
            make_loader(split, place, batch, consumed, workers, seed) for place in all_places(replicas, shards, micro)
        ]
        for _ in range(iterations):
            batches = [loader.next_batch() for loader in loaders]
            for replica in range(replicas):
                mine = batches[replica * shards : (replica + 1) * shards]
                woven = [i for m in range(microbatches) for found, _ in mine for i in ids_of([found[m]])]
                assert all(ids == woven for _, ids in mine), "what is logged is what is read"
                read += woven
        consumed = loaders[0].consumed_samples
        for loader in loaders:
            loader.close()
    order = split.training_order(seed)
    assert read == order.sample_ids(np.arange(consumed)).tolist()
    if weights is None:
        for start in range(0, len(read) - sum(sizes) + 1, sum(sizes)):
            assert sorted(read[start : start + sum(sizes)]) == list(range(sum(sizes)))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_batch_and_draw_nothing(workers: int) -> None:
    split = SplitDatasets((MockDataset(50, SEQ, 100),))
    place = RankPlace(1, 0, 1, 0, 2)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    plain, threaded = make_loader(split, place, 4), make_loader(split, place, 4, workers=workers)
    for _ in range(30):  # more than two epochs
        (expected, expected_ids), (got, got_ids) = plain.next_batch(), threaded.next_batch()
        assert got_ids == expected_ids
        assert all(torch.equal(a[k], b[k]) for a, b in zip(expected, got, strict=True) for k in a)
    threaded.close()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]  # type: ignore[index]


def test_workers_read_ahead() -> None:
    """While the caller computes, the next batch is read: by another thread, before it is asked for."""
    readers: Counter[str] = Counter()

    class Watched(NumberedDataset):
        def __getitem__(self, index: int) -> Sample:
            readers[threading.current_thread().name] += 1
            return super().__getitem__(index)

    loader = make_loader(SplitDatasets((Watched(50),)), RankPlace(1, 0, 1, 0, 2), 4, workers=1)
    loader.next_batch()
    deadline = time.monotonic() + 10
    while sum(readers.values()) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(readers.values()) == 8 and threading.current_thread().name not in readers
    assert loader.state == {"consumed_samples": 4}, "what was only read ahead does not count"
    loader.close()
    assert not any(thread.name.startswith("data-loader") for thread in threading.enumerate())


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_arrive_with_their_cause(workers: int) -> None:
    dataset = FailingDataset(40, bad=-1)
    loader = make_loader(SplitDatasets((dataset,)), RankPlace(2, 1, 1, 0, 2), 8, workers=workers)
    dataset.bad = int(loader.order.sample_ids(np.array([8 * 3 + 5]))[0])  # replica 1, fourth iteration
    for _ in range(3):
        loader.next_batch()
    for _ in range(2):  # and again when asked again
        with pytest.raises(LoaderError, match=r"replica 1, shard rank 0: .* after 24 .*Input/output error") as caught:
            loader.next_batch()
        assert isinstance(caught.value.__cause__, OSError)
    assert loader.state == {"consumed_samples": 24}
    loader.close()


def test_sizes_that_do_not_divide_are_refused_at_once() -> None:
    split = SplitDatasets((NumberedDataset(10),))
    with pytest.raises(DataError, match="--global-batch-size 10 is not a multiple of 3 replicas"):
        make_loader(split, RankPlace(3, 0, 1, 0, 1), 10)
    with pytest.raises(DataError, match="--micro-batch-size 4 x 1"):
        make_loader(split, RankPlace(2, 0, 1, 0, 4), 12)


@pytest.mark.parametrize(("size", "eval_iters", "batch"), [(24, 3, 8), (24, 2, 8), (21, 3, 8), (5, 10, 8), (24, 0, 8)])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2), (2, 1, 4), (2, 2, 1)])
def test_evaluation_takes_each_sample_once_in_every_layout(
    size: int, eval_iters: int, batch: int, layout: tuple[int, int, int]
) -> None:
    """The first eval_iters * batch samples, or all; equal shapes and counts on all ranks; twice the same."""
    split = SplitDatasets((NumberedDataset(size),))
    for _ in range(2):
        counts: Counter[int] = Counter()
        shapes = set()
        for place in all_places(*layout):
            batches = list(
                evaluation_batches(
                    split.datasets,
                    split.evaluation_order(),
                    eval_iters=eval_iters,
                    place=place,
                    global_batch_size=batch,
                )
            )
            shapes.add(tuple(len(microbatches) for microbatches in batches))
            for microbatch in (m for microbatches in batches for m in microbatches):
                assert microbatch["tokens"].shape == (layout[2], SEQ)
                weights = microbatch["loss_mask"].mean(dim=1)
                for sample, weight in zip(microbatch["tokens"][:, 0].tolist(), weights.tolist(), strict=True):
                    assert weight in (0.0, 1.0)
                    counts[sample] += int(weight)
        assert len(shapes) == 1, "all ranks make the same number of forward passes"
        assert +counts == Counter(range(min(size, eval_iters * batch)))


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(("num_replicas", "shard_size", "micro"), [(1, 1, 2), (2, 2, 1), (2, 1, 2)])
def test_a_batch_that_grows_is_cut_out_of_the_same_order(
    num_replicas: int, shard_size: int, micro: int, workers: int
) -> None:
    """Begun anywhere, also where a size is over: each iteration has the next batch, each position comes once."""
    split = SplitDatasets((NumberedDataset(1000),))
    batch = BatchSchedule(((0, 4), (12, 8), (40, 12), (60, 4)))
    starts = [0, 4, 8, 12, 20, 28, 36, 44, 56, 68, 72, 76]
    in_order = split.training_order(7).sample_ids(np.arange(80, dtype=np.int64)).tolist()
    for first in (0, 3, 6, 9):
        loaders = {
            place: MicrobatchLoader(
                split.datasets, split.training_order(7), consumed_samples=starts[first], place=place, batch=batch,
                num_workers=workers,
            )
            for place in all_places(num_replicas, shard_size, micro)
        }  # fmt: skip
        for start, stop in itertools.pairwise([*starts[first:], 80]):
            taken = {place: loader.next_batch() for place, loader in loaders.items()}
            whole = [sample for place, (_, ids) in taken.items() if place.shard_rank == 0 for sample in ids]
            assert whole == in_order[start:stop]
            assert sorted(i for microbatches, _ in taken.values() for i in ids_of(microbatches)) == sorted(whole)
        assert {loader.consumed_samples for loader in loaders.values()} == {80}
        for loader in loaders.values():
            loader.close()


def test_a_batch_to_come_that_does_not_divide_is_found_at_once() -> None:
    split = SplitDatasets((NumberedDataset(1000),))
    batch = BatchSchedule(((0, 2), (12, 6), (40, 8)))
    for consumed, fails in ((0, True), (39, True), (40, False)):
        with pytest.raises(DataError, match=r"(no|not a) multiple") if fails else contextlib.nullcontext():
            MicrobatchLoader(
                split.datasets, split.training_order(7), consumed_samples=consumed, place=RankPlace(4, 0, 1, 0, 2),
                batch=batch,
            ).close()  # fmt: skip


def test_evaluation_of_a_blend_repeats_nothing() -> None:
    split = SplitDatasets((NumberedDataset(30), NumberedDataset(4, first=30)))
    (counts,) = {
        tuple(
            ids_of([m for batch in evaluation_batches(
                split.datasets, split.evaluation_order(), eval_iters=100, place=RankPlace(1, 0, 1, 0, 1),
                global_batch_size=2) for m in batch])
        )
        for _ in range(2)
    }  # fmt: skip
    assert sorted(counts) == list(range(34)) and any(i >= 30 for i in counts[:10])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_reserves_are_read_in_order_and_cut_like_global_batches(workers: int) -> None:
    """Two shard ranks of one replica share its batches; holes in the reserve change nothing."""
    split = SplitDatasets((NumberedDataset(60),))
    order = split.training_order(7)
    loaders = [
        ReserveLoader(split.datasets, order, place=place, num_workers=workers) for place in all_places(1, 2, 2)
    ]
    assert [loader.batches_left for loader in loaders] == [0, 0]
    for reserve, taken in ((Reserve((range(3, 9), range(20, 38)), 8), 2), (Reserve((range(36, 44),), 8), 1)):
        for loader in loaders:
            loader.refill(reserve)
        for index in range(taken):
            assert [loader.batches_left for loader in loaders] == [reserve.num_batches - index] * 2
            batches = [loader.next_batch() for loader in loaders]
            woven = [i for m in range(2) for microbatches, _ in batches for i in ids_of([microbatches[m]])]
            assert woven == batches[0][1] == order.sample_ids(reserve.batch(index)).tolist()
    assert loaders[0].batches_left == 0
    with pytest.raises(AssertionError, match="reserve is empty"):
        loaders[0].next_batch()
    for loader in loaders:
        loader.close()
    assert not any(thread.name.startswith("data-loader") for thread in threading.enumerate())


def test_reserve_is_read_ahead_and_forgotten_at_the_sync() -> None:
    read: Counter[int] = Counter()

    class Watched(NumberedDataset):
        def __getitem__(self, index: int) -> Sample:
            read[index] += 1
            return super().__getitem__(index)

    split = SplitDatasets((Watched(50),))
    loader = ReserveLoader(split.datasets, split.training_order(7), place=RankPlace(1, 0, 1, 0, 2), num_workers=1)
    loader.refill(Reserve((range(20),), 4))
    deadline = time.monotonic() + 10
    while sum(read.values()) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(read.values()) == 8, "two batches are read before the first is asked for"
    loader.refill(Reserve((range(8, 12),), 4))
    microbatches, ids = loader.next_batch()
    assert ids_of(microbatches) == ids == loader.order.sample_ids(np.arange(8, 12)).tolist()
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_in_a_reserve_arrive_with_their_cause(workers: int) -> None:
    dataset = FailingDataset(40, bad=-1)
    split = SplitDatasets((dataset,))
    loader = ReserveLoader(split.datasets, split.training_order(7), place=RankPlace(2, 1, 1, 0, 2), num_workers=workers)
    dataset.bad = int(loader.order.sample_ids(np.array([9]))[0])
    loader.refill(Reserve((range(20),), 4))
    for _ in range(2):
        loader.next_batch()
    for _ in range(2):
        with pytest.raises(LoaderError, match=r"replica 1, shard rank 0: .* 2 of 5 of its reserve: OSError") as caught:
            loader.next_batch()
        assert isinstance(caught.value.__cause__, OSError)
    assert loader.batches_left == 3
    loader.close()
