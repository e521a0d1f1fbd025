"""Saving: all ranks write into one folder, then rank 0 gives it its name; in the foreground or in the background.

Both are the same call. In the background it works on a copy of the state, in a thread and on a process group of its
own, so that nothing is left behind when the process is killed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError, SaveError
from megatron_edit.checkpoint.folders import FINAL
from megatron_edit.checkpoint.manifest import Manifest, size_problems
from megatron_edit.checkpoint.save_folder import SaveFolder
from megatron_edit.checkpoint.torch_dist import ShardedTensor, write_tensors
from megatron_edit.ranks.collective import on_first_rank
from megatron_edit.ranks.shared import wait_until

Say = Callable[[str], None]
_SECONDS_TO_SEE = 5.0  # what other ranks have written


@dataclass(frozen=True)
class Checkpoint:
    """What is to be written."""

    content: dict[str, Any]  # JSON for the manifest, the same on all ranks; `scope` and `iteration` are among it
    tensors: Iterable[ShardedTensor]  # of this rank; read once
    expected: Mapping[str, tuple[int, ...]]  # shapes of whole tensors that all ranks together must write

    @property
    def iteration(self) -> int:
        """Completed iterations."""
        return int(self.content["iteration"])


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete and durable."""

    folder: Path
    iteration: int
    bytes: int  # of all files
    seconds: float  # of the writing
    deleted: tuple[int, ...]  # iterations of older checkpoints that made room
    remark: str = ""  # what is to be said of the folder


class CheckpointWriter:
    """Writes into the folder of --save. Every method is collective over `group`, all ranks over gloo.

    `keep`: newest checkpoints to keep, 0 = all. Raises CheckpointError when another run saves there.
    """

    def __init__(self, directory: str | Path, group: dist.ProcessGroup, *, keep: int = 0, say: Say) -> None:
        self.folder = SaveFolder(directory)
        self._group = group
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._staging: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        if remark := on_first_rank(self.folder.acquire, group):
            say(remark)

    def save(self, checkpoint: Checkpoint) -> Saved:
        """Writes it and moves the pointer to it; weights go to `final/`, without. Raises SaveError on all ranks."""
        assert self._thread is None, "wait for the save in the background first"
        return self._write(checkpoint)

    def save_in_background(self, checkpoint: Checkpoint) -> None:
        """As `save`, but returns when the state has been copied; see `finished`."""
        assert self._thread is None, "wait for the save in the background first"
        staged = replace(checkpoint, tensors=self._stage(checkpoint.tensors))

        def run() -> None:
            try:
                self._outcome = self._write(staged)
            except BaseException as error:
                self._outcome = error

        self._thread = threading.Thread(target=run, name=f"save {checkpoint.iteration}", daemon=True)
        self._thread.start()

    def finished(self, *, wait: bool = False) -> Saved | None:
        """The save in the background once it is complete, one time; None before that, and without one.

        Raises SaveError when it failed. Ranks see the end at slightly different times; nothing but what is printed
        may depend on it, unless all `wait`.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """Lets other runs save into the folder; a save in the background must have ended."""
        assert self._thread is None, "wait for the save in the background first"
        self.folder.release()

    def _write(self, checkpoint: Checkpoint) -> Saved:
        started = time.monotonic()
        group, folder = self._group, self.folder
        is_final = checkpoint.content["scope"] == "weights"
        name = FINAL if is_final else folder.path(checkpoint.iteration).name
        try:
            remark = on_first_rank(folder.renew, group)
            aside = on_first_rank(lambda: folder.begin(name), group)
            mine = write_tensors(aside, checkpoint.tensors, group, checkpoint.expected)
            parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
            dist.gather_object(mine, parts, dst=0, group=group)

            def commit() -> Saved:
                files = {file: entry for part in parts or [] for file, entry in part.items()}
                manifest = Manifest(checkpoint.content, files)
                _look_at_files(aside, manifest)
                path = folder.commit(name, manifest)
                deleted: list[int] = []
                if not is_final:
                    folder.point_to(manifest.iteration)
                    deleted = folder.delete_old(manifest.iteration, self._keep)
                size = sum(entry.bytes for entry in manifest.files.values())
                return Saved(path, manifest.iteration, size, time.monotonic() - started, tuple(deleted), remark)

            return on_first_rank(commit, group)
        except (OSError, SaveError, CheckpointError) as error:
            if dist.get_rank(group) == 0:
                folder.abandon(name)
            raise SaveError(
                f"{name} was not saved in {folder.directory}: {error}; the checkpoints before it are as they were"
            ) from error

    def _stage(self, tensors: Iterable[ShardedTensor]) -> list[ShardedTensor]:
        """Copies on the CPU; the buffers are kept for the next save."""
        staged = []
        for tensor in tensors:
            data = tensor.data
            assert data is not None
            place = (tensor.key, tensor.global_offset)
            buffer = self._staging.get(place)
            if buffer is None or buffer.shape != data.shape:
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                self._staging[place] = buffer
            buffer.copy_(data, non_blocking=True)
            staged.append(replace(tensor, data=buffer))
        torch.cuda.synchronize()
        return staged


def _look_at_files(folder: Path, manifest: Manifest) -> None:
    """Raises SaveError when one process does not see every file of the others: ranks may write on disks of their own.

    What another machine has written may take a moment to be seen; see `shared`.
    """
    if not wait_until(lambda: not size_problems(folder, manifest), _SECONDS_TO_SEE):
        problems = size_problems(folder, manifest)
        raise SaveError(f"{problems[0]} on {socket.gethostname()}: is the folder one that all ranks share?")
