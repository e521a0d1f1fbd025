"""The folder of --save: how a new checkpoint takes its place, and what is deleted. No torch.

One process (rank 0) calls what is here. Order of a save: files, `manifest.json`, rename, pointer, deletion of old
ones; each step is durable before the next. Nothing is deleted that could be all that is left of a checkpoint.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import (
    FINAL,
    PARTIAL,
    POINTER,
    CheckpointFolder,
    is_checkpoint,
    is_complete,
    sync_folder,
    write_durably,
)
from megatron_edit.checkpoint.lock import FolderLock
from megatron_edit.checkpoint.manifest import MANIFEST, Manifest

_REPLACED, _DAMAGED = ".replaced", ".damaged"


class SaveFolder(CheckpointFolder):
    """A folder of checkpoints that this process saves into."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._lock = FolderLock(self.directory)

    def acquire(self) -> str | None:
        """Keeps other runs from saving here as long as this process lives, and ends renames that a killed one began.

        Returns what is to be said when the file system has no locks. Raises CheckpointError when another run saves
        here, or the folder lies in a checkpoint, with which it would be deleted.
        """
        self._refuse_in_checkpoint()
        remark = self._lock.acquire()
        if self._lock.held:
            try:
                self._end_renames()
            except OSError as error:
                raise CheckpointError(f"--save {self.directory} cannot be used: {error}") from error
        return remark

    def _refuse_in_checkpoint(self) -> None:
        here = self.directory.resolve()
        for folder in (here, *here.parents):  # any folder above may have a manifest.json of something else
            if (folder == here or folder.name.startswith(("iter_", FINAL))) and is_checkpoint(folder):
                raise CheckpointError(
                    f"--save {self.directory} lies in the checkpoint {folder}: what is saved there would be deleted "
                    f"with it; --save {folder.parent} would go on in the folder of that run, or give a new folder"
                )

    def renew(self) -> str:
        """Takes the lock anew when the folder, or the lock in it, was removed since `acquire`; what is to be said then.

        Raises CheckpointError when another run saves here by now.
        """
        if not self._lock.was_removed():
            return ""
        lost = "" if self.iterations() else ", with the checkpoints in it"
        self._lock.release()
        return (
            f"*** --save {self.directory} was removed or moved away while the run went on{lost}: it is made anew, and "
            f"the next checkpoints go there{_and(self._lock.acquire())} ***"
        )

    def release(self) -> None:
        """Lets other runs save here."""
        self._lock.release()

    def clean_up(self) -> None:
        """Removes what a killed run has left half written.

        To be called when it is settled what is loaded: as long as nothing could be, it may be all that there is.
        """
        if not self._lock.held:  # another run may be writing it
            return
        for path in self.entries():
            replaces = path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)).exists()
            if replaces or (path.name.endswith(PARTIAL) and path.is_dir()):
                shutil.rmtree(path, ignore_errors=True)

    def set_aside_after(self, iteration: int) -> list[str]:
        """Renames checkpoints after `iteration`, up to the pointer's, that the run goes on without; the new names.

        They are damaged; what can be saved of them is not to be written over when the run comes there again.
        """
        try:
            last = self.pointer()
        except CheckpointError:
            last = None
        renamed = []
        for later in self.iterations():
            if later > iteration and (last is None or later <= last):
                renamed.append(self._set_aside(self.path(later)).name)
        return renamed

    def begin(self, name: str) -> Path:
        """A new empty folder in which the checkpoint `name` is written."""
        aside = self.directory / (name + PARTIAL)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def abandon(self, name: str) -> None:
        """Gives the space of a save that failed back."""
        shutil.rmtree(self.directory / (name + PARTIAL), ignore_errors=True)

    def commit(self, name: str, manifest: Manifest) -> Path:
        """The folder of `begin`, whose files are durable, becomes the checkpoint `name`."""
        aside, folder = self.directory / (name + PARTIAL), self.directory / name
        write_durably(aside / MANIFEST, manifest.to_json().encode())
        sync_folder(aside)
        replaced = self.directory / (name + _REPLACED)
        if folder.exists():
            if is_complete(folder):
                folder.rename(replaced)
            else:
                self._set_aside(folder)
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
            aside = self.path(iteration).with_name(self.path(iteration).name + PARTIAL)
            with suppress(OSError):  # one that cannot be deleted does no harm to the new one
                self.path(iteration).rename(aside)  # half deleted it must not look like a checkpoint
                shutil.rmtree(aside)
                deleted.append(iteration)
        return deleted

    def _end_renames(self) -> None:
        """A whole checkpoint must not stay under a name that is not looked at, where a kill came before a rename."""
        for suffix in (_REPLACED, PARTIAL):
            for path in self.entries():
                folder = path.with_name(path.name.removesuffix(suffix))
                if path.name.endswith(suffix) and not folder.exists() and (suffix == _REPLACED or is_complete(path)):
                    path.rename(folder)

    def _set_aside(self, folder: Path) -> Path:
        aside = folder.with_name(folder.name + _DAMAGED)
        number = 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}{_DAMAGED}-{number}")
        folder.rename(aside)
        return aside


def _and(remark: str | None) -> str:
    return f"; {remark}" if remark else ""
