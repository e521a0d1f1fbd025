"""One checkpoint, any layout, in the middle of an interval: equal tensors, and the run goes on as it would have. B23."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.train.replica import Replica
from tests.dist.checkpoint_runs import Part, PartRecord, run_part, tensors_of, unequal

STOP, END = 4, 10  # interval 3: one iteration after a sync; six more, two syncs among them
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
# name -> ranks of one replica, settings. Hidden 64 with a vocabulary of 259: buckets with padding in every layout.
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "S2": (2, {}),
    "S3": (3, {}),
    "TP2": (2, TP),
    "PP2": (2, PP),
    "TP2xPP2": (4, {**TP, **PP}),
    "TP2xS2": (4, TP),
    "interleaved": (2, {**PP, "num_layers_per_virtual_pipeline_stage": 1}),
}
BATCH = 12  # divides over all ranks that read


def part(grid: str, first: int, last: int, replicas: int = 1, **more: Any) -> Part:
    ranks, settings = GRIDS[grid]
    fields = {name: more.pop(name) for name in ("load", "save", "fault", "scope") if name in more}
    size = {"edit_num_replicas": replicas, "global_batch_size": BATCH, "micro_batch_size": 1}
    return Part(ranks * replicas, {**size, **settings, **more}, first, last, **fields)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, bool], Path]:
    """Folders of runs that stopped at STOP, by (grid, replicas, tied), made when first asked for."""
    return {}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, bool], PartRecord]:
    """Whole runs."""
    return {}


def check(
    start: str,
    end: str,
    replicas: int,
    tied: bool,
    stopped: dict[tuple[str, int, bool], Path],
    unbroken: dict[tuple[str, int, bool], PartRecord],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings = {"untie_embeddings_and_output_weights": not tied}
    key = (start, replicas, tied)
    if key not in stopped:
        folder = tmp_path_factory.mktemp("stopped")
        run_part(part(start, 0, STOP, replicas, save=folder, **settings))
        stopped[key] = folder
        unbroken[key] = run_part(part(start, 0, END, replicas, **settings))
    again = tmp_path_factory.mktemp("again")
    run_part(part(end, STOP, STOP, replicas, load=stopped[key], save=again, **settings))
    assert unequal(tensors_of(stopped[key], STOP), tensors_of(again, STOP)) == []
    more = run_part(part(end, STOP, END, replicas, load=stopped[key], **settings))
    # a step in another layout adds up in another order: 2e-7 after four steps and a sync
    for name in ("losses", "grad_norms"):
        expected = torch.tensor(getattr(unbroken[key], name)[STOP:])
        torch.testing.assert_close(torch.tensor(getattr(more, name)), expected, rtol=1e-6, atol=1e-6)


CHANGES = [("S2", "TP2", 1), ("TP2", "PP2", 2)]
MORE_CHANGES = [
    *[("S2", end, 1) for end in ("PP2", "TP2xPP2", "one rank", "S3", "interleaved")],
    *[(start, "S2", 1) for start in ("TP2", "PP2", "TP2xPP2", "one rank", "S3", "interleaved")],
    *[("TP2xS2", end, 1) for end in ("one rank", "S3", "PP2", "TP2xPP2")],
    ("S2", "TP2", 2),
    ("PP2", "S2", 2),
]


@pytest.mark.parametrize(("start", "end", "replicas"), CHANGES)
def test_another_layout_goes_on(start: str, end: str, replicas: int, stopped: Any, unbroken: Any,
                                tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    check(start, end, replicas, False, stopped, unbroken, tmp_path_factory)


@pytest.mark.full(reason="more layouts of the same")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("start", "end", "replicas"), MORE_CHANGES)
def test_more_layouts_go_on(start: str, end: str, replicas: int, tied: bool, stopped: Any, unbroken: Any,
                            tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    check(start, end, replicas, tied, stopped, unbroken, tmp_path_factory)


# ---- the comparison sees what silent corruption would do -------------------------------------------------------------


def zeroed_outer_momentum(replica: Replica, state: TrainingState) -> None:
    for momentum in replica.engine.state.outer_momentum:
        momentum.zero_()


def anchor_of_local_weights(replica: Replica, state: TrainingState) -> None:
    for module, anchor in zip(replica.engine.modules, replica.engine.state.anchor, strict=True):
        module.copy_masters_to(anchor)


def shared_step(replica: Replica, state: TrainingState) -> None:
    """One step tensor for all parameters, as megatron-core's own load leaves it."""
    for part in replica.optimizer.chained_optimizers:
        states = list(part.optimizer.state.values())
        for each in states:
            each["step"] = states[0]["step"]


def moments_of_a_new_run(replica: Replica, state: TrainingState) -> None:
    for module in replica.engine.modules:
        for piece in module.slices:
            state.local_state(piece)["exp_avg"].zero_()


def test_faults_in_what_is_loaded_are_seen(tmp_path: Path) -> None:
    settings = {"edit_outer_lr": 1.0}
    run_part(part("S2", 0, STOP, 2, save=tmp_path, **settings))
    good = torch.tensor(run_part(part("S2", STOP, END, 2, load=tmp_path, **settings)).losses)
    unbroken = torch.tensor(run_part(part("S2", 0, END, 2, **settings)).losses[STOP:])
    assert torch.equal(good, unbroken)
    for fault in (zeroed_outer_momentum, anchor_of_local_weights, shared_step, moments_of_a_new_run):
        bad = torch.tensor(run_part(part("S2", STOP, END, 2, load=tmp_path, fault=fault, **settings)).losses)
        assert (bad - good).abs().max() > 1e-4, fault.__name__
