"""Reserves of samples for replicas that take unequal numbers of steps between two syncs (A-EDiT). No process group.

At each sync the next unused positions of the global order are dealt out; at the next one each replica says how many
batches it took, and the rest goes back to the front, in order. Whoever knows the step counts knows the pool: nothing
but the counts travels, and every rank keeps the same pool.

Every sample of an epoch is used before the next epoch is dealt. Dealing stops at the epoch's end as long as a batch for
each replica is left in it. With less than that, exactly one batch each is dealt, across the end: a replica takes at
least one step before it meets the others, and with an empty reserve it asks for the sync, so it takes exactly one. All
that was left of the old epoch is then used, and nothing of the new one can be taken instead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_edit.data.errors import DataError

MORE_THAN_LAST_TIME = (3, 2)  # a reserve is 3/2 of what its replica took in the interval before


@dataclass(frozen=True)
class Reserve:
    """What one replica may take until the next sync: global positions in order, in whole batches of it."""

    ranges: tuple[range, ...]
    batch_size: int  # samples of one step of the replica

    @property
    def num_batches(self) -> int:
        """Steps that it lasts for."""
        return _count(self.ranges) // self.batch_size

    def batch(self, index: int) -> np.ndarray:
        """Global positions [batch_size] int64 of the batch `index`, from 0 on."""
        assert 0 <= index < self.num_batches, (index, self.num_batches)
        parts = _cut(self.ranges, index * self.batch_size, (index + 1) * self.batch_size)
        return np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])

    def unused(self, steps: int) -> list[range]:
        """What is left after `steps` batches."""
        assert 0 <= steps <= self.num_batches, f"{steps} batches of a reserve of {self.num_batches}"
        return list(_cut(self.ranges, steps * self.batch_size, _count(self.ranges)))


class SamplePool:
    """The positions of the global order that no replica has used.

    epoch_size  samples of an epoch; None: no epoch that ends for all datasets at once (a blend with weights)
    frontier    all positions from here on are unused
    ranges      unused positions before it, as disjoint (first, last + 1) in order
    Raises DataError when ranges and frontier contradict each other.
    """

    def __init__(self, epoch_size: int | None, frontier: int, ranges: Sequence[Sequence[int]] = ()) -> None:
        assert epoch_size is None or epoch_size >= 1
        bounds = [bound for start, stop in ranges for bound in (start, stop)] + [frontier]
        if bounds != sorted(bounds) or bounds[0] < 0:
            raise DataError(f"a pool of samples with the unused positions {list(ranges)} before {frontier}")
        self._epoch_size = epoch_size
        self._frontier = frontier
        self._ranges = [range(start, stop) for start, stop in ranges if stop > start]

    @property
    def consumed_samples(self) -> int:
        """Positions that were used, or are dealt out now."""
        return self._frontier - _count(self._ranges)

    @property
    def state(self) -> dict[str, Any]:
        """Of a pool whose reserves were given back: JSON, the arguments of a new pool."""
        return {"frontier": self._frontier, "ranges": [[part.start, part.stop] for part in self._ranges]}

    def deal(
        self, num_replicas: int, batch_size: int, *, left_of_run: int, last_steps: Sequence[int] | None
    ) -> list[Reserve]:
        """Takes a reserve of at least one batch of `batch_size` samples for each replica out of the pool.

        `last_steps`: of each replica in the interval before; None: not known, equal shares of all that may be dealt
        (what is unused comes back, so that costs nothing). `left_of_run`: samples until the end of the training; not
        more than that is dealt, rounded up to one batch for each replica.
        """
        assert num_replicas >= 1 and batch_size >= 1
        one_each = num_replicas * batch_size
        room = max(1, -(-left_of_run // one_each)) * num_replicas  # in batches
        left_of_epoch = self._left_of_epoch()
        if left_of_epoch is not None:
            room = min(room, max(num_replicas, left_of_epoch // batch_size))
        shares = share_batches(room, num_replicas, last_steps)
        return [Reserve(tuple(self._take(share * batch_size)), batch_size) for share in shares]

    def give_back(self, reserves: Sequence[Reserve], steps: Sequence[int]) -> None:
        """Ends an interval: of `reserves` the replicas have used `steps` batches."""
        unused = [part for reserve, n in zip(reserves, steps, strict=True) for part in reserve.unused(n)]
        self._ranges = _joined([*self._ranges, *unused])
        while self._ranges and self._ranges[-1].stop == self._frontier:
            self._frontier = self._ranges.pop().start

    def _left_of_epoch(self) -> int | None:
        """Unused samples of the epoch in which the first unused one lies."""
        if self._epoch_size is None:
            return None
        first = self._ranges[0].start if self._ranges else self._frontier
        end = (first // self._epoch_size + 1) * self._epoch_size
        holes = sum(max(0, min(part.stop, end) - part.start) for part in self._ranges)
        return holes + max(0, end - self._frontier)

    def _take(self, samples: int) -> list[range]:
        """The first `samples` positions of the pool."""
        holes = _count(self._ranges)
        taken = list(_cut(self._ranges, 0, samples))
        self._ranges = list(_cut(self._ranges, samples, holes))
        if samples > holes:
            stop = self._frontier + samples - holes
            taken = _joined([*taken, range(self._frontier, stop)])
            self._frontier = stop
        return taken


def share_batches(room: int, num_replicas: int, last_steps: Sequence[int] | None) -> list[int]:
    """Batches for each replica: at least one, together at most `room` (at least one each), `last_steps` x 1.5 where
    there is room for it, else less in the same proportion. Without `last_steps` equal ones, as many as there are.
    """
    assert room >= num_replicas
    if last_steps is None:
        return [room // num_replicas] * num_replicas
    assert len(last_steps) == num_replicas
    more, than = MORE_THAN_LAST_TIME
    wanted = [max(1, -(-more * steps // than)) for steps in last_steps]
    if sum(wanted) <= room:
        return wanted
    shares = [max(1, want * room // sum(wanted)) for want in wanted]
    while sum(shares) > room:  # some were raised to 1
        shares[shares.index(max(shares))] -= 1
    for replica in sorted(range(num_replicas), key=lambda i: shares[i] * sum(wanted) - wanted[i] * room):
        if sum(shares) < room:  # largest remainders
            shares[replica] += 1
    return shares


def _count(ranges: Sequence[range]) -> int:
    return sum(len(part) for part in ranges)


def _cut(ranges: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """The `start`-th to `stop`-th of the positions in `ranges`."""
    before = 0
    for part in ranges:
        cut = part[max(0, start - before) : max(0, stop - before)]
        if cut:
            yield cut
        before += len(part)


def _joined(ranges: Sequence[range]) -> list[range]:
    """The same positions in order, neighbours made one."""
    joined: list[range] = []
    for part in sorted(ranges, key=lambda each: each.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            assert not joined or joined[-1].stop < part.start, f"{joined[-1]} and {part} overlap"
            joined.append(part)
    return joined
