"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_edit.checkpoint.folders import sync_folder
from megatron_edit.convert.errors import ConversionError

_PARTIAL, _REPLACED = ".partial", ".replaced"


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
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write into; it becomes `output` at the end, and goes when something fails."""
    aside = output.with_name(output.name + _PARTIAL)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    try:
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
