"""Looking into checkpoints without a run: content, checksums, comparison, one replica's state. One process, no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import (
    FINAL,
    POINTER,
    Candidate,
    CheckpointFolder,
    complete_checkpoint,
    is_checkpoint,
)
from megatron_edit.checkpoint.manifest import content_problem, read_manifest
from megatron_edit.checkpoint.torch_dist import StoredTensor, read_whole_tensors, stored_tensors
from megatron_edit.config.save_size import human_bytes

_BATCH_BYTES = 256 << 20  # of whole tensors read at once
_LAST_PARTS = ("param", "exp_avg", "exp_avg_sq", "anchor", "outer_momentum")


def choose(directory: Path, step: int | None) -> Candidate:
    """The checkpoint that is meant: `directory` itself, iteration `step` in it, or the one its pointer names."""
    if is_checkpoint(directory):
        return complete_checkpoint(directory)
    choice = next(CheckpointFolder(directory).to_load(step, False), None)
    if choice is None:
        raise CheckpointError(
            f"{directory} holds no checkpoint: there is no {POINTER} and no complete iter_NNNNNNN in it"
        )
    return choice[0]


def list_folder(directory: Path) -> list[str]:
    """One line for each checkpoint in `directory`, complete or not."""
    folder, lines = CheckpointFolder(directory), []
    try:
        pointer = folder.pointer()
    except CheckpointError as error:
        pointer = None
        lines.append(str(error))
    complete = folder.complete_iterations()
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or not (path.name.startswith("iter_") or path.name.startswith(FINAL)):
            continue
        mark = "  <- " + POINTER if pointer is not None and path == folder.path(pointer) else ""
        try:
            manifest = complete_checkpoint(path).manifest
        except CheckpointError as error:
            lines.append(f"{path.name}: incomplete: {str(error).splitlines()[0]}{mark}")
            continue
        size = sum(entry.bytes for entry in manifest.files.values())
        lines.append(f"{path.name}: iteration {manifest.iteration}, {manifest.scope}, {human_bytes(size)}{mark}")
    if pointer is not None and pointer not in complete:
        lines.append(f"{POINTER} names iteration {pointer}, which is not complete")
    return lines


def describe(candidate: Candidate) -> list[str]:
    """Content, layout and sizes of one checkpoint, one line each."""
    content, files = candidate.manifest.content, candidate.manifest.files
    stored = stored_tensors(candidate.folder)
    lines = [
        f"folder: {candidate.folder}",
        f"iteration: {candidate.manifest.iteration}",
        f"scope: {candidate.manifest.scope}",
        f"layout: {_pairs(content['layout'])}",
        f"vocabulary: {content['vocab_size']}",
        f"versions: {_pairs(content.get('versions', {}))}",
    ]
    for name in ("method", "consumed_samples", "has_anchor"):
        if name in content:
            lines.append(f"{name.replace('_', ' ')}: {content[name]}")
    if "trigger" in content:
        lines.append(f"sync: {_pairs(content['trigger'])}")
    if "schedule" in content:
        given = {name: value for name, value in content["schedule"]["optimizer"].items() if value is not None}
        lines.append(f"optimizer: {_pairs(given)}")
    for index, replica in enumerate(content.get("replicas", [])):
        lines.append(f"replica {index}: {_pairs(replica)}")
    groups: dict[str, list[StoredTensor]] = {}
    for name, entry in stored.items():
        groups.setdefault(group_of(name), []).append(entry)
    lines += [
        f"tensors {group}: {len(entries)}, {human_bytes(sum(entry.bytes for entry in entries))}"
        for group, entries in sorted(groups.items())
    ]
    lines.append(f"files: {len(files) + 1}, {human_bytes(sum(entry.bytes for entry in files.values()))}")
    return lines


def tensor_lines(candidate: Candidate) -> list[str]:
    """Name, shape, dtype and size of every tensor."""
    return [
        f"{name} {list(entry.shape)} {str(entry.dtype).removeprefix('torch.')} {human_bytes(entry.bytes)}"
        + ("" if entry.complete else f" INCOMPLETE: {entry.elements_written} elements")
        for name, entry in sorted(stored_tensors(candidate.folder).items())
    ]


def verify(candidate: Candidate) -> list[str]:
    """Everything that is wrong: checksums of all files, and tensors that were not written as a whole."""
    problems = [
        problem
        for name, entry in candidate.manifest.files.items()
        if (problem := content_problem(candidate.folder, name, entry))
    ]
    if not problems:
        problems = [
            f"{name} {list(entry.shape)}: only {entry.elements_written} elements are there"
            for name, entry in stored_tensors(candidate.folder).items()
            if not entry.complete
        ]
    return problems


@dataclass(frozen=True)
class Difference:
    """One thing that is not bit-equal. `largest`: of the absolute differences; NaN where there is none."""

    name: str
    what: str
    largest: float = float("nan")


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """Tensor by tensor, bit by bit, and number by number of two checkpoints' folders; whole tensors, so that the
    layouts may differ."""
    one, other = stored_tensors(first), stored_tensors(second)
    for name in sorted(one.keys() ^ other.keys()):
        yield Difference(name, f"only in {first if name in one else second}")
    shared = []
    for name in sorted(one.keys() & other.keys()):
        if (one[name].shape, one[name].dtype) != (other[name].shape, other[name].dtype):
            yield Difference(name, f"{list(one[name].shape)} {one[name].dtype}, {list(other[name].shape)} "
                                   f"{other[name].dtype}")  # fmt: skip
        else:
            shared.append(name)
    for names in _batches(shared, one):
        left, right = read_whole_tensors(first, names), read_whole_tensors(second, names)
        for name in names:
            unequal = left[name].reshape(-1).view(torch.uint8) != right[name].reshape(-1).view(torch.uint8)
            if unequal.any():
                apart = (left[name].double() - right[name].double()).abs()
                count = int((unequal.view(-1, left[name].element_size()).any(dim=1)).sum())
                yield Difference(name, f"{count} of {left[name].numel()} elements", float(apart.nan_to_num().max()))
    content, theirs = read_manifest(first).content, read_manifest(second).content
    for name in sorted(content.keys() | theirs.keys()):
        if content.get(name) != theirs.get(name):
            yield Difference(name, f"{content.get(name)}, {theirs.get(name)}")


def replica_state(candidate: Candidate, replica: int) -> dict[str, Any]:
    """One replica's own state: {"param": {name: whole fp32 tensor}, "exp_avg": ..., "exp_avg_sq": ..., "rng": {...},
    "numbers": ...}. Raises CheckpointError when the checkpoint does not hold that replica."""
    prefix, generators = f"replica{replica}.optimizer.state.", f"rng.{replica}."
    names = [name for name in stored_tensors(candidate.folder) if name.startswith((prefix, generators))]
    saved = candidate.manifest.content.get("replicas", [])
    if not names or replica >= len(saved):
        held = {0: "no replica", 1: "replica 0"}.get(len(saved), f"replicas 0 to {len(saved) - 1}")
        raise CheckpointError(f"{candidate.folder} holds the state of {held}: there is no replica {replica}")
    state: dict[str, Any] = {"numbers": saved[replica], "rng": {}}
    for name, tensor in read_whole_tensors(candidate.folder, names).items():
        if name.startswith(generators):
            state["rng"][name.removeprefix("rng.")] = tensor
        else:
            part, parameter = name.removeprefix(prefix).split(".", 1)
            state.setdefault(part, {})[parameter] = tensor
    return state


def group_of(name: str) -> str:
    """The key up to the parameter's name: `replica0.optimizer.state.param`, `edit.anchor`, `rng`, ..."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in _LAST_PARTS:
            return ".".join(parts[: index + 1])
    return "edit.detector" if name.startswith("edit.detector") else parts[0]


def _batches(names: Sequence[str], stored: dict[str, StoredTensor]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + stored[name].bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += stored[name].bytes
    if batch:
        yield batch


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
