"""What of a checkpoint is taken up, and from where: every pair of saved and resuming run, without a process group."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.plan import RestorePlan, ThisRun, plan_restore
from megatron_edit.tables.methods import get_method

SCHEDULE = ["steps", 4, 1, 0]
GRID = {"dp": 1, "pp": 1, "cp": 1, "tp": 1, "chunks": 1}


def saved(method: str = "edit", *, replicas: int = 2, updates: int = 0, **more: Any) -> dict[str, Any]:
    """Content of a manifest; `under_way`: `apply_after` of each sync under way."""
    under_way = more.pop("under_way", ())
    scope = more.pop("scope", "full")
    states = 1 if scope == "compact" else replicas
    return {
        "scope": scope,
        "method": method,
        "layout": {"sync": replicas, **GRID},
        "trigger": {"steps": 6, "syncs": 1, "warmup_end": more.pop("warmup_end", 0)},
        "has_anchor": get_method(method).has_anchor,
        "has_errors": False,
        "edit_modules": "layer",
        "in_flight": {
            "events": [{"index": i, "apply_after": after} for i, after in enumerate(under_way, 1)],
            "schedule": SCHEDULE,
            "modules": {},
        },
        "replicas": [{"updates_since_sync": [updates]} for _ in range(states)],
        **more,
    }


def plan(
    content: dict[str, Any], method: str = "edit", *, replicas: int = 2, replica: int = 0, **more: Any
) -> RestorePlan:
    run = {
        "edit_modules": "layer",
        "schedule_of_syncs": SCHEDULE,
        "layout": {"sync": replicas, **GRID, **more.pop("grid", {})},
        **more,
    }
    return plan_restore(content, "folder", ThisRun(get_method(method), num_replicas=replicas, replica=replica, **run))


def test_the_same_run_goes_on_with_its_own_state() -> None:
    found = plan(saved(updates=2, has_errors=True), replica=1)
    assert (found.source, found.masters, found.at_launch) == (1, 1, 1)
    assert found.reads_anchor and found.reads_detectors and found.reads_errors and found.own_generators
    assert found.keeps_interval and not found.resized and not found.sync_first
    assert not found.new_momentum and not found.apply_now
    assert found.remarks == found.generator_remarks == ()


@pytest.mark.parametrize(("to", "replica", "kept"), [(3, 2, (0, 1, None)), (1, 0, (0,))])
def test_another_number_starts_from_the_anchor(to: int, replica: int, kept: tuple[int | None, ...]) -> None:
    found = plan(saved(has_errors=True), replicas=to, replica=replica)
    assert found.resized and not found.sync_first and found.masters is None and found.kept == kept
    assert found.source == replica % 2 and found.own_generators == (replica < 2)
    assert not found.keeps_interval and not found.reads_errors and found.at_launch is None
    assert found.remarks == (f"2 replicas become {to}; all start from the same weights",)
    assert found.generator_remarks == (
        ("generators (dropout) of replicas from 2 on are seeded anew",) if to == 3 else ()
    )


@pytest.mark.parametrize(
    ("content", "sync_first"),
    [
        (saved(updates=1), True),
        (saved("post-local-sgd", updates=1), True),
        (saved("co2", under_way=(None,)), True),
        (saved(updates=6, warmup_end=None), False),  # gradients are averaged: the replicas are equal
        (saved(), False),
    ],
)
def test_replicas_that_differ_synchronise_before_their_number_changes(
    content: dict[str, Any], sync_first: bool
) -> None:
    found = plan(content, content["method"], replicas=3)
    assert found.sync_first == sync_first
    assert ("the sync of the saved replicas was made now" in found.remarks[0]) == sync_first


def test_without_an_anchor_all_start_from_the_first_replica() -> None:
    assert plan(saved("post-local-sgd"), "post-local-sgd", replicas=3, replica=1).masters == 0
    assert plan(saved("post-local-sgd"), "post-local-sgd", replica=1).masters == 1
    in_warmup = saved(updates=6, warmup_end=None, has_anchor=False)
    assert plan(in_warmup, replicas=3, replica=1).masters == 0 and not plan(in_warmup).reads_anchor


def test_a_compact_checkpoint_is_one_replica_for_all() -> None:
    found = plan(saved(scope="compact"), replica=1)
    assert (found.source, found.masters, found.resized) == (0, None, False)
    assert not found.keeps_interval and not found.own_generators
    assert plan(saved("post-local-sgd", scope="compact"), "post-local-sgd", replica=1).masters == 0


def test_averages_under_way_stay_or_are_applied() -> None:
    delayed = saved("streaming", under_way=(8,))
    assert plan(delayed, "streaming").keeps_interval and not plan(delayed, "streaming").apply_now
    other = plan(delayed, "streaming", schedule_of_syncs=["staggered", 2, 1, 0])
    assert other.apply_now and other.remarks == (
        "the schedule of the syncs is another one: the averages under way were applied now",
    )
    assert not plan(saved("streaming"), "streaming", schedule_of_syncs=[]).apply_now  # there are none
    assert not plan(delayed, "streaming", replicas=3, schedule_of_syncs=[]).apply_now  # the sync has applied them
    assert not plan(saved("co2", under_way=(None,)), "co2", schedule_of_syncs=[]).apply_now  # due at the next sync


def test_another_method_or_other_modules_start_anew_what_does_not_carry_over() -> None:
    found = plan(saved("slowmo"), "diloco", edit_modules="sublayer")
    assert found.new_momentum and not found.reads_detectors and found.keeps_interval
    assert found.remarks == (
        "--edit-method was slowmo: the outer momentum starts anew",
        "--edit-modules was layer, is sublayer: the detectors start anew",
    )
    assert not plan(saved("diloco"), "edit").new_momentum
    assert not plan(saved("slowmo"), "post-local-sgd").new_momentum  # it keeps none


def test_on_another_grid_generators_are_seeded_anew() -> None:
    found = plan(saved(), grid={"tp": 2})
    assert not found.own_generators and "grid is another one" in found.generator_remarks[0]
    assert not found.remarks


@pytest.mark.parametrize(
    ("content", "method", "more", "says"),
    [
        ({"scope": "weights"}, "edit", {}, "folder holds weights only and cannot be resumed; --finetune"),
        (saved("post-local-sgd", updates=1), "edit", {}, "there is no anchor, which --edit-method edit needs"),
        (saved("co2", under_way=(None,)), "edit", {}, "--edit-method edit cannot apply: resume with co2"),
        (saved("streaming", under_way=(8,)), "post-local-sgd", {}, "--edit-method post-local-sgd keeps none"),
        (saved("co2", under_way=(None,)), "co2", {"edit_modules": "sublayer"}, "--edit-modules sublayer cannot apply"),
    ],
)
def test_what_this_run_cannot_go_on_from_is_refused(
    content: dict[str, Any], method: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        plan(content, method, **more)
