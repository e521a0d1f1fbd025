"""bf16: replicas are equal bit for bit after a sync, and what is synchronised are the fp32 masters."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.dist.engine_runs import RankRecord, Run, run_engine
from tests.dist.test_against_reference import make_run

STATES = ("masters", "model", "anchor", "outer momentum")


@pytest.mark.parametrize(
    "layout",
    [
        "R2xS2",
        "R2xTP2",
        "R3",
        pytest.param("R2xPP2", marks=pytest.mark.full("the rest of the layouts")),
        pytest.param("R2xTP2xPP2", marks=pytest.mark.full("the rest of the layouts")),
        pytest.param("R2xPP2 interleaved", marks=pytest.mark.full("the rest of the layouts")),
    ],
)
def test_replicas_are_bit_equal_after_a_sync_and_the_model_is_the_cast_of_its_masters(layout: str) -> None:
    assert unequal_replicas(run_engine(make_run(layout, bf16=True, steps=6))) == set()


def test_tied_copies_are_bit_equal_on_both_stages() -> None:
    """Both stages hold the matrix, sync it by themselves and end with the same bits."""
    records = run_engine(make_run("R2xPP2", "tied", bf16=True, steps=6))
    assert unequal_replicas(records) == set()
    for replica in (0, 1):
        first, last = (record for record in records if record.place.sync == replica)
        assert first.digests["embedding"] == last.digests["embedding"]


def unequal_replicas(records: list[RankRecord]) -> set[str]:
    """Names of what differs between the ranks of a sync group, or between model and masters; empty when all is well."""
    found = set()
    groups = defaultdict(list)
    for record in records:
        place = record.place
        groups[place.dp, place.pp, place.tp].append(record)
        if not record.model_is_cast_of_masters:
            found.add("model is not the cast of its masters")
    for peers in groups.values():
        found |= {name for name in STATES if len({record.digests[name] for record in peers}) > 1}
    return found


@pytest.mark.parametrize("layout", ["R2xS2", "R3"])
def test_updates_below_one_bf16_step_reach_the_anchor(layout: str) -> None:
    assert lost_updates(run_engine(small_steps(layout))) == set()


def small_steps(layout: str) -> Run:
    """One interval with a learning rate that moves hardly any bf16 weight."""
    return make_run(
        layout, steps=3, bf16=True, lr=1e-6, edit_weighting="mean", edit_pseudo_grad_clip=0.0, weight_decay=0.0
    )


def lost_updates(records: list[RankRecord]) -> set[str]:
    """Names of the tensors whose anchor was not moved by the fp32 masters; empty when all is well.

    After the first sync, with equal weights and no clip: anchor + eta (1 + mu) mean of (masters - anchor).
    """
    leaders = [record.snapshots for record in records if record.snapshots]
    lost, unchanged, count = set(), 0, 0
    for name, start in leaders[0]["initial"].items():
        deltas = [leader["before sync 1"][name].double() - start.double() for leader in leaders]
        expected = 0.7 * 1.8 * torch.stack(deltas).mean(0)
        moved = leaders[0]["anchor"][name].double() - start.double()
        if expected.norm() == 0 or (moved - expected).norm() > 0.1 * expected.norm():
            lost.add(name)
        local = leaders[0]["before sync 1"][name]
        unchanged += int((local.bfloat16() == start.bfloat16()).sum())
        count += local.numel()
    assert unchanged > 0.9 * count, "the learning rate is too large for this test"
    return lost
