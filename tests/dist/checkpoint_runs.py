"""Parts of one run on different layouts: train, save, load elsewhere, go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.restore import layout_description, restore
from megatron_edit.checkpoint.torch_dist import read_whole_tensors, stored_tensors
from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.checkpoint.writer import Checkpoint, CheckpointWriter
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, tiny_batch, tiny_config, tiny_replica
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep
from tests.dist.engine_runs import learning_rate

ITERATIONS = 12  # of a whole run: settings that depend on the length are the same in all parts


@dataclass(frozen=True)
class Part:
    """Iterations `first` + 1 to `last` on one layout. A checkpoint is loaded before and written after when named."""

    world_size: int
    settings: Mapping[str, Any]
    first: int
    last: int
    load: Path | None = None
    save: Path | None = None
    scope: str = "full"
    fault: Callable[[Replica, TrainingState], None] | None = None  # breaks what was loaded, before the first step


@dataclass
class PartRecord:
    """What rank 0 saw; losses are means over all tokens of all replicas."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # largest of the replicas
    remarks: list[str] = field(default_factory=list)


def run_part(part: Part) -> PartRecord:
    """The record of rank 0."""
    record: PartRecord = run_ranks(_run, part.world_size, part)[0]
    return record


def _run(rank: int, world_size: int, part: Part) -> PartRecord:
    config = tiny_config(world_size, **{"train_iters": ITERATIONS, **part.settings})
    replica = tiny_replica(config)
    mesh, group = replica.mesh, replica.mesh.checkpoint_group
    state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)
    record = PartRecord()
    if part.load is not None:
        candidate = find_checkpoint(part.load, group, say=record.remarks.append)
        assert candidate is not None and candidate.manifest.iteration == part.first
        record.remarks += restore(state, candidate, group, random_states=True, seed=config.training.seed)
    if part.fault is not None:
        part.fault(replica, state)
    step = TrainStep(replica)
    for iteration in range(part.first + 1, part.last + 1):
        outcome = step.run(tiny_batch(config, mesh, iteration), learning_rate(config, iteration))
        sums = torch.stack([outcome.loss_sum, outcome.tokens]).double() * float(mesh.reports_loss)
        norm = torch.tensor(outcome.grad_norm)
        dist.all_reduce(sums, group=mesh.world_control_group)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=mesh.world_control_group)
        record.losses.append(float(sums[0] / sums[1]))
        record.grad_norms.append(float(norm))
    if part.save is not None:
        save(replica, state, part.save, part.last, part.scope)
    return record


def save(replica: Replica, state: TrainingState, folder: Path, iteration: int, scope: str = "full") -> None:
    """Completes a due sync and writes a checkpoint as the trainer does."""
    replica.engine.drain()
    writer = CheckpointWriter(folder, replica.mesh.checkpoint_group, say=print)
    writer.save(checkpoint_of(replica, state, iteration, scope))
    writer.close()


def checkpoint_of(replica: Replica, state: TrainingState, iteration: int, scope: str = "full") -> Checkpoint:
    """What is to be written, between two steps and drained. Collective."""
    numbers = state.numbers(replica.mesh.checkpoint_group)
    content = {
        "iteration": iteration,
        "scope": scope,
        "layout": layout_description(state),
        "method": replica.config.edit.edit_method,
        "vocab_size": VOCABULARY,
        "model": vars(replica.config.model),
        **numbers,
        "replicas": numbers["replicas"] if scope == "full" else numbers["replicas"][:1],
    }
    return state.checkpoint(content)


def tensors_of(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, whole, without those of the generators, which go by the rank's place."""
    path = folder / f"iter_{iteration:07d}"
    names = [name for name in stored_tensors(path) if not name.startswith("rng.")]
    return read_whole_tensors(path, names)


def unequal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bit-equal, or are in one of them only."""
    return sorted(one.keys() ^ other.keys()) + [
        name for name in one.keys() & other.keys() if one[name].numpy().tobytes() != other[name].numpy().tobytes()
    ]
