"""A gradient that is not finite costs one step, not the weights: in local steps, in warm-up and in `baseline`."""

import pytest
import torch

from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import tiny_batch, tiny_config, tiny_replica
from megatron_edit.train.step import TrainStep

BAD_ITERATION = 1


def masters_after_each_step(rank: int, world_size: int, settings: dict) -> list:
    config = tiny_config(world_size, **settings)
    replica = tiny_replica(config)
    step = TrainStep(replica)
    result = []
    for iteration in range(4):
        hook = None
        if iteration == BAD_ITERATION and replica.mesh.replica == 1:
            parameter = next(replica.chunks[0].module.parameters())
            hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
        outcome = step.run(tiny_batch(config, replica.mesh, iteration), 1e-3)
        if hook is not None:
            hook.remove()
        masters = torch.cat([piece.master for module in replica.engine.modules for piece in module.slices])
        result.append((outcome.updated, outcome.grad_norm, masters.clone()))
    return result


@pytest.mark.parametrize(
    ("settings", "replica_0_updates"),
    [
        ({"edit_method": "baseline"}, False),  # the reduced gradient is everybody's
        ({"edit_warmup_steps": 3}, False),
        ({"edit_sync_interval": 100}, True),
    ],
    ids=["baseline", "warm-up", "local steps"],
)
def test_a_non_finite_gradient_costs_one_step(settings: dict, replica_0_updates: bool) -> None:
    first, second = run_ranks(masters_after_each_step, 2, {"edit_num_replicas": 2, **settings})
    assert [updated for updated, _, _ in second] == [True, False, True, True]
    assert [updated for updated, _, _ in first] == [True, replica_0_updates, True, True]
    assert not torch.tensor(second[BAD_ITERATION][1]).isfinite()
    for rank in (first, second):
        assert all(masters.isfinite().all() for _, _, masters in rank)
    assert torch.equal(second[BAD_ITERATION][2], second[BAD_ITERATION - 1][2])
