"""Runs of the command on a tiny Llama, and what they print, taken apart.

The model: 4 layers, hidden size 64, 8 heads in 2 groups, sequence 32, vocabulary
259; micro batch 2, global batch 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_edit.checkpoint.manifest import read_manifest
from megatron_edit.checkpoint.torch_dist import read_whole_tensors, stored_tensors
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


def weights_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint whose names start with `prefix`, by the rest of the name."""
    names = [name for name in stored_tensors(folder) if name.startswith(prefix)]
    return {name.removeprefix(prefix): value for name, value in read_whole_tensors(folder, names).items()}


def masters(checkpoint: Path, replica: int) -> dict[str, torch.Tensor]:
    """fp32 masters of one replica, by canonical name."""
    return weights_of(checkpoint, f"replica{replica}.optimizer.state.param.")


def differences(first: Path, second: Path) -> list[str]:
    """Tensors and numbers that are not bit-equal in two checkpoints (or two folders `final`)."""
    one, other = stored_tensors(first), stored_tensors(second)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    assert all(entry.complete for entry in (*one.values(), *other.values()))
    left, right = read_whole_tensors(first, list(one)), read_whole_tensors(second, list(other))
    found = [name for name in left if not _same_bits(left[name], right[name])]
    content, theirs = read_manifest(first).content, read_manifest(second).content
    return found + [name for name in content if content[name] != theirs.get(name)]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
