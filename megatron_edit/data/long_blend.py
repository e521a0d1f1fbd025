"""Blends: which dataset comes at a position, and how often it came before.

A blend whose pattern repeats soon is kept as a table of one period. Weights like 0.123456789 or 1e-9 have no short
common period; such a period is cut into blocks of BLOCK positions. How often each dataset was drawn at the start of a
block is weight x position, rounded down or up; the draws of a block follow from two such states, and inside the
block they are spread as those of a table are. So no weight is rounded and no error adds up, however long the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

BLOCK = 1 << 15


class PeriodicBlend:
    """A table. At every prefix each count differs from weight x position by less than one."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._pattern, self._ranks = blend_pattern(shares)
        self._shares = np.array(shares, dtype=np.int64)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Datasets and numbers of their earlier draws, [n] int64, at the positions [n] int64."""
        period, slot = np.divmod(positions, len(self._pattern))
        datasets = self._pattern[slot].astype(np.int64)
        return datasets, period * self._shares[datasets] + self._ranks[slot]

    def first_position(self, draws: Sequence[int]) -> int:
        """The first position at which some dataset i is drawn for the `draws[i]`-th time, counted from 0."""
        firsts = []
        for dataset, number in enumerate(draws):
            period, rank = divmod(number, int(self._shares[dataset]))
            slots = np.flatnonzero(self._pattern == dataset)
            firsts.append(period * len(self._pattern) + int(slots[rank]))
        return min(firsts)


class LongBlend:
    """Block by block. Each count differs from weight x position by less than one at the ends of blocks, and by less
    than two inside: less than one from the straight line between the ends, and that by less than one.

    Finding a position takes a few microseconds for each dataset and block before it the first time, and then the
    filling of one block. Threads may share it.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert min(weights) > 0
        self.weights, self.total = tuple(weights), sum(weights)
        self._states = [(0,) * len(weights)]  # draws of each dataset before block 0, 1, ...
        self._lock = Lock()
        self._filled = lru_cache(maxsize=16)(self._fill)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As PeriodicBlend's."""
        datasets, draws = np.empty_like(positions), np.empty_like(positions)
        periods = np.zeros_like(positions)
        if self.total < 1 << 62:  # a longer period than positions have bits never ends
            periods, positions = np.divmod(positions, self.total)
        blocks, slots = np.divmod(positions, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            with self._lock:
                pattern, numbers = self._filled(int(block))
            datasets[here], draws[here] = pattern[slots[here]], numbers[slots[here]]
        if periods.any():
            draws += periods * np.array(self.weights, dtype=np.int64)[datasets]
        return datasets, draws

    def first_position(self, draws: Sequence[int]) -> int:
        """As PeriodicBlend's."""
        periods = min(number // weight for number, weight in zip(draws, self.weights, strict=True))
        draws = [number - periods * weight for number, weight in zip(draws, self.weights, strict=True)]
        block = 0
        while block * BLOCK < self.total:
            with self._lock:
                state = self._state(block + 1)
                if any(count > limit for count, limit in zip(state, draws, strict=True)):
                    pattern, numbers = self._filled(block)
                    here = block * BLOCK + int(np.argmax(numbers >= np.asarray(draws)[pattern]))
                    return periods * self.total + here
            block += 1
        raise AssertionError("in a period each dataset is drawn as often as its weight")

    def _state(self, block: int) -> tuple[int, ...]:
        """Draws of each dataset before the block; the chain is extended up to there."""
        while len(self._states) <= block:
            self._states.append(self._next(self._states[-1], min(len(self._states) * BLOCK, self.total)))
        return self._states[block]

    def _next(self, state: tuple[int, ...], end: int) -> tuple[int, ...]:
        """The state after `end` draws, a block after `state`: rounded down, the largest remainders up; but no
        count falls, so a dataset of less than one draw a block that was rounded up stays so until it is due."""
        counts, opened = [], []
        for dataset, (weight, before) in enumerate(zip(self.weights, state, strict=True)):
            due, rest = divmod(weight * end, self.total)
            counts.append(max(due, before))
            if before <= due:
                opened.append((-rest, dataset))
        missing = end - sum(counts)
        for _, dataset in heapq.nsmallest(missing, opened):
            counts[dataset] += 1
        for dataset in heapq.nlargest(-missing, range(len(counts)), key=lambda i: counts[i] - state[i]):
            counts[dataset] -= 1  # more are ahead than remainders add up to: the busiest wait
        return tuple(counts)

    def _fill(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Dataset and number of its earlier draws, int64 [BLOCK] or fewer at the period's end, of each position."""
        after, before = np.array(self._state(block + 1)), np.array(self._state(block))
        drawn = np.flatnonzero(after - before)
        places, ranks = blend_pattern(tuple((after - before)[drawn].tolist()))
        pattern = drawn[places]
        return pattern, before[pattern] + ranks


@lru_cache(maxsize=8)
def blend_pattern(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """One period of the blend: the dataset of each slot, and how often it came before in the period.

    The j-th draw (from 0) of a dataset with share w of the period P may lie in the slots
    floor(j P / w) .. ceil((j + 1) P / w) - 1; a draw inside its window keeps the dataset's count within less
    than one of w k / P at every prefix k. Earliest deadline first fills such windows on one machine whenever
    that can be done (unit tasks), and it can: w / P of every slot to each dataset is a fractional solution.
    The windows are those of proportionate fairness (Baruah et al. 1996).

    Returns:
        uint16 or uint32 [P] dataset of the slot, int64 [P] rank of the draw.
    """
    period = sum(shares)
    pattern = np.empty(period, dtype=np.uint16 if len(shares) <= 1 << 16 else np.uint32)
    ranks = np.empty(period, dtype=np.int64)
    drawn = [0] * len(shares)
    waiting = [(0, dataset) for dataset in range(len(shares))]  # (first slot of the window, dataset)
    open_windows: list[tuple[int, int]] = []  # (last slot of the window, dataset)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            dataset = heapq.heappop(waiting)[1]
            last = -(-(drawn[dataset] + 1) * period // shares[dataset]) - 1
            heapq.heappush(open_windows, (last, dataset))
        last, dataset = heapq.heappop(open_windows)
        assert slot <= last, "a draw missed its window"
        pattern[slot], ranks[slot] = dataset, drawn[dataset]
        drawn[dataset] += 1
        if drawn[dataset] < shares[dataset]:
            heapq.heappush(waiting, (drawn[dataset] * period // shares[dataset], dataset))
    return pattern, ranks
