"""When the parts of a model synchronise, for methods that count steps. Integers alone: no torch, no settings.

The trigger, --dry-run, the sizes of the sync's buffers and the check of slowmo's learning rate all ask here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.tables.methods import Method


@dataclass(frozen=True)
class Timetable:
    """A sync every `interval` steps; fragment f of F at an offset of its own inside the interval.

    The interval is counted from the end of the warm-up (ours: the sources say "every tau steps" only). With local
    steps s = 1, 2, ..., fragment f is due where s mod interval = floor(f interval / F): fragment 0 after interval,
    2 interval, ..., the others spread evenly before it (Streaming DiLoCo, arXiv 2501.18512; the offsets are ours). With
    more fragments than steps several share a step.

    interval       tau, optimizer steps, at least 1
    num_fragments  F, at least 1
    warmup_end     last step of the synchronous warm-up, 0 without one; steps are counted over the whole run, from 1
    Raises ValueError for numbers out of range.
    """

    interval: int
    num_fragments: int = 1
    warmup_end: int = 0

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"sync interval must be at least 1 step, got {self.interval}; try 128")
        if self.num_fragments < 1:
            raise ValueError(f"the number of fragments must be at least 1, got {self.num_fragments}; try 1")

    @property
    def offsets(self) -> list[int]:
        """Of each fragment, steps after the start of an interval; 0 stands for its end."""
        return [fragment * self.interval // self.num_fragments for fragment in range(self.num_fragments)]

    def due_after(self, step: int) -> tuple[int, ...]:
        """Fragments that are due after `step`; none in the warm-up."""
        local = step - self.warmup_end
        if local <= 0:
            return ()
        return tuple(f for f, offset in enumerate(self.offsets) if offset == local % self.interval)

    def count_of(self, fragment: int, step: int) -> int:
        """How often `fragment` has been due up to `step`, this step included."""
        local, offset = max(0, step - self.warmup_end), self.offsets[fragment]
        return (local - offset) // self.interval + int(offset > 0)

    def syncs_in(self, after: int, until: int) -> int:
        """Steps s, after < s <= until, after which something is due: each is one sync."""
        return self._syncs_until(until) - self._syncs_until(min(after, until))

    def is_due_for_all(self, step: int) -> bool:
        """Whether after `step` no fragment has local steps that no sync has carried to the other replicas."""
        return step <= self.warmup_end or len(self.due_after(step)) == self.num_fragments

    def _syncs_until(self, step: int) -> int:
        whole, rest = divmod(max(0, step - self.warmup_end), self.interval)
        places = set(self.offsets)
        return whole * len(places) + sum(0 < place <= rest for place in places)


def fragments_of(method: Method, asked: int | None, num_modules: int, interval: int) -> int:
    """Fragments of a model of `num_modules`: as asked for, or every module one as far as the interval has steps."""
    if method.trigger != "staggered":
        return 1
    return asked or min(num_modules, interval)
