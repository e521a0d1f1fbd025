"""The grid of ranks: pure integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.parallel.layout import AXES, Layout, LayoutError

sizes = st.integers(1, 3)
layouts = st.builds(Layout, sync=sizes, dp=sizes, pp=sizes, cp=sizes, tp=sizes)


@given(layouts)
def test_rank_and_coordinates_are_inverse(layout: Layout) -> None:
    assert [layout.rank_of(layout.coordinates(rank)) for rank in range(layout.world_size)] == list(
        range(layout.world_size)
    )


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_slices_hold_every_rank_once(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
    for ranks in groups:
        places = [layout.coordinates(rank) for rank in ranks]
        assert all(len({getattr(p, axis) for p in places}) == 1 for axis in AXES if axis not in axes)


@given(layouts)
def test_a_replica_is_a_contiguous_block(layout: Layout) -> None:
    for index, ranks in enumerate(layout.replicas()):
        start = index * layout.replica_size
        assert ranks == list(range(start, start + layout.replica_size))


def test_tp2_pp2_s2_r2_by_hand() -> None:
    layout = Layout.from_world(16, num_replicas=2, tp=2, pp=2)
    assert layout == Layout(sync=2, dp=2, pp=2, cp=1, tp=2)
    assert layout.replicas() == [list(range(8)), list(range(8, 16))]
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("pp")[:2] == [[0, 2], [1, 3]]  # the pipeline stays inside four neighbouring ranks
    assert layout.groups("dp")[:2] == [[0, 4], [1, 5]]
    assert layout.groups("sync") == [[rank, rank + 8] for rank in range(8)]  # the sync always leaves the block
    assert layout.group_of(9, "dp", "cp", "tp") == [8, 9, 12, 13]


def test_sizes_that_do_not_divide_name_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"3 ranks .* blocks of 2 .* 2 ranks would work"):
        Layout.from_world(3, num_replicas=1, tp=2)
    with pytest.raises(LayoutError, match=r"3 replicas .* data parallel size 4 .* \[1, 2, 4\]"):
        Layout.from_world(4, num_replicas=3)
