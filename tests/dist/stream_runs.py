"""Runs of a tiny Llama under a `StreamWatch`, and what it saw on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_edit.platform import get_platform
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.streams import HostWait, StreamWatch
from megatron_edit.testing.tiny import VOCABULARY, rank_microbatches
from megatron_edit.train.replica import Replica, build_replica, mesh_of
from megatron_edit.train.step import TrainStep
from tests.dist.engine_runs import Run, learning_rate

AfterStep = Callable[[Replica, int], None]  # of (replica, iteration)


@dataclass
class Seen:
    """What the watch of one rank saw. `waits`: of each step, its sync among it."""

    races: list[str] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)
    waits: list[list[HostWait]] = field(default_factory=list)
    synced: list[bool] = field(default_factory=list)  # whether a sync was decided after the step


def watch(run: Run, after_step: AfterStep | None = None, **options: Any) -> list[Seen]:
    """What was seen on each rank."""
    return run_ranks(_watch, run.world_size, run, after_step, **options)


def _watch(rank: int, world_size: int, run: Run, after_step: AfterStep | None) -> Seen:
    get_platform("cpu").initialize()
    config, watch, seen = run.config, StreamWatch(), Seen()
    with watch.on() as platform:
        replica = build_replica(config, mesh_of(config, platform), VOCABULARY)
        name_memory(watch, replica)
        if run.fault is not None:
            run.fault(replica)
        step = TrainStep(replica)
        watch.waits.clear()
        for iteration in range(1, run.steps + 1):
            microbatches = rank_microbatches(config, replica.mesh, run.data(config, iteration))
            outcome = step.run(microbatches, learning_rate(config, iteration), replica.engine.trigger.wants_sync)
            seen.waits.append(list(watch.waits))
            seen.synced.append(outcome.meeting is not None)
            if after_step is not None:
                after_step(replica, iteration)
            replica.engine.take_results()
            watch.waits.clear()
        with torch.no_grad():
            replica.engine.sync_now()
        replica.engine.take_results()
    seen.races, seen.mixed = watch.races, watch.mixed
    return seen


def name_memory(watch: StreamWatch, replica: Replica) -> None:
    """So that reports say whose bytes they are about."""
    for module in replica.engine.modules:
        for piece in module.slices:
            watch.memory.name(piece.master, f"{module.key}: master of {piece.name}")
            watch.memory.name(piece.model, f"{module.key}: weight {piece.name}")
        bucket = module.bucket_group.bucket
        watch.memory.name(bucket.param_data, f"{module.key}: weights")
        watch.memory.name(bucket.grad_data, f"{module.key}: gradients")
