"""B57: one rank fails. Its error is said first, all ranks end with an error code, the last checkpoint is intact.

A full disk on one rank: test_checkpoint_faults.py.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import files_below, losses, start, train, training_lines

TIMEOUT_S = 10
SETTINGS: dict[str, Any] = {"train_iters": 12, "save_interval": 4, "distributed_timeout_seconds": TIMEOUT_S}


def at_iteration(iteration: int, culprit: int, act: Callable[[Any], None]) -> Callable[[int], None]:
    """Rank `culprit` calls `act(trainer)` as it begins `iteration`."""

    def in_rank(rank: int) -> None:
        from megatron_edit.ranks.signals import StopCoordinator
        from megatron_edit.train.trainer import Trainer

        original = Trainer._train_step

        def train_step(self: Trainer, stop: StopCoordinator) -> bool:
            if rank == culprit and self.iteration + 1 == iteration:
                act(self)
            return original(self, stop)

        Trainer._train_step = train_step  # type: ignore[method-assign]

    return in_rank


def bad_sample(trainer: Any) -> None:
    trainer._feed._loader._ahead.clear()
    trainer._feed._loader.datasets[0].num_samples = 0  # every index is then out of range


def unreadable(trainer: Any) -> None:
    raise OSError(errno.EIO, "Input/output error", "corpus.bin")


def killed(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "bad sample": (bad_sample, "LoaderError: replica 1, shard rank 0: reading the batch after 48 consumed samples"),
    "unreadable file": (unreadable, "corpus.bin"),
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "R2": (2, 1, {}),
    "R2xTP2": (4, 2, {"tensor_model_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "layout", ["R2", pytest.param("R2xTP2", marks=pytest.mark.full(reason="the same with two ranks a replica"))]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_said_first_with_its_rank(fault: str, layout: str, tmp_path: Path) -> None:
    act, message = FAULTS[fault]
    world_size, culprit, settings = LAYOUTS[layout]
    result = start(world_size, **SETTINGS, **settings, save=str(tmp_path), in_rank=at_iteration(7, culprit, act))
    ended_badly(result, culprit)
    first = result.ranks[culprit].stderr.splitlines()[0]
    assert first.startswith(f"[rank {culprit}] ") and message in first, result
    goes_on_from_4(world_size, settings, tmp_path)


def ended_badly(result: CommandResult, culprit: int) -> None:
    assert result.exit_codes[culprit] == 1, result
    # SIGTERM from the launcher asks for a stop that cannot be agreed on any more; SIGKILL follows it
    assert all(code in (1, -signal.SIGTERM, -signal.SIGKILL) for code in result.exit_codes), result
    assert result.seconds < TIMEOUT_S + 20, result  # 10 s of them between SIGTERM and SIGKILL
    others = [rank for index, rank in enumerate(result.ranks) if index != culprit]
    assert all("LoaderError" not in rank.stderr and "OSError" not in rank.stderr for rank in others), result


def goes_on_from_4(world_size: int, settings: dict[str, Any], folder: Path) -> None:
    """The checkpoint of iteration 4 is whole, and the run goes on from it as if nothing had been."""
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    again = train(world_size, **{**SETTINGS, **settings}, save=str(folder), load=str(folder))
    straight = train(world_size, **{**SETTINGS, **settings, "save_interval": None})
    assert losses(again.stdout) == {k: v for k, v in losses(straight.stdout).items() if k > 4}
    assert not [name for name in files_below(folder) if "partial" in name]


def test_a_rank_that_fails_ends_the_others_wherever_they_are() -> None:
    """Rank 0 would meet rank 1 in 500 iterations only, and no launcher ends it."""
    settings = {"train_iters": 1000, "edit_sync_interval": 500, "distributed_timeout_seconds": 100}
    result = start(2, **settings, in_rank=at_iteration(7, 1, unreadable), ends_others=False)
    assert result.exit_codes == [1, 1] and result.seconds < 30, result
    assert result.ranks[0].stderr.startswith("[rank 0] ends: rank 1 has failed, its message says why"), result
    assert len(result.ranks[0].stderr.splitlines()) == 1, result
    assert result.ranks[1].stderr.startswith("[rank 1] OSError: [Errno 5] Input/output error: 'corpus.bin'"), result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_rank_that_dies_is_named_first_and_all_end(number: signal.Signals, tmp_path: Path) -> None:
    """Without a launcher that would end the others: they end by themselves, within the time-out and 10 s."""

    def die(trainer: Any) -> None:
        os.kill(os.getpid(), number)

    result = start(2, **SETTINGS, save=str(tmp_path), in_rank=at_iteration(7, 1, die), ends_others=False)
    assert result.exit_codes == [1, -number], result
    assert result.seconds < TIMEOUT_S + 10, result
    first, last = result.ranks[0].stderr.splitlines()
    assert re.match(r"\[rank 0\] rank 1 \(process \d+ on .*\) is lost: it has died without a word", first), result
    assert last.startswith("[rank 0] ends: rank 1 is lost") and "save" not in result.ranks[0].stderr, result
    if number == signal.SIGBUS:  # what a file that became shorter does: its rank says where it was
        assert "Fatal Python error: Bus error" in result.ranks[1].stderr and "in die" in result.ranks[1].stderr
    goes_on_from_4(2, {}, tmp_path)


def frozen(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hung(trainer: Any) -> None:
    time.sleep(1000)


@pytest.mark.parametrize("fault", [frozen, hung])
def test_a_rank_that_does_not_come_is_named_first_and_all_end(fault: Callable[[Any], None]) -> None:
    """Four ranks, two replicas; rank 3 stands still. Nobody blames rank 2, whose collective fails."""
    settings = {"tensor_model_parallel_size": 2, "distributed_timeout_seconds": 8, "train_iters": 1000}
    result = start(4, **settings, in_rank=at_iteration(7, 3, fault), ends_others=False)
    assert result.exit_codes == [1, 1, 1, -signal.SIGKILL if fault is frozen else 1], result
    said = [line for line in result.stderr.splitlines() if "All ranks end" in line]
    assert len(said) == 1 and re.match(r"\[rank \d\] rank 3 \(process \d+ on ", said[0]), result
    words = {frozen: "is lost: it does not answer, it is frozen", hung: "answers but has not come: .* at train/trainer"}
    assert re.search(words[fault], said[0]) and "waited for it in step" in said[0], result
    others = result.ranks[:3]
    assert all("rank 3 is lost" in rank.stderr and "Traceback" not in rank.stderr for rank in others), result
    if fault is hung:
        assert "in hung" in result.ranks[3].stderr, f"its stacks are missing: {result}"


def test_no_stop_is_announced_when_the_launcher_ends_the_others() -> None:
    """Rank 1 of another replica dies; torchrun's SIGTERM to rank 0 is not a request that could be followed."""
    result = start(2, train_iters=1000, edit_sync_interval=500, in_rank=at_iteration(7, 1, killed))
    assert result.exit_codes == [1, -signal.SIGKILL], result
    assert "rank 1" in result.ranks[0].stderr.splitlines()[0] and "has died" in result.ranks[0].stderr
    assert "will save and stop" not in result.stderr, result


# ---- numbers that are not finite -------------------------------------------------------------------------------------


def poisoned(trainer: Any) -> None:
    trainer.engine.modules[2].slices[0].master[0] = torch.nan


def test_a_replica_that_is_not_finite_is_left_out_and_comes_back() -> None:
    """Replica 1 has a NaN in one layer before iteration 6: its loss is NaN until the sync after iteration 8."""
    result = train(2, in_rank=at_iteration(6, 1, poisoned))
    lines = training_lines(result.stdout)
    own = {k: float(fields["lm loss replica 1"]) for k, fields in lines.items()}
    broken = [k for k, loss in own.items() if loss != loss]
    assert broken and set(broken) <= {6, 7, 8}
    assert all(fields["lm loss"] == fields["lm loss replica 0"] for k, fields in lines.items() if k in broken)
    assert all(lines[k]["number of nan iterations"] == "1" for k in broken)
    first, second, third = (line for line in result.stdout.splitlines() if re.match(r"sync \d ", line))
    assert "left out 0 of 12" not in second and "rolled back 0" in second
    assert "left out 0 of 12" in first and "left out 0 of 12" in third
    assert float(lines[12]["lm loss"]) < float(lines[5]["lm loss"])


def ends_soon(rank: int) -> None:
    from megatron_edit.sync import notices

    notices.IDLE_ITERATIONS = 20


def test_a_run_whose_weights_never_change_does_not_end_as_if_it_had_trained() -> None:
    result = start(2, train_iters=60, lr=1e38, in_rank=ends_soon)
    assert result.exit_codes[0] == 1 and result.exit_codes[1] != 0, result
    (line,) = result.ranks[0].stderr.splitlines()
    assert line.startswith("error: the weights have not changed in the last 5 syncs, 20 iterations: every replica")
    assert "sync 1: every replica left out (all not finite), rolled back to the anchor: all 6 modules" in result.stdout
