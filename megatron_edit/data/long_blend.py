"""Blends: which dataset comes at a position, and how often it came before; at every prefix each count differs from
weight x position by less than one.

A blend whose pattern repeats soon is kept as a table of one period. Weights like 0.123456789 or 1e-9 have no short
common period; such a period is cut into blocks. In both, draw j of a dataset with weight w of the total W may lie in
the slots floor(j W / w) .. ceil((j + 1) W / w) - 1 (proportionate fairness, Baruah et al. 1996), and the draw whose
window ends first is made first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

BLOCK = 1 << 15
LARGEST_TOTAL = 1 << 47


class PeriodicBlend:
    """A table of one period."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._pattern, self._ranks = blend_pattern(shares)
        self._shares = np.array(shares, dtype=np.int64)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Datasets and numbers of their earlier draws, [n] int64, at the positions [n] int64."""
        period, slot = np.divmod(positions, len(self._pattern))
        datasets = self._pattern[slot].astype(np.int64)
        return datasets, period * self._shares[datasets] + self._ranks[slot]

    def first_position(self, draws: Sequence[int], limit: int | None = None) -> int:
        """The first position at which some dataset i is drawn for the `draws[i]`-th time, counted from 0; `limit` is
        as far as anybody wants to know."""
        firsts = []
        for dataset, number in enumerate(draws):
            period, rank = divmod(number, int(self._shares[dataset]))
            slots = np.flatnonzero(self._pattern == dataset)
            firsts.append(period * len(self._pattern) + int(slots[rank]))
        return min(firsts)


class LongBlend:
    """Block by block: from how often each dataset was drawn before a block follows how often it is after it, without
    filling the block; a block is filled when somebody asks for it. Weights whose sum is 2**47 or more are rounded to
    2**-46 of it.

    What is due in a block must be drawn in it. The slots that this leaves, as late as they can be left, go to draws
    whose window goes on into the next block: by earliest deadline, so that those for which no later slot would be
    left come first. (Ours: jobs with windows on one machine, of which the due ones are kept back to the latest slots
    that they can fill. The tests check every window.)

    Finding a position takes about 0.1 ms for each dataset and block before it the first time. Threads may share it.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert min(weights) > 0
        total = sum(weights)
        if total >= LARGEST_TOTAL:  # so that a block's sums fit 64 bits
            weights = [max(1, weight * (LARGEST_TOTAL // 2) // total) for weight in weights]
        self.weights, self.total = tuple(weights), sum(weights)
        self._states = [(0,) * len(weights)]  # draws of each dataset before block 0, 1, ...
        self._lock = Lock()
        self._filled = lru_cache(maxsize=16)(self._fill)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As PeriodicBlend's."""
        datasets, draws = np.empty_like(positions), np.empty_like(positions)
        periods, positions = np.divmod(positions, self.total)
        blocks, slots = np.divmod(positions, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            with self._lock:
                pattern, numbers = self._filled(int(block))
            datasets[here], draws[here] = pattern[slots[here]], numbers[slots[here]]
        draws += periods * np.array(self.weights, dtype=np.int64)[datasets]
        return datasets, draws

    def first_position(self, draws: Sequence[int], limit: int | None = None) -> int:
        """As PeriodicBlend's; `limit` instead when it is not before it."""
        periods = min(number // weight for number, weight in zip(draws, self.weights, strict=True))
        draws = [number - periods * weight for number, weight in zip(draws, self.weights, strict=True)]
        block = 0
        while block * BLOCK < self.total:
            if limit is not None and periods * self.total + block * BLOCK >= limit:
                return limit
            with self._lock:
                state = self._state(block + 1)
                if any(count > limit for count, limit in zip(state, draws, strict=True)):
                    pattern, numbers = self._filled(block)
                    here = block * BLOCK + int(np.argmax(numbers >= np.asarray(draws)[pattern]))
                    found = periods * self.total + here
                    return found if limit is None else min(found, limit)
            block += 1
        raise AssertionError("in a period each dataset is drawn as often as its weight")

    def _state(self, block: int) -> tuple[int, ...]:
        """Draws of each dataset before the block; the chain is extended up to there."""
        while len(self._states) <= block:
            self._states.append(self._next(self._states[-1], min(len(self._states) * BLOCK, self.total)))
        return self._states[block]

    def _next(self, state: tuple[int, ...], end: int) -> tuple[int, ...]:
        """The state after `end` draws, a block after `state`, that filling by earliest deadline arrives at."""
        begin = (len(self._states) - 1) * BLOCK
        counts, opened = [], []
        for dataset, (weight, before) in enumerate(zip(self.weights, state, strict=True)):
            due, rest = divmod(weight * end, self.total)
            counts.append(max(due, before))
            if rest and before <= due:  # its next draw may be made here, or in the next block
                release, last = due * self.total // weight, -(-(due + 1) * self.total // weight) - 1
                opened.append((max(release, begin), last, dataset))
        missing = end - sum(counts)
        waiting = sorted(opened, reverse=True)
        urgent: list[tuple[int, int]] = []
        for slot in self._free_slots(state, begin, end, missing):
            while waiting and waiting[-1][0] <= slot:
                _, last, dataset = waiting.pop()
                heapq.heappush(urgent, (last, dataset))
            counts[heapq.heappop(urgent)[1]] += 1
        return tuple(counts)

    def _free_slots(self, state: tuple[int, ...], begin: int, end: int, missing: int) -> list[int]:
        """The latest `missing` slots that draws which must lie in the block leave to others, ascending.

        From a slot s on, as many are left as there are slots, less the draws whose window lies in s .. end - 1.
        """
        slots = np.arange(end - begin, dtype=np.int64)  # from the block's begin
        left = (end - begin) - slots
        for weight, before in zip(self.weights, state, strict=True):
            due = weight * end // self.total
            if due <= before:
                continue
            drawn, rest = divmod(weight * begin, self.total)
            opening = drawn - (-(rest + weight * slots) // self.total)  # draws whose window opened before the slot
            left -= np.maximum(due - np.maximum(opening, before), 0)
        left = np.minimum.accumulate(left)
        assert left[0] >= missing >= 0
        # the last slot from which on at least j are left, for j = missing .. 1
        places = np.searchsorted(-left, -np.arange(missing, 0, -1), side="right") - 1
        return (begin + places).tolist()

    def _fill(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Dataset and number of its earlier draws, int64 [BLOCK] or fewer at the period's end, of each position."""
        ends, drawn = self._state(block + 1), list(self._state(block))
        begin, end = block * BLOCK, min((block + 1) * BLOCK, self.total)
        pattern, numbers = np.empty(end - begin, dtype=np.int64), np.empty(end - begin, dtype=np.int64)
        total, weights = self.total, self.weights
        waiting = [(drawn[i] * total // weights[i], i) for i in range(len(weights)) if drawn[i] < ends[i]]
        heapq.heapify(waiting)  # (first slot of the window, dataset)
        urgent: list[tuple[int, int]] = []  # (last slot of the window, dataset)
        for slot in range(begin, end):
            while waiting and waiting[0][0] <= slot:
                dataset = heapq.heappop(waiting)[1]
                last = -(-(drawn[dataset] + 1) * total // weights[dataset]) - 1
                heapq.heappush(urgent, (min(last, end - 1), dataset))
            last, dataset = heapq.heappop(urgent)
            assert slot <= last, "a draw missed its window"
            pattern[slot - begin], numbers[slot - begin] = dataset, drawn[dataset]
            drawn[dataset] += 1
            if drawn[dataset] < ends[dataset]:
                heapq.heappush(waiting, (drawn[dataset] * total // weights[dataset], dataset))
        return pattern, numbers


@lru_cache(maxsize=8)
def blend_pattern(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """One period of the blend: the dataset of each slot, and how often it came before in the period.

    Earliest deadline first fills the windows told of above on one machine whenever that can be done (unit tasks), and
    it can: w / W of every slot to each dataset is a fractional solution.

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
