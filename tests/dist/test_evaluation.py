"""Evaluation: on the anchor, one number on every layout, and training does not notice it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import rank_microbatches, tiny_global_batch, tiny_replica
from megatron_edit.train.evaluate import EvaluationResult, evaluate
from megatron_edit.train.step import TrainStep
from tests.dist.against_reference import reference_shape, run_reference
from tests.dist.engine_runs import Parameters, Run, digests, learning_rate, masked_batch
from tests.dist.test_against_reference import LAYOUTS
from tests.reference.plain_edit import PlainLlama

FULL = pytest.mark.full("the rest of the layouts")
HELD_OUT = (1001, 1002)  # iterations whose batches training never sees: 24 samples


def evaluated_run(layout: str, steps: int, **settings: Any) -> Run:
    """12 samples a batch on every layout, their tokens masked unevenly."""
    world_size, layout_settings = LAYOUTS[layout]
    batch = {"global_batch_size": 12, "micro_batch_size": 1}
    merged = {"edit_num_replicas": 2, "adam_eps": 1e-6, **layout_settings, **batch, **settings}
    return Run(world_size, merged, steps, masked_batch)


def losses_after_each_step(
    rank: int, world_size: int, run: Run, evaluations: bool = True
) -> tuple[list[EvaluationResult], dict[str, str], list[tuple[float, float]]]:
    """(evaluation before the first step and after each, hashes at the end, losses of training)."""
    config = run.config
    replica = tiny_replica(config)
    step, results, losses = TrainStep(replica), [], []

    def held_out() -> None:
        if evaluations:
            batches = [rank_microbatches(config, replica.mesh, masked_batch(config, k)) for k in HELD_OUT]
            results.append(evaluate(replica, batches))

    held_out()
    for iteration in range(1, run.steps + 1):
        microbatches = rank_microbatches(config, replica.mesh, run.data(config, iteration))
        outcome = step.run(microbatches, learning_rate(config, iteration))
        losses.append((float(outcome.loss_sum), float(outcome.tokens)))
        held_out()
    replica.engine.drain()
    for chunk in replica.chunks:
        chunk.start_param_sync(force_sync=True)  # an evaluation has gathered the weights, a step has not yet
    return results, digests(replica), losses


# ---- training does not notice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("R2xS2", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ("R2xTP2", {"bf16": True}),
        ("R2xPP2", {"edit_warmup_steps": 2, "untie_embeddings_and_output_weights": False}),
        ("R2xPP2 interleaved", {"hidden_dropout": 0.1}),
        ("R2xS2", {"edit_method": "baseline"}),
    ],
)
def test_training_is_bit_identical_with_and_without_evaluations(layout: str, settings: dict[str, Any]) -> None:
    """An evaluation before the first step and after each of 7, also where a sync is due, and in the warm-up."""
    run = evaluated_run(layout, 7, **settings)
    with_evaluations = run_ranks(losses_after_each_step, run.world_size, run)
    without = run_ranks(losses_after_each_step, run.world_size, run, False)
    for (_, hashes, losses), (_, expected_hashes, expected_losses) in zip(with_evaluations, without, strict=True):
        assert losses == expected_losses
        assert hashes == expected_hashes


# ---- one number, the anchor's --------------------------------------------------------------------------------------


def plain_loss(run: Run, parameters: Parameters) -> tuple[float, int]:
    """Token-weighted mean loss on the held-out samples by the plain PyTorch model, and the tokens."""
    model = PlainLlama(reference_shape(run.config), parameters)
    batches = [masked_batch(run.config, k) for k in HELD_OUT]
    loss = sum(float(model.loss_sum(batch)) for batch in batches)
    tokens = sum(int(batch["loss_mask"].sum()) for batch in batches)
    return loss / tokens, tokens


@pytest.mark.parametrize(
    "layout",
    ["R1xS2", "R2xS2", "R3", "R2xTP2", "R2xPP2 interleaved"]
    + [pytest.param(layout, marks=FULL) for layout in ("R2", "R2xPP2", "R2xTP2xPP2")],
)
def test_the_loss_is_that_of_the_anchor_on_every_layout(layout: str) -> None:
    """After 2 steps the anchor is the initial weights; after step 3 a sync is due, and completed; then local steps."""
    run = evaluated_run(layout, 5)
    results = run_ranks(losses_after_each_step, run.world_size, run)
    anchors = {k: run_reference(Run(run.world_size, run.settings, k, run.data)).anchor for k in (1, 3)}
    for evaluations, *_ in results:
        for step, result in enumerate(evaluations):
            anchor = anchors[1 if step < 3 else 3]
            assert anchor is not None
            expected, tokens = plain_loss(run, anchor)
            assert result.loss == pytest.approx(expected, abs=1e-5), f"after step {step}"
            assert result.tokens == tokens
        assert abs(evaluations[2].loss - evaluations[3].loss) > 1e-3


def test_in_warmup_and_baseline_the_current_weights_are_evaluated() -> None:
    for settings in ({"edit_warmup_steps": 4}, {"edit_method": "baseline"}):
        run = evaluated_run("R2xS2", 3, **settings)
        results = run_ranks(losses_after_each_step, run.world_size, run)
        parameters = run_reference(run).parameters[0]
        for evaluations, *_ in results:
            assert evaluations[-1].loss == pytest.approx(plain_loss(run, parameters)[0], abs=1e-5)
        assert abs(results[0][0][-1].loss - results[0][0][0].loss) > 1e-3


def nothing_counts(rank: int, world_size: int, run: Run) -> tuple[EvaluationResult, EvaluationResult]:
    config = run.config
    replica = tiny_replica(config)
    batch = tiny_global_batch(config, 1)
    batch["loss_mask"].zero_()
    return evaluate(replica, []), evaluate(replica, [rank_microbatches(config, replica.mesh, batch)])


def test_no_batch_or_no_token_gives_no_number() -> None:
    run = evaluated_run("R2", 1)
    for results in run_ranks(nothing_counts, run.world_size, run):
        assert all(result.tokens == 0 and math.isnan(result.loss) for result in results)
