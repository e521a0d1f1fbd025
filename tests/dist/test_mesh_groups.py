"""What megatron-core is given of a replica's groups ends at the replica's edge, whatever its release puts in."""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist

from megatron_edit.platform.megatron_core import end_at_the_replica
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import tiny_config, tiny_mesh

LAYOUT = {"edit_num_replicas": 2, "tensor_model_parallel_size": 2}


def groups_of(rank: int, world_size: int) -> tuple[list[int], dict[str, list[int]]]:
    """Ranks of the replica, and of every group in the collection."""
    mesh = tiny_mesh(tiny_config(world_size, **LAYOUT))
    groups = {
        name: dist.get_process_group_ranks(group)
        for name, group in vars(mesh.process_groups).items()
        if isinstance(group, dist.ProcessGroup)
    }
    return mesh.layout.group_of(rank, "dp", "pp", "cp", "tp"), groups


def test_no_group_reaches_beyond_the_replica() -> None:
    for replica, groups in run_ranks(groups_of, 8):
        assert {"dp", "dp_cp", "tp_dp_cp", "tp", "pp"} <= groups.keys()
        wide = {name for name, ranks in groups.items() if not set(ranks) <= set(replica)}
        assert wide <= {"inter_dist_opt"}  # what joins replicas by its meaning
        assert groups["dp_cp"] == [rank for rank in replica if rank % 2 == groups["dp_cp"][0] % 2]


def narrow(rank: int, world_size: int) -> tuple[dict[str, list[int]], str]:
    """A collection with an unknown wide group: what becomes of it, and what is said without a twin inside."""
    mesh = tiny_mesh(tiny_config(world_size, **LAYOUT))
    replica = mesh.layout.group_of(rank, "dp", "pp", "cp", "tp")

    def collection() -> SimpleNamespace:
        return SimpleNamespace(of_a_later_release=mesh.world_control_group, tp=mesh.process_groups.tp, unused=None)

    groups, refusal = collection(), ""
    end_at_the_replica(groups, replica, [mesh.norm_group])
    try:
        end_at_the_replica(collection(), replica, [mesh.shard_group])
    except RuntimeError as error:
        refusal = str(error)
    return {name: dist.get_process_group_ranks(group) for name, group in vars(groups).items() if group}, refusal


def test_an_unknown_wide_group_is_narrowed_or_named() -> None:
    for rank, (groups, refusal) in enumerate(run_ranks(narrow, 8)):
        first = rank // 4 * 4
        assert groups == {"of_a_later_release": list(range(first, first + 4)), "tp": [rank // 2 * 2, rank // 2 * 2 + 1]}
        assert "of_a_later_release" in refusal and "reaches beyond the replica" in refusal
