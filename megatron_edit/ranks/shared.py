"""Whether a path is the same place for all ranks: rank 0 makes a file there, the others look for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from megatron_edit.ranks.collective import gather_lists, on_first_rank

_SECONDS = 30.0  # in which all of a network's file system is seen: NFS keeps "is not there" for so long


def ranks_that_do_not_share(path: Path, group: dist.ProcessGroup, *, timeout_seconds: float) -> list[str]:
    """"rank 1 on node7" for each rank for which `path` is not where it is for rank 0. Collective over `group`.

    Looked at in the nearest folder of `path` that rank 0 has, so that `path` is not made; a relative one is each
    rank's own. Where rank 0 can make no file nothing is known, and nobody is named. `timeout_seconds`: of collectives,
    the longest wait for the file is less.
    """

    def make() -> Path | None:
        folder = path
        try:
            if path.exists() and not path.is_file() and not path.is_dir():  # a device
                return None
            while not folder.is_dir() and folder != folder.parent:
                folder = folder.parent
            mark = folder / f".shared-{uuid4().hex}"
            mark.touch()
        except OSError:  # said where it is written
            return None
        return mark

    mark = on_first_rank(make, group)
    if mark is None:
        return []
    try:
        sees = dist.get_rank(group) == 0 or wait_until(mark.exists, min(_SECONDS, timeout_seconds / 2))
        mine = [] if sees else [f"rank {dist.get_rank(group)} on {socket.gethostname()}"]
        return gather_lists(mine, group)
    finally:
        if dist.get_rank(group) == 0:
            mark.unlink(missing_ok=True)


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether `is_so` becomes true in time; an OSError counts as false."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
