"""Folders of checkpoints: which are complete, which is to be loaded, how a new one takes its place. No torch.

    DIR/latest_checkpointed_iteration.txt    the pointer: iteration to resume from
    DIR/iter_0000010/                        a complete checkpoint, see `manifest`
    DIR/iter_0000020.partial/                being written, or left by a run that was killed
    DIR/iter_0000010.replaced/               for an instant, while a checkpoint of the same iteration takes its place
    DIR/final/                               weights only
    DIR/.lock                                held by the run that saves here

One process (rank 0) calls what changes something. Order of a save: files, `manifest.json`, rename, pointer, deletion
of old ones; each step is durable before the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.manifest import MANIFEST, Manifest, read_manifest, size_problems

POINTER = "latest_checkpointed_iteration.txt"
FINAL = "final"
LOCK = ".lock"
_PARTIAL, _REPLACED = ".partial", ".replaced"
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint: every file is there with its size; its checksums have not been looked at."""

    folder: Path
    manifest: Manifest


class CheckpointFolder:
    """The folder of --save or --load."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._lock: IO[str] | None = None

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of `iteration` is or will be."""
        return self.directory / f"iter_{iteration:07d}"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def candidate(self, iteration: int) -> Candidate:
        """The checkpoint of `iteration`. Raises CheckpointError saying what is missing or damaged."""
        return complete_checkpoint(self.path(iteration))

    def complete_iterations(self) -> list[int]:
        """Iterations of all complete checkpoints, ascending."""
        found = []
        for iteration in self._iterations():
            with suppress(CheckpointError):
                self.candidate(iteration)
                found.append(iteration)
        return found

    def pointer(self) -> int | None:
        """The iteration in the pointer; None without one. Raises CheckpointError for anything but a number in it."""
        path = self.directory / POINTER
        try:
            text = path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if not re.fullmatch(r"[0-9]+", text):
            raise CheckpointError(f"{path} should hold the number of an iteration, it holds {text[:40]!r}")
        return int(text)

    def is_last(self, iteration: int) -> bool:
        """Whether the pointer names `iteration`."""
        try:
            return self.pointer() == iteration
        except CheckpointError:
            return False

    def final_iteration(self) -> int | None:
        """Iteration of the weights in `final/`; None without complete ones."""
        try:
            return complete_checkpoint(self.directory / FINAL).manifest.iteration
        except CheckpointError:
            return None

    def to_load(self, step: int | None, fallback: bool) -> Iterator[tuple[Candidate, str]]:
        """Checkpoints to try, best first, each with what is to be said about the choice ("" when nothing is).

        `step` (--ckpt-step) alone counts when given. Otherwise the pointer's; without a pointer the newest complete
        one; with `fallback` also the complete ones before it. Raises CheckpointError when the one that is wanted is
        not there or incomplete; yields nothing in a folder without checkpoints.
        """
        if step is not None:
            yield self.candidate(step), ""
            return
        wanted: int | None = None
        problem = ""
        try:
            wanted = self.pointer()
            if wanted is not None:
                yield self.candidate(wanted), ""
            elif self.complete_iterations():
                problem = f"there is no {POINTER} in {self.directory}"
        except CheckpointError as error:
            if not fallback:
                others = [n for n in self.complete_iterations() if wanted is None or n < wanted]
                hint = f"; --load-fallback would take iteration {others[-1]}" if others else ""
                raise CheckpointError(f"{error}{hint}") from error
            problem = str(error)
        if wanted is not None and not fallback:
            return
        for iteration in reversed(self.complete_iterations()):
            if wanted is None or iteration < wanted:
                yield self.candidate(iteration), problem or "the checkpoint after it is damaged"

    def _iterations(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in names if match)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def acquire(self) -> str | None:
        """Keeps other runs from saving here as long as this process lives, and removes what a killed one has left.

        Returns what is to be said when the file system has no locks. Raises CheckpointError when another run saves
        here.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = self._lock = open(self.directory / LOCK, "a+")  # noqa: SIM115  held until the process ends
        except OSError as error:
            raise CheckpointError(f"--save {self.directory} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise CheckpointError(
                    f"--save {self.directory}: another run saves there ({holder}); give each run a folder of its own"
                ) from error
            return f"--save {self.directory}: no lock ({error.strerror}): nothing keeps a second run from saving there"
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._clean_up()
        return None

    def release(self) -> None:
        """Lets other runs save here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, name: str) -> Path:
        """A new empty folder in which the checkpoint `name` is written."""
        aside = self.directory / (name + _PARTIAL)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def abandon(self, name: str) -> None:
        """Gives the space of a save that failed back."""
        shutil.rmtree(self.directory / (name + _PARTIAL), ignore_errors=True)

    def commit(self, name: str, manifest: Manifest) -> Path:
        """The folder of `begin`, whose files are durable, becomes the checkpoint `name`."""
        aside, folder = self.directory / (name + _PARTIAL), self.directory / name
        write_durably(aside / MANIFEST, manifest.to_json().encode())
        sync_folder(aside)
        replaced = self.directory / (name + _REPLACED)
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        sync_folder(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def point_to(self, iteration: int) -> None:
        """Moves the pointer."""
        write_durably(self.directory / POINTER, str(iteration).encode())

    def delete_old(self, newest: int, keep: int) -> list[int]:
        """Deletes complete checkpoints beyond the `keep` newest up to `newest`; 0 keeps all. Returns their iterations.

        Ones of later iterations belong to another past of this folder: they are neither counted nor touched.
        """
        if keep == 0:
            return []
        deleted = []
        for iteration in [iteration for iteration in self.complete_iterations() if iteration <= newest][:-keep]:
            aside = self.path(iteration).with_name(self.path(iteration).name + _PARTIAL)
            with suppress(OSError):  # one that cannot be deleted does no harm to the new one
                self.path(iteration).rename(aside)  # half deleted it must not look like a checkpoint
                shutil.rmtree(aside)
                deleted.append(iteration)
        return deleted

    def _clean_up(self) -> None:
        for path in sorted(self.directory.iterdir()):
            if path.name.endswith(_PARTIAL) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(_REPLACED):
                folder = path.with_name(path.name.removesuffix(_REPLACED))
                if folder.exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:  # killed between the two renames
                    path.rename(folder)


def complete_checkpoint(folder: Path) -> Candidate:
    """The checkpoint in `folder`. Raises CheckpointError saying what is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}")
    manifest = read_manifest(folder)
    if problems := size_problems(folder, manifest):
        raise CheckpointError("\n".join(problems))
    return Candidate(folder, manifest)


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether --load and --save are one folder."""
    return first is not None and second is not None and os.path.realpath(first) == os.path.realpath(second)


def check_load(load: str | None, save: str | None) -> None:
    """Raises CheckpointError when there is nothing to load in `load`, and it is not `save` before a first start."""
    if load is None or same_folder(load, save):
        return
    directory = Path(load)
    if not directory.is_dir():
        raise CheckpointError(f"--load {load} is not a folder")
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise CheckpointError(f"--load {load} cannot be read: {error.strerror}") from error
    if POINTER not in names and MANIFEST not in names and not any(_NAME.fullmatch(name) for name in names):
        raise CheckpointError(
            f"--load {load}: there is no {POINTER}, no folder iter_NNNNNNN and no {MANIFEST} in it, so it holds no "
            "checkpoint"
        )


def write_durably(path: Path, content: bytes) -> None:
    """`path` holds all of `content`, or what it held before, whenever the machine stops."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
