"""manifest.json: what a checkpoint is, and the size and SHA-256 of every file. It is written last, so that a folder
with a manifest whose files have their sizes is complete. No torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 2  # 1: one file per rank, up to megatron_edit 0.1
_BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 in hexadecimal digits of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`content` is JSON: scope, iteration, layout, model, counters; see `checkpoint.training_state`."""

    content: dict[str, Any]
    files: dict[str, FileEntry]  # by name in the folder, without the manifest itself

    @property
    def iteration(self) -> int:
        """Completed iterations."""
        return int(self.content["iteration"])

    @property
    def scope(self) -> str:
        """ "full", "compact" or "weights"."""
        return str(self.content["scope"])

    def to_json(self) -> str:
        """The file's text, with a checksum of its own."""
        body = {
            "format_version": FORMAT_VERSION,
            "content": self.content,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`. Raises CheckpointError when it is missing, damaged or of a newer program."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text())
        version = int(body["format_version"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, this program reads up to {FORMAT_VERSION}: "
            "the checkpoint was written by a newer one"
        )
    try:
        digest = body.pop("sha256")
        if digest != _digest_of(body):
            raise ValueError("its checksum does not fit its text")
        files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        return Manifest(body["content"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size; fast."""
    problems = []
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if found != entry.bytes:
            problems.append(f"{path} has {found} bytes, expected {entry.bytes}")
    return problems


def content_problem(folder: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with one file when all of it is read, or None."""
    path = folder / name
    try:
        found = describe_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found.bytes != entry.bytes:
        return f"{path} has {found.bytes} bytes, expected {entry.bytes}"
    if found.sha256 != entry.sha256:
        return f"{path} is damaged: SHA-256 is {found.sha256[:16]}..., expected {entry.sha256[:16]}..."
    return None


def describe_file(path: Path) -> FileEntry:
    """Reads all of `path`."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
