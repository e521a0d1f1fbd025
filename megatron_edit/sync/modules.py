"""One bucket = one module: megatron-core's buckets cut at module edges, and this rank's shard of each module.

A module is the embedding, one transformer layer (or its attention and its MLP, with --edit-modules sublayer), or the
head; `tables/parameters.py` says which. Each is one bucket of megatron-core's DDP on every pipeline stage and chunk,
hence one reduce-scatter, one all-gather and one sync. These buckets are changed in this file only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from megatron_edit.model.names import canonical_name
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.platform.megatron_core import layout_arguments
from megatron_edit.tables.parameters import module_key, partition_dim


class ParameterSync(Protocol):
    """What a bucket group calls when the forward pass asks for its parameters (`placements.InForward`)."""

    def complete(self, module: ModuleShard) -> None:
        """Finish a due sync of `module`: its shard of the parameters is final afterwards."""

    def launch_after(self, module: ModuleShard, *, computes: bool) -> None:
        """Start the all-reduces of the modules that follow; `computes`: `module` itself computes now."""


@dataclass
class ShardSlice:
    """The part of one parameter that this rank's optimizer shard holds."""

    name: str  # canonical, global layer number
    parameter: torch.nn.Parameter
    master: torch.Tensor  # [n] fp32, flat; fp32 training: a view into the bucket
    model: torch.Tensor  # [n] in the model's dtype, a view into the bucket's parameters
    optimizer_parameter: torch.Tensor  # key of the inner optimizer's state
    counted: bool  # False for a tensor parallel duplicate: norms leave it out
    duplicated: bool  # all tensor parallel ranks hold the same here, the counted one too
    parameter_start: int  # first element of this slice in the flat parameter


@dataclass(frozen=True)
class Run:
    """Slices that lie one behind the other in memory, taken as one: fewer and larger operations on a module."""

    numel: int
    master: torch.Tensor  # [numel] fp32
    model: torch.Tensor | None  # [numel] in the model's dtype; None: it is the master
    counted: bool


def runs_of(slices: list[ShardSlice]) -> list[Run]:
    """The slices in order, joined wherever masters and model go on without a gap (fp32 training, sizes of 64 n)."""

    def follows(second: ShardSlice, first: ShardSlice) -> bool:
        return (
            second.counted == first.counted
            and second.master.untyped_storage().data_ptr() == first.master.untyped_storage().data_ptr()
            and second.master.data_ptr() == first.master.data_ptr() + first.master.nbytes
            and second.model.data_ptr() == first.model.data_ptr() + first.model.nbytes
        )

    groups: list[list[ShardSlice]] = []
    for piece in slices:
        if groups and follows(piece, groups[-1][-1]):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    runs = []
    for group in groups:
        numel = sum(piece.master.numel() for piece in group)
        master, model = (flat.as_strided((numel,), (1,)) for flat in (group[0].master, group[0].model))
        runs.append(Run(numel, master, None if model.data_ptr() == master.data_ptr() else model, group[0].counted))
    return runs


@dataclass
class ModuleShard:
    """This rank's shard of one module: slices in bucket order, duplicated ones last, together `numel` elements."""

    key: str  # "embedding", "layers.3", "head"
    index: int  # position in forward order over all chunks of this rank
    bucket_group: ModuleBucketGroup
    slices: list[ShardSlice] = field(default_factory=list)
    position: int = 0  # in forward order over the whole model; a tied matrix has one on both its stages
    fragment: int = 0  # modules of one fragment are synchronised after the same step

    @cached_property
    def numel(self) -> int:
        """Elements of this rank's shard; 0 where a small module's padding falls to this rank."""
        return sum(piece.master.numel() for piece in self.slices)

    @cached_property
    def num_duplicated(self) -> int:
        """Elements at the end that all tensor parallel ranks hold."""
        return sum(piece.master.numel() for piece in self.slices if piece.duplicated)

    @cached_property
    def runs(self) -> list[Run]:
        """The slices, joined where they are contiguous; the slices must be complete."""
        return runs_of(self.slices)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` [numel] cut like the slices."""
        return list(flat.split([piece.master.numel() for piece in self.slices])) if self.slices else []

    def _runs(self, *flats: torch.Tensor) -> Iterator[Any]:
        """Each run with its part of each of `flats`, [numel] each."""
        if len(self.runs) == 1:
            yield self.runs[0], *flats
        elif self.runs:
            sizes = [run.numel for run in self.runs]
            yield from zip(self.runs, *(flat.split(sizes) for flat in flats), strict=True)

    def copy_masters_to(self, flat: torch.Tensor) -> None:
        """flat [numel] fp32 := the masters."""
        for run, view in self._runs(flat):
            view.copy_(run.master)

    def write_masters(self, flat: torch.Tensor) -> None:
        """Masters and the model's own shard := flat [numel] fp32."""
        for run, view in self._runs(flat):
            run.master.copy_(view)
            self._copy_to_model(run)

    def add_local_progress(self, synchronised: torch.Tensor, at_launch: torch.Tensor) -> None:
        """Masters := synchronised + (masters - at_launch), [numel] fp32 each: steps since the launch stay (ours)."""
        for run, new, old in self._runs(synchronised, at_launch):
            run.master.sub_(old).add_(new)
            self._copy_to_model(run)

    def mix_with_local(self, synchronised: torch.Tensor, alpha: float) -> None:
        """Masters := alpha masters + (1 - alpha) synchronised (Streaming DiLoCo, arXiv 2501.18512)."""
        for run, new in self._runs(synchronised):
            run.master.mul_(alpha).add_(new, alpha=1 - alpha)
            self._copy_to_model(run)

    @staticmethod
    def _copy_to_model(run: Run) -> None:
        if run.model is not None:
            run.model.copy_(run.master)

    def write_pseudo_gradient(self, anchor: torch.Tensor, out: torch.Tensor) -> None:
        """out [numel] fp32 := masters - anchor [numel]: Delta of arXiv 2412.07210, from fp32 masters."""
        for run, anchor_view, out_view in self._runs(anchor, out):
            torch.sub(run.master, anchor_view, out=out_view)

    def counted_square_sum(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum of squares of flat [numel], without tensor parallel duplicates; 0-d fp64 on flat's device."""
        views = [view for run, view in self._runs(flat) if run.counted]
        if not views:
            return torch.zeros((), dtype=torch.float64, device=flat.device)
        return torch.stack(torch._foreach_norm(views)).double().square().sum()


class ModuleEdges:
    """Stands in for megatron-core's bucket size and closes a bucket at each module's last parameter.

    megatron-core asks `numel >= bucket_size` once per parameter, in reverse order of registration; Python turns
    that into `bucket_size <= numel`.
    """

    def __init__(self, keys_in_reverse_order: list[str]) -> None:
        self._keys = keys_in_reverse_order
        self._next = 0

    def __le__(self, numel: int) -> bool:
        here, self._next = self._next, self._next + 1
        return self._next == len(self._keys) or self._keys[here] != self._keys[self._next]


class _Finished:
    """A communication handle with nothing to wait for: a shard group of one rank."""

    def wait(self) -> None:
        return None


class GradientReducer:
    """Averages gradients over the replicas too, while `enabled`: warm-up and `baseline`.

    The all-reduce of a bucket's shard over the sync group is issued when the next bucket's reduce-scatter
    starts, by count and not by completion, so that all ranks issue in one order; it overlaps with backward.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.enabled = False
        self._mesh = mesh
        self._scattering: deque[ModuleBucketGroup] = deque()
        self._reducing: dict[ModuleBucketGroup, list[dist.Work]] = {}

    def reduce_scatter_started(self, group: ModuleBucketGroup) -> None:
        """Issue the all-reduce of every earlier bucket."""
        while self._scattering:
            self._all_reduce(self._scattering.popleft())
        self._scattering.append(group)

    def wait(self, group: ModuleBucketGroup) -> None:
        """Gradients of `group` are summed over all replicas afterwards."""
        while self._scattering:
            self._all_reduce(self._scattering.popleft())
        for work in self._reducing.pop(group, []):
            work.wait()

    def _all_reduce(self, group: ModuleBucketGroup) -> None:
        platform = self._mesh.platform
        platform.wait_event(platform.record_event(), platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            if group.grad_reduce_handle is not None:  # None: the first batch waits for it by itself
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = _Finished()  # a second wait would write gloo's result once more
            self._reducing[group] = [
                dist.all_reduce(shard, group=self._mesh.sync_group, async_op=True)
                for shard in group.gradient_shards()
            ]


class ModuleBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose parameter sync completes this module's EDiT sync and launches the next ones."""

    sync: ParameterSync | None = None
    module: ModuleShard
    reducer: GradientReducer
    grad_reduce_handle: Any

    @classmethod
    def adopt(cls, group: _ParamAndGradBucketGroup, reducer: GradientReducer) -> ModuleBucketGroup:
        """Turns a bucket group that megatron-core's DDP built into this class, in place."""
        assert len(group.buckets) == 1, "one bucket per module"
        group.__class__ = cls
        assert isinstance(group, ModuleBucketGroup)
        group.reducer = reducer
        return group

    @property
    def bucket(self) -> _ParamAndGradBucket:
        """The one bucket."""
        return self.buckets[0]

    @property
    def shard_group_size(self) -> int:
        """Ranks of the shard group."""
        return self.intra_distributed_optimizer_instance_size

    def gradient_shards(self) -> list[torch.Tensor]:
        """This rank's shard of the bucket's gradients, flat."""
        shard = self.bucket.grad_data.numel() // self.shard_group_size
        start = shard * self.intra_distributed_optimizer_instance_rank
        return [self.bucket.grad_data[start : start + shard]]

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Complete this module's sync, gather it in the shard group, launch the sync of the modules after it."""
        if self.sync is not None:
            self.sync.complete(self.module)
        if self.shard_group_size > 1:
            super().start_param_sync(force_sync=force_sync)
        else:  # nothing to gather, and no need to run ahead of the module that computes
            self.param_gather_dispatched = True
        if self.sync is not None:
            self.sync.launch_after(self.module, computes=self.shard_group_size == 1)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce-scatter in the shard group; over the replicas too while the reducer is enabled."""
        already_started = self.is_first_batch and self.grad_reduce_handle is not None
        if self.shard_group_size > 1:
            super().start_grad_sync(force_all_reduce=force_all_reduce)
        else:
            assert self.bucket.gradient_scaling_factor == 1.0, "the loss is a sum over tokens"
            self.grad_reduce_handle = _Finished()
        if self.reducer.enabled and not already_started:
            self.reducer.reduce_scatter_started(self)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait until this module's gradients are reduced."""
        if self.reducer.enabled and not self.is_first_batch:
            self.reducer.wait(self)
            super().finish_grad_sync(force_all_reduce=force_all_reduce)
        else:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)
            if self.reducer.enabled:
                self.reducer.wait(self)


class ReplicaDataParallel(DistributedDataParallel):
    """megatron-core's DDP inside one replica, one bucket per module on every stage and chunk."""

    def __init__(self, *, reducer: GradientReducer, modules: str = "layer", **arguments: Any) -> None:
        self.modules_are = modules
        ddp_config = arguments["ddp_config"]
        assert ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather
        assert ddp_config.overlap_grad_reduce and ddp_config.num_distributed_optimizer_instances == 1
        module = arguments["module"]
        layout = layout_arguments(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            self._edges_of(module),
            arguments["pg_collection"].intra_dp_cp.size(),
            ddp_config,
        )
        super().__init__(**arguments, **layout)
        assert not self.expert_parallel_bucket_groups, "mixture of experts is refused by the checks"
        for group in self.bucket_groups:
            ModuleBucketGroup.adopt(group, reducer)

    def key_of(self, name: str) -> str:
        """Module of the sync that the parameter of `named_parameters()` belongs to."""
        return self._key_in(self.module, name)

    def _key_in(self, module: torch.nn.Module, name: str) -> str:
        return module_key(canonical_name(module, name), self.modules_are)

    def _edges_of(self, module: torch.nn.Module) -> ModuleEdges:
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        assert len({p.dtype for _, p in parameters}) == 1, "one dtype, one buffer"
        return ModuleEdges([self._key_in(module, name) for name, _ in reversed(parameters)])

    @property
    def bucket_size(self) -> ModuleEdges:
        """What megatron-core compares bucket sizes with: edges of modules, whatever the stage."""
        return self._edges_of(self.module)

    @bucket_size.setter
    def bucket_size(self, value: int | None) -> None:
        """megatron-core's own idea of a size (none beyond the first stage) is not used."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """All modules, in forward order on every path, so that the sync group sees one order."""
        for group in reversed(self.bucket_groups):
            group.start_param_sync(force_sync=force_sync)


def collect_modules(
    chunks: list[ReplicaDataParallel], optimizer: MegatronOptimizer, mesh: Mesh
) -> list[ModuleShard]:
    """This rank's shard of each module, in forward order over its chunks."""
    owned: dict[torch.nn.Parameter, tuple[torch.Tensor, range, range]] = {}
    for part in optimizer.chained_optimizers:
        pairs = [
            *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
            *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
        ]
        for parameters, masters in pairs:
            for parameter, master in zip(parameters, masters, strict=True):
                ranges = part._get_model_param_range_map(parameter)
                bucket_range, inside = ranges["gbuf_world_in_bucket"], ranges["param"]
                owned[parameter] = (
                    master, range(bucket_range.start, bucket_range.end), range(inside.start, inside.end)
                )  # fmt: skip

    modules: list[ModuleShard] = []
    for chunk in chunks:
        names = {p: canonical_name(chunk.module, n) for n, p in chunk.module.named_parameters()}
        key_of = {p: chunk.key_of(n) for n, p in chunk.module.named_parameters()}
        for group in reversed(chunk.bucket_groups):
            keys = {key_of[p] for p in group.bucket.params_list}
            assert len(keys) == 1, f"a bucket crosses modules: {sorted(keys)}"
            module = ModuleShard(key=keys.pop(), index=len(modules), bucket_group=group)
            for parameter in group.bucket.params_list:
                if parameter not in owned:
                    continue
                master, in_bucket, in_parameter = owned[parameter]
                module.slices.append(
                    ShardSlice(
                        name=names[parameter],
                        parameter=parameter,
                        master=master.detach().view(-1),
                        model=group.bucket.param_data.view(-1)[in_bucket.start : in_bucket.stop],
                        optimizer_parameter=master,
                        counted=param_is_not_tensor_parallel_duplicate(parameter, mesh.process_groups.tp),
                        parameter_start=in_parameter.start,
                        duplicated=mesh.layout.tp > 1 and partition_dim(names[parameter]) is None,
                    )
                )
            module.slices.sort(key=lambda piece: piece.duplicated)
            group.module = module
            modules.append(module)
    return modules
