"""Another number of replicas: at a sync at once, between two after the sync that the loader makes. Compact checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.checkpoint.manifest import read_manifest
from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.testing.ranks import RankFailure
from megatron_edit.train.replica import Replica
from tests.dist.checkpoint_runs import ITERATIONS, Part, run_part, tensors_of, unequal

INTERVAL, BATCH = 3, 12
Tensors = dict[str, torch.Tensor]


def part(replicas: int, first: int, last: int, **more: Any) -> Part:
    fields = {name: more.pop(name) for name in ("load", "save", "fault", "scope", "world_size") if name in more}
    world_size = fields.pop("world_size", replicas)
    settings = {"edit_num_replicas": replicas, "global_batch_size": BATCH, "micro_batch_size": 1,
                "edit_sync_interval": INTERVAL, **more}  # fmt: skip
    return Part(world_size, settings, first, last, **fields)


def resized(folder: Path, to: int, at: int, target: Path, **more: Any) -> tuple[Tensors, list[str]]:
    """What `to` replicas hold right after they have loaded the checkpoint of iteration `at`, and the remarks."""
    record = run_part(part(to, at, at, load=folder, save=target, **more))
    return tensors_of(target, at), record.remarks


def local(tensors: Tensors, replica: int, state: str) -> Tensors:
    prefix = f"replica{replica}.optimizer.state.{state}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def shared(tensors: Tensors, state: str) -> Tensors:
    return {name.removeprefix(f"edit.{state}."): value for name, value in tensors.items()
            if name.startswith(f"edit.{state}.")}  # fmt: skip


def numbers(folder: Path, at: int) -> dict[str, Any]:
    return read_manifest(folder / f"iter_{at:07d}").content


def assert_equal_replicas(tensors: Tensors, replicas: int) -> None:
    anchor = shared(tensors, "anchor")
    assert anchor
    for replica in range(replicas):
        assert unequal(local(tensors, replica, "param"), anchor) == [], replica
    assert not local(tensors, replicas, "param")


@pytest.fixture(scope="module")
def at_sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas, stopped at their second sync."""
    folder = tmp_path_factory.mktemp("at sync")
    run_part(part(2, 0, 2 * INTERVAL, save=folder))
    return folder


@pytest.mark.parametrize("to", [4, 1, pytest.param(3, marks=pytest.mark.full(reason="one number more"))])
def test_at_a_sync_all_start_equal(to: int, at_sync: Path, tmp_path: Path) -> None:
    at = 2 * INTERVAL
    old = tensors_of(at_sync, at)
    assert not torch.equal(*(local(old, i, "exp_avg")["output_layer.weight"] for i in (0, 1)))
    new, remarks = resized(at_sync, to, at, tmp_path)
    assert any(f"2 replicas become {to}" in remark for remark in remarks), remarks
    assert_equal_replicas(new, to)
    for state in ("anchor", "outer_momentum"):
        assert unequal(shared(new, state), shared(old, state)) == [], state
    for replica in range(to):
        for state in ("exp_avg", "exp_avg_sq"):
            assert unequal(local(new, replica, state), local(old, replica % 2, state)) == []
    before, after = numbers(at_sync, at), numbers(tmp_path, at)
    assert after["trigger"] == before["trigger"]
    assert after["replicas"] == [before["replicas"][0]] * to
    for name in [name for name in old if name.startswith("edit.detector.")]:
        kept = min(to, 2)
        if name.endswith("majority_streak"):
            continue
        assert torch.equal(new[name][:kept], old[name][:kept]) and not new[name][kept:].any(), name
    assert old["edit.detector.head.accepted"].tolist() == [2, 2]


def test_a_chain_of_sizes_trains_on(at_sync: Path, tmp_path: Path) -> None:
    """2 -> 4 -> 3 -> 1, a sync each: the loss keeps falling about as it does with two."""
    folder, at = at_sync, 2 * INTERVAL
    for replicas in (4, 3, 1):
        target = tmp_path / str(replicas)
        record = run_part(part(replicas, at, at + INTERVAL, load=folder, save=target))
        at += INTERVAL
        assert_equal_replicas(tensors_of(target, at), replicas)
        assert numbers(target, at)["trigger"] == {"warmup_end": 0, "steps": at, "syncs": at // INTERVAL, "last_sync_step": at}
        folder = target
    straight = run_part(part(2, 0, at)).losses
    assert abs(record.losses[-1] - straight[-1]) < 0.05


def sync_now(replica: Replica, state: TrainingState) -> None:
    replica.engine.sync_now()


@pytest.mark.parametrize("layout", [{}, {"world_size": 4, "tensor_model_parallel_size": 2, "replicas": 2}])
def test_between_two_syncs_the_sync_is_made_first(layout: dict[str, Any], tmp_path: Path) -> None:
    """As if the old replicas had synchronised there: the same bits, weights by norm and clip included."""
    at, layout = INTERVAL + 2, dict(layout)
    to = layout.pop("replicas", 3)
    settings = {"edit_pseudo_grad_clip": 0.05, "edit_softmax_temperature": 0.1}
    run_part(part(2, 0, at, save=tmp_path / "old", **settings))
    run_part(part(2, at, at, load=tmp_path / "old", save=tmp_path / "synced", fault=sync_now, **settings))
    expected = tensors_of(tmp_path / "synced", at)
    if layout:  # to another grid and another number: one replica of two ranks
        to, layout["world_size"] = 1, 2
    new, remarks = resized(tmp_path / "old", to, at, tmp_path / "new", **layout, **settings)
    assert any("the sync of the saved replicas was made" in remark for remark in remarks)
    assert_equal_replicas(new, to)
    for state in ("anchor", "outer_momentum"):
        one, other = shared(new, state), shared(expected, state)
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-9, msg=name)
        assert unequal(one, shared(tensors_of(tmp_path / "old", at), state)) != []
    assert numbers(tmp_path / "new", at)["trigger"] == {"warmup_end": 0, "steps": at, "syncs": 2, "last_sync_step": at}
    assert all(replica["updates_since_sync"] == [0] for replica in numbers(tmp_path / "new", at)["replicas"])


@pytest.mark.parametrize(
    "method",
    [
        {"edit_method": "streaming", "edit_sync_delay": 2},
        {"edit_method": "co2"},
        {"edit_method": "post-local-sgd"},
        pytest.param({"edit_method": "co2-sharded"}, marks=pytest.mark.full(reason="as co2")),
        pytest.param({"edit_method": "slowmo"}, marks=pytest.mark.full(reason="as edit")),
    ],
    ids=lambda method: method["edit_method"],
)
def test_what_is_under_way_is_applied_before_the_number_changes(method: dict[str, Any], tmp_path: Path) -> None:
    """As if the old replicas had ended there: averages under way applied, then one last sync."""
    at = INTERVAL + 2
    run_part(part(2, 0, at, save=tmp_path / "old", **method))
    run_part(part(2, at, at, load=tmp_path / "old", save=tmp_path / "synced", fault=sync_now, **method))
    expected = tensors_of(tmp_path / "synced", at)
    under_way = shared(tensors_of(tmp_path / "old", at), "in_flight")
    assert bool(under_way) == (method["edit_method"] in ("streaming", "co2", "co2-sharded"))
    new, _ = resized(tmp_path / "old", 3, at, tmp_path / "new", **method)
    for replica in range(3):
        one, other = local(new, replica, "param"), local(expected, 0, "param")
        assert one.keys() == other.keys() and one
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7, msg=name)
    assert not shared(new, "in_flight") and not numbers(tmp_path / "new", at)["in_flight"]["events"]
    record = run_part(part(3, at, at + INTERVAL, load=tmp_path / "new", **method))
    assert all(loss < 6 for loss in record.losses)


DELAYED = {"edit_method": "streaming", "edit_sync_delay": 3, "edit_num_fragments": 2}


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (DELAYED, {"edit_method": "post-local-sgd"}, "keeps none"),
        ({"edit_method": "co2"}, {"edit_method": "edit"}, "cannot apply"),
        ({"edit_method": "co2"}, {"edit_method": "co2", "edit_modules": "sublayer"}, "--edit-modules sublayer"),
    ],
)
def test_what_is_under_way_is_refused_where_it_has_no_place(
    before: dict[str, Any], after: dict[str, Any], says: str, tmp_path: Path
) -> None:
    at = INTERVAL + 2
    run_part(part(2, 0, at, save=tmp_path, **before))
    with pytest.raises(RankFailure, match=says):
        run_part(part(2, at, at + 1, load=tmp_path, **after))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (DELAYED, {**DELAYED, "edit_num_fragments": 1}, "were applied now"),
        (DELAYED, {"edit_method": "edit", "edit_sync_interval": 1}, "were applied now"),
        ({"edit_method": "slowmo"}, {"edit_method": "diloco"}, "outer momentum starts anew"),
    ],
)
def test_another_schedule_or_method_takes_up_what_it_can(
    before: dict[str, Any], after: dict[str, Any], says: str, tmp_path: Path
) -> None:
    at = INTERVAL + 2
    losses = run_part(part(2, 0, at, save=tmp_path, **before)).losses
    record = run_part(part(2, at, ITERATIONS, load=tmp_path, **after))
    assert any(says in remark for remark in record.remarks), record.remarks
    assert max(record.losses) < max(losses) + 0.05, "the weights must not jump"


def nan_in_replica_1(replica: Replica, state: TrainingState) -> None:
    if replica.mesh.replica == 1:
        module = next(module for module in replica.engine.modules if module.key == "head")
        for piece in module.slices:
            piece.master.fill_(float("nan"))


def test_a_replica_that_is_nan_does_not_spread(tmp_path: Path) -> None:
    at = INTERVAL + 1
    run_part(part(2, 0, at, save=tmp_path / "good"))
    run_part(part(2, at, at, load=tmp_path / "good", save=tmp_path / "bad", fault=nan_in_replica_1))
    new, _ = resized(tmp_path / "bad", 3, at, tmp_path / "new")
    assert all(tensor.isfinite().all() for tensor in new.values())
    assert not local(new, 1, "exp_avg")["output_layer.weight"].any()
    assert local(new, 0, "exp_avg")["output_layer.weight"].any()


def test_in_the_warm_up_the_number_is_free(tmp_path: Path) -> None:
    run_part(part(2, 0, 4, save=tmp_path / "old", edit_warmup_steps=5))
    whole = run_part(part(2, 0, 5, edit_warmup_steps=5))
    record = run_part(part(4, 4, 5, load=tmp_path / "old", edit_warmup_steps=5))
    assert record.losses == pytest.approx(whole.losses[4:], rel=1e-6)


# ---- compact ---------------------------------------------------------------------------------------------------------


def test_compact_holds_one_replica_for_all(tmp_path: Path) -> None:
    at, sizes = 2 * INTERVAL, {}
    for replicas in (1, 2, 4):
        folder = tmp_path / str(replicas)
        run_part(part(replicas, 0, at, save=folder, scope="compact"))
        files = read_manifest(folder / f"iter_{at:07d}").files
        sizes[replicas] = sum(entry.bytes for name, entry in files.items() if name.endswith(".distcp"))
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes
    old = tensors_of(tmp_path / "2", at)
    assert not local(old, 0, "param") and not local(old, 1, "exp_avg")
    for replicas in (2, 3):
        new, _ = resized(tmp_path / "2", replicas, at, tmp_path / f"from compact {replicas}")
        assert_equal_replicas(new, replicas)
        for replica in range(replicas):
            assert unequal(local(new, replica, "exp_avg"), local(old, 0, "exp_avg")) == []
