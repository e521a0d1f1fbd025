"""Updates since the last sync, of modules and of fragments, through syncs that are made, put off or fail."""

from __future__ import annotations

from megatron_edit.sync.counts import SyncCounts


def counts_after(*steps: bool) -> SyncCounts:
    counts = SyncCounts([0, 0, 1, 1], 2)
    for updated in steps:
        counts.step(updated)
    return counts


def test_steps_that_change_nothing_do_not_count() -> None:
    counts = counts_after(True, False, True)
    assert [counts.since(module) for module in range(4)] == [2] * 4 and counts.of_fragments == [2, 2]


def test_a_sync_of_one_fragment_leaves_the_other() -> None:
    counts = counts_after(True, True)
    counts.launched([1])
    counts.step(True)
    assert [counts.since(module) for module in range(4)] == [3, 3, 1, 1] and counts.of_fragments == [3, 1]


def test_a_sync_that_failed_for_a_module_counts_for_the_others_alone() -> None:
    counts = counts_after(True, True)
    since = counts.since(2)
    counts.launched([0, 1])
    counts.step(True)
    counts.not_applied(2, since)
    assert [counts.since(module) for module in range(4)] == [1, 1, 3, 1] and counts.of_fragments == [1, 3]


def test_goes_on_from_saved_counts_and_from_those_of_other_fragments() -> None:
    counts = counts_after(True)
    counts.restart([5, 3])
    counts.step(True)
    assert counts.of_fragments == [6, 4]
    counts.restart([5, 3, 1])
    assert counts.of_fragments == [5, 5]
