"""Checkpoints that older versions wrote load bit for bit, and their runs go on as they did."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron_edit.train.replica import Replica
from megatron_edit.checkpoint.training_state import TrainingState
from tests.dist.checkpoint_runs import ITERATIONS, Part, run_part, save, tensors_of, unequal
from tests.dist.saved_checkpoints import CASES, extract, settings_of

NUMBERS = ("trigger", "has_anchor", "has_errors", "edit_modules", "in_flight", "replicas")


def write_again(folder: Path, iteration: int, replica: Replica, state: TrainingState) -> None:
    """Saves what has just been loaded."""
    save(replica, state, folder, iteration)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_an_older_version_is_taken_up(name: str, tmp_path: Path) -> None:
    world_size, _, iteration = CASES[name]
    old, again = extract(name, tmp_path), tmp_path / "again"
    went_on = run_part(
        Part(world_size, settings_of(name), iteration, ITERATIONS, load=old, fault=partial(write_again, again, iteration))
    )
    assert unequal(tensors_of(old, iteration), tensors_of(again, iteration)) == []
    before, after = (_content(folder, iteration) for folder in (old, again))
    assert {key: after[key] for key in NUMBERS} == {key: before[key] for key in NUMBERS}
    then = json.loads((old / "after.json").read_text())
    assert went_on.losses == pytest.approx(then["losses"], abs=1e-5)  # another machine rounds in another way
    assert went_on.grad_norms == pytest.approx(then["grad_norms"], rel=1e-4)


def _content(folder: Path, iteration: int) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / f"iter_{iteration:07d}" / "manifest.json").read_text())["content"]
    return content
