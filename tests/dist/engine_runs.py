"""One run of the engine on a tiny Llama, described by a `Run`, and what each rank saw of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.config.schema import Config
from megatron_edit.model.names import canonical_name
from megatron_edit.model.sharding import gather_full_parameters
from megatron_edit.tables.parameters import partition_dim
from megatron_edit.parallel.layout import Coordinates
from megatron_edit.sync.event import SyncDecision
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import (
    VOCABULARY,
    rank_microbatches,
    tiny_config,
    tiny_global_batch,
    tiny_replica,
)
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep

Batch = dict[str, Tensor]
Parameters = dict[str, Tensor]
# spoil(iteration, replica, name, value, anchor): may change `value` in place, element by element, after the step
# and before a sync; value and anchor are shards in the engine and whole tensors in the reference
Spoil = Callable[[int, int, str, Tensor, Tensor], None]


@dataclass(frozen=True)
class Run:
    """A layout with its settings, the data, and what goes wrong. Settings are on top of `tiny.TINY`."""

    world_size: int
    settings: Mapping[str, Any]
    steps: int = 7
    data: Callable[[Config, int], Batch] = tiny_global_batch  # of (config, iteration)
    spoil: Spoil | None = None
    fault: Callable[[Replica], None] | None = None  # breaks the replica on purpose, before the first step
    snapshots: bool = True  # whether whole tensors are kept
    # Triggers by time: [interval][replica], steps from one sync to the next, instead of a clock and of `steps`.
    steps_of_intervals: tuple[tuple[int, ...], ...] | None = None

    @property
    def config(self) -> Config:
        """The settings as the engine and the reference are given them."""
        return tiny_config(self.world_size, train_iters=self.steps, **self.settings)

    def changed(self, world_size: int | None = None, **settings: Any) -> Run:
        """The same run with other settings."""
        names = ("steps", "data", "spoil", "fault", "snapshots", "steps_of_intervals")
        fields = {key: getattr(self, key) for key in names}
        return Run(world_size or self.world_size, {**self.settings, **settings}, **fields)


masked_batch = partial(tiny_global_batch, masked=True)


def learning_rate(config: Config, iteration: int) -> float:
    """Falls a little with every step, so that a rate of the wrong step shows."""
    return config.optimizer.lr * (1 - 0.02 * (iteration - 1))


@dataclass
class SyncView:
    """One sync as one rank saw it; columns of the decision are `keys`, the modules of its stage."""

    iteration: int
    keys: list[str]
    decision: SyncDecision
    clip_coefficients: list[float] | None = None


@dataclass
class RankRecord:
    """What one rank saw. Whole tensors (`snapshots`) are kept by the first rank of each replica only."""

    place: Coordinates
    keys: list[str]
    losses: list[tuple[float, float]] = field(default_factory=list)  # (loss sum, tokens) of each step
    grad_norms: list[float | None] = field(default_factory=list)  # None where nothing was updated
    updated: list[bool] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)  # end of each step, time.monotonic, one clock for all ranks
    syncs: list[SyncView] = field(default_factory=list)
    snapshots: dict[str, Parameters] = field(default_factory=dict)
    # At the end: hashes of what this rank holds, see `digests`.
    digests: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # lines for the user
    # At the end: whether the whole model's weights on this rank are the whole masters, cast to its dtype.
    model_is_cast_of_masters: bool = False


def run_engine(run: Run, **options: Any) -> list[RankRecord]:
    """The records of all ranks."""
    return run_ranks(_train, run.world_size, run, **options)


def _train(rank: int, world_size: int, run: Run) -> RankRecord:
    config = run.config
    replica = tiny_replica(config)
    if run.fault is not None:
        run.fault(replica)
    return train(replica, run)


def train(replica: Replica, run: Run) -> RankRecord:
    """Takes the steps of `run`, completes a due sync, and tells what happened."""
    engine, mesh, config = replica.engine, replica.mesh, replica.config
    record = RankRecord(mesh.place, [module.key for module in engine.modules])
    step = TrainStep(replica)
    keep = partial(_keep, replica, record) if run.snapshots else lambda name, flats: None
    iteration = 0

    if run.steps_of_intervals is not None:
        _replace_clock(replica, run.steps_of_intervals)

    def after_step(updated: bool = True, **arguments: Any) -> Any:
        if run.spoil is not None:
            _spoil(replica, run.spoil, iteration)
        if _sync_is_due(replica, arguments.get("asked", False)):
            keep(f"before sync {engine.trigger.syncs + 1}", masters(replica))
        return type(engine).after_step(engine, updated, **arguments)

    engine.after_step = after_step  # type: ignore[method-assign]
    keep("initial", masters(replica))
    steps = run.steps
    if run.steps_of_intervals is not None:
        steps = sum(counts[replica.mesh.replica] for counts in run.steps_of_intervals)
    for iteration in range(1, steps + 1):
        microbatches = rank_microbatches(config, mesh, run.data(config, iteration))
        outcome = step.run(microbatches, learning_rate(config, iteration), engine.trigger.wants_sync)
        record.losses.append((float(outcome.loss_sum), float(outcome.tokens)))
        record.grad_norms.append(outcome.grad_norm)
        record.updated.append(outcome.updated)
        record.finished.append(time.monotonic())
        _note_sync(replica, record, iteration)
    engine.drain()
    _note_sync(replica, record, iteration)
    record.warnings = engine.take_warnings()
    keep("parameters", masters(replica))
    if engine.state.anchor:
        keep("anchor", engine.state.anchor)
        keep("outer momentum", engine.state.outer_momentum)
    for name in ("exp_avg", "exp_avg_sq"):
        keep(name, inner_moments(replica, name))
    for chunk in replica.chunks:
        chunk.start_param_sync(force_sync=True)
    record.digests = digests(replica)
    record.model_is_cast_of_masters = _model_is_cast_of_masters(replica)
    return record


def _sync_is_due(replica: Replica, asked: bool) -> bool:
    trigger = replica.engine.trigger
    return trigger.warmup_end is not None and bool(trigger.due_after(trigger.steps + 1, asked))


def _replace_clock(replica: Replica, steps_of_intervals: tuple[tuple[int, ...], ...]) -> None:
    """The replica wants to synchronise after so many steps of its own, whatever the time."""
    trigger, ends = replica.engine.trigger, set()
    for counts in steps_of_intervals:
        ends.add(max(ends, default=0) + counts[replica.mesh.replica])
    trigger.wants_sync = lambda: trigger.steps + 1 in ends  # type: ignore[method-assign]


def _note_sync(replica: Replica, record: RankRecord, iteration: int) -> None:
    engine = replica.engine
    decision, results = engine.last_decision, engine.take_results()
    if decision is not None and decision.index > len(record.syncs):
        record.syncs.append(SyncView(iteration, record.keys, decision))
    for result in results:
        view = record.syncs[result.decision.index - 1]
        assert view.clip_coefficients is None, "a sync is reported twice"
        view.clip_coefficients = result.clip_coefficients.tolist()


@torch.no_grad()
def _spoil(replica: Replica, spoil: Spoil, iteration: int) -> None:
    """Where the method keeps no anchor, the parameters themselves are given in its place."""
    engine = replica.engine
    if engine.trigger.in_warmup:
        return
    anchors = engine.state.anchor
    for module in engine.modules:
        views = module.views(anchors[module.index]) if anchors else [piece.master for piece in module.slices]
        for piece, anchor in zip(module.slices, views, strict=True):
            spoil(iteration, replica.mesh.replica, piece.name, piece.master, anchor)


def _keep(replica: Replica, record: RankRecord, name: str, flats: list[Tensor]) -> None:
    whole = full_tensors(replica, flats)
    if replica.mesh.is_replica_leader:
        record.snapshots[name] = whole


# ---- shards and whole tensors ------------------------------------------------------------------------------------


def masters(replica: Replica) -> list[Tensor]:
    """fp32 masters, [numel] of each module."""
    return [_joined(module, [piece.master for piece in module.slices]) for module in replica.engine.modules]


def model_shards(replica: Replica) -> list[Tensor]:
    """The model's own weights where this rank's shard lies, [numel] of each module, in the model's dtype."""
    return [_joined(module, [piece.model for piece in module.slices]) for module in replica.engine.modules]


def inner_moments(replica: Replica, name: str) -> list[Tensor]:
    """The inner optimizer's `exp_avg` or `exp_avg_sq`, [numel] of each module; zeros before the first step."""
    (optimizer,) = (part.optimizer for part in replica.optimizer.chained_optimizers)
    return [
        _joined(
            module,
            [
                optimizer.state.get(piece.optimizer_parameter, {}).get(name, torch.zeros_like(piece.master))
                for piece in module.slices
            ],
        )
        for module in replica.engine.modules
    ]


def _joined(module: ModuleShard, pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces]) if pieces else torch.empty(0)


def full_tensors(replica: Replica, flats: list[Tensor]) -> Parameters:
    """Whole tensors by canonical name from shards [numel] of each module. Collective over the replica."""
    local: dict[torch.nn.Parameter, Tensor] = {}
    for chunk in replica.chunks:
        for parameter in chunk.parameters():
            local[parameter] = torch.zeros(parameter.shape, dtype=torch.float32)
    for module, flat in zip(replica.engine.modules, flats, strict=True):
        for piece, view in zip(module.slices, module.views(flat), strict=True):
            start = piece.parameter_start
            local[piece.parameter].view(-1)[start : start + view.numel()] = view
    for tensor in local.values():
        dist.all_reduce(tensor, group=replica.mesh.shard_group)
    groups = replica.mesh.process_groups
    return gather_full_parameters(replica.chunks, VOCABULARY, groups.tp, groups.pp, read=lambda p: local[p])


def _model_is_cast_of_masters(replica: Replica) -> bool:
    groups = replica.mesh.process_groups
    model = gather_full_parameters(replica.chunks, VOCABULARY, groups.tp, groups.pp)
    whole = full_tensors(replica, masters(replica))
    return all(same_bytes([value], [whole[name].to(value.dtype)]) for name, value in model.items())


def digests(replica: Replica) -> dict[str, str]:
    """Hashes of this rank's shards (masters, model, anchor, outer momentum; the embedding's where it is), of
    the weights that it computes with (weights), and of those among them that tensor parallelism does not cut
    (replicated)."""
    engine, named = replica.engine, {}
    for chunk in replica.chunks:
        named.update({canonical_name(chunk, name): parameter for name, parameter in chunk.named_parameters()})
    own = masters(replica)
    groups = {
        "masters": own,
        "model": model_shards(replica),
        "anchor": engine.state.anchor,
        "outer momentum": engine.state.outer_momentum,
        "embedding": [own[module.index] for module in engine.modules if module.key == "embedding"],
        "anchor of the embedding": [
            engine.state.anchor[module.index] for module in engine.modules if engine.state.anchor and module.key == "embedding"
        ],
        "weights": list(named.values()),
        "replicated": [parameter for name, parameter in named.items() if partition_dim(name) is None],
    }
    return {name: digest(*tensors) for name, tensors in groups.items() if tensors}


def digest(*tensors: Tensor) -> str:
    """A hash of the tensors' bytes."""
    return hashlib.sha256(b"".join(map(_bytes, tensors))).hexdigest()[:16]


def same_bytes(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether the tensors are equal bit for bit, NaN or not."""
    return [_bytes(tensor) for tensor in first] == [_bytes(tensor) for tensor in second]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
