"""Which uses of memory are ordered, and which are not: vector clocks, and who used each byte last. No torch.

A *timeline* is whatever runs its work in order: a stream, the stream of a process group, a thread of the host. Each
counts its own work, and knows how much of the others' is over before its next piece begins. Two uses of a byte, one of
them a write, on different timelines, of which neither knows the other, are a race (Lamport 1978, Mattern 1988).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


class Timeline:
    """Work in order. `clock`: of each timeline, itself too, how much is over before the next work here begins."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Timeline, int] = {}

    def work(self, describe: Callable[[], str]) -> Work:
        """One more piece of work. `describe` is called if it is part of a race."""
        time = self.clock[self] = self.clock.get(self, 0) + 1
        return Work(self, time, describe)

    def now(self) -> dict[Timeline, int]:
        """The clock after all that was given to it: what an event records."""
        return dict(self.clock)

    def wait(self, clock: Mapping[Timeline, int]) -> None:
        """What comes next begins after all that `clock` knows."""
        for timeline, time in clock.items():
            if time > self.clock.get(timeline, 0):
                self.clock[timeline] = time

    def knows(self, work: Work) -> bool:
        """Whether `work` is over before the next work here begins."""
        return self.clock.get(work.timeline, 0) >= work.time


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, a copy, a collective."""

    timeline: Timeline
    time: int
    describe: Callable[[], str]

    def __str__(self) -> str:
        return f"{self.describe()}, on {self.timeline.name}"


@dataclass(slots=True)
class _Bytes:
    """The last uses of some neighbouring bytes."""

    write: Work | None = None
    reads: dict[Timeline, Work] = field(default_factory=dict)  # after the write


class Memory:
    """One allocation. `home`: the timeline on which it was allocated, None on the host."""

    def __init__(self, home: Timeline | None = None) -> None:
        self.home = home
        self._starts = [0]  # of the runs of bytes that have been used alike; the last one has no end
        self._bytes = [_Bytes()]
        self._last: dict[Timeline, Work] = {}
        self._kept_for: set[Timeline] = set()

    def use(self, work: Work, ranges: Iterable[tuple[int, int]], *, writes: bool) -> list[Work]:
        """Notes that `work` reads or writes these bytes, [start, stop) each; earlier work that it races with."""
        self._last[work.timeline] = work
        races = []
        for start, stop in ranges:
            first, end = self._cut(start), self._cut(stop)
            for run in self._bytes[first:end]:
                before = [run.write, *run.reads.values()] if writes else [run.write]
                races += [w for w in before if w and w.timeline is not work.timeline and not work.timeline.knows(w)]
                run.reads[work.timeline] = work
            if writes and end > first:
                self._starts[first:end], self._bytes[first:end] = [start], [_Bytes(work)]
        return races

    def _cut(self, at: int) -> int:
        """Index of the run that begins at byte `at`, which is cut off the one before."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            before = self._bytes[index - 1]
            self._starts.insert(index, at)
            self._bytes.insert(index, _Bytes(before.write, dict(before.reads)))
        return index

    def keep_for(self, timeline: Timeline) -> None:
        """It is not given to others before `timeline` has done what it was given so far (`record_stream`)."""
        self._kept_for.add(timeline)

    def in_use_elsewhere(self) -> list[Work]:
        """Work that may still use it when it is given back now and the next work of `home` takes it."""
        home = self.home
        if home is None:
            return []
        return [w for line, w in self._last.items() if line not in {home, *self._kept_for} and not home.knows(w)]


def ranges_of(shape: tuple[int, ...], strides: tuple[int, ...], start: int, item: int) -> list[tuple[int, int]]:
    """Bytes of a view, as few [start, stop) as there are runs without a gap; at most 4096, else one over them all.

    `strides` and `start` (of its first element) in elements of `item` bytes.
    """
    if 0 in shape:
        return []
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride)
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size in dims:
        if not outer and stride <= run:
            run += (size - 1) * stride
        else:
            outer.append((stride, size))
    offsets = [0]
    for stride, size in outer:
        if len(offsets) * size > 4096:
            span = run + sum((size - 1) * stride for stride, size in outer)
            return [(start * item, (start + span) * item)]
        offsets = [offset + i * stride for i in range(size) for offset in offsets]
    return [((start + offset) * item, (start + offset + run) * item) for offset in offsets]
