"""The sync itself: who averages with whom, when, and what is reported. Field reports B44 to B46, B55."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.restore import restore
from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.config.schema import Config
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, rank_microbatches, tiny_global_batch, tiny_replica
from megatron_edit.train.step import TrainStep
from tests.dist.against_reference import differences
from tests.dist.checkpoint_runs import save
from tests.dist.engine_runs import Batch, Parameters, RankRecord, Run, digests, learning_rate, run_engine
from tests.dist.test_layout_invariance import mean_losses
from tests.dist.test_identities import PLAIN_MEAN, identity_run, largest_difference, leaders

FULL = pytest.mark.full("the rest of the layouts and methods")


def constant_halves(config: Config, iteration: int) -> Batch:
    """Each replica's own samples, the same in every iteration."""
    return tiny_global_batch(config, 1)


def digests_of_each_step(rank: int, world_size: int, run: Run) -> list[dict[str, str]]:
    """Hashes before the first step and after each, a due sync completed; weights are gathered in the shard group."""
    replica = tiny_replica(run.config)
    step, found = TrainStep(replica), []
    for iteration in range(run.steps + 1):
        if iteration:
            batch = run.data(run.config, iteration)
            step.run(rank_microbatches(run.config, replica.mesh, batch), learning_rate(run.config, iteration))
        for chunk in replica.chunks:
            chunk.start_param_sync(force_sync=True)
        found.append(digests(replica))
    return found


# ---- parameters of the replicas (B44) --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["R2xTP2", "R3"])
def test_replicas_are_equal_at_the_start_and_after_each_sync_and_differ_in_between(layout: str) -> None:
    interval, syncs = 4, 5
    run = identity_run(layout, interval * syncs, constant_halves, edit_sync_interval=interval)
    replicas = run.config.edit.edit_num_replicas
    histories = run_ranks(digests_of_each_step, run.world_size, run)
    peers = [histories[first :: run.world_size // replicas] for first in range(run.world_size // replicas)]
    for group in peers:  # one rank of each replica
        for iteration, of_replicas in enumerate(zip(*group, strict=True)):
            equal = len({found["masters"] for found in of_replicas}) == 1
            assert equal == (iteration % interval == 0), f"iteration {iteration}"
            assert len({found["anchor"] for found in of_replicas}) == 1


def test_the_outer_step_is_the_closed_formula_of_nesterov_and_goes_downhill() -> None:
    """theta_k = theta_(k-1) - eta (g_k + mu m_k), m_k = sum_j mu^(k-j) g_j, g_j = theta_(j-1) - mean(local_j)."""
    interval, syncs, eta, mu = 4, 3, 0.7, 0.8
    settings = {**PLAIN_MEAN, "edit_outer_lr": eta, "edit_outer_momentum": mu}
    run = identity_run("R2xS2", interval * syncs, constant_halves, edit_sync_interval=interval, **settings)
    records = run_engine(run)
    states = [leader.snapshots for leader in leaders(records)]
    theta = {name: value.double() for name, value in states[0]["initial"].items()}
    gradients: list[Parameters] = []
    for k in range(1, syncs + 1):
        local = [state[f"before sync {k}"] for state in states]
        gradients.append({n: theta[n] - torch.stack([each[n].double() for each in local]).mean(0) for n in theta})
        momentum = {n: sum(mu ** (k - j) * g[n] for j, g in enumerate(gradients, 1)) for n in theta}
        theta = {n: theta[n] - eta * (gradients[-1][n] + mu * momentum[n]) for n in theta}
    for state in states:
        assert largest_difference(state["anchor"], theta) < 1e-6
    losses = mean_losses(records)
    assert losses[-1] < losses[0] - 0.1


# ---- who averages with whom (B45; its first case is in test_identities) ----------------------------------------------


def test_ranks_of_a_replica_are_equal_at_each_step_and_replicas_at_syncs_only() -> None:
    run = identity_run("R2xS2", 8, edit_sync_interval=4)
    histories = run_ranks(digests_of_each_step, 4, run)
    for iteration, ranks in enumerate(zip(*histories, strict=True)):
        weights = [found["weights"] for found in ranks]
        assert weights[0] == weights[1] and weights[2] == weights[3], f"iteration {iteration}"
        assert (weights[0] == weights[2]) == (iteration % 4 == 0), f"iteration {iteration}"


def groups_of_this_rank(rank: int, world_size: int, run: Run) -> dict[str, list[int]]:
    mesh = tiny_replica(run.config).mesh
    groups = {name: getattr(mesh, f"{name}_group") for name in ("shard", "norm", "replica", "sync", "sync_control")}
    groups["megatron-core dp"] = mesh.process_groups.dp_cp
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_gradients_and_averages_travel_in_different_groups() -> None:
    """Two replicas of two shards of two tensor parallel ranks."""
    run = identity_run("R2xTP2", 1)
    for rank, groups in enumerate(run_ranks(groups_of_this_rank, 8, run.changed(world_size=8))):
        first = rank // 4 * 4  # of this replica
        shard = [first + rank % 2, first + rank % 2 + 2]
        assert groups["shard"] == groups["megatron-core dp"] == shard
        assert groups["replica"] == groups["norm"] == list(range(first, first + 4))
        assert groups["sync"] == groups["sync_control"] == [rank % 4, rank % 4 + 4]


# ---- planned syncs (B46) ---------------------------------------------------------------------------------------------


def one_masked_step(config: Config, iteration: int) -> Batch:
    """Replica 1 has no token that counts in iteration 10: a step that changes nothing, and counts."""
    batch = tiny_global_batch(config, iteration)
    if iteration == 10:
        batch["loss_mask"][config.training.global_batch_size // 2 :] = 0  # type: ignore[operator]
    return batch


PLANNED = Run(
    2,
    {"edit_num_replicas": 2, "edit_sync_interval": 4, "edit_warmup_steps": 4, "micro_batch_size": 1},
    steps=24,
    data=one_masked_step,
)


def steps_from_to(
    rank: int, world_size: int, run: Run, folder: Path, first: int, last: int
) -> tuple[list[int], dict[str, str]]:
    """(iterations at which a sync was decided, hashes at the end). Goes on from `folder` and writes to it."""
    replica = tiny_replica(run.config)
    state = TrainingState(replica.engine.state, replica.optimizer, run.config.model, VOCABULARY)
    groups = replica.optimizer.param_groups
    assert {group.get("wd_mult", 1.0) for group in groups} == {0.0, 1.0}, "decayed and undecayed groups"
    if first > 1:
        candidate = find_checkpoint(folder, replica.mesh.checkpoint_group, say=print)
        assert candidate is not None and candidate.manifest.iteration == first - 1
        restore(state, candidate, replica.mesh.checkpoint_group, random_states=True, seed=0)
    step, decided, syncs = TrainStep(replica), [], replica.engine.trigger.syncs
    for iteration in range(first, last + 1):
        microbatches = rank_microbatches(run.config, replica.mesh, run.data(run.config, iteration))
        assert len(microbatches) == 4
        step.run(microbatches, learning_rate(run.config, iteration))
        decided += [iteration] * (replica.engine.trigger.syncs - syncs)
        syncs = replica.engine.trigger.syncs
    save(replica, state, folder, last)
    return decided, digests(replica)


def test_exactly_the_planned_syncs_with_and_without_a_restart(tmp_path: Path) -> None:
    run = partial(run_ranks, steps_from_to, 2, PLANNED)
    straight = run(tmp_path / "straight", 1, 24)
    for restart in (16, 18):
        before = run(tmp_path / str(restart), 1, restart)
        after = run(tmp_path / str(restart), restart + 1, 24)
        for whole, first, second in zip(straight, before, after, strict=True):
            assert first[0] + second[0] == whole[0] == [8, 12, 16, 20, 24]
            assert second[1] == whole[1], "a run that was stopped is byte-equal to one that was not"


# ---- the logged loss (B55) -------------------------------------------------------------------------------------------


def same_for_all(config: Config, iteration: int, masked_replica: int | None = None) -> Batch:
    """Four samples, whatever the number of replicas, the same for each; `masked_replica` has no token that counts."""
    replicas = config.edit.edit_num_replicas
    assert replicas is not None
    generator = torch.Generator().manual_seed(iteration)
    samples = torch.randint(0, VOCABULARY, (4, config.model.seq_length + 1), generator=generator)
    samples = samples.repeat(replicas, 1)
    mask = (torch.rand(4, config.model.seq_length, generator=generator) < 0.7).float().repeat(replicas, 1)
    if masked_replica is not None:
        mask[4 * masked_replica : 4 * masked_replica + 4] = 0
    return {"tokens": samples[:, :-1].contiguous(), "labels": samples[:, 1:].contiguous(), "loss_mask": mask}


def records_on_the_same_data(replicas: int, masked_replica: int | None = None, **settings: Any) -> list[RankRecord]:
    merged = {"edit_num_replicas": replicas, "global_batch_size": 4 * replicas, "adam_eps": 1e-6, **settings}
    data = partial(same_for_all, masked_replica=masked_replica)
    run = Run(replicas, merged, 7, data)
    records = run_engine(run)
    assert differences(run, records) == {}
    return records


@pytest.mark.parametrize("method", ["edit", pytest.param("baseline", marks=FULL)])
def test_the_mean_loss_is_one_number_whatever_the_number_of_replicas(method: str) -> None:
    """On identical data, over two syncs; then with a replica whose share is fully masked."""
    one, two, three = (mean_losses(records_on_the_same_data(replicas, edit_method=method)) for replicas in (1, 2, 3))
    assert two == pytest.approx(one, abs=1e-5) and three == pytest.approx(one, abs=1e-5)
    masked = mean_losses(records_on_the_same_data(2, masked_replica=1, edit_method=method))
    assert masked == pytest.approx(one, abs=1e-5)
