"""The one global order of samples: which sample is drawn at position k, for k = 0, 1, 2, ... without end.

A pure function of the corpus (sizes of its datasets, weights of the blend) and the seed. It does not depend
on how many samples a run asks for, nor on replicas, shards, batch size or workers: those only cut it into
slices (the functions at the end). No state, no table of the corpus' size: any position is found at once.

Kept to integers and hashlib on purpose: numpy may change the stream of its generators from version to
version, and a run that is resumed after an upgrade must go on in the order in which it began.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from megatron_edit.data.errors import DataError
from megatron_edit.data.long_blend import LongBlend, PeriodicBlend

# Blends whose pattern repeats within so many positions are kept as a table, others go from block to block.
LONGEST_PERIOD = 1 << 20
FEISTEL_ROUNDS = 8
# dataset index in the digest of the permutation over all datasets together
_ALL_DATASETS = -1


class SampleOrder:
    """order[k] -> (dataset, sample) for every k >= 0.

    Without weights the datasets count as one corpus: an epoch is a permutation of all samples, each exactly
    once. With weights, position k belongs to a dataset by a fixed pattern (long_blend.py) whose prefixes keep every
    weight within less than one sample: |draws of dataset i among the first k - weight_i * k| < 1. Each dataset then
    has epochs of its own, and starts the next one when it is used up. The order of an epoch is drawn from
    (seed, dataset, epoch), so orders differ from epoch to epoch.

    Args:
        sizes: samples of one epoch of each dataset.
        weights: None, or one positive number for each dataset (any scale).
        seed: --seed.
        shuffle: False keeps file order (for evaluation).

    Raises:
        DataError: no samples, or weights that are not positive finite numbers.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float | str | Fraction] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not sizes or min(sizes) < 0 or sum(sizes) == 0:
            raise DataError(f"an order of samples needs samples, got datasets of {list(sizes)}")
        self.sizes = tuple(int(size) for size in sizes)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        self.seed, self.shuffle = seed, shuffle
        self.weights: tuple[Fraction, ...] | None = None
        if weights is not None:
            shares = integer_weights(weights)
            if len(shares) != len(self.sizes):
                raise DataError(f"{len(shares)} weights for {len(self.sizes)} datasets")
            if 0 in self.sizes:
                raise DataError(f"dataset {self.sizes.index(0)} of the blend has a weight but no sample")
            short = sum(shares) <= LONGEST_PERIOD
            self._blend: PeriodicBlend | LongBlend = PeriodicBlend(shares) if short else LongBlend(shares)
            self.weights = tuple(Fraction(share, sum(shares)) for share in shares)  # as asked for

    def __getitem__(self, position: int) -> tuple[int, int]:
        datasets, samples = self.lookup(np.array([position], dtype=np.int64))
        return int(datasets[0]), int(samples[0])

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Datasets and samples [n] int64 at the global positions [n] int64."""
        assert positions.size == 0 or positions.min() >= 0, "positions start at 0"
        if self.weights is None:
            flat = self._draw(_ALL_DATASETS, int(self.offsets[-1]), positions)
            datasets = np.searchsorted(self.offsets, flat, side="right") - 1
            return datasets, flat - self.offsets[datasets]
        datasets, draws = self._blend.lookup(positions)
        samples = np.empty_like(draws)
        for dataset in np.unique(datasets):
            mine = datasets == dataset
            samples[mine] = self._draw(int(dataset), self.sizes[dataset], draws[mine])
        return datasets, samples

    def sample_ids(self, positions: np.ndarray) -> np.ndarray:
        """Ids [n] int64 of the samples at `positions` [n]; ids count through all datasets, from 0."""
        datasets, samples = self.lookup(positions)
        return self.offsets[datasets] + samples

    def unique_prefix(self, limit: int | None = None) -> int:
        """How many positions from 0 on come before any sample is drawn a second time; with `limit` at least that many
        when it is that or more."""
        if self.weights is None:
            return int(self.offsets[-1])
        return self._blend.first_position(self.sizes, limit)

    def _draw(self, dataset: int, size: int, draws: np.ndarray) -> np.ndarray:
        """Sample of each of the `draws` [n] from one dataset that is gone through epoch after epoch."""
        epochs, samples = np.divmod(draws, size)
        if not self.shuffle or not len(draws):
            return samples
        found, which = np.unique(epochs, return_inverse=True)
        keys = np.stack([round_keys(self.seed, dataset, int(epoch)) for epoch in found])
        return permute(samples, size, keys[which])


@lru_cache(maxsize=4096)
def round_keys(seed: int, dataset: int, epoch: int) -> np.ndarray:
    """A key for each Feistel round, uint64 [FEISTEL_ROUNDS], out of a hash of what the order depends on."""
    source = f"sample order {seed} {dataset} {epoch}".encode()
    digest = hashlib.blake2b(source, digest_size=8 * FEISTEL_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Keyed permutations of range(size) at `indices` [n] int64, in constant memory; `keys` are uint64
    [n, FEISTEL_ROUNDS], equal for indices of the same permutation.

    A balanced Feistel network over the next power of 4 (below 4 * size), walked until the value falls
    below `size` (cycle walking: Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    The round function is the finalizer of SplitMix64 (Steele, Lea & Flood 2014).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    values = indices.astype(np.uint64)
    todo = np.arange(len(values))
    while todo.size:
        left, right = values[todo] >> half, values[todo] & mask
        for key in keys[todo].T:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= size]
    return values.astype(np.int64)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer on uint64 [n]; products wrap at 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def integer_weights(weights: Sequence[float | str | Fraction]) -> tuple[int, ...]:
    """The smallest positive integers in the ratio of the weights, exactly.

    Floats count as the decimal number that they print as, so that 0.1 is one tenth.
    """
    exact = []
    for weight in weights:
        try:
            value = weight if isinstance(weight, Fraction) else Fraction(str(weight))
        except (ValueError, ZeroDivisionError):
            raise DataError(f"blend weight {weight} is not a number") from None
        if value <= 0:
            raise DataError(f"blend weight {weight} is not above 0; leave the dataset out")
        exact.append(value)
    unit = Fraction(math.gcd(*(v.numerator for v in exact)), math.lcm(*(v.denominator for v in exact)))
    return tuple(int(v / unit) for v in exact)


def evaluation_order(sizes: Sequence[int], weights: Sequence[float | str | Fraction] | None) -> SampleOrder:
    """File order for evaluation. Datasets without weights take turns in proportion to their sizes."""
    if weights is None and len(sizes) > 1 and min(sizes) > 0:
        weights = list(sizes)
    return SampleOrder(sizes, weights, shuffle=False)


def replica_positions(consumed_samples: int, global_batch_size: int, num_replicas: int, replica: int) -> range:
    """Global positions of one replica in the next iteration: the `replica`-th of equal contiguous slices of
    consumed_samples .. consumed_samples + global_batch_size - 1.

    Raises:
        DataError: the replicas do not divide the global batch.
    """
    assert consumed_samples >= 0 and 0 <= replica < num_replicas
    if global_batch_size < 1 or global_batch_size % num_replicas:
        lower = max(1, global_batch_size // num_replicas) * num_replicas
        raise DataError(
            f"--global-batch-size {global_batch_size} is not a multiple of {num_replicas} replicas; {lower} would work"
        )
    size = global_batch_size // num_replicas
    start = consumed_samples + replica * size
    return range(start, start + size)


def microbatch_positions(replica_batch: range, micro_batch_size: int, shard_size: int, shard_rank: int) -> list[range]:
    """Cuts a replica's slice into microbatches for one rank of its shard group.

    Microbatch m of shard rank s is the s-th run of `micro_batch_size` in the m-th run of
    shard_size * micro_batch_size, so the samples of a replica do not depend on how it is cut.

    Raises:
        DataError: shard_size * micro_batch_size does not divide the slice.
    """
    assert 0 <= shard_rank < shard_size
    step = micro_batch_size * shard_size
    if micro_batch_size < 1 or not len(replica_batch) or len(replica_batch) % step:
        works = max(1, len(replica_batch) // max(step, 1)) * step
        raise DataError(
            f"the batch of a replica, {len(replica_batch)}, is not a multiple of --micro-batch-size "
            f"{micro_batch_size} x {shard_size} data parallel ranks in a replica; {works} would work"
        )
    first = replica_batch.start + shard_rank * micro_batch_size
    return [range(start, start + micro_batch_size) for start in range(first, replica_batch.stop, step)]
