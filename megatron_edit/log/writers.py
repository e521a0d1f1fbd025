"""Where reports are kept: `metrics.jsonl`, TensorBoard, Weights & Biases. One rank writes.

After a restart at iteration k every iteration stands once: lines of the JSON file after k, from steps that
the checkpoint did not hold, move to `FILE.dropped`; TensorBoard is told to forget its points after k; Weights
& Biases goes on with the same run, on an axis of iterations, with the restart marked. A package that is
missing is found before the training (`package_problems`). What fails later (a full disk, a lost network) is
said once, and the training goes on without that writer.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

from megatron_edit.config.schema import LoggingConfig
from megatron_edit.log.lines import EvaluationReport, SyncReport, TrainReport

AnyReport = TrainReport | SyncReport | EvaluationReport
KINDS: dict[type, str] = {TrainReport: "train", SyncReport: "sync", EvaluationReport: "eval"}


def package_problems(logging: LoggingConfig) -> list[str]:
    """One message for each writer that was asked for and whose package is missing. Call it on every rank."""
    wanted = [
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    ]
    return [
        f"{flag} {value} needs the Python package {package}, which is not installed: pip install {package}"
        for flag, value, package in wanted
        if value is not None and not _is_installed(package)
    ]


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # without origin: a mere folder of that name, as wandb's own


def metrics_file(logging: LoggingConfig, save: str | None) -> Path | None:
    """The JSON lines file of a run: `--metrics-file`, or metrics.jsonl in the `--save` folder, or none."""
    if logging.metrics_file is not None:
        return Path(logging.metrics_file)
    return Path(save) / "metrics.jsonl" if save is not None else None


class _Sink(Protocol):
    def write(self, report: AnyReport) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes every report to all that was asked for. Make one, on one rank.

    `save`: the folder of checkpoints, `iteration`: where this start begins (0: from scratch), `settings`:
    shown with the run in Weights & Biases, `say`: prints a line for the user. `write` and `close` raise
    nothing.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        save: str | None,
        *,
        iteration: int,
        settings: dict[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._say = say
        self._sinks: dict[str, _Sink] = {}
        file, tensorboard_dir, project = metrics_file(logging, save), logging.tensorboard_dir, logging.wandb_project
        if file is not None:
            self._open(str(file), lambda: _JsonLines(file, iteration, say))
        if tensorboard_dir is not None:
            self._open("TensorBoard", lambda: _TensorBoard(tensorboard_dir, iteration, say))
        if project is not None:
            self._open("Weights & Biases", lambda: _WeightsAndBiases(project, save, iteration, settings or {}))

    def _open(self, name: str, make: Callable[[], _Sink]) -> None:
        try:
            self._sinks[name] = make()
        except Exception as error:
            self._say(f"warning: no metrics go to {name}: {type(error).__name__}: {error}")

    def write(self, report: AnyReport) -> None:
        """To every writer that still works."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(report)
            except Exception as error:
                del self._sinks[name]
                self._say(f"warning: no more metrics go to {name}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends all writers."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._say(f"warning: the last metrics may be missing in {name}: {type(error).__name__}: {error}")
        self._sinks = {}


def record_of(report: AnyReport) -> dict[str, Any]:
    """The JSON object of a report: its fields as they are, `kind`, and null where a number is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {"kind": KINDS[type(report)]} | {name: plain(value) for name, value in asdict(report).items()}


def scalars_of(report: AnyReport) -> dict[str, float]:
    """Name -> number for TensorBoard and Weights & Biases; Megatron-LM's tags where it has the number."""
    if isinstance(report, SyncReport):
        shown = {k: v for k, v in asdict(report).items() if k not in ("iteration", "of", "num_replicas")}
        return {f"sync/{name.replace('_', '-')}": float(value) for name, value in shown.items()}
    if isinstance(report, EvaluationReport):
        name = f"lm loss {report.split}" + (f" {report.set}" if report.set is not None else "")
        return {name: report.lm_loss, f"{name} ppl": math.exp(min(report.lm_loss, 20.0))}
    scalars: dict[str, float | None] = {
        "lm loss": report.lm_loss,
        "z loss": report.z_loss,
        "learning-rate": report.learning_rate,
        "batch-size": report.global_batch_size,
        "consumed-samples": report.consumed_samples,
        "iteration-time": report.iteration_ms / 1000,
        "grad-norm": report.grad_norm,
        "grad-norm-max": report.grad_norm_max,
        "loss-scale": report.loss_scale,
        "throughput": report.tflops,
        "tokens-per-second": report.tokens_per_second,
        "skipped-iterations": report.skipped_iterations,
        "nan-iterations": report.nan_iterations,
    }
    if len(report.replica_losses) > 1:
        scalars |= {f"lm loss replica {r}": loss for r, loss in enumerate(report.replica_losses)}
    return {name: float(value) for name, value in scalars.items() if value is not None}


class _JsonLines:
    """One JSON object a line: `record_of` plus the time of writing in seconds since 1970."""

    def __init__(self, file: Path, iteration: int, say: Callable[[str], None]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        dropped = drop_lines_after(file, iteration)
        if dropped:
            say(f"{file}: {dropped} lines after iteration {iteration} moved to {file.name}.dropped")
        self._lines = LineFile(file, say)

    def write(self, report: AnyReport) -> None:
        self._lines.write(json.dumps(record_of(report) | {"time": round(time.time(), 3)}))

    def close(self) -> None:
        self._lines.close()


class LineFile:
    """Lines are appended to `path`, each in the file once it is written. When the file, or its folder, is removed or
    moved away, a new one is begun at that place, and `say` is told."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._stream = self._open()

    def write(self, line: str) -> None:
        """Appends `line`. Raises OSError."""
        try:
            is_there = os.path.samestat(os.fstat(self._stream.fileno()), os.stat(self._path))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            self._stream.close()
            self._stream = self._open()
            self._say(f"*** {self._path} was removed or moved away while the run went on: a new one is begun ***")
        self._stream.write(line + "\n")

    def close(self) -> None:
        """Ends it."""
        self._stream.close()

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("a", buffering=1, encoding="utf-8")


def drop_lines_after(file: Path, iteration: int) -> int:
    """Moves lines later than `iteration` out of `file`, as `drop_lines` does."""
    return drop_lines(file, lambda entry: float(entry["iteration"]) > iteration)


def drop_lines(file: Path, drops: Callable[[dict[str, Any]], bool]) -> int:
    """Moves lines that `drops`, and a line cut short by a kill, to `FILE.dropped`; returns how many."""
    if not file.is_file():  # there is none, or it is a device
        return 0

    def is_dropped(line: str) -> bool:
        try:
            return drops(json.loads(line))
        except (ValueError, KeyError, TypeError):  # not one of ours
            return True

    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    dropped = [line for line in lines if is_dropped(line)]
    kept = [line for line in lines if not is_dropped(line)] if dropped else lines
    if dropped:
        with file.with_name(file.name + ".dropped").open("a", encoding="utf-8") as stream:
            stream.writelines(line + "\n" for line in dropped)
        rest = file.with_name(file.name + ".new")
        rest.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(rest, file)
    return len(dropped)


class _TensorBoard:
    def __init__(self, folder: str, iteration: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder, self._say = SummaryWriter, folder, say
        self._writer = self._make(folder, purge_step=iteration + 1, flush_secs=10)

    def write(self, report: AnyReport) -> None:
        if not os.path.isdir(self._folder):
            with suppress(OSError):  # its thread may have tried to write where nothing is any more
                self._writer.close()
            self._writer = self._make(self._folder, flush_secs=10)
            self._say(f"*** {self._folder} was removed or moved away while the run went on: it is made anew ***")
        for tag, value in scalars_of(report).items():
            self._writer.add_scalar(tag, value, report.iteration)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run over all restarts: its id is kept in the `--save` folder."""

    def __init__(self, project: str, save: str | None, iteration: int, settings: dict[str, Any]) -> None:
        import wandb

        run_id = uuid4().hex[:8]
        if save is not None:
            Path(save).mkdir(parents=True, exist_ok=True)
            id_file = Path(save) / "wandb_run_id"
            if iteration > 0 and id_file.exists():
                run_id = id_file.read_text(encoding="utf-8").strip()
            id_file.write_text(run_id + "\n", encoding="utf-8")
        self._run = wandb.init(project=project, dir=save, id=run_id, resume="allow", config=settings)
        # wandb drops points that go back on its own step axis, as those after a restart do; so an axis of our own.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        if iteration > 0:
            self._run.log({"iteration": iteration, "restart": 1})

    def write(self, report: AnyReport) -> None:
        self._run.log({"iteration": report.iteration} | scalars_of(report))

    def close(self) -> None:
        self._run.finish()
