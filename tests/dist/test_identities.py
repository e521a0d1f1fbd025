"""The identities that a correct build shows (last section of the method's description in docs/method.md)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_edit.config.schema import Config
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import tiny_global_batch, tiny_replica
from tests.dist.engine_runs import (
    Batch,
    Parameters,
    RankRecord,
    Run,
    digests,
    full_tensors,
    masked_batch,
    masters,
    run_engine,
    train,
)
from tests.dist.test_against_reference import LAYOUTS

FULL = pytest.mark.full("the same on other data")

PLAIN_MEAN = {
    "edit_outer_lr": 1.0,
    "edit_outer_momentum": 0.0,
    "edit_weighting": "mean",
    "edit_pseudo_grad_clip": 0.0,
    "edit_anomaly_threshold": 0.0,
}
# Adam's first moment over (second's root + eps): with both decays 0 and a huge eps the step is lr / eps x gradient.
PLAIN_SGD = {"adam_beta1": 0.0, "adam_beta2": 0.0, "adam_eps": 1e6, "weight_decay": 0.0, "clip_grad": 0.0}
SGD_RATE = 0.5


def identity_run(layout: str, steps: int, data: Any = tiny_global_batch, **settings: Any) -> Run:
    world_size, layout_settings = LAYOUTS[layout]
    merged = {"edit_num_replicas": 2, "adam_eps": 1e-6, **layout_settings, **settings}
    return Run(world_size, merged, steps, data)


def leaders(records: list[RankRecord]) -> list[RankRecord]:
    """The first rank of each replica, which keeps whole tensors."""
    return [record for record in records if record.snapshots]


def largest_difference(first: Parameters, second: Parameters) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def replicas_differ_before_a_sync(records: list[RankRecord]) -> bool:
    """Whether the first sync found different weights in the replicas."""
    first, second = (leader.snapshots["before sync 1"] for leader in leaders(records)[:2])
    return largest_difference(first, second) > 1e-5


def test_replicas_differ_before_a_sync() -> None:
    """A build that never skips the gradient all-reduce passes most other checks."""
    for layout in ("R2xS2", "R2xPP2"):
        assert replicas_differ_before_a_sync(run_engine(identity_run(layout, 4)))


@pytest.mark.parametrize("layout", ["R2xTP2", "R3"])
def test_eta_1_mu_0_and_equal_weights_give_the_mean_of_the_local_parameters(layout: str) -> None:
    records = leaders(run_engine(identity_run(layout, 1, edit_sync_interval=1, **PLAIN_MEAN)))
    local = [record.snapshots["before sync 1"] for record in records]
    mean = {name: torch.stack([each[name] for each in local]).mean(0) for name in local[0]}
    for record in records:
        assert largest_difference(record.snapshots["parameters"], mean) < 1e-6
    assert largest_difference(local[0], mean) > 1e-4


def after_a_last_sync(rank: int, world_size: int, run: Run) -> tuple[list[int], list[Parameters], list[str]]:
    """(syncs counted, whole masters) before a sync that no trigger asked for, after it, and after one more; hashes."""
    replica = tiny_replica(run.config)
    train(replica, run)
    counts, states, hashes = [], [], []
    for _ in range(3):
        counts.append(replica.engine.trigger.syncs)
        states.append(full_tensors(replica, masters(replica)))
        hashes.append(digests(replica)["masters"])
        replica.engine.sync_now()
    return counts, states, hashes


def test_the_last_sync_of_a_run_gives_the_mean_too_and_finds_nothing_to_do_when_repeated() -> None:
    run = identity_run("R2xS2", 4, edit_sync_interval=3, **PLAIN_MEAN)  # one local step after the sync
    ranks = run_ranks(after_a_last_sync, run.world_size, run)
    mean = {name: (ranks[0][1][0][name] + ranks[2][1][0][name]) / 2 for name in ranks[0][1][0]}
    for counts, states, hashes in ranks:
        assert counts == [1, 2, 2]
        assert hashes[0] != hashes[1] == hashes[2]
        assert largest_difference(states[1], mean) < 1e-6 < largest_difference(states[0], mean)
    assert ranks[0][2][1] == ranks[2][2][1] and ranks[1][2][1] == ranks[3][2][1]


def test_one_replica_with_eta_1_and_mu_0_is_no_sync_at_all() -> None:
    run = identity_run("R1xS2", 7, edit_num_replicas=1, edit_sync_interval=2, **PLAIN_MEAN)
    synced, baseline = run_engine(run), run_engine(run.changed(edit_method="baseline"))
    assert len(synced[0].syncs) == 3 and not baseline[0].syncs
    assert largest_difference(*(r[0].snapshots["parameters"] for r in (synced, baseline))) < 1e-6


def test_one_replica_with_momentum_is_a_look_ahead_optimizer() -> None:
    settings = {**PLAIN_MEAN, "edit_outer_momentum": 0.8}
    run = identity_run("R1xS2", 7, edit_num_replicas=1, edit_sync_interval=2, **settings)
    synced, baseline = run_engine(run), run_engine(run.changed(edit_method="baseline"))
    assert largest_difference(*(r[0].snapshots["parameters"] for r in (synced, baseline))) > 1e-4


@pytest.mark.parametrize(
    "data", [pytest.param(tiny_global_batch, marks=FULL), masked_batch], ids=["all tokens", "masked tokens"]
)
def test_baseline_of_replicas_is_baseline_of_one_replica_with_a_larger_shard_group(data: Any) -> None:
    replicas = identity_run("R2xS2", 5, data, edit_method="baseline")
    one = replicas.changed(edit_num_replicas=1)
    found, expected = run_engine(replicas), run_engine(one)
    assert largest_difference(*(r[0].snapshots["parameters"] for r in (found, expected))) < 1e-5
    for mine, theirs in zip(found[0].grad_norms, expected[0].grad_norms, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def same_for_both_replicas(config: Config, iteration: int) -> Batch:
    half = {key: value.chunk(2)[0] for key, value in tiny_global_batch(config, iteration).items()}
    return {key: torch.cat([value, value]) for key, value in half.items()}


def test_equal_norms_weigh_the_same() -> None:
    records = run_engine(identity_run("R2xTP2", 3, same_for_both_replicas, edit_softmax_temperature=1e-3))
    for record in records:
        (view,) = record.syncs
        assert torch.equal(view.decision.norms[0], view.decision.norms[1])
        assert (view.decision.weights == 0.5).all()


@pytest.mark.parametrize("phi", [0.01, 0.1])
def test_the_clipped_pseudo_gradient_is_at_most_phi_long(phi: float) -> None:
    """With eta 1 and mu 0 the anchor moves by beta Dbar."""
    settings = {"edit_outer_lr": 1.0, "edit_outer_momentum": 0.0, "edit_pseudo_grad_clip": phi}
    records = leaders(run_engine(identity_run("R2xS2", 3, **settings)))
    start, end = records[0].snapshots["initial"], records[0].snapshots["anchor"]
    layer = [end[name].double() - start[name].double() for name in start if name.startswith("decoder.layers.2.")]
    length = math.sqrt(sum(float(delta.square().sum()) for delta in layer))
    assert phi * 0.999 < length <= phi * (1 + 1e-5)


@pytest.mark.parametrize("data", [tiny_global_batch, pytest.param(masked_batch, marks=FULL)])
def test_local_sgd_with_interval_1_and_the_mean_is_synchronous_sgd(data: Any) -> None:
    """Equal token counts: the mean of the replicas' gradients is the gradient of the whole batch."""
    if data is masked_batch:
        data = equally_masked
    run = identity_run("R2xS2", 5, data, edit_sync_interval=1, lr=SGD_RATE * 1e6, **PLAIN_MEAN, **PLAIN_SGD)
    local, synchronous = run_engine(run), run_engine(run.changed(edit_method="baseline"))
    assert len(local[0].syncs) == 5
    found, expected = local[0].snapshots["parameters"], synchronous[0].snapshots["parameters"]
    assert largest_difference(found, expected) < 1e-6
    assert largest_difference(found, local[0].snapshots["initial"]) > 1e-3, "nothing was learnt"


def equally_masked(config: Config, iteration: int) -> Batch:
    """Every second token does not count: as many in every replica."""
    batch = tiny_global_batch(config, iteration)
    batch["loss_mask"][:, ::2] = 0
    return batch
