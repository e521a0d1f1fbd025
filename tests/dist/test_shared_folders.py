"""Ranks that write or read on disks of their own: found at the start, and again before the pointer moves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.ranks import shared
from megatron_edit.checkpoint import writer
from megatron_edit.checkpoint.errors import CheckpointError, SaveError
from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.folders import POINTER
from megatron_edit.ranks.shared import ranks_that_do_not_share
from megatron_edit.checkpoint.torch_dist import whole_tensor
from megatron_edit.checkpoint.writer import Checkpoint, CheckpointWriter
from megatron_edit.config.schema import ConfigError
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import tiny_config
from megatron_edit.ranks.shared_paths import check_shared_paths


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are forked from here."""
    monkeypatch.setattr(shared, "_SECONDS", 0.1)
    monkeypatch.setattr(writer, "_SECONDS_TO_SEE", 0.1)


def own_folder(tmp_path: Path, rank: int) -> Path:
    """What a path is to this rank: a folder of its own, as on a disk of its own."""
    folder = tmp_path / f"disk{rank}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return folder


def checkpoint(rank: int, iteration: int) -> Checkpoint:
    name = f"of rank {rank}"
    content = {"iteration": iteration, "scope": "full"}
    return Checkpoint(content, [whole_tensor(name, torch.full((64,), float(rank)))], {})


def test_what_is_shared_is_seen_and_nothing_is_left_behind(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> dict[str, list[str]]:
        (tmp_path / "file").touch()
        own_folder(tmp_path, rank)
        group = dist.group.WORLD
        assert group is not None
        paths = [tmp_path / "run", tmp_path / "a" / "b" / "run", tmp_path / "file", Path("run"), Path("a/ids.jsonl"),
                 Path("../run"), Path("/dev/null"), Path("/proc/run")]  # fmt: skip
        return {str(path): ranks_that_do_not_share(path, group, timeout_seconds=60) for path in paths}

    one, other = run_ranks(run, 2)
    assert one == other
    named = {path for path, ranks in one.items() if ranks}
    assert named == {"run", "a/ids.jsonl"} and all(one[path][0].startswith("rank 1 on ") for path in named)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk0", "disk1", "file"]


def test_a_run_that_does_not_share_its_folders_is_refused(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[str, list[str]]:
        own_folder(tmp_path, rank)
        group = dist.group.WORLD
        assert group is not None
        settings: dict[str, Any] = {"save": "ck", "metrics_file": "m.jsonl"}
        with pytest.raises(ConfigError) as caught:
            check_shared_paths(tiny_config(world_size, **settings, log_sample_ids="ids.jsonl"), group)
        settings["save"] = str(tmp_path / "run")
        return str(caught.value), check_shared_paths(tiny_config(world_size, **settings), group)

    one, other = run_ranks(run, 2)
    assert one == other
    refusal, remarks = one
    assert "--save ck is not one place for all ranks" in refusal and "is not seen by rank 1 on " in refusal
    assert "--log-sample-ids ids.jsonl is not one place" in refusal and "Disks of their own are not supported" in refusal
    assert len(remarks) == 1 and "--metrics-file m.jsonl is written by rank 0 alone" in remarks[0]


def test_the_pointer_does_not_move_to_what_rank_0_does_not_see(tmp_path: Path) -> None:
    """A disk that is the ranks' own from the second save on, as when a mount is lost in the middle of a run."""
    def run(rank: int, world_size: int) -> str:
        group = dist.group.WORLD
        assert group is not None
        own_folder(tmp_path, rank)
        (tmp_path / "shared").mkdir(exist_ok=True)
        Path("run").symlink_to(tmp_path / "shared")
        dist.barrier()
        saves = CheckpointWriter("run", group, say=print)
        saves.save(checkpoint(rank, 2))
        dist.barrier()
        if rank == 1:
            Path("run").unlink()
        with pytest.raises(SaveError) as caught:
            saves.save(checkpoint(rank, 4))
        with pytest.raises(SaveError):
            saves.save(Checkpoint({"iteration": 4, "scope": "weights"}, checkpoint(rank, 4).tensors, {}))
        return str(caught.value)

    messages = run_ranks(run, 2)
    assert messages[0] == messages[1]
    assert "__1_0.distcp cannot be read" in messages[0] and "is the folder one that all ranks share?" in messages[0]
    assert (tmp_path / "shared" / POINTER).read_text() == "2"
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [".lock", "iter_0000002", POINTER]


def test_copies_on_disks_of_their_own_are_loaded_and_each_is_looked_at(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        assert dist.group.WORLD is not None
        CheckpointWriter(tmp_path / "run", dist.group.WORLD, say=print).save(checkpoint(rank, 2))

    run_ranks(save, 2)
    for rank in (0, 1):
        shutil.copytree(tmp_path / "run", tmp_path / f"disk{rank}" / "run")

    def load(rank: int, world_size: int) -> list[str]:
        group = dist.group.WORLD
        assert group is not None
        own_folder(tmp_path, rank)
        found = find_checkpoint("run", group, say=print)
        assert found is not None and found.manifest.iteration == 2
        dist.barrier()
        messages = []
        for spoil in ("__0_0.distcp", "__1_0.distcp", "manifest.json"):
            if rank == 1:
                path = Path("run/iter_0000002") / spoil
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                find_checkpoint("run", group, say=print)
            messages.append(str(caught.value))
            dist.barrier()
        return messages

    one, other = run_ranks(load, 2)
    assert one == other
    assert "__0_0.distcp is damaged" in one[0] and "__1_0.distcp is damaged" in one[1]
    assert "rank 1 on " in one[2] and "a folder that all ranks share, or a full copy" in one[2]
