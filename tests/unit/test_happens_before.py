"""Vector clocks and byte ranges: what is ordered, what overlaps, what is still in use."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.testing.streams.happens_before import Memory, Timeline, ranges_of


def ranges(view: torch.Tensor) -> list[tuple[int, int]]:
    return ranges_of(tuple(view.shape), view.stride(), int(view.storage_offset()), view.itemsize)


def bytes_of(view: torch.Tensor) -> set[int]:
    """By counting: the storage's bytes that the view's elements lie on."""
    numbers = torch.arange(view.untyped_storage().nbytes() // view.itemsize)
    elements = numbers.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()
    return {element * view.itemsize + byte for element in elements for byte in range(view.itemsize)}


@pytest.mark.parametrize(
    ("view", "runs"),
    [
        (lambda t: t, 1),
        (lambda t: t[1], 1),
        (lambda t: t.permute(2, 0, 1), 1),
        (lambda t: t[:, :, 1:3], 12),
        (lambda t: t[:, 1:], 3),
        (lambda t: t[..., 0], 12),
        (lambda t: t[:, :1].expand(3, 4, 5), 3),
        (lambda t: t.view(-1).unfold(0, 10, 5), 1),
        (lambda t: t[:0], 0),
        (lambda t: t[2, 3, 4], 1),
    ],
)
def test_ranges_are_the_bytes_of_a_view(view, runs: int) -> None:
    taken = view(torch.empty(3, 4, 5))
    found = ranges(taken)
    assert len(found) == runs
    assert {byte for start, stop in found for byte in range(start, stop)} == bytes_of(taken)


def work(line: Timeline):
    return line.work(lambda: "work")


def test_a_write_races_with_what_is_not_waited_for() -> None:
    one, other, memory = Timeline("one"), Timeline("other"), Memory()
    written = work(one)
    assert memory.use(written, [(0, 8)], writes=True) == []
    assert memory.use(work(other), [(8, 16)], writes=True) == [], "beside it"
    assert memory.use(work(other), [(4, 12)], writes=False) == [written]
    other.wait(one.now())
    assert memory.use(work(other), [(0, 8)], writes=True) == []


def test_reads_race_with_writes_only() -> None:
    one, other, memory = Timeline("one"), Timeline("other"), Memory()
    read = work(one)
    memory.use(read, [(0, 8)], writes=False)
    assert memory.use(work(other), [(0, 8)], writes=False) == []
    assert memory.use(work(other), [(7, 9)], writes=True) == [read]


def test_an_event_orders_what_was_given_before_it_was_recorded() -> None:
    one, other, third, memory = Timeline("one"), Timeline("other"), Timeline("third"), Memory()
    memory.use(work(one), [(0, 4)], writes=True)
    event = one.now()
    late = work(one)
    memory.use(late, [(4, 8)], writes=True)
    other.wait(event)
    third.wait(other.now())  # by way of the other
    assert memory.use(work(third), [(0, 8)], writes=False) == [late]


def test_memory_is_in_use_until_its_home_has_waited_or_knows_of_the_use() -> None:
    home, other = Timeline("home"), Timeline("other")
    memory, kept = Memory(home), Memory(home)
    used = work(other)
    memory.use(used, [(0, 4)], writes=False)
    kept.use(used, [(0, 4)], writes=False)
    kept.keep_for(other)
    assert memory.in_use_elsewhere() == [used] and kept.in_use_elsewhere() == []
    home.wait(other.now())
    assert memory.in_use_elsewhere() == []
