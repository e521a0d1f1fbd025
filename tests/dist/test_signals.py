"""Stop requests among real ranks: two replicas of two ranks at unequal speeds, with collectives that block.

A further rank plays the user: it sends the signals. An iteration sleeps, then joins a collective of its
replica; every SYNC_INTERVAL iterations it joins one of all replicas.
"""

import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.testing.ranks import run_ranks
from megatron_edit.ranks import signals
from megatron_edit.ranks.signal_pipe import STOP_SIGNALS
from megatron_edit.ranks.signals import StopCoordinator

REPLICAS = [[0, 1], [2, 3]]
USER = 4
SYNC_INTERVAL = 7
TRIALS = 20


def trial_plan(trial: int) -> dict[str, Any]:
    """What happens in a trial; the same on every rank."""
    draw = random.Random(trial)
    victims = draw.choice([[0, 1, 2, 3], draw.sample(range(4), 2), *([draw.randrange(4)] for _ in range(4))])
    return {
        "signals": [(rank, draw.choice(STOP_SIGNALS)) for rank in victims],
        "after_seconds": draw.uniform(0.0, 0.15),
        "iteration_seconds": [draw.choice([0.0, 0.001, 0.004, 0.02]) for _ in REPLICAS],
        "start": draw.choice([0, 0, 100]),
        "most_iterations_ahead": draw.choice([0, 16]),  # 0: ranks do wait at their proposals
    }


def many_trials(rank: int, world_size: int) -> list[dict[str, Any]]:
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # what holds between trials, when no coordinator listens
    store = dist.distributed_c10d._get_default_store()
    replica_groups = [dist.new_group(ranks) for ranks in REPLICAS]
    everyone_trains = dist.new_group([0, 1, 2, 3])
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    outcomes = []
    for trial in range(TRIALS):
        plan = trial_plan(trial)
        trial_store = dist.PrefixStore(f"trial{trial}", store)
        if rank == USER:
            dist.barrier()
            time.sleep(plan["after_seconds"])
            sent = time.monotonic()
            for victim, number in plan["signals"]:
                os.kill(pids[victim], number)
            dist.barrier()
            outcomes.append({"plan": plan, "seconds": time.monotonic() - sent})
            continue
        with StopCoordinator(
            trial_store, rank, 4, next_boundary=plan["start"], timeout_seconds=20, poll_seconds=0.03
        ) as stopper:
            dist.barrier()
            outcome = iterate(stopper, rank, plan, replica_groups[rank // 2], everyone_trains)
            dist.barrier()
        outcomes.append(outcome)
    return outcomes


def iterate(
    stopper: StopCoordinator,
    rank: int,
    plan: dict[str, Any],
    replica: dist.ProcessGroup,
    trainers: dist.ProcessGroup,
) -> dict[str, Any]:
    signals.MOST_ITERATIONS_AHEAD = plan["most_iterations_ahead"]
    jitter = random.Random(rank)
    iteration = plan["start"]
    while (reason := stopper.should_stop(iteration)) is None:
        time.sleep(plan["iteration_seconds"][rank // 2] * jitter.uniform(0.5, 1.5))
        iteration += 1
        dist.all_reduce(torch.ones(1), group=replica)
        if iteration % SYNC_INTERVAL == 0:
            dist.all_reduce(torch.ones(1), group=trainers)
    return {"stopped_after": iteration, "said": reason.iteration, "cause": reason.cause, "asked": reason.rank}


def test_any_signal_at_any_moment_stops_all_ranks_after_one_iteration() -> None:
    results = run_ranks(many_trials, 5, timeout_s=60)
    for trial in range(TRIALS):
        plan, seconds = results[USER][trial]["plan"], results[USER][trial]["seconds"]
        outcomes = [results[rank][trial] for rank in range(4)]
        assert all(outcome == outcomes[0] for outcome in outcomes), f"trial {trial}, {plan}: {outcomes}"
        assert outcomes[0]["stopped_after"] == outcomes[0]["said"] >= plan["start"]
        assert (outcomes[0]["asked"], outcomes[0]["cause"]) in [(r, s.name) for r, s in plan["signals"]]
        assert seconds < 10, f"trial {trial} took {seconds:.1f} s to stop"
    assert max(results[0][trial]["stopped_after"] for trial in range(TRIALS)) > 20  # they did run


@pytest.mark.parametrize("how", ["sleeps", "sits in a collective"])
def test_a_rank_that_does_not_come_to_its_boundary_still_answers(how: str) -> None:
    """Two replicas of one rank. Rank 1 gets the signal while it is away for 2 s; rank 0 stops meanwhile."""

    def run(rank: int, world_size: int) -> float:
        user_and_1 = dist.new_group([1, 2])
        pids: list[Any] = [None] * world_size
        dist.all_gather_object(pids, os.getpid())
        if rank == 2:
            dist.barrier()
            time.sleep(0.2)
            os.kill(pids[1], signal.SIGTERM)
            time.sleep(1.8)
            dist.all_reduce(torch.ones(1), group=user_and_1)
            return 0.0
        store = dist.distributed_c10d._get_default_store()
        with StopCoordinator(store, rank, 2, next_boundary=0, timeout_seconds=20, poll_seconds=0.05) as stopper:
            assert stopper.should_stop(0) is None
            dist.barrier()
            started = time.monotonic()
            if rank == 1:
                if how == "sleeps":
                    time.sleep(2.0)
                dist.all_reduce(torch.ones(1), group=user_and_1)
            iteration = 1
            while (reason := stopper.should_stop(iteration)) is None:
                time.sleep(0.01)
                iteration += 1
            seconds = time.monotonic() - started
            assert reason.cause == "SIGTERM" and reason.rank == 1 and iteration > 5
            time.sleep(max(0.0, 2.5 - seconds))  # keep the store until all are done
        return seconds

    seconds = run_ranks(run, 3, timeout_s=30)
    assert 0.2 <= seconds[0] < 1.2, f"rank 0 waited for rank 1: {seconds}"
    assert seconds[1] >= 1.9
