"""The lines of the training log, as pure functions of what they say.

The training line has Megatron-LM's field names in Megatron-LM's order and number formats (`training_log` in
its `megatron/training/training.py`), so that parsers written for its logs read ours: split at `|`, or
searched for `iteration <n>/`, `lm loss: <x>` and so on. Fields that Megatron-LM lacks stand between its own,
under names that a search for one of its own, colon included, does not find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class TrainReport:
    """All replicas together, over the iterations since the report before; the same on every rank.

    `lm_loss` is the mean over all tokens of all replicas that counted, `replica_losses[r]` over those of
    replica r; nan where no token counted. `grad_norm` is that of the last iteration, the mean over the
    replicas (they agree in synchronous steps); `grad_norm_max` is the largest of any replica in any of the
    iterations, given only with local steps.
    """

    iteration: int
    train_iters: int
    consumed_samples: int  # over all replicas, since the start of the training
    iteration_ms: float  # seconds of the replicas / their steps: what a global batch takes
    learning_rate: float
    global_batch_size: int
    lm_loss: float  # nats per token
    replica_losses: tuple[float, ...]
    grad_norm: float | None  # before clipping; None: not computed
    grad_norm_max: float | None
    skipped_iterations: int  # of the replica with most of them
    nan_iterations: int  # likewise
    loss_scale: float | None = None  # fp16 only
    tokens_per_second: float | None = None  # per device
    tflops: float | None = None  # per device, TFLOP/s of the model's arithmetic
    z_loss: float | None = None  # coefficient x mean of logsumexp(logits)^2, not in `lm_loss`; None: there is none
    replica_steps: tuple[int, ...] = ()  # of each replica since the report before, where they are not equal (a-edit)


@dataclass(frozen=True)
class SyncReport:
    """One sync of all modules, as all ranks decided it."""

    sync: int  # counted from 1
    iteration: int  # after which the replicas' parameters were taken
    modules: int
    weight_min: float  # smallest and largest weight of a replica in a module's average, those left out aside;
    weight_max: float  # nan when every module was rolled back
    left_out: int  # (module, replica) pairs left out of an average
    of: int  # all pairs: modules x replicas
    effective_replicas_min: float  # 1 / sum of squared weights, smallest over the modules
    num_replicas: int
    beta_min: float  # clip coefficient, smallest over the modules
    rolled_back: int  # modules that kept their anchor, as every replica was left out
    bytes: int  # sent by one replica, all its ranks together
    exposed_ms: float  # during which the computation waited
    total_ms: float  # from the first launch to the last completion


@dataclass(frozen=True)
class EvaluationReport:
    """Loss of the anchor on one split."""

    iteration: int
    split: str  # "validation" or "test"
    lm_loss: float  # token-weighted mean over all replicas, nats per token
    tokens: int
    set: str | None = None  # name, where there are several validation sets


def training_line(report: TrainReport, now: datetime | None = None) -> str:
    """Megatron-LM's line of a training step, at the local time `now`. Ends in `|`, without a newline."""
    fields = [
        f" [{now or datetime.now():%Y-%m-%d %H:%M:%S}] iteration {report.iteration}/ {report.train_iters}",
        f"consumed samples: {report.consumed_samples}",
        f"elapsed time per iteration (ms): {report.iteration_ms:.1f}",
    ]
    if report.tflops is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {report.tflops:.1f}")
    if report.tokens_per_second is not None:
        fields.append(f"tokens per second per GPU: {report.tokens_per_second:.1f}")
    fields += [
        f"learning rate: {report.learning_rate:.6E}",
        f"global batch size: {report.global_batch_size}",
        f"lm loss: {report.lm_loss:.6E}",
    ]
    if len(report.replica_losses) > 1:
        fields += [f"lm loss replica {r}: {loss:.6E}" for r, loss in enumerate(report.replica_losses)]
    if report.z_loss is not None:
        fields.append(f"z loss: {report.z_loss:.6E}")
    fields += [f"steps of replica {r}: {steps}" for r, steps in enumerate(report.replica_steps)]
    if report.loss_scale is not None:
        fields.append(f"loss scale: {report.loss_scale:.1f}")
    if report.grad_norm is not None:
        fields.append(f"grad norm: {report.grad_norm:.3f}")
    if report.grad_norm_max is not None:
        fields.append(f"grad norm max: {report.grad_norm_max:.3f}")
    fields += [
        f"number of skipped iterations: {report.skipped_iterations}",
        f"number of nan iterations: {report.nan_iterations}",
    ]
    return " | ".join(fields) + " |"


def sync_line(report: SyncReport) -> str:
    """One line per sync."""
    fields = [
        f"sync {report.sync} at iteration {report.iteration}",
        f"modules {report.modules}",
        f"weights min {report.weight_min:.2f} max {report.weight_max:.2f}",
        f"left out {report.left_out} of {report.of}",
        f"N_eff min {report.effective_replicas_min:.1f} of {report.num_replicas}",
        f"beta min {report.beta_min:.2f}",
        f"rolled back {report.rolled_back}",
        f"bytes {format_bytes(report.bytes)}",
        f"exposed {report.exposed_ms:.1f} ms of {report.total_ms:.1f} ms",
    ]
    return " | ".join(fields) + " |"


def evaluation_line(report: EvaluationReport) -> str:
    """Megatron-LM's line of an evaluation; perplexity is that of at most 20 nats, as there."""
    perplexity = math.exp(min(report.lm_loss, 20.0))  # nan stays nan
    which = "" if report.set is None else f" on {report.set}"
    return (
        f" {report.split} loss at iteration {report.iteration}{which} | lm loss value: {report.lm_loss:.6E} | "
        f"lm loss PPL: {perplexity:.6E} |"
    )


def format_bytes(count: float) -> str:
    """`count` bytes in decimal units: 512 B, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
