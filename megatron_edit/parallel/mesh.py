"""Process groups of the grid. Every replica is given a world that ends at its own edge.

megatron-core's `initialize_model_parallel` is called for its model parallel groups only. What it calls data
parallel spans all replicas; the collection handed to model, optimizer and schedule is narrowed to one replica,
so that reduce-scatter, scaling, token counts, norms and found-inf are the replica's own without overriding a
gradient path.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_edit.parallel.layout import AXES, Coordinates, Layout
from megatron_edit.platform.base import Platform
from megatron_edit.platform.megatron_core import end_at_the_replica

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """The grid with this rank's groups.

    `process_groups` is what megatron-core is given. The others belong to the sync:
    `shard_group` (dp x cp of a replica: the optimizer shards over it), `norm_group` (tp x dp x cp of one stage of
    one replica: a module's squared norms are summed over it), `replica_group`, `sync_group` (one rank of each
    replica, same shard of the same layers; big messages only), `sync_control_group` (the same ranks over gloo,
    CPU tensors: norms and flags, never behind a big message) and `world_control_group` (all ranks over gloo, CPU
    tensors: metrics, evaluation) and `checkpoint_group` (the same again: a save in the background talks there while
    training goes on).
    """

    layout: Layout
    platform: Platform
    rank: int
    place: Coordinates
    process_groups: ProcessGroupCollection
    shard_group: ProcessGroup
    norm_group: ProcessGroup
    replica_group: ProcessGroup
    sync_group: ProcessGroup
    sync_control_group: ProcessGroup
    world_control_group: ProcessGroup
    checkpoint_group: ProcessGroup

    @property
    def num_replicas(self) -> int:
        """Size of the sync axis."""
        return self.layout.sync

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.place.sync

    @property
    def is_replica_leader(self) -> bool:
        """True on the first rank of each replica."""
        return self.rank % self.layout.replica_size == 0

    @property
    def is_first_stage(self) -> bool:
        """True where the embedding is."""
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is."""
        return self.place.pp == self.layout.pp - 1

    @property
    def reports_loss(self) -> bool:
        """True on one rank of each shard: its loss sums count, the tensor parallel copies' do not."""
        return self.is_last_stage and self.place.tp == 0

    def seed_dropout(self, seed: int) -> None:
        """Seeds torch and megatron-core's trackers: TP ranks alike outside the split regions, all else apart."""
        place, layout = self.place, self.layout
        stream = (place.sync * layout.dp + place.dp) * layout.pp + place.pp
        offset = seed + 100_003 * stream
        torch.manual_seed(offset)
        tensor_parallel.model_parallel_cuda_manual_seed(
            offset, tp_rank=place.tp, ep_rank=0, etp_rank=place.tp, force_reset_rng=True
        )


def build_mesh(
    layout: Layout,
    platform: Platform,
    *,
    timeout_seconds: float,
    virtual_pipeline_model_parallel_size: int | None = None,
) -> Mesh:
    """Makes all groups; collective over the world, which must be initialised with `layout.world_size` ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == layout.world_size, (world_size, layout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.cp,
        order="tp-cp-ep-pp-dp",
        num_distributed_optimizer_instances=layout.sync,
        distributed_timeout_minutes=timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    timeout = timedelta(seconds=timeout_seconds)

    def group(*axes: str, **options: Any) -> ProcessGroup:
        mine = None
        for ranks in layout.groups(*axes):  # every rank makes every group, in one order
            made = dist.new_group(ranks, timeout=timeout, **options)
            mine = made if rank in ranks else mine
        assert mine is not None
        return mine

    shard_group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    replica_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    _assert_ranks(shard_group, layout.group_of(rank, "dp", "cp"))
    _assert_ranks(replica_group, layout.group_of(rank, "dp", "pp", "cp", "tp"))

    groups = ProcessGroupCollection.use_mpu_process_groups()
    _assert_ranks(groups.tp, layout.group_of(rank, "tp"))
    _assert_ranks(groups.pp, layout.group_of(rank, "pp"))
    norm_group = group("dp", "cp", "tp")
    groups.dp = shard_group if layout.cp == 1 else group("dp")
    groups.dp_cp = groups.intra_dp_cp = shard_group
    groups.tp_dp_cp = norm_group
    groups.expt_dp = groups.intra_expt_dp
    end_at_the_replica(groups, layout.group_of(rank, "dp", "pp", "cp", "tp"), [shard_group, norm_group, groups.dp])

    return Mesh(
        layout=layout,
        platform=platform,
        rank=rank,
        place=layout.coordinates(rank),
        process_groups=groups,
        shard_group=shard_group,
        norm_group=norm_group,
        replica_group=replica_group,
        sync_group=group("sync", backend=platform.sync_backend()),
        sync_control_group=group("sync", backend="gloo"),
        world_control_group=group(*AXES, backend="gloo"),
        checkpoint_group=group(*AXES, backend="gloo"),
    )


def _assert_ranks(group: ProcessGroup, expected: list[int]) -> None:
    found = dist.get_process_group_ranks(group)
    assert found == expected, f"megatron-core's group {found} is not the slice of the grid {expected}"
