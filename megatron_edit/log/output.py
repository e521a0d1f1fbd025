"""Where the words and numbers of a run go: the terminal and the metric files, from one rank."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.config.schema import Config
from megatron_edit.config.settings import SETTINGS, value_of
from megatron_edit.log.progress import AnyReport, ProgressDisplay, make_progress
from megatron_edit.log.writers import MetricsWriter


class RunOutput:
    """One rank `writes`; on the others every call does nothing, except `warn`.

    `begin` comes once, when it is known at which iteration this start begins; lines said before are plain.
    """

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._config = config
        self._writes = writes
        self._display: ProgressDisplay | None = None
        self._writer: MetricsWriter | None = None

    def begin(self, iteration: int, train_iters: int) -> None:
        """Opens display and files; what an earlier start wrote beyond `iteration` is not this run's."""
        if not self._writes:
            return
        logging, save = self._config.logging, self._config.checkpoint.save
        self._display = make_progress(logging.progress, train_iters=train_iters, iteration=iteration)
        settings = {name: value_of(self._config, name) for name in SETTINGS}
        self._writer = MetricsWriter(logging, save, iteration=iteration, settings=settings, say=self.say)

    def say(self, line: str) -> None:
        """One line for the user."""
        if not self._writes:
            return
        if self._display is None:
            print(line, flush=True)
        else:
            self._display.line(line)

    def warn(self, lines: Sequence[str]) -> None:
        """Lines that this rank alone knows, whichever rank it is."""
        for line in lines:
            if self._writes:
                self.say(line)
            else:
                print(line, flush=True)

    def advance(self, iteration: int) -> None:
        """This rank has completed `iteration`."""
        if self._display is not None:
            self._display.advance(iteration)

    def show(self, reports: Sequence[AnyReport]) -> None:
        """Reports in the order in which they became complete."""
        if self._display is None or self._writer is None:
            return
        for report in reports:
            self._display.report(report)
            self._writer.write(report)

    def close(self) -> None:
        """Ends display and files."""
        for part in (self._writer, self._display):
            if part is not None:
                part.close()
        self._display = self._writer = None
