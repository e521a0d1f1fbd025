"""Saving that is interrupted, cannot write, or meets another run: the last complete checkpoint is there. B24."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.folders import CheckpointFolder
from megatron_edit.checkpoint.manifest import content_problem
from megatron_edit.checkpoint.save_folder import SaveFolder
from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import differences, losses, start, train

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
                         "edit_sync_interval": 3, "lr_decay_style": "cosine", "hidden_dropout": 0.1}  # fmt: skip


def complete(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints, all of whose files have their checksum."""
    folder = CheckpointFolder(directory)
    iterations = folder.complete_iterations()
    for iteration in iterations:
        candidate = folder.candidate(iteration)
        for name, entry in candidate.manifest.files.items():
            assert content_problem(candidate.folder, name, entry) is None
    return iterations


# ---- killed while saving ---------------------------------------------------------------------------------------------


def killed_in_save(number: int, share: float, victim: int, begun: Path) -> Callable[[int], None]:
    """`victim` is killed in its `number`th save, after `share` of the time that the save before it took.

    The file `begun` holds the iteration of the last save that it began.
    """

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint.writer import Checkpoint, CheckpointWriter, Saved

        if rank != victim:
            return
        original, saves, seconds = CheckpointWriter._write, 0, 0.0

        def write(self: CheckpointWriter, checkpoint: Checkpoint) -> Saved:
            nonlocal saves, seconds
            saves += 1
            aside = begun.with_suffix(".aside")
            aside.write_text(str(checkpoint.iteration))
            aside.replace(begun)  # whole or not at all: the kill may come here
            if saves == number:
                threading.Timer(share * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            started = time.monotonic()
            saved = original(self, checkpoint)
            seconds = time.monotonic() - started
            return saved

        CheckpointWriter._write = write  # type: ignore[method-assign]

    return in_rank


def check_kills(folder: Path, trials: int, seed: int) -> None:
    """Kills and restarts, one after the other; the run that comes out is the one that was never killed."""
    draw, reached, behind = random.Random(seed), 0, []
    end, begun = 4 * trials + 8, folder.with_name("begun")
    settings = {**SMALL, "train_iters": end, "save": str(folder), "load": str(folder), "save_interval": 1,
                "keep_checkpoints": 2}  # fmt: skip
    for trial in range(trials):
        kill = killed_in_save(3, draw.uniform(0, 1.1), draw.randrange(2), begun)
        result = start(2, **settings, async_save=trial % 2 == 1, in_rank=kill)
        assert -signal.SIGKILL in result.exit_codes, result
        saved = [int(iteration) for iteration in re.findall(r"saved iteration (\d+) to ", result.stdout)]
        pointer = CheckpointFolder(folder).pointer()
        assert pointer in complete(folder)
        assert pointer > reached and all(iteration <= pointer for iteration in saved), result
        behind.append(int(begun.read_text()) - pointer)
        assert behind[-1] in (0, 1), "more than one save old"
        reached = pointer
    assert 1 in behind, "no kill came before the pointer moved: this shows nothing"
    last = train(2, **settings)
    assert f"resumed iteration {reached} of {end}" in last.stdout
    straight = folder.with_name("straight")
    train(2, **{**settings, "save": str(straight), "load": None, "save_interval": None})
    assert differences(folder / f"iter_{end:07d}", straight / f"iter_{end:07d}") == []
    assert not list(folder.glob("*.partial")) and not list(folder.glob("*.replaced"))


def test_killed_while_saving(tmp_path: Path) -> None:
    check_kills(tmp_path / "run", trials=3, seed=1)


@pytest.mark.full(reason="20 kills and restarts")
def test_killed_while_saving_twenty_times(tmp_path: Path) -> None:
    check_kills(tmp_path / "run", trials=20, seed=2)


def test_complete_is_said_only_when_it_is(tmp_path: Path) -> None:
    """--async-save, and a kill right after the line: what was said to be saved can be loaded."""

    def in_rank(rank: int) -> None:
        from megatron_edit.log.output import RunOutput

        original = RunOutput.say

        def say(self: RunOutput, line: str) -> None:
            original(self, line)
            if rank == 0 and line.startswith("saved iteration 4"):
                os.kill(os.getpid(), signal.SIGKILL)

        RunOutput.say = say  # type: ignore[method-assign]

    settings = {**SMALL, "train_iters": 40, "save": str(tmp_path), "load": str(tmp_path)}
    result = start(2, **settings, save_interval=2, async_save=True, in_rank=in_rank)
    assert -signal.SIGKILL in result.exit_codes, result
    assert 4 in complete(tmp_path)
    assert re.search(r"resumed iteration [46] of 40", start(2, **settings, exit_interval=1).stdout)


# ---- no space, no permission -----------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; where none can be mounted, the test says so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system of a limited size can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def failed_save(result: CommandResult) -> str:
    """The message of a run that ended since it could not save, from one rank."""
    assert set(result.exit_codes) <= {1, -signal.SIGTERM} and 1 in result.exit_codes, result
    speaking = [rank.stderr for rank in result.ranks if rank.stderr]
    assert len(speaking) == 1 and "Traceback" not in speaking[0], result
    return speaking[0]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_full_disk_keeps_what_is_there(background: bool, tiny_disk: Path) -> None:
    settings = {**SMALL, "train_iters": 40, "load": str(tiny_disk), "save": str(tiny_disk)}
    result = start(2, **settings, save_interval=1, async_save=background)
    message = failed_save(result)
    assert "No space left on device" in message and "was not saved" in message
    saved = complete(tiny_disk)
    assert saved and CheckpointFolder(tiny_disk).pointer() == saved[-1]
    assert not list(tiny_disk.glob("*.partial")), "the space of the failed save is given back"
    again = start(2, **{**settings, "save": None}, exit_interval=1)
    assert f"resumed iteration {saved[-1]} of 40" in again.stdout


def full_disk_on(victim: int, saves: int) -> Callable[[int], None]:
    """The disk of one rank is full from its save number `saves` on."""

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint import torch_dist

        if rank != victim:
            return
        original, opened = torch_dist._HashingStream.__init__, 0

        class Full(io.RawIOBase):
            def write(self, data: Any) -> int:
                raise OSError(28, "No space left on device")

        def made(self: Any, file: Any) -> None:
            nonlocal opened
            opened += 1
            original(self, file if opened < saves else Full())  # type: ignore[arg-type]

        torch_dist._HashingStream.__init__ = made  # type: ignore[method-assign]

    return in_rank


def test_a_full_disk_on_one_rank_is_named(tmp_path: Path) -> None:
    settings = {**SMALL, "train_iters": 40, "load": str(tmp_path), "save": str(tmp_path)}
    message = failed_save(start(2, **settings, save_interval=2, in_rank=full_disk_on(1, saves=2)))
    assert "rank 1: OSError: [Errno 28] No space left on device" in message and "iter_0000004" in message
    assert complete(tmp_path) == [2]
    assert "resumed iteration 2 of 40" in start(2, **settings, exit_interval=1).stdout


def read_only_from(iteration: int) -> Callable[[int], None]:
    """The file system turns read-only: nothing can be made in the folder any more."""

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint.save_folder import SaveFolder

        original = SaveFolder.begin

        def begin(self: SaveFolder, name: str) -> Path:
            if name >= f"iter_{iteration:07d}":
                raise OSError(30, "Read-only file system", str(self.directory))
            return original(self, name)

        SaveFolder.begin = begin  # type: ignore[method-assign]

    return in_rank


def test_a_folder_that_turns_read_only(tmp_path: Path) -> None:
    settings = {**SMALL, "train_iters": 40, "load": str(tmp_path), "save": str(tmp_path)}
    message = failed_save(start(2, **settings, save_interval=2, in_rank=read_only_from(4)))
    assert "Read-only file system" in message
    assert complete(tmp_path) == [2]


# ---- two runs in one folder ------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    holder = SaveFolder(tmp_path)
    holder.acquire()
    result = start(2, **SMALL, train_iters=2, save=str(tmp_path))
    assert 2 in result.exit_codes and set(result.exit_codes) <= {2, -signal.SIGTERM}, result
    assert f"another run saves there (process {os.getpid()} on " in result.stderr
    assert complete(tmp_path) == [] and losses(result.stdout) == {}
    holder.release()
    train(2, **SMALL, train_iters=2, save=str(tmp_path))


# ---- folders that are not there, or not for all ----------------------------------------------------------------------


def test_ranks_with_a_folder_each_are_refused_before_training(tmp_path: Path) -> None:
    def in_rank(rank: int) -> None:
        from megatron_edit.ranks import shared

        shared._SECONDS = 0.1
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))

    result = start(2, **SMALL, train_iters=2, save="ck", in_rank=in_rank)
    assert result.exit_codes[0] == 2 and losses(result.stdout) == {}, result
    assert "--save ck is not one place for all ranks" in result.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_removed_while_training(tmp_path: Path) -> None:
    """A loud line; folder, lock and metrics are made anew, and the run can be resumed from what is saved then."""
    folder = tmp_path / "run"

    def in_rank(rank: int) -> None:
        from megatron_edit.ranks.signals import StopCoordinator
        from megatron_edit.train.trainer import Trainer

        original = Trainer._train_step

        def train_step(self: Trainer, stop: StopCoordinator) -> bool:
            at_boundary = original(self, stop)
            if rank == 0 and self.iteration == 5:
                folder.rename(tmp_path / "moved")
            return at_boundary

        Trainer._train_step = train_step  # type: ignore[method-assign]

    settings = {**SMALL, "save": str(folder), "load": str(folder), "save_interval": 2}
    result = train(2, **settings, train_iters=7, in_rank=in_rank)
    assert f"*** --save {folder} was removed or moved away while the run went on, with the checkpoints" in result.stdout
    assert f"*** {folder / 'metrics.jsonl'} was removed or moved away" in result.stdout
    assert complete(folder) == [6, 7] and complete(tmp_path / "moved") == [2, 4] and (folder / ".lock").exists()
    assert '"iteration": 7' in (folder / "metrics.jsonl").read_text()
    assert "resumed iteration 7 of 8" in train(2, **settings, train_iters=8).stdout
