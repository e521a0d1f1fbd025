"""The grid of ranks as pure integers: (sync, dp, pp, cp, tp), tp fastest. No torch, no process groups.

A group is a slice of the grid: the ranks that differ along the named axes only. A replica is a slice along
every axis but `sync`, hence a contiguous block of ranks: its pipeline stays on the fast links inside a node or
between neighbouring nodes, and only the sync crosses the slow ones.

    axis   what its ranks share                       megatron-core's name
    sync   the same shard of the same layers          (none: this project's)
    dp     the shard group of the optimizer           data parallel, narrowed to one replica
    pp     one sample, layer after layer              pipeline model parallel
    cp     one sequence                               context parallel
    tp     each layer                                 tensor model parallel
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

AXES = ("sync", "dp", "pp", "cp", "tp")


class LayoutError(ValueError):
    """Degrees of parallelism that do not fit the number of ranks."""


@dataclass(frozen=True)
class Coordinates:
    """Place of one rank in the grid."""

    sync: int
    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Size of the grid along each axis; `sync` is the number of replicas, `dp` the ranks of a shard group."""

    sync: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def from_world(cls, world_size: int, *, num_replicas: int, tp: int = 1, pp: int = 1, cp: int = 1) -> Layout:
        """The layout of `world_size` ranks; dp is what remains. Raises LayoutError when the sizes do not divide."""
        model_ranks = tp * pp * cp
        if world_size % model_ranks:
            nearest = max(model_ranks, world_size // model_ranks * model_ranks)
            raise LayoutError(
                f"{world_size} ranks cannot be divided into blocks of {model_ranks} "
                f"(tensor {tp} x pipeline {pp} x context {cp}); {nearest} ranks would work"
            )
        data_parallel_size = world_size // model_ranks
        if data_parallel_size % num_replicas:
            working = [r for r in range(1, data_parallel_size + 1) if data_parallel_size % r == 0]
            raise LayoutError(
                f"{num_replicas} replicas do not divide the data parallel size {data_parallel_size} "
                f"({world_size} ranks / {model_ranks} per copy of the model); these would: {working}"
            )
        return cls(sync=num_replicas, dp=data_parallel_size // num_replicas, pp=pp, cp=cp, tp=tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size along each of AXES."""
        return (self.sync, self.dp, self.pp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.world_size // self.sync

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` lies in the grid."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        place = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            place.append(index)
        return Coordinates(*reversed(place))

    def rank_of(self, place: Coordinates) -> int:
        """The rank at `place`."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + getattr(place, axis)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """All slices along `axes`: lists of ascending ranks that together hold every rank once."""
        assert set(axes) <= set(AXES), axes
        return list(self._slices(frozenset(axes)))

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The slice along `axes` that holds `rank`."""
        return next(ranks for ranks in self.groups(*axes) if rank in ranks)

    def replicas(self) -> list[list[int]]:
        """Ranks of each replica: contiguous blocks."""
        return self.groups("dp", "pp", "cp", "tp")

    def _slices(self, axes: frozenset[str]) -> Iterator[list[int]]:
        free = [range(size) if axis in axes else range(1) for axis, size in zip(AXES, self.sizes, strict=True)]
        fixed = [range(1) if axis in axes else range(size) for axis, size in zip(AXES, self.sizes, strict=True)]
        for base in product(*fixed):
            yield [
                self.rank_of(Coordinates(*(b + f for b, f in zip(base, offset, strict=True))))
                for offset in product(*free)
            ]
