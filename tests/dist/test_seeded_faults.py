"""Faults on purpose: each is patched into the ranks, and the checks of the other tests must see it.

A test that stays green whatever the engine does would be found here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_edit.sync.decide as decide_module
from megatron_edit.sync.modules import ModuleBucketGroup, ModuleShard
from megatron_edit.sync.outer import OUTER_STEPS
from megatron_edit.train.replica import Replica
from tests.dist.against_reference import differences
from tests.dist.engine_runs import RankRecord, Run, run_engine
from tests.dist.test_against_reference import make_run
from tests.dist.test_anomalies import anomaly_run
from tests.dist.test_bf16 import lost_updates, small_steps, unequal_replicas
from tests.dist.test_identities import replicas_differ_before_a_sync

Fault = Callable[[Replica], None]


def with_fault(run: Run, fault: Fault) -> list[RankRecord]:
    return run_engine(Run(run.world_size, run.settings, run.steps, run.data, run.spoil, fault))


# ---- the faults ----------------------------------------------------------------------------------------------------


def reduces_gradients_over_replicas(replica: Replica) -> None:
    """The gradient reduce of warm-up and baseline is never skipped."""
    replica.engine.state.reducer.enabled = True


def averages_gradients_over_replicas(replica: Replica) -> None:
    """The same with the tokens counted over the replicas too: the right gradient of the wrong method."""
    replica.engine.state.reducer.enabled = True
    type(replica.engine).synchronous = property(lambda engine: True)  # type: ignore[assignment, method-assign]


def sums_instead_of_averaging(replica: Replica) -> None:
    """The 1/R is missing in the weights."""
    right = decide_module.replica_weights
    decide_module.replica_weights = lambda norms, *rest, **more: right(norms, *rest, **more) * norms.shape[0]


def averages_twice(replica: Replica) -> None:
    """1/R once more, on the way into the all-reduce."""
    transport = replica.engine.fleet.transport
    right = transport.all_reduce
    transport.all_reduce = lambda flat: right(flat.div_(replica.mesh.num_replicas))  # type: ignore[method-assign]


def takes_rounded_weights(replica: Replica) -> None:
    """The pseudo gradient is taken from the weights in bf16."""

    def write(module: ModuleShard, anchor: Tensor, out: Tensor) -> None:
        for piece, anchor_view, out_view in zip(module.slices, module.views(anchor), module.views(out), strict=True):
            torch.sub(piece.model.bfloat16().float(), anchor_view, out=out_view)

    ModuleShard.write_pseudo_gradient = write  # type: ignore[method-assign]


def counts_duplicates_twice(replica: Replica) -> None:
    """The norms of Delta count what all tensor parallel ranks hold once for each of them."""
    for module in replica.engine.modules:
        module.runs = [dataclasses.replace(run, counted=True) for run in module.runs]


def counts_duplicates_twice_in_the_gradient(replica: Replica) -> None:
    """The same in the gradient norm: the parameters look as if they were cut."""
    for module in replica.engine.modules:
        for piece in module.slices:
            piece.parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            piece.optimizer_parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def patch_outer_step(change: Callable[..., None]) -> None:
    """`change(step, anchor, momentum, averaged, beta, settings)` in place of the outer step."""
    right = OUTER_STEPS["nesterov"]
    OUTER_STEPS["nesterov"] = lambda *arguments: change(right, *arguments)


def goes_uphill(replica: Replica) -> None:
    """The sign of the pseudo gradient is flipped."""

    def change(step: Any, anchor: Tensor, momentum: Tensor, averaged: Tensor, beta: Tensor, *rest: Any) -> None:
        step(anchor, momentum, averaged, -beta, *rest)

    patch_outer_step(change)


def forgets_momentum(replica: Replica) -> None:
    """The outer momentum is not kept."""
    patch_outer_step(lambda step, anchor, momentum, *rest: step(anchor, torch.zeros_like(momentum), *rest))


def zeroes_momentum(replica: Replica) -> None:
    """The outer momentum starts anew at every sync, as after a resume that has lost it."""
    patch_outer_step(lambda step, anchor, momentum, *rest: step(anchor, momentum.zero_(), *rest))


def ignores_the_clip(replica: Replica) -> None:
    """beta is reported and not used."""

    def change(step: Any, anchor: Tensor, momentum: Tensor, averaged: Tensor, beta: Tensor, *rest: Any) -> None:
        step(anchor, momentum, averaged, 1.0, *rest)

    patch_outer_step(change)


def takes_plain_momentum(replica: Replica) -> None:
    """Heavy ball in place of Nesterov."""

    def change(step: Any, anchor: Tensor, momentum: Tensor, averaged: Tensor, *rest: Any) -> None:
        beta, settings = rest
        momentum.mul_(settings.outer_momentum).sub_(averaged * beta)
        anchor.sub_(momentum, alpha=settings.outer_lr)

    patch_outer_step(change)


def swaps_anchor_and_local(replica: Replica) -> None:
    """What is kept as the anchor after a sync are this replica's weights before it."""
    engine = replica.engine

    def observer(event: str, module: ModuleShard) -> None:
        if event == "launch":
            local[module.index] = torch.cat([piece.master.clone() for piece in module.slices])
        elif event == "complete":
            engine.state.anchor[module.index].copy_(local[module.index])

    local: dict[int, Tensor] = {}
    engine.averages.observer = observer


def sync_resets_inner_moments(replica: Replica) -> None:
    """A sync touches the inner optimizer."""

    def observer(event: str, module: ModuleShard) -> None:
        for part in replica.optimizer.chained_optimizers:
            for piece in module.slices:
                if state := part.optimizer.state.get(piece.optimizer_parameter):
                    state["exp_avg"].zero_()

    replica.engine.averages.observer = observer


def sends_zero_times_its_values(replica: Replica) -> None:
    """A replica that is left out sends 0 x Delta in place of zeros."""

    def weighted_sum(flat: Tensor, weight: float, error: Tensor | None, *, exact: int = 0) -> Any:
        return [transport.all_reduce(flat.mul_(weight))]

    transport = replica.engine.fleet.transport
    transport.weighted_sum = weighted_sum  # type: ignore[method-assign]


def keeps_moments_of_a_non_finite_replica(replica: Replica) -> None:
    """Inner moments are kept whatever the norm was: here they come from a NaN gradient."""
    replica.engine.exchange.zero_moments_of_non_finite = lambda verdict: None  # type: ignore[method-assign]


def writes_only_the_masters(replica: Replica) -> None:
    """A sync updates the masters and forgets the model's own weights."""

    def write(module: ModuleShard, flat: Tensor) -> None:
        for view, piece in zip(module.views(flat), module.slices, strict=True):
            piece.master.copy_(view)

    ModuleShard.write_masters = write  # type: ignore[method-assign]


def gathers_too_late(replica: Replica) -> None:
    """Layer 1 computes with the other shard's weights of the step before: nobody waits for its all-gather."""
    layer = next(module for module in replica.engine.modules if module.key == "layers.1")
    right, old = ModuleBucketGroup.start_param_sync, [layer.bucket_group.bucket.param_data.clone()]

    def start_param_sync(group: ModuleBucketGroup, force_sync: bool = False) -> None:
        right(group, force_sync=force_sync)
        if group is layer.bucket_group and not force_sync:
            group.param_gather_handle.wait()
            data, start = group.bucket.param_data, group.intra_distributed_optimizer_instance_rank
            mine = data.chunk(group.shard_group_size)[start].clone()
            now = data.clone()
            data.copy_(old[0])
            data.chunk(group.shard_group_size)[start].copy_(mine)
            old[0] = now

    ModuleBucketGroup.start_param_sync = start_param_sync  # type: ignore[method-assign]


# ---- what must see them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "fault", "red"),
    [
        ("R2xS2", reduces_gradients_over_replicas, {"grad norms", "weights before a sync"}),
        ("R2xS2", averages_gradients_over_replicas, {"grad norms", "weights before a sync"}),
        ("R2xS2", sums_instead_of_averaging, {"weights of the replicas", "anchor", "parameters"}),
        ("R2xTP2", averages_twice, {"anchor", "parameters"}),
        ("R2", takes_rounded_weights, {"norms", "anchor", "parameters"}),
        ("R2xTP2", counts_duplicates_twice, {"norms", "clip coefficients", "anchor"}),
        ("R2xTP2", counts_duplicates_twice_in_the_gradient, {"grad norms"}),
        ("R2", goes_uphill, {"anchor", "outer momentum", "parameters"}),
        ("R2xPP2", forgets_momentum, {"anchor", "outer momentum", "parameters"}),
        ("R2", zeroes_momentum, {"anchor", "outer momentum", "parameters"}),
        ("R2", ignores_the_clip, {"anchor", "outer momentum", "parameters"}),
        ("R2", takes_plain_momentum, {"anchor", "parameters"}),
        ("R2xS2", swaps_anchor_and_local, {"anchor", "norms"}),
        ("R2xS2", gathers_too_late, {"losses", "grad norms"}),
        ("R2", sync_resets_inner_moments, {"moments", "parameters"}),
    ],
)
def test_the_comparison_with_the_reference_sees(layout: str, fault: Fault, red: set[str]) -> None:
    run = make_run(layout)
    assert red <= differences(run, with_fault(run, fault)).keys()


@pytest.mark.parametrize(
    ("fault", "red"),
    [
        (sends_zero_times_its_values, {"anchor", "parameters"}),
        (keeps_moments_of_a_non_finite_replica, {"moments"}),
    ],
)
def test_the_comparison_of_spoiled_replicas_sees(fault: Fault, red: set[str]) -> None:
    run = anomaly_run("R2")
    assert red <= differences(run, with_fault(run, fault)).keys()


@pytest.mark.parametrize("fault", [reduces_gradients_over_replicas, averages_gradients_over_replicas])
def test_a_gradient_reduce_that_is_not_skipped_leaves_replicas_equal(fault: Fault) -> None:
    run = make_run("R2xS2", steps=3)
    assert not replicas_differ_before_a_sync(with_fault(run, fault))


def test_small_updates_are_seen_to_be_lost_with_a_pseudo_gradient_from_bf16_weights() -> None:
    lost = lost_updates(with_fault(small_steps("R2xS2"), takes_rounded_weights))
    assert "decoder.layers.1.mlp.linear_fc1.weight" in lost and "decoder.final_layernorm.weight" in lost


def test_a_model_that_is_not_its_masters_is_seen() -> None:
    run = make_run("R2xS2", bf16=True, steps=6)
    assert "model is not the cast of its masters" in unequal_replicas(with_fault(run, writes_only_the_masters))
