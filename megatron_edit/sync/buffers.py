"""Buffers of the sync, kept for the next one: nothing is allocated in a step once a first sync has been made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.sync.timetable import Timetable


class BufferPool:
    """fp32 buffers by size. `taken` and `given back` must match; what is allocated stays allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, numel: int) -> torch.Tensor:
        """[numel] fp32 with any content."""
        free = self._free.get(numel)
        if free:
            return free.pop()
        self.allocated_bytes += 4 * numel
        return torch.empty(numel, dtype=torch.float32, device=self._device)

    def give_back(self, *buffers: torch.Tensor) -> None:
        """The buffers may be taken again."""
        for buffer in buffers:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def hold_at_once(self, sizes: Sequence[int]) -> None:
        """Allocates what it takes to have buffers of all `sizes` out at the same time."""
        self.give_back(*[self.take(size) for size in sizes])


def most_at_once(
    fragments: Sequence[Sequence[int]],
    placement: str,
    *,
    ahead: int = 1,
    delay: int = 0,
    timetable: Timetable | None = None,
    with_moments: bool = False,
) -> list[list[int]]:
    """Sets of buffers that one sync after the other has out at the same time, as sizes; the pool must hold each.

    fragments    sizes of the modules of each fragment, in forward order
    placement    "step", "forward" or "round", see `methods.Method`
    ahead        modules under way beyond the one that is completed ("forward")
    delay        steps between launch and update; needs the timetable, which says when each fragment is launched
    with_moments Adam's moments of a module travel with it: twice its size more
    """

    def messages(sizes: Sequence[int]) -> list[int]:
        return [*sizes, *(2 * size for size in sizes)] if with_moments else list(sizes)

    everything = [size for fragment in fragments for size in fragment]
    if delay:  # with each the masters when it was launched
        assert timetable is not None and timetable.num_fragments == len(fragments)
        starts, sets = timetable.offsets, []
        for start in starts:
            under_way = [f for f, other in enumerate(starts) if (start - other) % timetable.interval < delay]
            sets.append([size for f in under_way for size in 2 * list(fragments[f])])
        return sets
    if placement == "round":  # the average of the last round is applied module by module as this round's sets out
        return [[*everything, size] for size in everything]
    if placement == "step":
        return [messages([size]) for size in everything]
    sets = []
    for fragment in fragments:
        sets += [[*messages(fragment[: ahead + 1]), size] for size in fragment[ahead + 1 :]]  # norms of the others
        sets += [messages(fragment[i : i + ahead + 1]) for i in range(len(fragment))]
    return sets
