"""Where the numbers of a run go: the log, metrics.jsonl, TensorBoard, Weights & Biases, the progress display."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.config.schema import Config
from megatron_edit.train.loglines import (
    EvaluationReport,
    SyncReport,
    TrainReport,
    evaluation_line,
    sync_line,
    training_line,
)

Report = TrainReport | SyncReport | EvaluationReport


class RunOutput:
    """One rank `writes`; on the others every call does nothing, except `warn`."""

    def __init__(self, config: Config, *, writes: bool, train_iters: int) -> None:
        self._writes = writes

    def say(self, line: str) -> None:
        """One line for the user."""
        if self._writes:
            print(line, flush=True)

    def warn(self, lines: Sequence[str]) -> None:
        """Lines that this rank alone knows, whichever rank it is."""
        for line in lines:
            print(line, flush=True)

    def show(self, reports: Sequence[Report]) -> None:
        """Reports in the order in which they became complete."""
        for report in reports:
            if isinstance(report, TrainReport):
                self.say(training_line(report))
            elif isinstance(report, SyncReport):
                self.say(sync_line(report))
            else:
                self.say(evaluation_line(report))

    def resume(self, iteration: int) -> None:
        """What was written beyond `iteration` by an earlier start is not this run's."""

    def close(self) -> None:
        """Ends all writers."""
