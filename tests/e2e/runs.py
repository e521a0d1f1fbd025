"""Runs of the command on a tiny Llama, and what they print, taken apart.

The model is the fixture of the field reports: 4 layers, hidden size 64, 8 heads in 2 groups, sequence 32, vocabulary
259; micro batch 2, global batch 8.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_edit.testing.command import CommandResult, run_command

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "seq_length": 32,
    "untie_embeddings_and_output_weights": True,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 12,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "edit_sync_interval": 4,
    "edit_num_replicas": 2,
    "mock_data": True,
    "device": "cpu",
    "log_interval": 1,
    "eval_iters": 0,
    "distributed_timeout_seconds": 30,
}


def arguments(settings: dict[str, Any]) -> list[str]:
    """Flags of `settings` by name: True and False are switches, a list several values, None leaves the flag out."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return words


def start(
    world_size: int,
    *extra: str,
    in_rank: Callable[[int], None] | None = None,
    directory: Path | None = None,
    local_world_size: int | None = None,
    timeout_s: float = 120,
    ends_others: bool = True,
    **settings: Any,
) -> CommandResult:
    """The command with TINY changed by `settings`; `extra`: words behind the flags."""
    argv = [*arguments({**TINY, **settings}), *extra]
    return run_command(
        argv, world_size, local_world_size=local_world_size, directory=directory, in_rank=in_rank, timeout_s=timeout_s,
        ends_others=ends_others,
    )  # fmt: skip


def train(world_size: int, *extra: str, **options: Any) -> CommandResult:
    """As `start`; the run must end well, without a word on stderr but that it was asked to stop."""
    result = start(world_size, *extra, **options)
    complaints = re.sub(r"^rank \d+: .*: all ranks will save and stop .*\n", "", result.stderr, flags=re.MULTILINE)
    assert result.exit_codes == [0] * world_size and complaints == "", result
    return result


# ---- what is printed -------------------------------------------------------------------------------------------------


def training_lines(log: str) -> dict[int, dict[str, str]]:
    """Fields of each training line by name, under its iteration. An iteration that is logged twice is an error."""
    found: dict[int, dict[str, str]] = {}
    for line in log.splitlines():
        match = re.match(r" \[[\d :-]+\] iteration (\d+)/ (\d+) \|(.*)\|$", line)
        if match:
            fields = dict(field.strip().split(": ", 1) for field in match[3].split("|"))
            assert int(match[1]) not in found, line
            found[int(match[1])] = {**fields, "train iters": match[2]}
    return found


def losses(log: str) -> dict[int, str]:
    """The loss as printed, under its iteration."""
    return {iteration: fields["lm loss"] for iteration, fields in training_lines(log).items()}


def syncs(log: str) -> dict[int, int]:
    """Iteration of each sync line, under the number of the sync."""
    lines = re.findall(r"^sync (\d+) at iteration (\d+) \|", log, re.MULTILINE)
    found = {int(number): int(iteration) for number, iteration in lines}
    assert len(found) == len(lines), log
    return found


def evaluations(log: str, split: str = "validation") -> dict[int, float]:
    """Loss of each evaluation, under its iteration."""
    lines = re.findall(rf"^ {split} loss at iteration (\d+) \| lm loss value: (\S+) \|", log, re.MULTILINE)
    return {int(iteration): float(loss) for iteration, loss in lines}


# ---- what is written -------------------------------------------------------------------------------------------------


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a file that torch.save has written, by its path; other leaves as tensors of their hash."""
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}/{key}", inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                visit(f"{path}/{index}", inner)
        else:
            found[path] = torch.frombuffer(bytearray(hashlib.sha256(repr(value).encode()).digest()), dtype=torch.uint8)

    visit("", torch.load(file, weights_only=True))
    return found


def differences(first: Path, second: Path) -> list[str]:
    """Tensors that are not bit-equal in two folders of a checkpoint; the folders must hold the same files."""
    assert files_below(first) == files_below(second)
    found = []
    for name in sorted(files_below(first)):
        if not name.endswith(".pt"):
            continue
        one, other = tensors_of(first / name), tensors_of(second / name)
        assert one.keys() == other.keys(), f"{name}: {one.keys() ^ other.keys()}"
        found += [f"{name}{path}" for path in one if not _same_bits(one[path], other[path])]
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
