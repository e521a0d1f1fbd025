"""What a long work over files says: how far it is, in documents, bytes, rate and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """A line whenever `interval` more documents are done.

    Args:
        total_bytes: of the inputs on disk; 0: not known (standard input).
        documents: done before this start; they do not count in the rate.
    """

    def __init__(self, total_bytes: int, interval: int, log: Callable[[str], None], documents: int = 0) -> None:
        self.total_bytes, self.interval, self.log = total_bytes, interval, log
        self._started, self._first_documents, self._first_bytes = time.monotonic(), documents, -1
        self._next = documents + interval

    def show(self, documents: int, bytes_read: int) -> None:
        """documents, bytes_read: since the beginning of the work."""
        if self._first_bytes < 0:
            self._first_bytes = bytes_read if self._first_documents else 0
        if documents < self._next:
            return
        self._next = documents + self.interval
        seconds = max(time.monotonic() - self._started, 1e-9)
        line = f"{documents} documents, {(documents - self._first_documents) / seconds:.0f} a second"
        if self.total_bytes:
            rate = (bytes_read - self._first_bytes) / seconds
            left = max(self.total_bytes - bytes_read, 0) / rate if rate > 0 else 0
            line += (
                f"; {bytes_read / 1e6:.0f} of {self.total_bytes / 1e6:.0f} MB "
                f"({100 * min(bytes_read / self.total_bytes, 1):.0f} %), {rate / 1e6:.1f} MB/s, {clock(left)} left"
            )
        self.log(line)


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
