"""One decision for all ranks of a replica, in the reduction of its gradient's norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import rank_microbatches, tiny_config, tiny_global_batch, tiny_replica
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "S2": (2, {}),
    "R2xTP2xPP2": (
        8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "edit_num_replicas": 2}
    ),
    "tied PP2": (2, {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}),
}  # fmt: skip


def norms_of_steps(rank: int, world_size: int, settings: dict[str, Any]) -> list[tuple[float, float, bool]]:
    """(megatron-core's norm, ours, the flag) of three steps; the last rank of each replica raises it in the second."""
    config = tiny_config(world_size, train_iters=3, **settings)
    replica = tiny_replica(config)
    step = TrainStep(replica)
    own, found = step.norm_and_flags, []
    is_last = rank % replica.mesh.layout.replica_size == replica.mesh.layout.replica_size - 1

    def both(flag: bool, own_flag: torch.Tensor) -> tuple[float, bool, bool]:
        theirs = float(replica.optimizer.get_grad_norm())
        norm, asked, any_token = own(flag, own_flag)
        assert any_token
        found.append((theirs, norm, asked))
        return norm, asked, any_token

    step.norm_and_flags = both  # type: ignore[method-assign]
    for iteration in range(1, 4):
        batch = rank_microbatches(config, replica.mesh, tiny_global_batch(config, iteration))
        step.run(batch, 1e-3, lambda asks=iteration == 2 and is_last: asks)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_is_that_of_megatron_core_and_the_flag_reaches_every_rank(layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    for found in run_ranks(norms_of_steps, world_size, settings):
        for theirs, ours, _ in found:
            assert theirs > 0 and ours == pytest.approx(theirs, rel=1e-6)
        assert [asked for *_, asked in found] == [False, True, False]


def collectives_of_a_step(rank: int, world_size: int, method: str) -> list[int]:
    """All-reduces that the optimizer's part of a step asks for: sizes of their tensors."""
    config = tiny_config(world_size, edit_method=method, edit_sync_time=600.0, edit_num_replicas=2)
    replica = tiny_replica(config)
    step, sizes = TrainStep(replica), []
    gradient = step._clipped_gradient

    def watched(asks: Any) -> Any:
        original = dist.all_reduce
        dist.all_reduce = lambda tensor, *rest, **options: sizes.append(tensor.numel()) or original(  # type: ignore
            tensor, *rest, **options
        )
        try:
            return gradient(asks)
        finally:
            dist.all_reduce = original

    step._clipped_gradient = watched  # type: ignore[method-assign]
    step.run(rank_microbatches(config, replica.mesh, tiny_global_batch(config, 1)), 1e-3)
    return sizes


@pytest.mark.parametrize("method", ["edit", "a-edit"])
def test_the_flag_costs_no_collective_of_its_own(method: str) -> None:
    assert run_ranks(collectives_of_a_step, 4, method) == [[2]] * 4


def steps_without_a_token(rank: int, world_size: int, mask_all: bool) -> list[Any]:
    """Replica 1 sees masked tokens only, and its leader asks in step 3; replica 0's asks in step 2."""
    config = tiny_config(
        world_size, edit_method="a-edit", edit_sync_time=600.0, edit_num_replicas=2, tensor_model_parallel_size=2
    )
    replica = tiny_replica(config)
    step, mesh = TrainStep(replica), replica.mesh
    asks_at = 2 if mesh.replica == 0 else 3
    outcomes: list[Any] = []
    for iteration in range(1, asks_at + 1):
        batch = rank_microbatches(config, mesh, tiny_global_batch(config, iteration))
        if mesh.replica == 1 or mask_all:
            for microbatch in batch:
                microbatch["loss_mask"].zero_()
        outcome = step.run(batch, 1e-3, lambda at=iteration: mesh.is_replica_leader and at == asks_at)
        outcomes.append(outcome.meeting and (outcome.meeting.index, outcome.meeting.steps, outcome.meeting.averaged))
        assert outcome.updated == (mesh.replica == 0 and not mask_all)
    finish(replica)
    return outcomes


def finish(replica: Replica) -> None:
    replica.engine.drain()
    dist.barrier()


def steps_up_to_a_sync(rank: int, world_size: int) -> Any:
    """Replica 1 sees masked tokens only in the step of the sync, and updates nothing in it."""
    config = tiny_config(world_size, edit_sync_interval=2, edit_num_replicas=2)
    replica = tiny_replica(config)
    step, outcome = TrainStep(replica), None
    for iteration in (1, 2, 3):
        batch = rank_microbatches(config, replica.mesh, tiny_global_batch(config, iteration))
        if iteration == 2 and replica.mesh.replica == 1:
            for microbatch in batch:
                microbatch["loss_mask"].zero_()
        last, outcome = outcome, step.run(batch, 1e-3)
    return last is not None and (last.updated, last.meeting and last.meeting.steps)


def test_a_replica_without_an_update_joins_the_exchange() -> None:
    """The others exchange the first modules' norms before they update the rest; so must one that updates nothing."""
    assert run_ranks(steps_up_to_a_sync, 2, timeout_s=40) == [(True, (2, 2)), (False, (2, 2))]


@pytest.mark.parametrize("mask_all", [False, True])
def test_a_replica_that_never_has_a_norm_meets_the_others(mask_all: bool) -> None:
    outcomes = run_ranks(steps_without_a_token, 4, mask_all, timeout_s=40)
    met = (1, (2, 3), True)
    assert outcomes == [[None, met]] * 2 + [[None, None, met]] * 2
