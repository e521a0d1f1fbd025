"""Nobody but the fleet remembers who the replicas are: its members change between two syncs, and all else follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_edit.sync.engine as engine_module
from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.restore import restore
from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.config.schema import Config
from megatron_edit.sync.fleet import FixedFleet
from megatron_edit.sync.transport import SyncTransport
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, rank_microbatches, tiny_config, tiny_global_batch, tiny_replica
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep
from tests.dist.checkpoint_runs import save
from tests.dist.engine_runs import learning_rate, masters

INTERVAL, ITERATIONS = 3, 15
CHANGE_AT = 2 * INTERVAL
SAMPLES = 4  # of one replica in a step


class ChangingFleet(FixedFleet):
    """The replicas of one job, until some of them are lost."""

    def __init__(self, transport: SyncTransport) -> None:
        super().__init__(transport)
        self._ids = super().ids

    @property
    def ids(self) -> tuple[int, ...]:
        """See Fleet."""
        return self._ids

    def keep(self, ids: tuple[int, ...], transport: SyncTransport) -> None:
        self._ids, self.transport = ids, transport
        self.epoch += 1


@dataclass
class End:
    """What a rank holds at the end, and the norms [R, M] and weights [R, M] of each sync since the change."""

    masters: list[Tensor]
    anchors: list[Tensor]
    norms: list[Tensor]
    weights: list[Tensor]


@dataclass(frozen=True)
class Job:
    settings: Mapping[str, Any]
    stay: tuple[int, ...]
    folder: Path

    def config(self, num_replicas: int) -> Config:
        return tiny_config(
            num_replicas,
            **{
                "edit_num_replicas": num_replicas,
                "global_batch_size": SAMPLES * num_replicas,
                "edit_sync_interval": INTERVAL,
                "edit_anomaly_warmup_syncs": 3,
                "train_iters": ITERATIONS,
                **self.settings,
            },
        )


def train(replica: Replica, config: Config, place: Any, iterations: range) -> None:
    """`config`, `place`: how many replicas there are, and which of them this one is."""
    step = TrainStep(replica)
    for iteration in iterations:
        batch = rank_microbatches(config, place, tiny_global_batch(config, iteration))
        step.run(batch, learning_rate(config, iteration))
    replica.engine.drain()


def end_of(replica: Replica) -> End:
    decisions = [result.decision for result in replica.engine.take_results()]
    return End(
        masters(replica), replica.engine.state.anchor, [d.norms for d in decisions], [d.weights for d in decisions]
    )


def lose_replicas(rank: int, world_size: int, job: Job) -> End | None:
    engine_module.FixedFleet = ChangingFleet  # type: ignore[misc]
    replica = tiny_replica(job.config(world_size))
    state = TrainingState(replica.engine.state, replica.optimizer, job.config(world_size).model, VOCABULARY)
    train(replica, job.config(world_size), replica.mesh, range(1, CHANGE_AT + 1))
    save(replica, state, job.folder, CHANGE_AT)
    replica.engine.take_results()
    groups = [dist.new_group(job.stay), dist.new_group(job.stay)]
    if rank not in job.stay:
        return None
    fleet: Any = replica.engine.fleet
    fleet.keep(job.stay, SyncTransport(replica.mesh.platform, *groups))
    mesh = replica.mesh
    place = SimpleNamespace(num_replicas=len(job.stay), replica=fleet.replica, layout=mesh.layout, place=mesh.place)
    train(replica, job.config(len(job.stay)), place, range(CHANGE_AT + 1, ITERATIONS + 1))
    return end_of(replica)


def start_smaller(rank: int, world_size: int, job: Job) -> End:
    config = job.config(world_size)
    replica = tiny_replica(config)
    state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)
    candidate = find_checkpoint(job.folder, replica.mesh.checkpoint_group, say=print)
    assert candidate is not None
    restore(state, candidate, replica.mesh.checkpoint_group, random_states=True, seed=config.training.seed)
    train(replica, config, replica.mesh, range(CHANGE_AT + 1, ITERATIONS + 1))
    return end_of(replica)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"edit_sync_placement": "step", "edit_modules": "sublayer"},
        {"edit_method": "streaming", "edit_num_fragments": 1, "edit_cpu_offload": True},
    ],
)
def test_a_fleet_that_loses_a_replica_goes_on_like_a_smaller_job(settings: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: the replicas that stay have the averages, detectors and moments of a job of their number."""
    job = Job(settings, (0, 1), tmp_path)
    changed, smaller = run_ranks(lose_replicas, 3, job), run_ranks(start_smaller, 2, job)
    assert changed[2] is None
    for after, expected in zip(changed, smaller, strict=False):
        assert [norms.shape[0] for norms in after.norms] == [2, 2, 2]
        for name in ("norms", "weights", "anchors", "masters"):
            for mine, theirs in zip(getattr(after, name), getattr(expected, name), strict=True):
                assert torch.equal(mine, theirs), name


def test_the_replicas_that_stay_keep_their_own_detectors(tmp_path: Path) -> None:
    """Replicas 0 and 2 stay: the second column is no longer that of replica 1."""
    replicas = run_ranks(lose_replicas, 3, Job({}, (0, 2), tmp_path))
    assert replicas[1] is None
    assert all(torch.equal(*anchors) for anchors in zip(replicas[0].anchors, replicas[2].anchors, strict=True))
