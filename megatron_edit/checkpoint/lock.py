"""One run at a time in a folder: a lock that ends with the process. No torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from megatron_edit.checkpoint.errors import CheckpointError

LOCK = ".lock"


class FolderLock:
    """Keeps other runs from saving into `directory`, the folder of --save, as long as this process lives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[str] | None = None
        self.held = False  # False also where the file system has no locks

    def acquire(self) -> str | None:
        """Makes the folder where it is missing. Returns what is to be said when the file system has no locks.

        Raises CheckpointError when another run saves here, or nothing can be written.
        """
        directory = self._directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = self._file = open(directory / LOCK, "a+")  # noqa: SIM115  held until the process ends
        except OSError as error:
            raise CheckpointError(f"--save {directory} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise CheckpointError(
                    f"--save {directory}: another run saves there ({holder}); give each run a folder of its own"
                ) from error
            return f"--save {directory}: no lock ({error.strerror}): nothing keeps a second run from saving there"
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self.held = True
        return None

    def was_removed(self) -> bool:
        """Whether the file of `acquire` is not there any more: somebody removed or moved it, or the folder."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._directory / LOCK))
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Lets other runs save here."""
        if self._file is not None:
            self._file.close()
        self._file, self.held = None, False
