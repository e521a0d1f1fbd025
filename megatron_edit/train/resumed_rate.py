"""The learning rate of a run that goes on with another batch, or another number of replicas. No torch.

A schedule is a function of samples. One that is given in iterations is meant as a curve over iterations: with another
global batch its samples stretch, so its position is moved by as much, and the rate is where it was (ours; Megatron-LM
keeps the samples, and the rate jumps).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config, OptimizerConfig
from megatron_edit.config.settings import is_given
from megatron_edit.train.schedule import LearningRateSchedule


def counts_iterations(config: Config) -> bool:
    """Whether the flags' schedule is a curve over iterations, and not over samples.

    What counts is the length of the decay, that of the run where it is not given; for the styles without a length
    of their own that of the warm-up.
    """
    optimizer = config.optimizer
    has_no_length = optimizer.lr_decay_style in ("constant", "inverse-square-root")
    if has_no_length and not is_given(config, "lr_warmup_fraction"):
        return bool(optimizer.lr_warmup_iters)
    if is_given(config, "lr_decay_iters") or is_given(config, "lr_decay_samples"):
        return is_given(config, "lr_decay_iters")
    return not is_given(config, "train_samples")


def first_sample(config: ResolvedConfig, consumed_samples: int, saved: dict[str, Any]) -> int:
    """Samples consumed before the schedule's first step, as its position is counted now; negative after a larger batch.

    `saved`: "schedule" of the checkpoint's manifest.
    """
    batch, before = config.batch_schedule, saved_batch(saved)
    first = int(saved["samples"])
    # Batches that grow are counted by samples: there is not one factor between the two curves.
    if batch == before or not (batch.is_constant and before.is_constant and counts_iterations(config)):
        return first
    return consumed_samples - round((consumed_samples - first) * batch.last_size / before.last_size)


def saved_batch(saved: dict[str, Any]) -> BatchSchedule:
    """Of the run that was saved; before batches could grow it was one number."""
    steps = saved.get("batch_steps", [[0, saved["global_batch_size"]]])
    return BatchSchedule(tuple((start, size) for start, size in steps))


def saved_schedule(saved: dict[str, Any]) -> LearningRateSchedule:
    """The schedule of a checkpoint, with its batch."""
    return LearningRateSchedule(
        OptimizerConfig(**saved["optimizer"]), saved["train_iters"], saved_batch(saved), saved["samples"]
    )


def change_of_batch(saved: BatchSchedule, flags: BatchSchedule, consumed_samples: int) -> list[str]:
    """Where the flags make another batch of the iterations to come than the saved run would have had."""
    theirs, ours = (next(iter(batch.stretches(consumed_samples)))[1] for batch in (saved, flags))
    if list(saved.stretches(consumed_samples)) == list(flags.stretches(consumed_samples)):
        return []
    if theirs == ours:
        return [f"global batch {ours} as in the checkpoint, but later ones differ"]
    return [f"global batch {theirs} -> {ours}"]


def describe_change(
    flags: LearningRateSchedule,
    first: int,
    saved: dict[str, Any],
    *,
    iteration: int,
    consumed_samples: int,
    tells_batch: bool = True,
) -> str:
    """What the flags' schedule, which begins at sample `first`, changes against the `saved` one; "" for nothing.

    With both rates of the next step, where they differ.
    """
    ours, theirs = asdict(flags.optimizer), dict(saved["optimizer"])
    if first != saved["samples"] and theirs["lr_decay_samples"] is not None:  # moved: in samples of the batch now
        theirs["lr_decay_samples"] = round(
            theirs["lr_decay_samples"] * flags.batch.last_size / saved["global_batch_size"]
        )
    names = [name for name in theirs if name.startswith(("lr", "min_lr"))]
    if ours["lr_decay_style"] == theirs["lr_decay_style"] == "constant":
        names = [name for name in names if "decay" not in name and name != "min_lr"]
    changes = [f"{name} {theirs[name]} -> {ours[name]}" for name in names if ours[name] != theirs[name]]
    if tells_batch:
        changes += change_of_batch(saved_batch(saved), flags.batch, consumed_samples)
    rate = flags.at_samples(consumed_samples - first)
    before = saved_schedule(saved).at_samples(consumed_samples - saved["samples"])
    if math.isclose(rate, before, rel_tol=1e-9):
        same = "the rate goes on where it was" if changes else ""
    else:
        same = f"iteration {iteration + 1} has {rate:.6E}, with the checkpoint's schedule it would be {before:.6E}"
    return ", ".join(changes) + ("; " if changes and same else "") + same
