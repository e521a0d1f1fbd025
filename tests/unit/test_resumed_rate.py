"""The learning rate goes on where it was when a run is resumed with another batch; where it does not, both are said."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.configure import resolve
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import with_values
from megatron_edit.train.resumed_rate import counts_iterations, describe_change, first_sample
from megatron_edit.train.schedule import LearningRateSchedule

ITERATION, BATCH = 10, 8  # where the run was saved
CONSUMED = ITERATION * BATCH


def config_of(batch: int, **settings: Any) -> ResolvedConfig:
    values = {"lr": 1e-3, "min_lr": 1e-5, "mock_data": True, "edit_num_replicas": 1, "global_batch_size": batch}
    return resolve(with_values(Config(), {**values, **settings}, "flag"), 1, 1, "cpu")


def schedule_of(config: ResolvedConfig, first: int, iteration: int, consumed: int) -> LearningRateSchedule:
    """As `RunCheckpoints` makes it: a decay that is not given ends with the run."""
    training, optimizer = config.training, config.optimizer
    left = (training.train_iters - iteration) * training.global_batch_size
    if config.sources.get("train_samples") == "flag":
        left = training.train_samples - consumed
    if config.sources.get("lr_decay_iters") == "derived":
        optimizer = replace(optimizer, lr_decay_iters=None, lr_decay_samples=consumed - first + left)
    batch = BatchSchedule.constant(training.global_batch_size)
    return LearningRateSchedule(optimizer, training.train_iters, batch, first)


def resumed(settings: dict[str, Any], then: dict[str, Any], *batches: int) -> tuple[list[float], str]:
    """Rate of iteration 11 before the save, and after a resumption with each of `batches`; the last one's words."""
    config = config_of(BATCH, **settings)
    schedule, first, consumed = schedule_of(config, 0, 0, 0), 0, CONSUMED
    rates, words = [schedule.at_samples(consumed)], ""
    for batch in batches:
        saved = {"samples": first, "global_batch_size": schedule.batch.last_size,
                 "train_iters": schedule.train_iters, "optimizer": asdict(schedule.optimizer)}  # fmt: skip
        config = config_of(batch, **{**settings, **then})
        first = first_sample(config, consumed, saved)
        schedule = schedule_of(config, first, ITERATION, consumed)
        words = describe_change(schedule, first, saved, iteration=ITERATION, consumed_samples=consumed)
        rates.append(schedule.at_samples(consumed - first))
    return rates, words


LENGTHS: dict[str, dict[str, Any]] = {
    "run in iterations": {"train_iters": 20},
    "warm-up and decay in iterations": {"train_iters": 30, "lr_warmup_iters": 4, "lr_decay_iters": 20},
    "in the warm-up": {"train_iters": 30, "lr_warmup_iters": 15},
    "a share of the decay": {"train_iters": 20, "lr_warmup_fraction": 0.25},
    "run in samples": {"train_samples": 160},
    "all in samples": {"train_samples": 240, "lr_warmup_samples": 32, "lr_decay_samples": 160},
    "a run in iterations, lengths in samples": {"train_iters": 20, "lr_warmup_samples": 32, "lr_decay_samples": 160},
}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_another_batch_leaves_the_rate_where_it_was(lengths: str, style: str) -> None:
    settings = {**LENGTHS[lengths], "lr_decay_style": style}
    if style == "WSD":
        in_samples = "train_samples" in settings or "lr_decay_samples" in settings
        settings |= {"lr_wsd_decay_samples": 96} if in_samples else {"lr_wsd_decay_iters": 12}
    rates, words = resumed(settings, {}, 16, 4, 24)
    assert rates[1:] == pytest.approx(rates[:1] * 3, rel=1e-9)
    assert words.endswith("global batch 4 -> 24; the rate goes on where it was")
    assert resumed(settings, {}, BATCH)[1] == ""


def test_a_run_in_iterations_ends_at_the_smallest_rate() -> None:
    """Ten of twenty iterations are done: at twice the batch the other ten bring the rate down all the same."""
    config = config_of(16, train_iters=20, lr_decay_style="linear")
    saved = {"samples": 0, "global_batch_size": 8}
    first = first_sample(config, CONSUMED, saved)
    schedule = schedule_of(config, first, ITERATION, CONSUMED)
    found = [schedule.at_samples(CONSUMED + 16 * k - first) for k in (0, 5, 10)]
    assert found == pytest.approx([1e-5 + 9.9e-4 * share for share in (0.5, 0.25, 0)])


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "longer run": ({"train_iters": 20}, {"train_iters": 40}, 8, "lr_decay_samples 160 -> 320; iteration 11 has 7.525"),
    "peak": ({"train_iters": 20}, {"lr": 2e-3}, 8, "lr 0.001 -> 0.002; iteration 11 has 1.005000E-03, with the "),
    "mixed": (
        {"train_samples": 160, "lr_warmup_iters": 4, "lr_decay_style": "cosine"}, {}, 16,
        "global batch 8 -> 16; iteration 11 has 9.3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_rate_that_jumps_is_said_with_the_one_before(case: str) -> None:
    settings, then, batch, expected = CHANGES[case]
    rates, words = resumed({"lr_decay_style": "linear", **settings}, then, batch)
    assert words.startswith(expected) and rates[0] != rates[1]
    assert f"{rates[1]:.6E}, with the checkpoint's schedule it would be {rates[0]:.6E}" in words


def test_what_a_schedule_counts() -> None:
    assert counts_iterations(config_of(8, train_iters=20, lr_decay_style="cosine"))
    assert not counts_iterations(config_of(8, train_samples=160, lr_decay_style="cosine"))
    assert counts_iterations(config_of(8, train_samples=160, lr_decay_style="cosine", lr_decay_iters=10))
    assert not counts_iterations(config_of(8, train_iters=20, lr_decay_style="inverse-square-root"))
