"""The learning rate as a closed formula of the samples that were consumed before a step. No state, no torch.

With p = samples consumed before the step, w = warm-up, d = decay length (warm-up included), both in samples:

    p <= w, w > 0       init + (lr - init) p / w
    constant            lr
    p > d               min_lr
    otherwise, with x = (p - w) / (d - w) and f = the style's share of (lr - min_lr): min_lr + (lr - min_lr) f
      linear            f = 1 - x
      cosine            f = (1 + cos(pi x)) / 2
      WSD               f = 1 until the last v samples of d, then with y = (p - (d - v)) / v
                          linear 1 - y; cosine (1 + cos(pi y)) / 2; exponential 2 (1/2)^y - 1;
                          minus_sqrt 1 - sqrt(y)
    inverse-square-root max(min_lr, lr sqrt(max(w, 1) / max(p, 1)))

Iteration k, counted from 1, steps with p = the samples of the k - 1 iterations before: with a warm-up the
first step has the rate `init`. These are the values of megatron-core's OptimizerParamScheduler, which
advances after each step; a test compares them one by one. A length in iterations is the samples of so many
iterations from the beginning of the schedule on, a final decay's of so many before its end. Unset, the decay
is as long as the run.
"""

from __future__ import annotations

import math

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.derive import ScheduleLengths, schedule_lengths
from megatron_edit.config.schema import OptimizerConfig


class LearningRateSchedule:
    """Learning rate of a run of `train_iters` iterations. It begins where `first_sample` samples are consumed."""

    def __init__(
        self, optimizer: OptimizerConfig, train_iters: int, batch: BatchSchedule, first_sample: int = 0
    ) -> None:
        self.optimizer = optimizer
        self.train_iters = train_iters
        self.batch = batch
        self.first_sample = first_sample
        self.lengths: ScheduleLengths = schedule_lengths(optimizer, train_iters, batch, first_sample)

    def at_iteration(self, iteration: int) -> float:
        """Rate with which iteration `iteration` (from 1 on) after `first_sample` steps."""
        assert iteration >= 1, "iterations are counted from 1"
        return self.at_samples(self.batch.samples_after(iteration - 1, self.first_sample) - self.first_sample)

    def at_samples(self, samples: float) -> float:
        """Rate of a step before which `samples` samples after `first_sample` were consumed, over all replicas."""
        o, warmup, decay = self.optimizer, self.lengths.warmup, self.lengths.decay
        if warmup > 0 and samples <= warmup:
            return o.lr_warmup_init + (o.lr - o.lr_warmup_init) * samples / warmup
        if o.lr_decay_style == "constant":
            return o.lr
        if samples > decay:
            return o.min_lr
        if o.lr_decay_style == "inverse-square-root":
            return max(o.min_lr, o.lr * math.sqrt(max(warmup, 1) / max(samples, 1)))
        return o.min_lr + (o.lr - o.min_lr) * self._share(samples)

    def _share(self, samples: float) -> float:
        """The style's f, from 1 (peak) to 0 (minimum)."""
        warmup, decay, wsd_decay = self.lengths.warmup, self.lengths.decay, self.lengths.wsd_decay
        style = self.optimizer.lr_decay_style
        if style == "WSD":
            start = decay - wsd_decay
            if samples <= start:
                return 1.0
            return _shape(self.optimizer.lr_wsd_decay_style, (samples - start) / wsd_decay)
        return _shape(style, (samples - warmup) / (decay - warmup) if decay > warmup else 1.0)


def _shape(style: str, x: float) -> float:
    """Fall from 1 at x = 0 to 0 at x = 1."""
    match style:
        case "linear":
            return 1.0 - x
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * x))
        case "exponential":
            return 2.0 * 0.5**x - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(x)
    raise AssertionError(style)
