"""Every flag of the layout once: the run ends well and its loss falls on --mock-data."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.runs import syncs, train, training_lines

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"edit_num_replicas": 1}),
    "R2": (2, {}),
    "R2xS2": (4, {}),
    "R2xTP2": (4, {**TP2}),
    "R2xPP2 tied": (4, {**PP2, "untie_embeddings_and_output_weights": False}),
    "R2xTP2 with sequence parallel and recompute": (4, {**TP2, **RECOMPUTE, "sequence_parallel": True}),
    "TP2xPP2": (4, {**TP2, **PP2, "edit_num_replicas": 1}),
    "R2xPP2 interleaved": (4, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "R3": (3, {"edit_num_replicas": 3, "global_batch_size": 12}),
    "R4": (4, {"edit_num_replicas": 4}),
    "four microbatches": (2, {"global_batch_size": 16}),
    "warm-up": (2, {"edit_warmup_steps": 6}),
    "bf16": (2, {"bf16": True}),
    "bf16 with R2xTP2, tied": (4, {**TP2, "bf16": True, "untie_embeddings_and_output_weights": False}),
    "baseline": (2, {"edit_method": "baseline"}),
    "selective recompute, block recompute": (2, {**RECOMPUTE, "recompute_method": "block", "recompute_num_layers": 2}),
    "sync after the step": (2, {"edit_sync_placement": "step"}),
    "deep prefetch": (2, {"edit_prefetch_depth": 3}),
    "llama3 positions, biases, dropout": (
        2,
        {"rope_scaling_type": "llama3", "add_qkv_bias": True, "hidden_dropout": 0.05, "attention_dropout": 0.05},
    ),
    "deterministic": (2, {"deterministic_mode": True}),
    "WSD schedule": (2, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_warmup_iters": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls(name: str) -> None:
    world_size, settings = RUNS[name]
    result = train(world_size, **{"train_iters": 16, "lr": 3e-3, "eval_iters": 1, **settings})
    lines = training_lines(result.stdout)
    assert len(lines) == 16
    losses = [float(fields["lm loss"]) for fields in lines.values()]
    assert sum(losses[-3:]) / 3 < losses[0] - 0.25, losses
    assert all(float(fields["grad norm"]) > 0 for fields in lines.values())
    assert all(fields["number of nan iterations"] == "0" for fields in lines.values())
    warmup = settings.get("edit_warmup_steps", 0)
    planned = [warmup + 4, warmup + 8, 16] if warmup else [4, 8, 12, 16]
    assert list(syncs(result.stdout).values()) == ([] if "edit_method" in settings else planned)
    assert all((rank.stdout, rank.stderr) == ("", "") for rank in result.ranks[1:]), result
