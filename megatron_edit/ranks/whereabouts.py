"""Where a rank is: its process, and the place of its main thread in the program. No process group."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Answer:
    """Where the main thread of a rank is."""

    step: str
    seconds: float  # in this step so far
    place: str
    waits: bool  # in a collective, as far as its stack shows


@dataclass(frozen=True)
class Process:
    """`machine`: the same for processes that see each other's ids; "" when that is not known."""

    machine: str
    host: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_here(self) -> bool:
        return self.machine != "" and self.machine == machine()

    @property
    def state(self) -> str | None:
        """psutil's word for the state of a process of this machine; None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            state = process.status() if abs(process.create_time() - self.started) < 1 else None
        except psutil.NoSuchProcess:
            return None
        except (psutil.Error, OSError):  # no open files are left, say: that tells nothing of the process
            return "unknown"
        return None if state in (None, psutil.STATUS_ZOMBIE) else str(state)


def machine() -> str:
    """Boot and namespace of process ids: the same for processes that see each other; "" when not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def main_thread_answer(step: str, since: float, *, has_failed: bool) -> Answer:
    """Of this process, whose main thread is in `step` since the `time.monotonic()` value given."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    return Answer(step, time.monotonic() - since, place_in(stack), has_failed or _is_wait(stack))


def place_of(error: BaseException) -> str:
    """The collective and the line of this program where `error` was raised."""
    return place_in(traceback.extract_tb(error.__traceback__))


def place_in(stack: traceback.StackSummary) -> str:
    """The innermost line of this program, and the collective that it has called."""
    ours = next((frame for frame in reversed(stack) if frame.filename.startswith(PACKAGE)), None)
    collective = next((frame.name for frame in reversed(stack) if _is_collective(frame)), "")
    if ours is None:
        return collective or "another library"
    line = f"{os.path.relpath(ours.filename, PACKAGE)}, line {ours.lineno}, in {ours.name}"
    return f"{collective} ({line})" if collective else line


def _is_collective(frame: traceback.FrameSummary) -> bool:
    return frame.filename.endswith("distributed_c10d.py") and not frame.name.startswith("_")


def _is_wait(stack: traceback.StackSummary) -> bool:
    return bool(stack) and ("distributed_c10d.py" in stack[-1].filename or ".wait(" in (stack[-1].line or ""))
