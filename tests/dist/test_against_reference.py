"""The engine on every layout equals the plain PyTorch reference: weights, norms, decisions, at every step and sync."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.dist.against_reference import differences
from tests.dist.engine_runs import RankRecord, Run, masked_batch, run_engine

# Both clips are active: gradients have norms of 0.7 to 1.4, averaged pseudo gradients of 0.1 to 0.2. With the low
# temperature the replicas' weights differ, though their norms hardly do. Adam's epsilon is large enough that it does
# not blow rounding errors of the smallest gradients up to whole steps.
COMMON: dict[str, Any] = {
    "edit_pseudo_grad_clip": 0.12,
    "edit_softmax_temperature": 0.01,
    "clip_grad": 0.5,
    "adam_eps": 1e-6,
}

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
TWO_CHUNKS = {"num_layers_per_virtual_pipeline_stage": 1}
SEQUENCE_PARALLEL = {**TP2, "sequence_parallel": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}

# layout: (ranks, settings)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "R2": (2, {}),
    "R2xS2": (4, {}),
    "R2xTP2": (4, TP2),
    "R2xPP2": (4, PP2),
    "R2xTP2xPP2": (8, {**TP2, **PP2}),
    "R2xPP2 interleaved": (4, {**PP2, **TWO_CHUNKS}),
    "R2xTP2 sequence parallel, full recompute": (4, {**SEQUENCE_PARALLEL, **FULL_RECOMPUTE}),
    "R2xTP2 sequence parallel, selective recompute": (4, {**SEQUENCE_PARALLEL, **SELECTIVE_RECOMPUTE}),
    "R4": (4, {"edit_num_replicas": 4, "edit_pseudo_grad_clip": 0.09}),
    "R3": (3, {"edit_num_replicas": 3, "global_batch_size": 6}),
    "R2xS3": (6, {"global_batch_size": 12}),
    "R2xS2xTP2": (8, TP2),
    "R2xS2xPP2": (8, PP2),
    "R2xS2xPP2 interleaved": (8, {**PP2, **TWO_CHUNKS, "global_batch_size": 16}),
    "R2xPP4": (8, {"pipeline_model_parallel_size": 4}),
    "R1xS2": (2, {"edit_num_replicas": 1}),
}

# variant: settings on top; masked tokens are uneven over replicas and shards
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "masked": {"masked": True},
    "masked, warm-up": {"masked": True, "edit_warmup_steps": 2, "edit_sync_interval": 2, "edit_pseudo_grad_clip": 0.06},
    "every step": {"edit_sync_interval": 1, "edit_pseudo_grad_clip": 0.03},
    "four microbatches": {"micro_batch_size": 1, "replica_batch_size": 4, "edit_prefetch_depth": 2},
    "mean, in the step": {"edit_weighting": "mean", "edit_sync_placement": "step", "edit_prefetch_depth": 3},
}

ALWAYS = [
    ("R2xS2", "untied"),
    ("R2xTP2", "untied"),
    ("R2xPP2", "untied"),
    ("R2xTP2xPP2", "untied"),
    ("R2xPP2 interleaved", "untied"),
    ("R2xPP2", "tied"),
    ("R2xTP2 sequence parallel, full recompute", "untied"),
    ("R2xTP2 sequence parallel, selective recompute", "untied"),
    ("R4", "untied"),
    ("R3", "untied"),
    ("R2xTP2", "four microbatches"),
    ("R2xS2", "masked"),
    ("R2xS2", "masked, warm-up"),
    ("R2xPP2", "masked, warm-up"),
    ("R2xS2", "mean, in the step"),
    ("R2xTP2", "every step"),
]
REST = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS if (layout, variant) not in ALWAYS]
DEFAULT = ALWAYS + random.Random(2412).sample(REST, 3)
CASES = [
    pytest.param(
        layout,
        variant,
        id=f"{layout}-{variant}",
        marks=[] if (layout, variant) in DEFAULT else pytest.mark.full("the rest of layouts x variants"),
    )
    for layout in LAYOUTS
    for variant in VARIANTS
]


def make_run(layout: str, variant: str = "untied", steps: int = 7, **settings: Any) -> Run:
    """Six steps with two syncs (unless the variant syncs more often), then one more local step."""
    world_size, layout_settings = LAYOUTS[layout]
    variant_settings = dict(VARIANTS[variant])
    data = {"data": masked_batch} if variant_settings.pop("masked", False) else {}
    merged = {"edit_num_replicas": 2, **COMMON, **layout_settings, **variant_settings, **settings}
    if "replica_batch_size" in merged:  # so many samples a shard, whatever the layout
        replicas = merged["edit_num_replicas"]
        model_ranks = merged.get("tensor_model_parallel_size", 1) * merged.get("pipeline_model_parallel_size", 1)
        samples = merged.pop("replica_batch_size") * (world_size // replicas // model_ranks)
        merged["global_batch_size"] = samples * replicas
    return Run(world_size, merged, steps, **data)


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_equals_the_reference(layout: str, variant: str) -> None:
    run = make_run(layout, variant)
    records = run_engine(run)
    assert differences(run, records) == {}
    assert len(records[0].syncs) == {"every step": 7}.get(variant, 2)
    assert_clips_are_active(records)


def assert_clips_are_active(records: list[RankRecord]) -> None:
    """Gradients were clipped in most steps, pseudo gradients in most modules of every sync."""
    for record in records:
        assert sum((norm or 0) > COMMON["clip_grad"] for norm in record.grad_norms) > len(record.grad_norms) / 2
    syncs = {}
    for record in records:
        for view in record.syncs:
            betas = dict(zip(view.keys, view.clip_coefficients or [], strict=True))
            syncs.setdefault(view.decision.index, {}).update(betas)
    for betas in syncs.values():
        assert sum(beta < 1 for beta in betas.values()) > len(betas) / 2, betas


Z_LOSS = {"z_loss_coeff": 0.05}  # adds about a third to the loss: logsumexp is near log(259) = 5.6


@pytest.mark.parametrize(("layout", "variant"), [("R2xTP2", "masked"), ("R2xPP2", "tied"), ("R2", "untied")])
def test_the_z_loss_equals_the_reference(layout: str, variant: str) -> None:
    """In the gradient, exactly also over a vocabulary that is cut; the reported loss is without it."""
    run = make_run(layout, variant, steps=4, **Z_LOSS)
    records = run_engine(run)
    assert differences(run, records) == {}
    assert differences(run.changed(z_loss_coeff=0.04), records).keys() >= {"grad norms", "weights before a sync"}


def test_baseline_equals_the_reference() -> None:
    """Synchronous data parallelism over replicas and shards, masked tokens counted over all of them."""
    for layout in ("R2xS2", "R2xPP2"):
        run = make_run(layout, "masked", edit_method="baseline")
        assert differences(run) == {}
