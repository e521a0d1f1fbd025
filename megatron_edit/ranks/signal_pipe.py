"""Signals of this process as numbers in a pipe, which a thread reads while the main thread sits in a collective."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """From here on this process ends by itself, with its own exit code. Main thread only."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note_signal(number: int, frame: FrameType | None) -> None:
    """Python-level handler. Nothing to do: the number is already in the pipe (`signal.set_wakeup_fd`)."""


class SignalPipe:
    """The pipe. `handles`: the stop signals go into it from now on, which the main thread alone can arrange.

    A SIGHUP that nohup has made ignored stays ignored.
    """

    def __init__(self, *, handles: bool) -> None:
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        os.set_blocking(self._write_end, False)
        self._previous: dict[signal.Signals, object] = {}
        self._previous_wakeup_fd = -1
        if not handles:
            return
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, _note_signal)
        os.register_at_fork(after_in_child=_ForkedChild(self))

    def read(self) -> list[signal.Signals]:
        """Stop signals that have come since the last call. Never waits."""
        try:
            numbers = os.read(self.read_end, 512)
        except BlockingIOError:
            return []
        # 0: woken by ourselves; others: handlers that are not ours
        return [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]

    def wake(self) -> None:
        """Ends the wait of a thread that polls `read_end`."""
        with contextlib.suppress(OSError):  # a full pipe wakes the thread just as well
            os.write(self._write_end, b"\0")

    @property
    def handles(self) -> bool:
        return bool(self._previous)

    def give_back(self, *, ignore: bool = False) -> None:
        """The handlers are as they were before; `ignore`: the signals do nothing instead."""
        if not self._previous:
            return
        for number, handler in self._previous.items():
            after = signal.SIG_IGN if ignore else signal.SIG_DFL if handler is None else handler
            signal.signal(number, after)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self._previous = {}

    def close(self) -> None:
        """When nobody reads it any more."""
        os.close(self.read_end)
        os.close(self._write_end)


class _ForkedChild:
    """Called in every child that this process forks, such as a checkpoint writer.

    The child shares the pipe, so a SIGTERM that ends the child must not look like a request to its parent;
    and the Ctrl-C of a terminal, which reaches the child too, must not cut its writing short.
    """

    def __init__(self, pipe: SignalPipe) -> None:
        self._pipe = weakref.ref(pipe)

    def __call__(self) -> None:
        pipe = self._pipe()
        if pipe is not None and pipe.handles:
            pipe.give_back()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
