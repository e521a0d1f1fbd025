"""A message that is lost leaves its module as it was, on all ranks that hold a part of it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.config.schema import Config
from megatron_edit.sync.event import Handle, MessageLostError, Pending
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.transport import SyncTransport
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import rank_microbatches, tiny_config, tiny_global_batch, tiny_replica
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep
from tests.dist.engine_runs import learning_rate

INTERVAL, LOST_SYNC, LOST_MODULE = 3, 2, 1


class LostHandle:
    def wait(self) -> None:
        raise MessageLostError("the connection is gone")


class LossyTransport(SyncTransport):
    """Loses the message that is launched as `lost_call`-th, counted from 0; -1: none."""

    may_lose_messages = True

    def __init__(self, whole: SyncTransport, lost_call: int) -> None:
        groups = whole._sync_group, whole._control_group
        super().__init__(whole.platform, *groups, codec=whole.codec, consensus=whole.consensus)
        self._lost_call, self._calls = lost_call, 0

    def weighted_sum(self, *arguments: Any, **keywords: Any) -> list[Handle | None]:
        """See SyncTransport."""
        handles = super().weighted_sum(*arguments, **keywords)
        self._calls += 1
        return [*handles, LostHandle()] if self._calls == self._lost_call + 1 else handles


@dataclass(frozen=True)
class Job:
    settings: Mapping[str, Any]
    world_size: int
    losers: tuple[int, ...]  # ranks

    @property
    def config(self) -> Config:
        settings = {"edit_num_replicas": 2, "edit_sync_interval": INTERVAL, "train_iters": 4 * INTERVAL}
        return tiny_config(self.world_size, **{**settings, **self.settings})


@dataclass
class Seen:
    """State of the lost module before its launch (the masters: before its update) and after its update."""

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    made: dict[tuple[int, int], bool] = field(default_factory=dict)  # by sync and module
    steps: dict[int, list[int]] = field(default_factory=dict)  # by sync: updates of each module in the exchange
    others: list[Tensor] = field(default_factory=list)  # anchors of the other modules after the lost sync
    anchors: list[Tensor] = field(default_factory=list)  # at the end


def state_of(replica: Replica, module: ModuleShard) -> dict[str, Tensor]:
    state = replica.engine.state
    found = {"anchor": state.anchor[module.index], "momentum": state.outer_momentum[module.index]}
    if (error := state.errors.of(module)) is not None:
        found["error"] = error
    return {name: tensor.clone() for name, tensor in found.items()}


def masters_of(module: ModuleShard) -> Tensor:
    flat = torch.empty(module.numel)
    module.copy_masters_to(flat)
    return flat


def watch(replica: Replica, seen: Seen) -> None:
    averages = replica.engine.averages
    launch, apply = averages.launch, averages.apply

    def is_lost(pending: Pending) -> bool:
        return (pending.event.decision.index, pending.module) == (LOST_SYNC, LOST_MODULE)

    def watched_launch(pending: Pending, **keywords: Any) -> None:
        if is_lost(pending):
            seen.before = state_of(replica, averages.modules[pending.module])
        launch(pending, **keywords)

    def watched_apply(pending: Pending, **keywords: Any) -> bool:
        module = averages.modules[pending.module]
        if is_lost(pending):
            seen.before["masters"] = masters_of(module)
        made = apply(pending, **keywords)
        seen.made[pending.event.decision.index, pending.module] = made
        if is_lost(pending):
            seen.after = state_of(replica, module) | {"masters": masters_of(module)}
        return made

    averages.launch, averages.apply = watched_launch, watched_apply  # type: ignore[method-assign]


def train(rank: int, world_size: int, job: Job) -> Seen:
    replica = tiny_replica(job.config)
    engine, seen = replica.engine, Seen()
    lost_call = (LOST_SYNC - 1) * len(engine.modules) + LOST_MODULE if rank in job.losers else -1
    engine.fleet.transport = LossyTransport(engine.fleet.transport, lost_call)  # type: ignore[misc]
    watch(replica, seen)
    step = TrainStep(replica)
    for iteration in range(1, job.config.training.train_iters + 1):  # type: ignore[operator]
        batch = rank_microbatches(job.config, replica.mesh, tiny_global_batch(job.config, iteration))
        step.run(batch, learning_rate(job.config, iteration))
        if iteration == LOST_SYNC * INTERVAL + job.config.edit.edit_sync_delay:
            engine.drain()
            seen.others = [a.clone() for i, a in enumerate(engine.state.anchor) if i != LOST_MODULE]
    engine.drain()
    seen.anchors = engine.state.anchor
    for result in engine.take_results():
        seen.steps[result.decision.index] = result.decision.steps[engine.fleet.replica].tolist()
    return seen


CASES = {
    "in the forward pass": ({}, 2, (0, 1)),
    "one tensor parallel rank loses its part": ({"tensor_model_parallel_size": 2}, 4, (0, 2)),
    "one stage": ({"pipeline_model_parallel_size": 2, "num_layers": 4}, 4, (0, 2)),
    "compressed, after the step": ({"edit_comm_dtype": "int8", "edit_sync_placement": "step"}, 2, (0, 1)),
    "delayed, on the host": (
        {"edit_method": "streaming", "edit_num_fragments": 1, "edit_sync_delay": 1, "edit_cpu_offload": True},
        2,
        (0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_lost_message_changes_nothing_of_its_module(case: str) -> None:
    """The next sync holds the updates of both intervals, and the replicas agree again."""
    settings, world_size, losers = CASES[case]
    lost = run_ranks(train, world_size, Job(settings, world_size, losers))
    whole = run_ranks(train, world_size, Job(settings, world_size, ()))
    failed = [0, 1, 2, 3] if "tensor_model_parallel_size" in settings else list(losers)
    for rank, (seen, expected) in enumerate(zip(lost, whole, strict=True)):
        assert {key for key, made in seen.made.items() if not made} == (
            {(LOST_SYNC, LOST_MODULE)} if rank in failed else set()
        )
        if rank in failed:
            assert seen.before and all(torch.equal(seen.before[name], seen.after[name]) for name in seen.after)
            assert seen.steps[LOST_SYNC + 1][LOST_MODULE] == 2 * INTERVAL
            assert not torch.equal(seen.after["anchor"], expected.after["anchor"])
        assert sum(steps == INTERVAL for steps in seen.steps[LOST_SYNC + 1]) == len(seen.steps[1]) - (rank in failed)
        assert all(torch.equal(*pair) for pair in zip(seen.others, expected.others, strict=True))
    stride = world_size // 2  # rank r and r + stride hold the same part
    for mine, theirs in zip(lost[:stride], lost[stride:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine.anchors, theirs.anchors, strict=True))
