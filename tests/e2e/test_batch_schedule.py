"""Runs whose batch grows: the same as steps of those batches one after the other, and as a run that was stopped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import differences, evaluations, losses, start, syncs, train, training_lines

# Sequences of 32 tokens: 4 samples until 12 are used, 8 until 40 are, then 12. The last of 8 goes beyond 40.
GROWING = {"global_batch_size": None, "step_batch_size_schedule": ["0:4", "384:8", "1.28K:12"]}
BATCHES = [4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 12]
RAMP = {"step_batch_size_schedule": None, "rampup_batch_size": [4, 4, 28], "global_batch_size": 12}
RAMP_BATCHES = [4, 4, 4, 4, 8, 8, 12, 12, 12, 12, 12, 12]
RUN = {"lr_decay_style": "cosine", "edit_sync_interval": 5, "eval_interval": 6, "eval_iters": 1, **GROWING}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "edit": {},
    "baseline, a ramp": {"edit_method": "baseline", **RAMP},
    "streaming with a delay": {"edit_method": "streaming", "edit_sync_delay": 2},
}
MORE_METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"edit_method": "diloco"},
    "streaming": {"edit_method": "streaming"},
    "post-local-sgd": {"edit_method": "post-local-sgd"},
    "slowmo": {"edit_method": "slowmo", "min_lr": 1e-5},
    "co2": {"edit_method": "co2"},
    "co2-sharded": {"edit_method": "co2-sharded"},
    "baseline": {"edit_method": "baseline"},
    "warm-up over a step": {"edit_warmup_steps": 4},
    "ramp": RAMP,
}


def sample_ids(file: Path) -> list[tuple[int, list[int]]]:
    """(iteration, samples of all replicas in order) of each iteration."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    found: dict[int, list[int]] = {}
    for entry in sorted(entries, key=lambda entry: (entry["iteration"], entry["replica"])):
        found.setdefault(entry["iteration"], []).extend(entry["samples"])
    return sorted(found.items())


def in_order(file: Path) -> list[int]:
    return [sample for _, samples in sample_ids(file) for sample in samples]


def check_resume(folder: Path, stop: int, **settings: Any) -> None:
    at_once, in_two = folder / "one", folder / "two"
    settings = {"train_iters": 12, **RUN, **DROPOUT, **settings}
    whole = train(2, **settings, save=str(at_once), log_sample_ids=str(folder / "one.jsonl"))
    two = {**settings, "save": str(in_two), "load": str(in_two), "log_sample_ids": str(folder / "two.jsonl")}
    first, second = train(2, **two, exit_interval=stop), train(2, **two)
    assert f"resumed iteration {stop} of 12" in second.stdout and not re.search("global batch [0-9]+ ", second.stdout)
    assert {**losses(first.stdout), **losses(second.stdout)} == losses(whole.stdout)
    assert {**syncs(first.stdout), **syncs(second.stdout)} == syncs(whole.stdout)
    assert {**evaluations(first.stdout), **evaluations(second.stdout)} == evaluations(whole.stdout)
    assert sample_ids(folder / "one.jsonl") == sample_ids(folder / "two.jsonl")
    for part in ("iter_0000012", "final"):
        assert differences(at_once / part, in_two / part) == []
    lines = training_lines(whole.stdout).values()
    expected = RAMP_BATCHES if "rampup_batch_size" in settings else BATCHES
    assert [int(line["global batch size"]) for line in lines] == expected
    assert [int(line["consumed samples"]) for line in lines] == [sum(expected[: k + 1]) for k in range(12)]


@pytest.mark.parametrize(
    ("method", "stop"), [("edit", 3), ("edit", 8), ("baseline, a ramp", 7), ("streaming with a delay", 7)]
)
def test_two_halves_are_one_run(method: str, stop: int, tmp_path: Path) -> None:
    """Stopped on a step of the schedule, and one iteration after it."""
    check_resume(tmp_path, stop, **METHODS[method])


@pytest.mark.full(reason="more methods and stops of the same")
@pytest.mark.parametrize("stop", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("method", {**METHODS, **MORE_METHODS})
def test_two_halves_are_one_run_with_every_method_and_stop(method: str, stop: int, tmp_path: Path) -> None:
    check_resume(tmp_path, stop, **{**METHODS, **MORE_METHODS}[method])


def test_it_is_the_same_as_plain_steps_of_those_batches(tmp_path: Path) -> None:
    """Runs of a constant batch, each going on with the next one, and a run of samples: bit for bit, no sample twice."""
    settings = {"lr_decay_style": "cosine", "lr_decay_samples": 150, "edit_sync_interval": 5, "num_workers": 3}
    growing = train(
        2, **settings, **GROWING, train_iters=None, train_samples=113, save=str(tmp_path / "growing"),
        log_sample_ids=str(tmp_path / "growing.jsonl"),
    )  # fmt: skip
    assert "--train-samples 113 is not at a batch's end: the run has 12 iterations, 104 samples" in growing.stdout
    plain = str(tmp_path / "plain")
    seen: dict[int, dict[str, str]] = {}
    for end, batch in ((3, 4), (7, 8), (12, 12)):
        part = train(
            2, **settings, global_batch_size=batch, train_iters=12, exit_interval=end, save=plain, load=plain,
            log_sample_ids=str(tmp_path / "plain.jsonl"),
        )  # fmt: skip
        seen |= training_lines(part.stdout)
    lines = training_lines(growing.stdout)
    for name in ("lm loss", "learning rate", "grad norm", "consumed samples", "global batch size"):
        assert {k: line[name] for k, line in lines.items()} == {k: line[name] for k, line in seen.items()}, name
    assert differences(tmp_path / "growing" / "final", tmp_path / "plain" / "final") == []
    ids = sample_ids(tmp_path / "growing.jsonl")
    assert ids == sample_ids(tmp_path / "plain.jsonl") and [len(samples) for _, samples in ids] == BATCHES
    train(2, train_iters=13, log_sample_ids=str(tmp_path / "order.jsonl"))  # a constant batch of 8
    assert in_order(tmp_path / "growing.jsonl") == in_order(tmp_path / "order.jsonl")


def test_other_replicas_and_other_batches_go_on_or_are_refused(tmp_path: Path) -> None:
    """Four replicas of micro batches of 2 cannot take the first batch of 4: no matter when it is over, else refused."""
    save, ids = str(tmp_path / "run"), tmp_path / "ids.jsonl"
    settings = {**RUN, "train_iters": 12, "save": save, "load": save, "log_sample_ids": str(ids), "eval_interval": None}
    more: dict[str, Any] = {"edit_num_replicas": 4, "step_batch_size_schedule": ["0:4", "384:8", "1280:16"]}
    train(2, **settings, exit_interval=3)
    refused = start(4, **{**settings, **more, "step_batch_size_schedule": ["0:8,640:12,1280:16"]})
    assert refused.exit_codes[0] == 2
    assert "every global batch from sample 12 on must be a multiple of --micro-batch-size 2 x data parallel" in (
        refused.stderr
    )
    assert "12 is not (8 or 16 would work)" in refused.stderr and "Traceback" not in refused.stderr
    second = train(4, **{**settings, **more, "use_checkpoint_opt_param_scheduler": True})
    rates = [float(line["learning rate"]) for line in training_lines(second.stdout).values()]
    used = [12, 20, 28, 36, 44, 60, 76, 92, 108]  # samples before each step; the saved run would have had 104 in all
    expected = [1e-3 * (1 + math.cos(math.pi * min(before / 104, 1))) / 2 for before in used]
    assert rates == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert "global batch 8 as in the checkpoint, but later ones differ: the flags' batches hold" in second.stdout
    sizes = [int(line["global batch size"]) for line in training_lines(second.stdout).values()]
    assert sizes == [8, 8, 8, 8, 16, 16, 16, 16, 16]
    assert [len(samples) for _, samples in sample_ids(ids)] == [4, 4, 4, *sizes]
    train(2, train_iters=16, log_sample_ids=str(tmp_path / "order.jsonl"))
    assert in_order(ids) == in_order(tmp_path / "order.jsonl")[: 12 + sum(sizes)]
