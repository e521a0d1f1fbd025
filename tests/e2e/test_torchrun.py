"""The true command lines. Few, as each start imports everything; the rest runs the same program in forked ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_edit.checkpoint.manifest import read_manifest
from tests.e2e.runs import TINY, arguments, evaluations, files_below, losses, syncs, train

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(ranks: int, *words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / "pretrain_llama.py"), *words]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )  # fmt: skip


def test_a_run_of_torchrun_is_a_run_of_forked_ranks(tmp_path: Path) -> None:
    """Same losses, same syncs, same files: what the other tests see in forked ranks holds for the command."""
    settings = {"save": "run", "eval_iters": 2, "eval_interval": 6, "log_sample_ids": "ids.jsonl"}
    result = run(torchrun(2, *arguments({**TINY, **settings})), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (tmp_path / "forked").mkdir()
    forked = train(2, directory=tmp_path / "forked", **settings)
    assert losses(result.stdout) == losses(forked.stdout) and len(losses(result.stdout)) == 12
    assert syncs(result.stdout) == syncs(forked.stdout) == {1: 4, 2: 8, 3: 12}
    assert evaluations(result.stdout) == evaluations(forked.stdout) and len(evaluations(result.stdout)) == 2
    shown = files_below(tmp_path / "forked")
    assert files_below(tmp_path) - {"forked"} - {f"forked/{name}" for name in shown} == shown
    assert "Traceback" not in result.stderr and "destroy_process_group" not in result.stderr


def test_bad_input_under_torchrun(tmp_path: Path) -> None:
    """The ranks end with code 2 in seconds, one of them speaks, torchrun makes its own report of it."""
    started = time.monotonic()
    words = arguments({**TINY, "global_batch_size": 10, "micro_batch_size": 4, "save": "run"})
    result = run(torchrun(2, *words), tmp_path)
    assert result.returncode != 0 and result.stdout == ""
    said = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(said) == 1 and "--global-batch-size 10" in said[0] and "8 or 16 would work" in said[0], result.stderr
    assert re.search(r"exitcode\s*: 2\b", result.stderr), result.stderr
    assert files_below(tmp_path) == set()
    assert time.monotonic() - started < 60


def test_without_a_launcher(tmp_path: Path) -> None:
    """One rank: bad input ends with code 2, and without importing megatron-core; then a run."""
    command = [sys.executable, str(ROOT / "pretrain_llama.py")]
    result = run([*command, *arguments(TINY)], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: --edit-num-replicas 2 .*start 2 ranks\n", result.stderr), result.stderr
    result = run([*command, *arguments({**TINY, "edit_num_replicas": 1, "train_iters": 2})], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(result.stdout) == losses(train(1, edit_num_replicas=1, train_iters=2).stdout)
    assert files_below(tmp_path) == set()


def test_sigterm_to_one_rank_of_torchrun(tmp_path: Path) -> None:
    """Rank 1 is told to end: all save once and end with 0, so torchrun does too."""
    words = arguments({**TINY, "train_iters": 100_000, "save": "run", "log_interval": 5, "metrics_file": "m.jsonl"})
    process = subprocess.Popen(
        torchrun(2, *words), cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 180
        while not (tmp_path / "m.jsonl").exists() or len((tmp_path / "m.jsonl").read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < deadline, "no iteration in time"
            time.sleep(0.1)
        ranks = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
        ranks[0].send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        for each in (process, *psutil.Process(process.pid).children()) if process.poll() is None else ():
            each.kill()
    assert process.returncode == 0, stdout + stderr
    (saved,) = re.findall(r"^saved iteration (\d+) to run/iter_(\d+)$", stdout, re.MULTILINE)
    assert f"SIGTERM on rank 1: all ranks stop after iteration {saved[0]}" in stdout
    folder = tmp_path / "run" / f"iter_{saved[1]}"
    assert read_manifest(folder).iteration == int(saved[0]) == int(saved[1])
    assert {path.name for path in folder.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.full(reason="one true start more; forked ranks show the same")
def test_stop_and_go_on_under_torchrun(tmp_path: Path) -> None:
    settings = {**TINY, "edit_num_replicas": 2, "tensor_model_parallel_size": 2, "save": "run", "load": "run"}
    first = run(torchrun(4, *arguments({**settings, "exit_interval": 7})), tmp_path)
    second = run(torchrun(4, *arguments(settings)), tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    (tmp_path / "straight").mkdir()
    straight = train(4, directory=tmp_path / "straight", tensor_model_parallel_size=2, save="run")
    assert {**losses(first.stdout), **losses(second.stdout)} == losses(straight.stdout)
