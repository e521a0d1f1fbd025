"""A folder that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.checkpoint.folders import sync_folder
from megatron_edit.convert.errors import ConversionError

_PARTIAL, _REPLACED = ".partial", ".replaced"


@dataclass(frozen=True)
class Written:
    """What was written where."""

    folder: Path
    tensors: int
    files: int
    bytes: int  # of the values
    notes: list[str]


def check_output(output: Path, overwrite: bool, *inputs: Path) -> None:
    """Raises ConversionError when the output would take the place of something that is not to be lost."""
    if os.path.lexists(output) and not output.is_dir():
        raise ConversionError(f"--output {output} is a file")
    for path in inputs:
        if output.resolve() == path.resolve() or output.resolve() in path.resolve().parents:
            raise ConversionError(f"--output {output} would replace the input {path}")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise ConversionError(f"--output {output} exists: give another folder, or --overwrite to replace it")


@contextmanager
def new_folder(output: Path, overwrite: bool, *inputs: Path) -> Iterator[Path]:
    """A folder beside `output` to write into; it becomes `output` at the end, and goes when something fails.

    Raises ConversionError when `check_output` does, or while another conversion writes there.
    """
    aside = output.with_name(output.name + _PARTIAL)
    lock = _lock(aside, output)
    try:
        check_output(output, overwrite, *inputs)  # once more: another conversion may have ended since
        for left in aside.iterdir():  # by one that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield aside
        sync_folder(aside)
        replaced = output.with_name(output.name + _REPLACED)
        if replaced.exists():
            shutil.rmtree(replaced)
        if output.exists():
            output.rename(replaced)
        try:
            aside.rename(output)
        except OSError:
            if replaced.exists():
                replaced.rename(output)
            raise
        sync_folder(output.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(aside: Path, output: Path) -> int:
    """Makes `aside` and locks it for as long as the descriptor that is returned stays open."""
    while True:
        aside.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                raise ConversionError(
                    f"--output {output}: another conversion is writing there now ({aside}); give each a folder of its "
                    "own, or wait for its end"
                ) from None
            # else a file system without locks: nothing keeps a second one away, as with checkpoints
        with suppress(FileNotFoundError):  # the other one may have ended between the two calls
            if os.path.samestat(os.fstat(descriptor), os.stat(aside)):
                return descriptor
        os.close(descriptor)
