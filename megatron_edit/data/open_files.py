"""Token files that are read by position: with few descriptors, and noticed when they change while a run reads them.

They are read, not memory mapped. To read a sample costs the same, but a file that is cut while it is mapped ends the
process with SIGBUS and without a word, and in Python a map holds a descriptor for as long as it lives.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np

from megatron_edit.data.errors import DataError

FEWEST_OPEN_FILES = 256  # a rank on a CPU holds 115 and more: connections, libraries
SECONDS_BETWEEN_LOOKS = 1.0  # at size and time of a file that is read: a look may be a message to a file server


def raise_open_files_limit() -> int:
    """Raises the soft limit of open files of this process to the hard one; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # the system allows less than it says
            pass
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def kept_open(limit: int) -> int:
    """Of `limit` open files those for corpora; the others are for connections, checkpoints and libraries."""
    return max(limit // 4, 1)


def open_files_notes(corpora: int, limit: int) -> list[str]:
    """A line where not all corpora can be kept open. `limit`: of open files, after the soft limit was raised.

    Raises:
        DataError: with so few nothing can run.
    """
    if limit < FEWEST_OPEN_FILES:
        raise DataError(
            f"this process may open {limit} files, even with the soft limit raised to the hard one, and a rank needs "
            f"{FEWEST_OPEN_FILES} or more for its connections: `ulimit -n 4096` before the start would work"
        )
    if corpora <= kept_open(limit):
        return []
    return [
        f"{corpora} corpora, and this process may open {limit} files, even with the soft limit raised to the hard one: "
        f"{kept_open(limit)} corpora stay open at a time, another is opened anew for a sample. This works, but takes "
        f"time on a slow file system; `ulimit -n {4 * corpora}` before the start would keep all open"
    ]


class OpenFiles:
    """Descriptors of files, at most `limit` of them at a time: the one not used for longest is closed for another.

    limit: None: a quarter of what this process may open, after the soft limit was raised.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = kept_open(raise_open_files_limit()) if limit is None else limit
        self._open: OrderedDict[Path, Descriptor] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: Path) -> Descriptor:
        """The open file. Whoever reads from it keeps it open by holding it. Raises OSError."""
        with self._lock:  # threads that read ahead share the descriptors
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            while len(self._open) >= self.limit:
                self._open.popitem(last=False)
            found = self._open[path] = Descriptor(path)
            return found


class Descriptor:
    """An open file; closed when nobody holds it any more. `looked_at`: when its size and time were seen last."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.looked_at = -SECONDS_BETWEEN_LOOKS

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def warn_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class TokenFile:
    """The ids of a corpus, `PREFIX.bin`, from the moment on at which this was made.

    Raises:
        DataError: `size` in bytes is not that of the file (its index tells of so many).
    """

    def __init__(
        self, path: Path, size: int, files: OpenFiles, warn: Callable[[str], None] = warn_on_stderr
    ) -> None:
        self.path, self._size, self._files, self._warn = path, size, files, warn
        status = os.stat(path)
        self._modified_ns = status.st_mtime_ns
        if status.st_size != size:
            raise DataError(self._cut(status.st_size))

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        """ids [count] of `dtype`, from the byte `offset` on.

        Raises:
            DataError: the file is not any more what it was when the run began; it is named, and what has changed.
        """
        ids = np.empty(count, dtype)
        left = ids.data.cast("B")
        try:
            descriptor = self._files.get(self.path)
            if time.monotonic() - descriptor.looked_at >= SECONDS_BETWEEN_LOOKS:
                self._look(descriptor)
            while len(left):
                taken = os.preadv(descriptor.number, [left], offset)
                if taken == 0:
                    raise DataError(self._cut(os.fstat(descriptor.number).st_size))
                left, offset = left[taken:], offset + taken
        except OSError as error:
            raise DataError(f"{self.path} can no longer be read: {error.strerror}; it was there at the start") from None
        return ids

    def changed(self) -> str:
        """What has become of the file since the run began, for a message about its content; "" if nothing."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            return f"; the file can no longer be looked at: {error.strerror}"
        if status.st_size != self._size:
            return f"; {self._cut(status.st_size)}"
        return "; the file was written to since the run began" if status.st_mtime_ns != self._modified_ns else ""

    def _look(self, descriptor: Descriptor) -> None:
        """The size must be the same. A time alone says little (a copy of the same bytes has another): a loud line."""
        status = os.fstat(descriptor.number)
        descriptor.looked_at = time.monotonic()
        if status.st_size != self._size:
            raise DataError(self._cut(status.st_size))
        if status.st_mtime_ns != self._modified_ns:
            self._modified_ns = status.st_mtime_ns
            self._warn(
                f"*** {self.path} was written to while the run reads it ({_clock(status.st_mtime)}; its size, "
                f"{self._size} bytes, is the same): what is read from now on may be another text ***"
            )

    def _cut(self, size: int) -> str:
        return (
            f"{self.path} has {size} bytes, and {self._size} when the run began: it was cut or replaced while the run "
            "reads it. Put the old file back, or start with the new one"
        )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
