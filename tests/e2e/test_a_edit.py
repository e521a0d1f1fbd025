"""A-EDiT on real ranks: unequal steps, their data, learning rates, log, saves and stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.manifest import read_manifest
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.schema import OptimizerConfig
from megatron_edit.train.schedule import LearningRateSchedule
from tests.e2e.runs import TINY, differences, evaluations, start, syncs, train, training_lines
from tests.e2e.unequal import A_EDIT, audit, lines_of, scripted, slowed, steps_of

SCRIPT = [[6, 3, 4], [2, 2, 1]]  # sums 8, 5, 5; no count above 3/2 of the one before, so no reserve is used up
CONSUMED = [48, 68, 88, 120, 140, 160]  # 16 of the warm-up + 4 x sums so far; the replica batch is 4
MEETINGS = [6, 8, 11, 15, 17, 20]  # iterations: whole global batches of 8
LINEAR = {"lr_decay_style": "linear", "min_lr": 1e-5}  # with a decay as long as the run
SCHEDULE: dict[str, Any] = {"lr": 1e-2, "min_lr": 1e-4, "lr_decay_style": "linear", "lr_warmup_samples": 40}


def test_log_data_and_learning_rate(tmp_path: Path) -> None:
    """Everything that a log or a file shows of 6 scripted intervals, after a warm-up of 2 iterations."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, **SCHEDULE, "train_samples": 400, "exit_interval": 20, "log_sample_ids": str(ids)}
    settings |= {"log_throughput": True}
    settings |= {"eval_interval": 10, "eval_iters": 1, "metrics_file": str(tmp_path / "metrics.jsonl")}
    log = train(2, in_rank=scripted(SCRIPT, rates=tmp_path), **settings).stdout

    lines = training_lines(log)
    assert list(lines) == [1, 2, *MEETINGS]
    assert [int(fields["consumed samples"]) for fields in lines.values()] == [8, 16, *CONSUMED]
    assert syncs(log) == dict(enumerate(MEETINGS, 1))
    assert list(evaluations(log)) == [11, 20], "at the first sync after each 10 iterations"
    assert "--exit-interval 20: stop after iteration 20" in log
    steps = [[int(line[f"steps of replica {r}"]) for line in list(lines.values())[2:]] for r in range(2)]
    assert steps == [each * 2 for each in SCRIPT]
    assert audit(ids) == 160 and steps_of(ids, 2) == [28, 12]
    reports = [r for r in lines_of(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert reports[-1]["replica_steps"] == [4, 1] and reports[0]["replica_steps"] == []
    for report in reports[2:]:  # all replicas' tokens in the time that a global batch took, per device
        tokens = 8 * 32 / (report["iteration_ms"] / 1000) / 2
        assert report["tokens_per_second"] == pytest.approx(tokens, rel=0.1)

    schedule = LearningRateSchedule(OptimizerConfig(**SCHEDULE), 50, BatchSchedule.constant(8))
    for replica in range(2):
        expected = [schedule.at_samples(samples) for samples in scheduled(replica, intervals=6)]
        rates = [float(line) for line in (tmp_path / f"{replica}.rates").read_text().splitlines()]
        assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.full),  # the same on other layouts
        pytest.param({}, marks=pytest.mark.full),
    ],
    ids=["R2xTP2", "R2xPP2", "R2xS2"],
)
def test_ranks_of_a_replica_decide_together(layout: dict[str, int], tmp_path: Path) -> None:
    """The leader's clock counts; those of the other ranks run away."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, **layout, "train_samples": 400, "exit_interval": 11, "log_sample_ids": str(ids)}
    log = train(4, in_rank=scripted(SCRIPT), **settings).stdout
    assert list(training_lines(log)) == [1, 2, *MEETINGS[:3]] and list(syncs(log).values()) == MEETINGS[:3]
    assert audit(ids) == CONSUMED[2] and steps_of(ids, 2) == [15, 7]


def scheduled(replica: int, intervals: int) -> list[float]:
    """rules.md: S_last + own samples since the sync x (all / own in the previous interval; R at first)."""
    positions, last, ratio = [0.0, 8.0], 16.0, 2.0
    for interval in range(intervals):
        all_steps = [each[interval % 3] for each in SCRIPT]
        positions += [last + 4 * step * ratio for step in range(all_steps[replica])]
        last += 4 * sum(all_steps)
        ratio = sum(all_steps) / all_steps[replica]
    return positions


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at once, with saves at the first sync after each 8 iterations."""
    folder = tmp_path_factory.mktemp("straight")
    settings = {**A_EDIT, "save": str(folder), "save_interval": 8, "log_sample_ids": str(folder / "ids.jsonl")}
    train(2, in_rank=scripted(SCRIPT), **{**settings, **LINEAR, "train_samples": 160})
    return folder


def resumed(straight: Path, folder: Path, iteration: int, world_size: int = 2, **settings: Any) -> str:
    """Goes on in `folder` from a save of the straight run."""
    folder.mkdir()
    shutil.copytree(straight / f"iter_{iteration:07d}", folder / f"iter_{iteration:07d}")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    shutil.copy(straight / "ids.jsonl", folder)  # with lines that the checkpoint does not know of
    options = {**A_EDIT, **LINEAR, "train_samples": 160, "in_rank": scripted(SCRIPT * 2), **settings}
    names = {"save": str(folder), "load": str(folder), "log_sample_ids": str(folder / "ids.jsonl")}
    return train(world_size, **{**options, **names}).stdout


def test_resume_is_byte_equal(straight: Path, tmp_path: Path) -> None:
    """From a save at a sync, holes in the data's pool included; the last checkpoint and `final` are the same."""
    content = read_manifest(straight / "iter_0000008").content["reserves"]
    assert content["ranges"] and content["last_steps"] == [3, 2] and content["replica_steps"] == [11, 6]
    assert content["samples_beyond_iteration"] == 4
    resumed(straight, tmp_path / "run", 8)
    for name in ("iter_0000020", "final"):
        assert differences(straight / name, tmp_path / "run" / name) == []
    assert sorted(map(str, lines_of(tmp_path / "run/ids.jsonl"))) == sorted(map(str, lines_of(straight / "ids.jsonl")))


def test_stop_in_the_warm_up(straight: Path, tmp_path: Path) -> None:
    settings = {**A_EDIT, **LINEAR, "train_samples": 160, "save": str(tmp_path), "load": str(tmp_path)}
    for exit_interval in (1, None):
        train(2, in_rank=scripted(SCRIPT), exit_interval=exit_interval, **settings)
    assert differences(straight / "iter_0000020", tmp_path / "iter_0000020") == []


def test_resume_with_another_number_of_replicas(straight: Path, tmp_path: Path) -> None:
    log = resumed(straight, tmp_path / "run", 8, 3, edit_num_replicas=3, global_batch_size=12)
    assert "2 replicas become 3" in log
    consumed = [int(fields["consumed samples"]) for fields in training_lines(log).values()]
    assert audit(tmp_path / "run/ids.jsonl") == consumed[-1] >= 160
    iterations = list(training_lines(log))
    assert iterations == [8 + (4 + samples - 68) // 12 for samples in consumed], "of 12 samples each from then on"


def test_other_methods_take_up_a_run_without_holes_only(straight: Path, tmp_path: Path) -> None:
    load = {"load": str(straight), "save": str(tmp_path / "edit"), "train_iters": 30}
    refused = start(2, ckpt_step=8, **load)
    assert refused.exit_codes[0] == 2
    assert re.search(r"saved by --edit-method a-edit: \d+ samples before its position \d+ are", refused.stderr), refused

    ids = tmp_path / "ids.jsonl"
    options: dict[str, Any] = {"save": str(tmp_path / "both"), "log_sample_ids": str(ids), "lr_decay_style": "constant"}
    train(2, train_iters=6, edit_warmup_steps=2, edit_sync_interval=3, **options)  # one step after a sync
    options |= {"load": options["save"], "in_rank": scripted([[4], [2]])}
    # 48 samples, then 4 and 2 steps, then 3 and 1: the last reserves are used up, so no hole is left
    log = train(2, **{**A_EDIT, "train_samples": 48 + 24 + 16}, **options).stdout
    assert list(training_lines(log)) == [9, 11] and audit(ids) == 88
    train(2, train_iters=13, edit_warmup_steps=2, edit_sync_interval=3, **{**options, "in_rank": None})
    assert audit(ids) == 104


def test_stop_request_brings_the_sync_forward(tmp_path: Path) -> None:
    """T is 10 minutes. All stop at one sync, save, and the run goes on from there with the samples that are left."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, "edit_sync_time": 600, "save": str(tmp_path / "run"), "log_sample_ids": str(ids)}

    def asked(rank: int) -> None:
        from megatron_edit.train.trainer import Trainer

        slowed([0.03, 0.09])(rank)
        iterate = Trainer._iterate

        def asked_while_it_trains(self: Trainer, stop: Any) -> Any:
            if rank == 1:
                threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return iterate(self, stop)

        Trainer._iterate = asked_while_it_trains  # type: ignore[method-assign]

    result = train(2, **{**settings, "train_samples": 100_000}, in_rank=asked)
    stop = re.search(r"SIGTERM on rank 1: all ranks stop after iteration (\d+)", result.stdout)
    assert stop is not None and result.seconds < 60
    fast, slow = steps_of(ids, 2)
    assert fast > slow > 2
    iteration = (fast + slow) * 4 // 8
    assert int(stop[1]) == iteration and (tmp_path / f"run/iter_{iteration:07d}").is_dir()
    assert "final" not in os.listdir(tmp_path / "run")
    total = (fast + slow) * 4 + 40
    log = train(2, **{**settings, "train_samples": total, "load": settings["save"]}).stdout
    assert f"resumed iteration {iteration}" in log and audit(ids) >= total


def test_a_replica_that_has_used_up_its_reserve_enters_early(tmp_path: Path) -> None:
    """T is never over. Equal shares of the epoch first, at its end one batch each, then 1.5 of the steps before."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, "edit_warmup_steps": 0, "train_samples": 100, "edit_sync_time": 1e6}
    settings |= {"log_sample_ids": str(ids)}
    log = train(2, in_rank=scripted([[1], [1]], epoch_size=30), **settings).stdout
    # epoch of 30: 3 + 3 batches of 4, and 6 samples left; 1 + 1, across its end; 2 + 2; 2 + 1 to the next end; ...
    assert [int(f["consumed samples"]) for f in training_lines(log).values()] == [24, 32, 48, 60, 80, 88, 96, 104]
    assert audit(ids, epoch_size=30) == 104


def test_too_few_steps_average_nothing(tmp_path: Path) -> None:
    """8, 5 and 5 steps, and 8 are wanted: the second sync is put off to the third; a save there goes on exactly."""
    settings = {**A_EDIT, "edit_min_total_steps": 8, "train_samples": 120, "save": str(tmp_path / "one")}
    log = train(2, in_rank=scripted(SCRIPT), **settings).stdout
    assert re.findall(r"^sync (\d) at iteration (\d+): put off", log, re.MULTILINE) == [("2", "8")]
    assert syncs(log) == {1: 6, 3: 11, 4: 15}
    halves = {**settings, "save": str(tmp_path / "two"), "load": str(tmp_path / "two")}
    stopped = train(2, in_rank=scripted(SCRIPT), exit_interval=8, **halves).stdout
    assert "stop after iteration 8" in stopped
    train(2, in_rank=scripted(SCRIPT), **halves)
    assert differences(tmp_path / "one/iter_0000015", tmp_path / "two/iter_0000015") == []


def test_length_in_iterations_is_refused() -> None:
    result = start(2, **{**A_EDIT, "train_iters": 12, "train_samples": None})
    assert result.exit_codes[0] == 2 and "give --train-samples, for example 96" in result.stderr


# ---- clocks and processes that misbehave -----------------------------------------------------------------------------

LATE_S, STOPPED_S = 3.0, 2.0


def misbehaving(folder: Path) -> Any:
    """Rank 0 is stopped for seconds, rank 1 begins late, rank 2's clock jumps ahead and back."""

    def in_rank(rank: int) -> None:
        from megatron_edit.train.trainer import Trainer

        slowed([0.03, 0.03, 0.06])(rank)
        fit, at_boundary = Trainer.fit, Trainer._at_boundary

        def fit_late(self: Trainer) -> None:
            if rank == 1:
                time.sleep(LATE_S)
            if rank == 0:
                pid = os.getpid()
                script = f"sleep {LATE_S + 1}; kill -STOP {pid}; sleep {STOPPED_S}; kill -CONT {pid}"
                subprocess.Popen(["sh", "-c", script])
            if rank == 2:
                readings = iter(range(10**9))
                self.engine.trigger._clock = (  # type: ignore[attr-defined]
                    lambda: time.monotonic() + (0, 0, 0, 1e4, -1e4)[next(readings) // 7 % 5]
                )
            fit(self)

        def note(self: Trainer) -> None:
            from tests.dist.engine_runs import digests

            self.engine.drain()
            entry = {"syncs": self.engine.trigger.syncs, "anchor": digests(self.replica)}
            with (folder / f"{rank}.boundaries").open("a") as file:
                file.write(json.dumps(entry) + "\n")
            at_boundary(self)

        Trainer.fit, Trainer._at_boundary = fit_late, note  # type: ignore[method-assign]

    return in_rank


def test_late_stopped_and_jumping_replicas_meet(tmp_path: Path) -> None:
    """Nothing hangs, the k-th syncs meet, and the replicas' parameters are equal after each."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, "edit_sync_time": 0.5, "edit_warmup_steps": 1, "edit_num_replicas": 3}
    settings |= {"global_batch_size": 12, "train_samples": 1200, "log_sample_ids": str(ids), "log_interval": 10_000}
    result = train(3, in_rank=misbehaving(tmp_path), **settings)
    assert result.seconds > LATE_S + STOPPED_S
    boundaries = [lines_of(tmp_path / f"{rank}.boundaries") for rank in range(3)]
    assert len(boundaries[0]) >= 6 and boundaries[0] == boundaries[1] == boundaries[2]
    assert [entry["syncs"] for entry in boundaries[0]] == list(range(len(boundaries[0])))
    assert audit(ids) >= 1200
    assert TINY["distributed_timeout_seconds"] > 2 * (LATE_S + STOPPED_S)


def test_the_fast_replica_takes_more_steps(tmp_path: Path) -> None:
    """One of two replicas three times as slow; loose, as CI machines are busy: benchmarks/straggler.py measures."""
    ids = tmp_path / "ids.jsonl"
    settings = {**A_EDIT, "edit_sync_time": 2.0, "edit_warmup_steps": 0, "train_samples": 216}
    settings |= {"log_sample_ids": str(ids)}
    train(2, in_rank=slowed([0.1, 0.3]), **settings)
    fast, slow = steps_of(ids, 2)
    assert 1.5 < fast / slow < 3.5 and audit(ids) >= 216
