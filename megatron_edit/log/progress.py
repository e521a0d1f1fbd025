"""What the user sees while training: log lines, and on a terminal a bar with the latest numbers below them.

One rank shows it. `make_progress` picks: `plain` prints lines, `rich` adds the bar, `auto` adds it where
standard output is a terminal. Every line of the log is printed in both, so a terminal's scroll-back and a log
file say the same.
"""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TextIO

from megatron_edit.log.lines import (
    EvaluationReport,
    SyncReport,
    TrainReport,
    evaluation_line,
    sync_line,
    training_line,
)

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

AnyReport = TrainReport | SyncReport | EvaluationReport


def line_of(report: AnyReport) -> str:
    """The log line of any report."""
    if isinstance(report, TrainReport):
        return training_line(report)
    return sync_line(report) if isinstance(report, SyncReport) else evaluation_line(report)


class ProgressDisplay(Protocol):
    """Shows lines and numbers. All methods return at once and may be called at every iteration."""

    def line(self, text: str) -> None:
        """Prints a line of text."""

    def advance(self, iteration: int) -> None:
        """`iteration` iterations are done, here; other replicas may be elsewhere."""

    def report(self, report: AnyReport) -> None:
        """Prints the report's log line and shows its numbers."""

    def close(self) -> None:
        """Leaves the terminal as it was found."""


class PlainProgress:
    """Lines only, each flushed as it is printed, so that `tail -f` and a pipe are up to date."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        """See ProgressDisplay."""
        print(text, file=self._stream, flush=True)

    def advance(self, iteration: int) -> None:
        """Nothing: the log interval decides what is printed."""

    def report(self, report: AnyReport) -> None:
        """See ProgressDisplay."""
        self.line(line_of(report))

    def close(self) -> None:
        """Nothing is held."""


class RichProgress:
    """Lines above a bar: iterations, loss, learning rate, tokens/s, the last sync. rich redraws it 4 times a second."""

    def __init__(self, stream: TextIO, train_iters: int, iteration: int, *, always: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        columns: list[ProgressColumn] = [
            TextColumn("{task.completed}/{task.total}", table_column=Column(min_width=2 * len(str(train_iters)) + 1)),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("{task.fields[last_sync]}", style="dim"),
        ]
        terminal = True if always else None  # None: rich looks at the stream
        console = Console(file=stream, force_terminal=terminal, markup=False, highlight=False, emoji=False)
        self._bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("train", total=train_iters, completed=iteration, numbers="", last_sync="")
        self._bar.start()

    def line(self, text: str) -> None:
        """See ProgressDisplay. The line is not wrapped, so that it can be copied and parsed."""
        self._bar.console.print(text, soft_wrap=True)

    def advance(self, iteration: int) -> None:
        """See ProgressDisplay."""
        self._bar.update(self._task, completed=iteration)

    def report(self, report: AnyReport) -> None:
        """See ProgressDisplay."""
        self.line(line_of(report))
        if isinstance(report, TrainReport):
            self._bar.update(self._task, numbers=numbers_of(report))
        elif isinstance(report, SyncReport):
            self._bar.update(self._task, last_sync=f"sync {report.sync} at {report.iteration}")

    def close(self) -> None:
        """See ProgressDisplay."""
        self._bar.stop()


def numbers_of(report: TrainReport) -> str:
    """The short form beside the bar; with tokens/s of one device. The whole bar fits into 80 columns."""
    parts = [f"loss {report.lm_loss:.3f}", f"lr {report.learning_rate:.2e}"]
    if report.tokens_per_second is not None and math.isfinite(report.tokens_per_second):
        parts.append(f"{report.tokens_per_second:,.0f} tokens/s")
    return "  ".join(parts)


def make_progress(mode: str, *, train_iters: int, iteration: int, stream: TextIO | None = None) -> ProgressDisplay:
    """The display for `--progress` `mode`: auto, plain or rich. `iteration`: where this start begins.

    A terminal that cannot move its cursor (TERM=dumb or unset) gets plain lines with `auto`, as does one
    without rich.
    """
    stream = sys.stdout if stream is None else stream
    assert mode in ("auto", "plain", "rich"), mode
    if mode == "rich" or (mode == "auto" and _can_redraw(stream)):
        return RichProgress(stream, train_iters, iteration, always=mode == "rich")
    return PlainProgress(stream)


def _can_redraw(stream: TextIO) -> bool:
    if not stream.isatty() or find_spec("rich") is None:
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal
