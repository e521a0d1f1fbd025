"""Standard output and error may lose their reader: `| head`, a killed `tee`, a terminal that is closed, a full disk.

What a program has to do is more than what it says of it: a run trains on and saves, a conversion writes its files.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

_READER_HAS_LEFT = (errno.EPIPE, errno.EIO)  # a pipe's; a terminal's


class LastingStream:
    """`stream`, whose writes never raise an OSError. `note`: said once on standard error, after `name`, when one fails.

    A stream without a reader goes on as /dev/null, for what is written below Python too. Text that a full disk does not
    take waits in Python's buffer, or is lost.
    """

    def __init__(self, stream: TextIO, name: str, note: str = "") -> None:
        self._stream, self._name = stream, name
        self.note = note

    def write(self, text: str) -> int:
        """As a TextIO's."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._after(error)
            return len(text)

    def flush(self) -> None:
        """As a TextIO's."""
        try:
            self._stream.flush()
        except OSError as error:
            self._after(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _after(self, error: OSError) -> None:
        note, self.note = self.note, ""
        if error.errno in _READER_HAS_LEFT:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if note:
            with suppress(OSError):
                print(f"{self._name}: {error.strerror}; {note}", file=sys.stderr, flush=True)


def outlive_readers(note: str = "") -> None:
    """Standard output and error of this process become LastingStreams; of those that are it already, `note` is set.

    One that was closed before Python started (`>&-`, a service without a terminal) is None, and becomes /dev/null.
    """
    for attribute, name in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, attribute)
        if isinstance(stream, LastingStream):
            stream.note = note
        else:
            stream = stream or open(os.devnull, "w")  # noqa: SIM115  until the process ends
            setattr(sys, attribute, LastingStream(stream, name, note))
