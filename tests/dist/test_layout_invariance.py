"""What a layout must not change: losses, norms, updates, and what counts as a token. Field reports B09, B13 to B16."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_edit.config.schema import Config
from megatron_edit.model.init import initialize_weights
from megatron_edit.model.llama import build_model_chunks, transformer_config
from megatron_edit.model.loss import forward_step
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, rank_microbatches, tiny_global_batch, tiny_mesh, tiny_replica
from megatron_edit.train.replica import build_optimizer
from megatron_edit.train.step import TrainStep
from tests.dist.against_reference import differences
from tests.dist.engine_runs import Batch, RankRecord, Run, learning_rate, run_engine
from tests.dist.test_identities import PLAIN_SGD

# (tensor, pipeline, data parallel size) of one replica
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


def constant_batch(config: Config, iteration: int) -> Batch:
    """The same samples in every iteration: a loss that falls fast."""
    return tiny_global_batch(config, 1)


def grid_run(grid: tuple[int, int, int], steps: int, **settings: Any) -> Run:
    tensor, pipeline, data = grid
    merged = {
        "edit_num_replicas": 1,
        "edit_method": "baseline",
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        **settings,
    }
    return Run(tensor * pipeline * data, merged, steps, constant_batch)


def mean_losses(records: list[RankRecord], replica: int | None = None) -> list[float]:
    """Token-weighted mean loss of each step, over all replicas or of one."""
    ranks = [r for r in records if r.place.tp == 0 and replica in (None, r.place.sync)]
    steps = zip(*(r.losses for r in ranks), strict=True)
    return [sum(loss for loss, _ in step) / sum(tokens for _, tokens in step) for step in steps]


# ---- losses (B09) ----------------------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_the_layout_and_copies_stay_equal() -> None:
    expected: list[float] = []
    cases = [(grid, False) for grid in GRIDS] + [((2, 1, 1), True), ((2, 2, 1), True)]
    for grid, sequence_parallel in cases:
        records = run_engine(grid_run(grid, steps=10, sequence_parallel=sequence_parallel, adam_eps=1e-6))
        losses = mean_losses(records)
        expected = expected or losses
        assert losses == pytest.approx(expected, abs=2e-5), grid
        copies: dict[Any, set[str]] = {}
        for record in records:
            place = record.place
            copies.setdefault((place.dp, place.pp), set()).add(record.digests["replicated"])
        assert all(len(digests) == 1 for digests in copies.values()), grid
    assert expected[0] - expected[-1] > 0.1


# ---- overlap (B13) ---------------------------------------------------------------------------------------------------


def losses_of_plain_data_parallelism(
    rank: int, world_size: int, run: Run, bucket_size: int | None
) -> list[tuple[float, float]]:
    """megatron-core's own data parallelism without any overlap, in buckets of `bucket_size` elements."""
    config = run.config
    mesh = tiny_mesh(config)
    megatron_config = transformer_config(config.model, config.parallel, params_dtype=torch.float32, device_type="cpu")
    models = build_model_chunks(config.model, megatron_config, VOCABULARY, mesh.process_groups)
    initialize_weights(models, config.model, VOCABULARY, config.training.seed, mesh.process_groups.tp)
    chunk = DistributedDataParallel(
        config=megatron_config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=bucket_size
        ),
        module=models[0],
        pg_collection=mesh.process_groups,
    )
    optimizer = build_optimizer(config, [chunk], mesh.process_groups)
    megatron_config.grad_scale_func = optimizer.scale_loss
    megatron_config.finalize_model_grads_func = finalize_model_grads
    found = []
    for iteration in range(1, run.steps + 1):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, iteration)
            group["weight_decay"] = config.optimizer.weight_decay * group.get("wd_mult", 1.0)
        microbatches = rank_microbatches(config, mesh, run.data(config, iteration))
        losses = get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=chunk,
            num_microbatches=len(microbatches),
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=False,
            pg_collection=mesh.process_groups,
        )
        optimizer.step()
        loss_sum, tokens = torch.stack([loss["lm loss"] for loss in losses]).sum(0).tolist()
        found.append((loss_sum, tokens))
    return found


@pytest.mark.parametrize("bucket_size", [None, 1])
def test_overlap_changes_no_loss_by_one_bit(bucket_size: int | None) -> None:
    """Modules gathered just before they compute, against no overlap with one bucket, or one a parameter; clip off:
    the gradient norm sums up in another order. Warm-up of two replicas is the same sum once more."""
    run = grid_run((1, 1, 2), steps=20, clip_grad=0.0)
    plain = run_ranks(losses_of_plain_data_parallelism, 2, run, bucket_size)
    assert [record.losses for record in run_engine(run)] == plain
    if bucket_size is None:
        assert [record.losses for record in run_engine(run.changed(edit_num_replicas=2))] == plain
    assert plain[0][-1] < plain[0][0], "the weights of the last step must not do as well"


# ---- gradient norm and clip (B14) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_one_gradient_norm_and_one_clipped_update_in_all_layouts(tied: bool) -> None:
    """Plain SGD, so that the clip shows in the update; the reference has seen no layout."""
    settings = {**PLAIN_SGD, "lr": 1e6, "untie_embeddings_and_output_weights": not tied}
    (record,) = run_engine(grid_run((1, 1, 1), steps=1, **{**settings, "clip_grad": 1e9}))
    norm = record.grad_norms[0]
    assert norm is not None and norm > 0.5
    for grid in GRIDS[1:5]:
        run = grid_run(grid, steps=1, **{**settings, "clip_grad": norm / 2})
        records = run_engine(run)
        assert [r.grad_norms[0] for r in records] == pytest.approx([norm] * len(records), rel=1e-5), grid
        assert differences(run, records) == {}, grid


# ---- microbatches in bf16 (B15) --------------------------------------------------------------------------------------


def gradient_of_one_step(
    rank: int, world_size: int, run: Run, first: float, others: float
) -> tuple[float, torch.Tensor]:
    """(norm, gradient of the loss sum) on bf16-rounded weights; so often the first and the other microbatches count."""
    config = run.config
    replica = tiny_replica(config)
    with torch.no_grad():
        for module in replica.engine.modules:
            for piece in module.slices:
                piece.master.copy_(piece.master.bfloat16())
                piece.model.copy_(piece.master)
    microbatches = rank_microbatches(config, replica.mesh, run.data(config, 1))
    for i, batch in enumerate(microbatches):
        batch["loss_mask"] = batch["loss_mask"] * (others if i else first)
    outcome = TrainStep(replica).run(microbatches, 0.0)
    assert outcome.grad_norm is not None
    tokens = sum(float(batch["loss_mask"].sum()) for batch in microbatches)
    gradients = [parameter.main_grad.flatten() for chunk in replica.chunks for parameter in chunk.parameters()]
    return outcome.grad_norm, torch.cat(gradients).double() * tokens


def bf16_run(micro_batch_size: int, **settings: Any) -> Run:
    batch = {"global_batch_size": 16, "micro_batch_size": micro_batch_size}
    return grid_run((1, 1, 1), steps=1, **{"bf16": True, "clip_grad": 0.0, **batch, **settings})


def test_microbatches_in_bf16_add_up_in_fp32() -> None:
    ((expected, _),) = run_ranks(gradient_of_one_step, 1, bf16_run(4, bf16=False), 1.0, 1.0)
    for micro_batch_size in (1, 4, 16):
        ((norm, _),) = run_ranks(gradient_of_one_step, 1, bf16_run(micro_batch_size), 1.0, 1.0)
        assert norm == pytest.approx(expected, rel=1e-3), micro_batch_size


def small_part_error(**settings: Any) -> float:
    """Relative error of what 15 microbatches add to the gradient next to one that is 256 times larger."""
    run = partial(run_ranks, gradient_of_one_step, 1, bf16_run(1, **settings))
    ((_, both),), ((_, large),), ((_, small),) = run(256.0, 1.0), run(256.0, 0.0), run(0.0, 1.0)
    return float((both - large - small).norm() / small.norm())


def test_small_microbatches_are_not_lost_next_to_a_large_one() -> None:
    assert small_part_error() < 1e-3
    assert small_part_error(accumulate_allreduce_grads_in_fp32=False) > 0.1, "this test would not see the fault"


# ---- tokens that count (B16) -----------------------------------------------------------------------------------------


def masked_rows(config: Config, iteration: int, rows: slice, iterations: tuple[int, ...]) -> Batch:
    batch = tiny_global_batch(config, iteration, masked=True)
    if iteration in iterations:
        batch["loss_mask"][rows] = 0
    return batch


ONE_SHARD = partial(masked_rows, rows=slice(0, 2), iterations=(1, 2, 5))
ONE_REPLICA = partial(masked_rows, rows=slice(4, 8), iterations=(2, 4, 5, 6))
EVERYTHING = partial(masked_rows, rows=slice(None), iterations=(2, 5))


@pytest.mark.parametrize("method", ["edit", "baseline"])
@pytest.mark.parametrize("data", [ONE_SHARD, ONE_REPLICA, EVERYTHING], ids=["one shard", "one replica", "everything"])
def test_a_share_without_tokens_adds_nothing_and_counts_nothing(data: Any, method: str) -> None:
    """The reference takes the mean over the tokens that count; a replica without a step is left out of a sync."""
    run = Run(4, {"edit_num_replicas": 2, "edit_method": method, "adam_eps": 1e-6}, 7, data)
    records = run_engine(run)
    assert differences(run, records) == {}
    assert all(loss == loss for record in records for loss, _ in record.losses)
    if data is ONE_REPLICA and method == "edit":
        (_, second) = records[0].syncs
        assert second.decision.stepped.tolist() == [True, False] and (second.decision.weights[1] == 0).all()


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_a_step_without_any_token_leaves_the_weights_unchanged_and_says_so(layout: dict[str, int]) -> None:
    def digests_after(steps: int, data: Any = EVERYTHING) -> list[RankRecord]:
        return run_engine(Run(2, {"edit_num_replicas": 1, **layout}, steps, data))

    one, two, three = (digests_after(steps) for steps in (1, 2, 3))
    for first, second, third in zip(one, two, three, strict=True):
        assert second.updated == [True, False] and second.grad_norms[1] is None
        assert first.digests["masters"] == second.digests["masters"] != third.digests["masters"]
        assert second.losses[1] == (0.0, 0.0)
