"""Folders of checkpoints: written aside, made durable, renamed; then the pointer moves.

    DIR/latest_checkpointed_iteration.txt    the pointer
    DIR/iter_0000010/metadata.json           iteration, layout, counters
    DIR/iter_0000010/rank_00003.pt           that rank's state
    DIR/final/                               weights only, see `save_final`
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

POINTER = "latest_checkpointed_iteration.txt"
FORMAT_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the folder and what was looked for."""


def check_load(load: str | None, save: str | None) -> None:
    """Raises CheckpointError when there is nothing to load in `load`, and it is not `save` before a first start."""
    if load is None or (Path(load) / POINTER).exists():
        return
    if save is None or Path(load).absolute() != Path(save).absolute():
        raise CheckpointError(f"--load {load}: there is no {POINTER} in it, so it holds no checkpoint")


class CheckpointStore:
    """Saves and loads per-rank states. `group` is a CPU group over all ranks; every method is collective."""

    def __init__(self, directory: str | Path, group: dist.ProcessGroup) -> None:
        self.directory = Path(directory)
        self._group = group
        self._rank = dist.get_rank()

    def save(self, iteration: int, rank_state: dict[str, Any], metadata: dict[str, Any]) -> Path:
        """Writes one complete checkpoint and moves the pointer to it."""
        folder = self.directory / f"iter_{iteration:07d}"
        self.write_folder(folder, {f"rank_{self._rank:05d}.pt": rank_state}, {"iteration": iteration, **metadata})
        if self._rank == 0:
            _write_durably(self.directory / POINTER, str(iteration).encode())
        dist.barrier(self._group)
        return folder

    def write_folder(self, folder: Path, files: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Each rank's `files` and one metadata.json appear under `folder` together or not at all."""
        aside = folder.with_name(folder.name + ".partial")
        if self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier(self._group)
        for name, content in files.items():
            with open(aside / name, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier(self._group)
        if self._rank == 0:
            described = {"format_version": FORMAT_VERSION, **metadata}
            _write_durably(aside / "metadata.json", json.dumps(described, indent=1).encode())
            _sync_folder(aside)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            _sync_folder(folder.parent)
        dist.barrier(self._group)

    def latest(self) -> dict[str, Any] | None:
        """metadata of the checkpoint that the pointer names, read by rank 0 for all; None without a pointer."""
        metadata: dict[str, Any] | None = self._read_once(self._read_pointer)
        return metadata

    def final_iteration(self) -> int | None:
        """Iteration of the weights in `final/`, read by rank 0 for all; None without it."""
        path = self.directory / "final" / "metadata.json"
        iteration: int | None = self._read_once(lambda: _read_metadata(path)["iteration"] if path.exists() else None)
        return iteration

    def _read_once(self, read: Callable[[], Any]) -> Any:
        found: list[Any] = [None]
        if self._rank == 0:
            try:
                found = [read()]
            except CheckpointError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0, group=self._group)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        return found[0]

    def load(self, iteration: int) -> dict[str, Any]:
        """This rank's state of `iteration`."""
        path = self.directory / f"iter_{iteration:07d}" / f"rank_{self._rank:05d}.pt"
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"--load: {path} is missing") from error
        except Exception as error:
            raise CheckpointError(f"--load: {path} is damaged: {error}") from error
        return state

    def _read_pointer(self) -> dict[str, Any] | None:
        pointer = self.directory / POINTER
        if not pointer.exists():
            return None
        text = pointer.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(f"--load: {pointer} should hold an iteration, it holds {text[:40]!r}")
        path = self.directory / f"iter_{int(text):07d}" / "metadata.json"
        if not path.exists():
            raise CheckpointError(f"--load: {pointer} names iteration {text}, but {path} is missing")
        return _read_metadata(path)


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads(path.read_text())
        version = metadata["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"--load: {path} is damaged: {type(error).__name__}: {error}") from None
    if version > FORMAT_VERSION:
        raise CheckpointError(f"--load: {path} has format {version}, this program reads up to {FORMAT_VERSION}")
    return metadata


def _write_durably(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".partial")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
