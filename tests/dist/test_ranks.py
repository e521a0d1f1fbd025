"""`run_ranks`: results, failures, hangs, deaths, and a parent that has already computed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megatron_edit.testing.ranks import RankFailure, run_ranks


def all_reduce(rank, world_size, factor=1.0):
    x = torch.full((3,), rank * factor)
    dist.all_reduce(x)
    return x


def test_results_by_rank():
    results = run_ranks(lambda rank, world_size, a, b: (rank, world_size, a + b), 3, 4, 5)
    assert results == [(0, 3, 9), (1, 3, 9), (2, 3, 9)]


def test_all_reduce_in_seconds():
    run_ranks(all_reduce, 1)  # warms the parent
    start = time.monotonic()
    results = run_ranks(all_reduce, 4, 2.0)
    assert time.monotonic() - start < 1.5
    assert all(torch.equal(result, torch.full((3,), 12.0)) for result in results)


def test_environment_and_threads():
    def environment(rank, world_size):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OURS", "MASTER_ADDR")
        return [os.environ[name] for name in names], torch.get_num_threads(), dist.get_backend()

    results = run_ranks(environment, 2, env={"OURS": "x"})
    assert results == [([str(r), str(r), "2", "2", "x", "127.0.0.1"], 1, "gloo") for r in (0, 1)]
    assert "OURS" not in os.environ and "RANK" not in os.environ


def test_large_results():
    results = run_ranks(lambda rank, world_size: torch.full((2**20,), float(rank)), 2)
    assert [result.sum().item() for result in results] == [0, 2**20]


def test_first_failure_comes_first_and_peers_show_where_they_wait():
    def fails_on_one(rank, world_size):
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 3 failed first") as caught:
        run_ranks(fails_on_one, 3)
    assert 3 <= time.monotonic() - start < 8
    failure = caught.value
    assert failure.rank == 1 and next(iter(failure.reports)) == 1
    assert "KeyError: 'the cause'" in failure.reports[1]
    assert failure.silent == [0, 2] and "in barrier" in failure.reports[0]


def test_all_failures_are_reported():
    def fails(rank, world_size):
        time.sleep(0.3 * (2 - rank))
        raise ValueError(f"from {rank}")

    with pytest.raises(RankFailure) as caught:
        run_ranks(fails, 3)
    assert list(caught.value.reports) == [2, 1, 0] and caught.value.silent == []
    assert all(f"from {rank}" in report for rank, report in caught.value.reports.items())


def test_killed_rank_is_named_before_those_that_lost_it():
    def dies(rank, world_size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match="rank 1 of 2 failed first") as caught:
        run_ranks(dies, 2)
    assert "killed by SIGKILL" in caught.value.reports[1]


def test_early_exit_is_a_failure():
    with pytest.raises(RankFailure, match="exit code 7"):
        run_ranks(lambda rank, world_size: os._exit(7), 1)
    with pytest.raises(RankFailure, match="SystemExit: 0"):
        run_ranks(lambda rank, world_size: sys.exit(0), 1)


def test_unpicklable_result_is_a_failure():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(lambda rank, world_size: lambda: 0, 1)


def test_hang_names_the_silent_ranks_and_where_they_are():
    def sleeper(rank, world_size):
        if rank == 1:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"no report within 1 s from rank\(s\) \[1\] of 2") as caught:
        run_ranks(sleeper, 2, timeout_s=1)
    assert time.monotonic() - start < 4
    assert caught.value.silent == [1] and "in sleeper" in caught.value.reports[1]


def test_processes_that_a_rank_left_behind_are_ended():
    def leaves_one(rank, world_size):
        return subprocess.Popen(["sleep", "100"]).pid

    (pid,) = run_ranks(leaves_one, 1)
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and state_of(pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}") or state_of(pid) == "Z"  # Z: ended, not reaped by its new parent


def state_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def test_no_child_and_no_open_file_is_left():
    run_ranks(all_reduce, 2)
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(all_reduce, 3)
    with pytest.raises(RankFailure):
        run_ranks(lambda rank, world_size: 1 / 0, 2)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_exit_handlers_of_the_parent_do_not_run_in_ranks():
    source = (
        "import atexit; atexit.register(lambda: print('handler'))\n"
        "from megatron_edit.testing.ranks import run_ranks\n"
        "print('unflushed', end=' ')\n"
        "run_ranks(lambda rank, world_size: print('rank'), 2)\n"
    )
    process = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert {word: process.stdout.count(word) for word in ("handler", "rank", "unflushed")} == {
        "handler": 1,
        "rank": 2,
        "unflushed": 1,
    }


def test_parent_that_has_computed_with_threads_and_autograd():
    """A forked rank has none of the threads that the parent's kernels and backward passes have started."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(512, 512, requires_grad=True)
        (x @ x).exp().mean().backward()
    finally:
        torch.set_num_threads(threads)

    def computes(rank, world_size):
        y = torch.ones(512, 512, requires_grad=True)
        (y @ y).sum().backward()
        dist.all_reduce(y.grad)
        return y.grad[0, 0].item()

    assert run_ranks(computes, 2, timeout_s=60) == [2048.0, 2048.0]
