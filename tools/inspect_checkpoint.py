"""Looks into a checkpoint: content, layout, sizes; verifies it, compares two, writes out one replica's state.

usage: python tools/inspect_checkpoint.py DIR [--ckpt-step N] [--tensors] [--verify] [--compare OTHER]
                                              [--dump-replica I FILE.pt]

DIR is a folder of checkpoints (then also a line for each, and the one its pointer names is taken) or one checkpoint.
Exit code: 0 all is well, 1 damaged or different, 2 nothing to look at.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import FINAL, complete_checkpoint
from megatron_edit.checkpoint.manifest import MANIFEST
from megatron_edit.config.paths import PathParser
from megatron_edit.log.streams import outlive_readers
from megatron_edit.platform.base import quiet_megatron_warnings

with warnings.catch_warnings():  # imports megatron-core
    quiet_megatron_warnings()
    from megatron_edit.checkpoint import inspect


def main(argv: list[str]) -> int:
    """Runs the tool; returns the exit code."""
    parser = PathParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder of checkpoints, or one checkpoint")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to look at")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every file, of final/ too")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="compare with this one, tensor by tensor")
    parser.add_argument("--dump-replica", nargs=2, metavar=("I", "FILE"), help="torch.save one replica's state")
    arguments = parser.parse_args(argv)
    try:
        return _inspect(arguments)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _inspect(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder")
    if arguments.dump_replica is not None:
        index, file = arguments.dump_replica
        if not index.isdecimal():
            raise CheckpointError(f"--dump-replica {index}: a number from 0 on is wanted")
        if not Path(file).parent.is_dir():
            raise CheckpointError(f"--dump-replica {index} {file}: there is no folder {Path(file).parent}")
    if not (directory / MANIFEST).exists():
        _print(inspect.list_folder(directory))
    candidate = inspect.choose(directory, arguments.ckpt_step)
    _print(inspect.describe(candidate))
    if arguments.tensors:
        _print(inspect.tensor_lines(candidate))
    code = 0
    if arguments.verify:
        folders = [candidate.folder]
        if arguments.ckpt_step is None and (directory / FINAL).is_dir():  # what is exported and fine-tuned
            folders.append(directory / FINAL)
        for folder in folders:
            code = max(code, _verify(folder))
    if arguments.compare is not None:
        other = inspect.choose(arguments.compare, None)
        equal = True
        for difference in inspect.compare(candidate.folder, other.folder):
            equal = False
            largest = "" if difference.largest != difference.largest else f", largest {difference.largest:.3e}"
            print(f"{difference.name}: {difference.what}{largest}")
        print(f"{candidate.folder} and {other.folder}: {'equal, bit by bit' if equal else 'different'}")
        code = code if equal else 1
    if arguments.dump_replica is not None:
        torch.save(inspect.replica_state(candidate, int(index)), file)
        print(f"wrote replica {index} to {file}")
    return code


def _verify(folder: Path) -> int:
    """Prints what is wrong with one checkpoint; returns the exit code."""
    try:
        candidate = complete_checkpoint(folder)
        problems = inspect.verify(candidate)
    except CheckpointError as error:
        problems = [str(error)]
    _print(problems or [f"verified: {len(candidate.manifest.files)} files of {folder}, every tensor complete"])
    return 1 if problems else 0


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
