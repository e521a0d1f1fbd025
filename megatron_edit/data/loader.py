"""Batches of one rank, cut out of the global order; read ahead by threads that no result depends on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.data.datasets import SampleDataset
from megatron_edit.data.errors import LoaderError
from megatron_edit.data.order import SampleOrder, microbatch_positions, replica_positions
from megatron_edit.data.reserves import Reserve

Microbatch = dict[str, torch.Tensor]
Batch = tuple[list[Microbatch], list[int]]  # of one rank, and the ids of its replica's samples


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the data layout, and what one forward pass of it takes."""

    num_replicas: int
    replica: int
    shard_size: int
    shard_rank: int
    micro_batch_size: int

    def microbatches(self, consumed_samples: int, global_batch_size: int) -> list[range]:
        """Global positions of this rank's microbatches in the next iteration."""
        batch = replica_positions(consumed_samples, global_batch_size, self.num_replicas, self.replica)
        return microbatch_positions(batch, self.micro_batch_size, self.shard_size, self.shard_rank)


def read_microbatches(
    datasets: Sequence[SampleDataset],
    order: SampleOrder,
    microbatches: Sequence[Sequence[int]],
    pin_memory: bool = False,
) -> list[Microbatch]:
    """Reads the samples at the given global positions; tensors are stacked to [micro_batch_size, S]."""
    positions = np.array([position for run in microbatches for position in run], dtype=np.int64)
    return read_samples(datasets, order.lookup(positions), [len(run) for run in microbatches], pin_memory)


def read_samples(
    datasets: Sequence[SampleDataset],
    places: tuple[np.ndarray, np.ndarray],
    sizes: Sequence[int],
    pin_memory: bool = False,
) -> list[Microbatch]:
    """Microbatches of `sizes` samples each. places: dataset and sample [sum(sizes)] of each, in order."""
    remaining = iter(zip(places[0].tolist(), places[1].tolist(), strict=True))
    result = []
    for size in sizes:
        samples = [datasets[dataset][sample] for dataset, sample in itertools.islice(remaining, size)]
        microbatch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        if pin_memory:
            microbatch = {key: tensor.pin_memory() for key, tensor in microbatch.items()}
        result.append(microbatch)
    return result


class OrderWindow:
    """Looks up an order for many positions at once: a few at a time would cost more than reading the samples."""

    def __init__(self, order: SampleOrder, size: int = 4096) -> None:
        self.order, self.size = order, size
        self._start, self._places = 0, (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        self._lock = Lock()

    def lookup(self, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Datasets and samples [n] int64 at positions that follow one another."""
        with self._lock:  # threads that read ahead share it
            if not self._start <= positions.start <= positions.stop <= self._start + len(self._places[0]):
                self._start = positions.start
                stop = max(positions.stop, positions.start + self.size)
                self._places = self.order.lookup(np.arange(self._start, stop, dtype=np.int64))
            part = slice(positions.start - self._start, positions.stop - self._start)
            return self._places[0][part], self._places[1][part]


class MicrobatchLoader:
    """Iteration after iteration of one rank, from `consumed_samples` on, without end.

    Its whole state is `consumed_samples`, a global count: a loader that starts from it goes on where another
    stopped, whatever the replicas, shards and batch sizes of the two.

    Args:
        datasets, order: those of the training split.
        consumed_samples: samples used so far, by all replicas.
        place: this rank's place.
        batch: samples of each iteration, over all replicas.
        num_workers: threads that read ahead; 0 reads in `next_batch`. Neither they nor anything else here
            draws random numbers, so their number changes no result.
        prefetch: iterations that are read ahead, at least one for each thread.
        pin_memory: page-locked tensors, for asynchronous copies to a GPU.

    Raises:
        DataError: sizes that do not divide (the numbers, and one that works).
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        order: SampleOrder,
        *,
        consumed_samples: int,
        place: RankPlace,
        batch: BatchSchedule,
        num_workers: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.datasets, self.order, self.place = list(datasets), order, place
        self.batch, self.pin_memory = batch, pin_memory
        self.consumed_samples = consumed_samples
        for samples, size, _ in batch.stretches(consumed_samples):
            place.microbatches(samples, size)  # raises where sizes do not divide
        self._window = OrderWindow(order)
        self._ahead = _ReadAhead(self._read, num_workers, max(prefetch, num_workers))

    def next_batch(self) -> Batch:
        """The microbatches of this rank in the next iteration, and the ids (SampleOrder.sample_ids) of all
        samples that its *replica* takes, in order.

        Raises:
            LoaderError: a sample cannot be read; `__cause__` is the first error, nothing counts as consumed.
        """
        starts = [self.consumed_samples]
        while len(starts) < self._ahead.depth:
            starts.append(starts[-1] + self.batch.size_at(starts[-1]))
        try:
            batch = self._ahead.next(starts)
        except Exception as error:
            raise _loader_error(self.place, f"after {self.consumed_samples} consumed samples", error) from error
        self.consumed_samples += self.batch.size_at(self.consumed_samples)
        return batch

    def _read(self, consumed_samples: int) -> Batch:
        place, size = self.place, self.batch.size_at(consumed_samples)
        mine = place.microbatches(consumed_samples, size)
        replica = replica_positions(consumed_samples, size, place.num_replicas, place.replica)
        datasets, samples = self._window.lookup(replica)
        sample_ids = self.order.offsets[datasets] + samples
        here = np.array([position - replica.start for run in mine for position in run], dtype=np.int64)
        places = datasets[here], samples[here]
        return read_samples(self.datasets, places, [len(run) for run in mine], self.pin_memory), sample_ids.tolist()

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint stores; equal on every rank."""
        return {"consumed_samples": self.consumed_samples}

    def close(self) -> None:
        """Ends the threads; what was read ahead is dropped and does not count."""
        self._ahead.close()


class ReserveLoader:
    """Batch after batch of a replica's reserve, for one rank; for replicas that take unequal numbers of steps.

    Arguments as of `MicrobatchLoader`. `refill` comes before the first batch and after every sync; what was taken of
    the reserve before is known from the number of steps, and the rest of it is not this loader's any more.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        order: SampleOrder,
        *,
        place: RankPlace,
        num_workers: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.datasets, self.order, self.place, self.pin_memory = list(datasets), order, place, pin_memory
        self._ahead = _ReadAhead(self._read, num_workers, max(prefetch, num_workers))
        self._reserve = Reserve((), batch_size=1)
        self._taken = 0

    @property
    def batches_left(self) -> int:
        """Steps that the reserve still lasts for."""
        return self._reserve.num_batches - self._taken

    def refill(self, reserve: Reserve) -> None:
        """Goes on with `reserve` from its first batch."""
        self._ahead.clear()
        self._reserve, self._taken = reserve, 0
        self._ahead.start(self._next_indices())

    def next_batch(self) -> Batch:
        """As `MicrobatchLoader.next_batch`. The reserve must not be empty.

        Raises:
            LoaderError: a sample cannot be read; `__cause__` is the first error, nothing counts as taken.
        """
        assert self.batches_left > 0, "the reserve is empty: the replica had to enter the sync before"
        try:
            batch = self._ahead.next(self._next_indices())
        except Exception as error:
            where = f"{self._taken} of {self._reserve.num_batches} of its reserve"
            raise _loader_error(self.place, where, error) from error
        self._taken += 1
        return batch

    def _next_indices(self) -> range:
        return range(self._taken, min(self._taken + self._ahead.depth, self._reserve.num_batches))

    def _read(self, index: int) -> Batch:
        positions, place = self._reserve.batch(index), self.place
        whole = range(len(positions))
        mine = microbatch_positions(whole, place.micro_batch_size, place.shard_size, place.shard_rank)
        microbatches = [positions[part.start : part.stop].tolist() for part in mine]
        ids = self.order.sample_ids(positions)
        return read_microbatches(self.datasets, self.order, microbatches, self.pin_memory), ids.tolist()

    def close(self) -> None:
        """Ends the threads; what was read ahead is dropped and does not count."""
        self._ahead.close()


class _ReadAhead:
    """`read(key)` for key after key, up to `depth` of them ahead in `num_workers` threads; 0: when asked."""

    def __init__(self, read: Callable[[int], Batch], num_workers: int, depth: int) -> None:
        self.depth = depth
        self._read = read
        self._futures: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(num_workers, "data-loader") if num_workers else None

    def start(self, keys: Sequence[int]) -> None:
        """Begins to read `keys`; the first of them have been begun already if there are futures."""
        if self._pool is not None:
            self._futures.extend(self._pool.submit(self._read, key) for key in keys[len(self._futures) :])

    def next(self, keys: Sequence[int]) -> Batch:
        """What is read at the first of `keys`; the others come next. After an error the same key is asked for again."""
        if self._pool is None:
            return self._read(keys[0])
        self.start(keys)
        batch = self._futures[0].result()
        self._futures.popleft()
        return batch

    def clear(self) -> None:
        """Forgets what was read ahead."""
        for future in self._futures:
            future.cancel()
        self._futures.clear()

    def close(self) -> None:
        """Ends the threads."""
        self.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _loader_error(place: RankPlace, where: str, error: Exception) -> LoaderError:
    return LoaderError(
        f"replica {place.replica}, shard rank {place.shard_rank}: reading the batch {where}: "
        f"{type(error).__name__}: {error}"
    )


def evaluation_batches(
    datasets: Sequence[SampleDataset],
    order: SampleOrder,
    *,
    eval_iters: int,
    place: RankPlace,
    global_batch_size: int,
    microbatch_multiple: int = 1,
    pin_memory: bool = False,
) -> Iterator[list[Microbatch]]:
    """This rank's share of the first eval_iters * global_batch_size samples of a split, or of all of its
    samples when they are fewer: the same at every call, each sample once over all ranks.

    All ranks get equally many microbatches of equal shape, because the pipeline and collectives want that:
    the last batch is filled up with samples whose loss_mask is 0 throughout, so the token-weighted mean over
    ranks is that of the samples. `microbatch_multiple` divides the number of microbatches of every batch, as the
    interleaved pipeline schedule wants of its number of stages. Use with SplitDatasets.evaluation_order().
    """
    wanted = eval_iters * global_batch_size
    total = min(wanted, order.unique_prefix(wanted))
    step = place.num_replicas * place.shard_size * place.micro_batch_size * microbatch_multiple
    for start in range(0, total, global_batch_size):
        size = min(global_batch_size, total - start)
        filled_size = -(-size // step) * step
        microbatches = place.microbatches(start, filled_size)
        real = [[position < start + size for position in positions] for positions in microbatches]
        # The last real sample stands in for the missing ones.
        clamped = [[min(position, start + size - 1) for position in positions] for positions in microbatches]
        batch = read_microbatches(datasets, order, clamped)
        for microbatch, rows in zip(batch, real, strict=True):
            microbatch["loss_mask"] *= torch.tensor(rows, dtype=torch.float32).unsqueeze(1)  # [b, 1]
            if pin_memory:
                microbatch.update({key: tensor.pin_memory() for key, tensor in microbatch.items()})
        yield batch
