"""metrics.jsonl, TensorBoard and Weights & Biases: written, broken, and restarted at iteration 3 of 6."""

import builtins
import json
import math
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_edit.config.schema import LoggingConfig
from megatron_edit.log import writers
from megatron_edit.log.lines import EvaluationReport, SyncReport, TrainReport
from megatron_edit.log.writers import MetricsWriter, metrics_file, package_problems, record_of, scalars_of

TRAIN = TrainReport(
    iteration=1, train_iters=6, consumed_samples=8, iteration_ms=12.5, learning_rate=1e-3, global_batch_size=8,
    lm_loss=5.0, replica_losses=(4.0, math.nan), grad_norm=1.5, grad_norm_max=2.0, skipped_iterations=0,
    nan_iterations=1,
)  # fmt: skip
SYNC = SyncReport(
    sync=1, iteration=4, modules=6, weight_min=0.4, weight_max=0.6, left_out=1, of=12, effective_replicas_min=1.9,
    num_replicas=2, beta_min=0.5, rolled_back=0, bytes=100, exposed_ms=3.0, total_ms=10.0,
)  # fmt: skip
EVALUATION = EvaluationReport(iteration=6, split="validation", lm_loss=2.0, tokens=100)


def step(iteration: int) -> TrainReport:
    return replace(TRAIN, iteration=iteration, consumed_samples=8 * iteration, lm_loss=6.0 - 0.5 * iteration)


def run_twice(logging: LoggingConfig, save: Path) -> None:
    """Steps 1 to 4, then the process is lost; the second start resumes at 3 and goes to 6."""
    first = MetricsWriter(logging, str(save), iteration=0)
    for iteration in range(1, 5):
        first.write(step(iteration))
    first.close()
    second = MetricsWriter(logging, str(save), iteration=3)
    for iteration in range(4, 7):
        second.write(step(iteration))
    second.write(SYNC)
    second.write(EVALUATION)
    second.close()
    second.close()


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_record_is_plain_json() -> None:
    record = record_of(TRAIN)
    assert record["kind"] == "train" and record["lm_loss"] == 5.0
    assert record["replica_losses"] == [4.0, None]
    assert "NaN" not in json.dumps(record)
    assert (record_of(SYNC)["kind"], record_of(EVALUATION)["kind"]) == ("sync", "eval")


def test_a_named_validation_set_has_numbers_of_its_own() -> None:
    wiki = replace(EVALUATION, set="wiki")
    assert scalars_of(wiki).keys() == {"lm loss validation wiki", "lm loss validation wiki ppl"}
    assert scalars_of(EVALUATION).keys() == {"lm loss validation", "lm loss validation ppl"}
    assert record_of(wiki)["set"] == "wiki" and record_of(EVALUATION)["set"] is None


def test_steps_stand_once_each_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_twice(LoggingConfig(), tmp_path)
    found = records(tmp_path / "metrics.jsonl")
    assert [r["iteration"] for r in found if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["kind"] for r in found[-2:]] == ["sync", "eval"]
    for r in found[:6]:
        assert r["lm_loss"] == 6.0 - 0.5 * r["iteration"] and r["consumed_samples"] == 8 * r["iteration"]
        assert r["learning_rate"] == 1e-3 and r["grad_norm"] == 1.5 and r["time"] > 1.7e9
    assert [r["iteration"] for r in records(tmp_path / "metrics.jsonl.dropped")] == [4]
    assert "1 lines after iteration 3 moved to metrics.jsonl.dropped" in capsys.readouterr().out


def test_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(record_of(step(1))) + "\n" + json.dumps(record_of(step(2)))[:30])
    writer = MetricsWriter(LoggingConfig(), str(tmp_path), iteration=2)
    writer.write(step(3))
    writer.close()
    assert [r["iteration"] for r in records(file)] == [1, 3]


def test_lines_are_in_the_file_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = MetricsWriter(LoggingConfig(), str(tmp_path), iteration=0)
    writer.write(step(1))
    assert len(records(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_where_the_file_lies() -> None:
    assert metrics_file(LoggingConfig(), None) is None
    assert metrics_file(LoggingConfig(), "out") == Path("out/metrics.jsonl")
    assert metrics_file(LoggingConfig(metrics_file="m.jsonl"), "out") == Path("m.jsonl")


def test_full_disk_is_said_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    writer = MetricsWriter(LoggingConfig(metrics_file="/dev/full"), None, iteration=0, say=said.append)
    for iteration in range(1, 4):
        writer.write(step(iteration))
    writer.close()
    assert len(said) == 1 and "no more metrics go to /dev/full: OSError: " in said[0]


def test_tensorboard_steps_stand_once_each_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    run_twice(LoggingConfig(tensorboard_dir=str(folder)), tmp_path)
    events = EventAccumulator(str(folder)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(k, 6.0 - 0.5 * k) for k in range(1, 7)]
    assert [e.value for e in events.Scalars("consumed-samples")] == [8.0 * k for k in range(1, 7)]
    for tag in ("learning-rate", "grad-norm", "grad-norm-max", "lm loss replica 0", "lm loss replica 1"):
        assert [e.step for e in events.Scalars(tag)] == [1, 2, 3, 4, 5, 6], tag
    assert [(e.step, e.value) for e in events.Scalars("lm loss validation")] == [(6, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("sync/left-out")] == [(4, 1.0)]


def test_unknown_numbers_have_no_point() -> None:
    found = scalars_of(replace(TRAIN, grad_norm=None, replica_losses=(5.0,)))
    assert "grad-norm" not in found and "throughput" not in found and "lm loss replica 0" not in found


class FakeWandb(ModuleType):
    """Stands for the package: keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Any] = []

    def init(self, **arguments: Any) -> Any:
        outer = self

        class Run:
            def __init__(self) -> None:
                self.arguments, self.logged, self.finished = arguments, [], False
                outer.runs.append(self)

            def define_metric(self, *arguments: Any, **named: Any) -> None: ...

            def log(self, values: dict[str, float]) -> None:
                if values["iteration"] == 5:
                    raise ConnectionError("network is down")
                self.logged.append(values)

            def finish(self) -> None:
                self.finished = True

        return Run()


def test_wandb_is_one_run_with_the_restart_marked_and_never_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_twice(LoggingConfig(wandb_project="llama"), tmp_path)
    first, second = fake.runs
    assert first.arguments["id"] == second.arguments["id"] and first.arguments["project"] == "llama"
    assert [v["iteration"] for v in first.logged] == [1, 2, 3, 4] and first.finished
    assert second.logged[0] == {"iteration": 3, "restart": 1}
    assert [v["iteration"] for v in second.logged[1:]] == [4]
    assert second.logged[1]["lm loss"] == 4.0
    assert "no more metrics go to Weights & Biases: ConnectionError: network is down" in capsys.readouterr().out
    assert len(records(tmp_path / "metrics.jsonl")) == 8, "the other writers go on"
    MetricsWriter(LoggingConfig(wandb_project="llama"), str(tmp_path), iteration=0).close()
    assert fake.runs[2].arguments["id"] != first.arguments["id"], "a start from scratch is another run"


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed (extra `wandb`)")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    writer = MetricsWriter(LoggingConfig(wandb_project="llama"), str(tmp_path), iteration=0, say=said.append)
    writer.write(step(1))
    writer.write(EVALUATION)
    writer.close()
    assert said == []
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))


@pytest.mark.parametrize(("flag", "package"), [("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")])
def test_missing_package_is_named_before_training(
    flag: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging = LoggingConfig(**{flag: str(tmp_path / "here")})
    folder_of_that_name = ModuleSpec(package, None, is_package=True)
    for spec in (None, folder_of_that_name):
        monkeypatch.setattr(writers, "find_spec", lambda name, spec=spec: spec)
        (problem,) = package_problems(logging)
        assert f"--{flag.replace('_', '-')}" in problem and f"pip install {package}" in problem
    assert package_problems(LoggingConfig()) == []
    monkeypatch.undo()
    assert package_problems(LoggingConfig(metrics_file="x")) == []


def test_package_that_breaks_on_import_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def broken(name: str, *rest: Any, **named: Any) -> Any:
        if name == "wandb":
            raise ImportError("libfoo is missing")
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    said: list[str] = []
    writer = MetricsWriter(LoggingConfig(wandb_project="llama"), str(tmp_path), iteration=0, say=said.append)
    writer.write(step(1))
    writer.close()
    assert said == ["warning: no metrics go to Weights & Biases: ImportError: libfoo is missing"]


def test_metrics_go_on_when_their_folder_is_removed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra `tensorboard`)")
    said: list[str] = []
    save = tmp_path / "run"
    writer = MetricsWriter(LoggingConfig(tensorboard_dir=str(save / "board")), str(save), iteration=0, say=said.append)
    writer.write(step(1))
    shutil.rmtree(save)
    writer.write(step(2))
    (save / "metrics.jsonl").rename(save / "metrics.jsonl.1")
    writer.write(step(3))
    writer.write(step(4))
    writer.close()
    assert [r["iteration"] for r in records(save / "metrics.jsonl")] == [3, 4]
    assert [r["iteration"] for r in records(save / "metrics.jsonl.1")] == [2]
    assert list((save / "board").glob("events*"))
    assert [line for line in said if "metrics.jsonl was removed or moved away" in line] == [said[0], said[2]]
    assert "board was removed or moved away" in said[1] and len(said) == 3
