"""Folders of checkpoints: which are complete, and which is to be loaded. No torch.

    DIR/latest_checkpointed_iteration.txt    the pointer: iteration to resume from
    DIR/iter_0000010/                        a complete checkpoint, see `manifest`
    DIR/iter_0000020.partial/                being written, or left by a run that was killed
    DIR/iter_0000010.replaced/               for an instant, while a checkpoint of the same iteration takes its place
    DIR/iter_0000010.damaged/                set aside: the run went on without it (--load-fallback)
    DIR/final/                               weights only
    DIR/.lock                                held by the run that saves here

Nothing here changes anything; `save_folder` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.manifest import MANIFEST, Manifest, read_manifest, size_problems

POINTER = "latest_checkpointed_iteration.txt"
FINAL = "final"
PARTIAL = ".partial"
_NAME = re.compile(r"iter_(\d{7,})")
_SHOWN = 8  # names that are listed


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint: every file is there with its size; its checksums have not been looked at."""

    folder: Path
    manifest: Manifest


class CheckpointFolder:
    """The folder of --save or --load."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def path(self, iteration: int) -> Path:
        """Where the checkpoint of `iteration` is or will be."""
        return self.directory / f"iter_{iteration:07d}"

    def candidate(self, iteration: int) -> Candidate:
        """The checkpoint of `iteration`. Raises CheckpointError saying what is missing or damaged."""
        return complete_checkpoint(self.path(iteration))

    def complete_iterations(self) -> list[int]:
        """Iterations of all complete checkpoints, ascending."""
        found = []
        for iteration in self.iterations():
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

    def final_to_load(self) -> Candidate | None:
        """`final/`, where weights alone are wanted of a run: it has the last sync. None where a later checkpoint is.

        Training from weights (--finetune), conversion, generation and evaluation all ask here. Raises CheckpointError
        when it is damaged.
        """
        final = self.directory / FINAL
        if not is_checkpoint(final):
            return None
        pointer = self.pointer()
        if pointer is not None and pointer > read_manifest(final).iteration:
            return None
        return complete_checkpoint(final)

    def to_load(self, step: int | None, fallback: bool) -> Iterator[tuple[Candidate, str]]:
        """Checkpoints to try, best first, each with what is to be said about the choice ("" when nothing is).

        `step` (--ckpt-step) alone counts when given. Otherwise the pointer's; without a pointer the newest complete
        one; with `fallback` also the complete ones before it. Raises CheckpointError when the one that is wanted is
        not there, incomplete or cannot be read, and where nothing complete is left; yields nothing in a folder that
        is unused, and only there.
        """
        if step is not None:
            yield self._asked_for(step), ""
            return
        wanted: int | None = None
        tried = False
        try:
            wanted = self.pointer()
            if wanted is not None:
                candidate = self.candidate(wanted)
        except CheckpointError as error:
            if not fallback:
                raise CheckpointError(f"{error}; {self.what_would_help(wanted)}") from error
            problem = str(error)
        else:
            problem = self._without_pointer()
            if wanted is not None:
                yield candidate, ""
                tried, problem = True, "the checkpoint after it is damaged"
                if not fallback:
                    return
        older = self._complete_before(wanted)
        for iteration in reversed(older):
            yield self.candidate(iteration), problem
        if not older and not tried and not self.is_unused():
            raise CheckpointError(f"{problem}; {self.what_would_help(wanted, fallback=True)}")

    def is_unused(self) -> bool:
        """Whether no run has ever saved here: a job that is started again and again has its first start.

        False with a pointer, with anything called `iter_...`, whole or damaged, and with `final/`. But a `.partial`
        without a manifest never was a checkpoint: a run that was killed in its first save starts again by itself.
        Raises CheckpointError when that cannot be read.
        """
        return not self._traces()

    def what_would_help(self, wanted: int | None, *, fallback: bool = False) -> str:
        """For a message: what can be done when the checkpoint `wanted` (None: that of any iteration) is of no use.

        `fallback`: with --load-fallback, so the complete ones before it are of no use either.
        """
        complete = self.complete_iterations()
        older = [] if fallback else [n for n in complete if wanted is None or n < wanted]
        if older:
            return f"--load-fallback would take iteration {older[-1]}"
        ways = ["put back a copy of what is damaged or missing"]
        if later := [n for n in complete if wanted is not None and n > wanted]:
            ways.append(f"--ckpt-step {later[-1]} would take iteration {later[-1]}, later than the pointer's")
        if (iteration := self.final_iteration()) is not None:
            final = self.directory / FINAL
            ways.append(f"--finetune --load {final} would start a new run from the weights of iteration {iteration}")
        there = ", ".join(self._traces()[:_SHOWN])
        return (
            f"no other complete checkpoint is there to fall back to ({self.directory} holds {there}), and this is not "
            f"a first start: nothing was begun or changed\nwhat would help: {'; '.join(ways)}; or start anew with "
            "another folder for --load and --save"
        )

    def _asked_for(self, step: int) -> Candidate:
        try:
            return self.candidate(step)
        except CheckpointError as error:
            complete = ", ".join(map(str, self.complete_iterations())) or "none"
            raise CheckpointError(f"{error}; --ckpt-step asks for it; complete iterations: {complete}") from error

    def _without_pointer(self) -> str:
        """What is to be said where there is no pointer; names what is newer than the newest complete one."""
        complete = self.complete_iterations()
        newer = [n for n in self.iterations() if not complete or n > complete[-1]]
        problems = [f"there is no {POINTER} in {self.directory}"]
        for iteration in newer:
            try:
                self.candidate(iteration)
            except CheckpointError as error:
                problems += str(error).splitlines()[:1]
        return "; ".join(problems)

    def _complete_before(self, iteration: int | None) -> list[int]:
        return [n for n in self.complete_iterations() if iteration is None or n < iteration]

    def iterations(self) -> list[int]:
        """Iterations of all checkpoints, complete or not, ascending."""
        names = (_NAME.fullmatch(path.name) for path in self.entries())
        return sorted(int(match[1]) for match in names if match)

    def _traces(self) -> list[str]:
        """Names of what tells that a run has saved here."""
        return [path.name for path in self.entries() if path.name == POINTER or _is_of_a_checkpoint(path)]

    def entries(self) -> list[Path]:
        """What lies in the folder; nothing where there is none. Raises CheckpointError when it cannot be read."""
        try:
            return sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror}") from error


def complete_checkpoint(folder: Path) -> Candidate:
    """The checkpoint in `folder`. Raises CheckpointError saying what is missing or damaged."""
    try:
        is_there = folder.is_dir()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    if not is_there:
        raise CheckpointError(f"there is no checkpoint {folder}")
    manifest = read_manifest(folder)
    if problems := size_problems(folder, manifest):
        raise CheckpointError("\n".join(problems))
    return Candidate(folder, manifest)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is one checkpoint, whole or not, and not a folder of them. Raises CheckpointError."""
    try:
        return (folder / MANIFEST).exists()
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror}") from error


def is_complete(folder: Path) -> bool:
    """Whether every file is there with its size."""
    try:
        complete_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _is_of_a_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint or may be what is left of one."""
    if not path.name.startswith(("iter_", FINAL)):
        return False
    try:
        return not path.name.endswith(PARTIAL) or (path / MANIFEST).exists()
    except OSError:
        return True  # what cannot be read is not to be taken for nothing


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether --load and --save are one folder."""
    return first is not None and second is not None and os.path.realpath(first) == os.path.realpath(second)


def check_load(load: str | None, save: str | None) -> None:
    """Raises CheckpointError when there is nothing to load in `load`, and it is not `save` before a first start."""
    if load is None or same_folder(load, save):
        return
    try:
        names = os.listdir(load)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"--load {load} is not a folder") from None
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
