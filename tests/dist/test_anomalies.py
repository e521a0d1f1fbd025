"""Anomaly elimination, non-finite replicas and rollbacks on the engine equal the reference, sync after sync."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.config.schema import Config
from megatron_edit.tables.parameters import module_key
from megatron_edit.sync import notices
from megatron_edit.testing.ranks import RankFailure
from megatron_edit.testing.tiny import tiny_global_batch
from tests.dist.against_reference import differences, run_reference
from tests.dist.engine_runs import RankRecord, Run, run_engine
from tests.dist.test_against_reference import LAYOUTS, make_run

INTERVAL, SYNCS = 2, 10

# sync -> (replica, module), of up to four replicas, whose Delta is some 20 times too long, or NaN
TOO_LONG = {5: {(1, "layers.1"), (1, "head")}, 8: {(i, "embedding") for i in range(4)}}
NOT_A_NUMBER = {7: {(0, "layers.2")}, 9: {(i, "layers.3") for i in range(4)}}
KEYS = ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def spoil(iteration: int, replica: int, name: str, value: Tensor, anchor: Tensor) -> None:
    sync, local = divmod(iteration, INTERVAL)
    if local:
        return
    place = (replica, module_key(name))
    if place in TOO_LONG.get(sync, ()):
        # On each of thousands of elements: multiplying would blow up rounding errors. Padded ids stay zero.
        value.add_((value != 0).to(value.dtype), alpha=0.01)
    if place in NOT_A_NUMBER.get(sync, ()):
        value.fill_(math.nan)


def anomaly_run(layout: str, **settings: Any) -> Run:
    run = make_run(
        layout,
        steps=INTERVAL * SYNCS + 1,
        edit_sync_interval=INTERVAL,
        edit_anomaly_warmup_syncs=3,
        edit_pseudo_grad_clip=0.03,
        **settings,
    )
    return Run(run.world_size, run.settings, run.steps, run.data, spoil=spoil)


@pytest.mark.parametrize(
    "layout",
    [
        "R2xTP2",
        "R2xPP2",
        "R3",
        pytest.param("R2xPP2 interleaved", marks=pytest.mark.full("the rest of the layouts")),
        pytest.param("R2xS2", marks=pytest.mark.full("the rest of the layouts")),
        pytest.param("R2xTP2xPP2", marks=pytest.mark.full("the rest of the layouts")),
        pytest.param("R4", marks=pytest.mark.full("the rest of the layouts")),
    ],
)
def test_spoiled_replicas_are_left_out_as_in_the_reference(layout: str) -> None:
    run = anomaly_run(layout)
    records = run_engine(run)
    assert differences(run, records) == {}
    replicas = LAYOUTS[layout][1].get("edit_num_replicas", 2)
    for k in range(1, SYNCS + 1):
        flagged, non_finite, left_out, rolled_back = flags_of(records, k)
        long = {place for place in TOO_LONG.get(k, set()) if place[0] < replicas}
        nan = {place for place in NOT_A_NUMBER.get(k, set()) if place[0] < replicas}
        assert (flagged, non_finite, left_out) == (long, nan, long | nan), f"sync {k}"
        everyone = {key for key in KEYS if all((i, key) in left_out for i in range(replicas))}
        assert rolled_back == everyone == {8: {"embedding"}, 9: {"layers.3"}}.get(k, set())
    lines = [line for record in records if record.place.sync == record.place.tp == 0 for line in record.warnings]
    named = [line for line in lines if "sync 5: replica 1 is far above its own past in" in line]
    assert [key in "".join(named) for key in KEYS] == [key in ("layers.1", "head") for key in KEYS]
    assert sum("sync 9: every replica left out (all not finite)" in line for line in lines) == 1


def flags_of(records: list[RankRecord], sync: int) -> tuple[set[Any], set[Any], set[Any], set[str]]:
    """(replica, module) of the flags, non-finite norms and those left out; modules rolled back."""
    found: tuple[set[Any], set[Any], set[Any], set[str]] = (set(), set(), set(), set())
    for record in records:
        view = record.syncs[sync - 1]
        verdict = view.decision.verdict
        for places, flags in zip(found, (verdict.flagged, verdict.non_finite, verdict.left_out), strict=False):
            places.update((int(i), view.keys[m]) for i, m in flags.nonzero())
        found[3].update(view.keys[int(m)] for m in view.decision.rolled_back.nonzero())
    return found


def test_a_rollback_leaves_anchor_and_momentum_and_a_non_finite_replica_forgets_its_moments() -> None:
    """In the engine's own words, without the reference: what a rollback is, and whose moments become zero."""
    run = anomaly_run("R2")
    run = Run(run.world_size, run.settings, INTERVAL * 9, run.data, spoil=spoil)  # up to sync 9: layers.3 rolled back
    rolled_back, before = run_engine(run), run_engine(Run(run.world_size, run.settings, INTERVAL * 8, run.data, spoil))
    for after, old in zip(rolled_back, before, strict=True):
        for state in ("anchor", "outer momentum") if after.snapshots else ():
            for name, value in after.snapshots[state].items():
                same = torch.equal(value, old.snapshots[state][name])
                assert same == (module_key(name) == "layers.3"), (state, name)
        for name, value in after.snapshots.get("exp_avg", {}).items():
            zeroed = not value.any() and not after.snapshots["exp_avg_sq"][name].any()
            assert zeroed == (module_key(name) == "layers.3"), name
            assert after.snapshots["parameters"][name].isfinite().all()


def nothing_counts(config: Config, iteration: int) -> dict[str, Tensor]:
    batch = tiny_global_batch(config, iteration)
    return batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])}


def soon(replica: Any) -> None:
    notices.IDLE_ITERATIONS = 6


@pytest.mark.parametrize("settings", [{"edit_sync_interval": 1}, {"edit_method": "baseline"}], ids=["edit", "baseline"])
def test_a_run_in_which_no_replica_steps_ends_with_an_error(settings: dict[str, Any]) -> None:
    run = make_run("R2", steps=12, **settings)
    with pytest.raises(RankFailure, match=r"NothingStepsError: the weights have not changed in the last .* no\s+token"):
        run_engine(Run(run.world_size, run.settings, run.steps, nothing_counts, fault=soon))


def test_the_reference_sees_what_was_planned() -> None:
    """The scenario is one: healthy norms are never flagged, and clip and weights are at work in it."""
    result = run_reference(anomaly_run("R3"))
    assert len(result.syncs) == SYNCS
    for k, sync in enumerate(result.syncs, 1):
        expected = {(i, KEYS.index(key)) for i, key in TOO_LONG.get(k, set()) if i < 3}
        assert {(int(i), int(m)) for i, m in sync.flagged.nonzero()} == expected
        assert (sync.betas < 1).sum() >= len(KEYS) / 2
