"""The display on a pseudo terminal and elsewhere."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

import pytest

from megatron_edit.log.lines import EvaluationReport, sync_line, training_line
from megatron_edit.log.progress import PlainProgress, RichProgress, line_of, make_progress, numbers_of
from tests.unit.test_loglines import REPORT, SYNC

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


class Terminal:
    """A pseudo terminal of 80 columns; `shown` is all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._master, False)
        self.stream: TextIO = os.fdopen(slave, "w")
        self.shown = ""

    def read(self) -> str:
        while True:
            try:
                self.shown += os.read(self._master, 65536).decode()
            except BlockingIOError:
                return self.shown

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def without_time(text: str) -> str:
    return STAMP.sub("T", text)


def test_plain_lines_are_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_progress("auto", train_iters=100, iteration=0)  # pytest's standard output is not a terminal
    assert isinstance(display, PlainProgress)
    display.advance(1)
    display.line("hello")
    display.report(REPORT)
    display.report(SYNC)
    display.close()
    expected = ["hello", training_line(REPORT), sync_line(SYNC)]
    assert without_time(capsys.readouterr().out).splitlines() == [without_time(line) for line in expected]


def test_bar_on_a_terminal_shows_the_latest_numbers_and_every_line_whole(terminal: Terminal) -> None:
    display = make_progress("auto", train_iters=100, iteration=10, stream=terminal.stream)
    assert isinstance(display, RichProgress)
    display.report(replace(REPORT, tokens_per_second=1234.5))
    display.report(SYNC)
    display.line("[brackets] :smile: stay as they are")
    display.advance(42)
    deadline = time.monotonic() + 5
    while "42/100" not in terminal.read() and time.monotonic() < deadline:
        time.sleep(0.05)
    display.close()
    shown = terminal.read()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "10/100" in plain and "42/100" in plain
    assert "loss 5.100  lr 1.00e-03  1,234 tokens/s" in plain
    assert "sync 3 at 384" in plain
    assert "[brackets] :smile: stay as they are" in plain
    lines = [without_time(line.strip("\r ")) for line in plain.replace("\r", "\n").split("\n")]
    assert without_time(training_line(replace(REPORT, tokens_per_second=1234.5))).strip() in lines, "not wrapped"
    assert sync_line(SYNC) in lines
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is visible again"


def test_mode_wins_over_the_terminal(terminal: Terminal) -> None:
    assert isinstance(make_progress("plain", train_iters=1, iteration=0, stream=terminal.stream), PlainProgress)
    display = make_progress("rich", train_iters=7, iteration=0, stream=(text := io.StringIO()))
    display.close()
    assert "0/7" in text.getvalue()


def test_terminal_that_cannot_redraw_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress("auto", train_iters=1, iteration=0, stream=terminal.stream), PlainProgress)


def test_rich_is_imported_only_for_the_bar() -> None:
    code = (
        "import sys; from megatron_edit.log.progress import make_progress\n"
        "make_progress('auto', train_iters=1, iteration=0).line('text'); print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["text", "False"]


def test_lines_and_numbers() -> None:
    assert line_of(EvaluationReport(5, "test", 1.0, 1)).startswith(" test loss at iteration 5 |")
    assert numbers_of(REPORT) == "loss 5.100  lr 1.00e-03"
