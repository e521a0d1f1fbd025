"""Numbers of the log, summed over all replicas without any step waiting for another replica.

Each rank adds up its own numbers on its device. At a log step every rank issues one asynchronous all-reduce
over a gloo group of all ranks and goes on; the line appears when the slowest replica has reached the same
iteration. Whether a reduction has completed decides only when its line is printed, never which collective
comes next, so all ranks issue the same ones in the same order. The vector has a slot for each replica, filled
by the ranks of that replica only: one sum then carries sums, maxima and values of one rank alike, and each
replica's own loss.

Reductions in flight are kept in a queue and nothing ever waits for one (except `flush`). The queue needs no
limit of its own: a replica cannot be further ahead than one sync interval, so there are at most interval /
log interval + 1.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.log.lines import SyncReport, TrainReport
from megatron_edit.tables.parameters import training_flops_per_token

if TYPE_CHECKING:
    from megatron_edit.parallel.mesh import Mesh
    from megatron_edit.sync.fleet import Fleet

Report = TrainReport | SyncReport


class MetricsError(RuntimeError):
    """A reduction of log numbers failed or did not complete in time: some rank did not join it."""


@dataclass(frozen=True)
class Reporter:
    """What this rank's numbers count for."""

    fleet: Fleet  # the replicas, asked at each report
    stage: int  # of the pipeline
    num_stages: int
    reports_loss: bool  # its loss sums and tokens count: last stage, first tensor parallel rank of each shard
    reports_stage: bool  # one rank of each stage of each replica

    @property
    def reports_replica(self) -> bool:
        """One rank of each replica, on the stage where the loss is."""
        return self.reports_stage and self.stage == self.num_stages - 1

    @classmethod
    def from_mesh(cls, mesh: Mesh, fleet: Fleet) -> Reporter:
        """The reporter of this rank of `mesh`, of a replica of `fleet`."""
        place, layout = mesh.place, mesh.layout
        return cls(
            fleet=fleet,
            stage=place.pp,
            num_stages=layout.pp,
            reports_loss=mesh.reports_loss,
            reports_stage=place.tp == place.dp == place.cp == 0,
        )


@dataclass(frozen=True)
class Throughput:
    """What tokens/s and TFLOP/s are computed from."""

    seq_length: int  # tokens of a sample, masked ones too
    replica_devices: int
    flops_per_token: float  # see `training_flops_per_token`


def throughput_of(config: ResolvedConfig, vocab_size: int, replica_devices: int) -> Throughput:
    """Of `config`."""
    return Throughput(
        seq_length=config.model.seq_length,
        replica_devices=replica_devices,
        flops_per_token=training_flops_per_token(config.model, vocab_size),
    )


@dataclass
class _InFlight:
    """One reduction under way."""

    slots: Tensor  # float64, CPU; the sum over all ranks once `work` has completed
    work: dist.Work
    what: str
    report: Callable[[Tensor], Report]


class _Column(IntEnum):
    """Of a replica's slot in the vector of a training report."""

    LOSS_SUM = 0  # nats, over the tokens that count; iterations with a non-finite loss left out
    TOKENS = 1  # those tokens
    Z_LOSS_SUM = 2  # over the same tokens
    GRAD_NORM = 3  # of the last iteration, 0 when not finite
    GRAD_NORM_IS_FINITE = 4
    GRAD_NORM_MAX = 5  # over the iterations with a finite one; -inf without any
    NAN_ITERATIONS = 6
    SKIPPED_ITERATIONS = 7
    ITERATIONS = 8
    SECONDS = 9
    SAMPLES = 10  # that the replica has read


class MetricsReducer:
    """Adds up one rank's numbers and reduces them; see the module's text.

    `group`: gloo, all ranks. `device`: where losses are. `train_iters`: total shown in the line. `z_loss`: whether
    the line has one. The clock of
    the first report starts now. All ranks call `emit` and `emit_sync` for the same iterations and syncs, in
    one order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        reporter: Reporter,
        *,
        train_iters: int,
        throughput: Throughput | None = None,
        z_loss: bool = False,
    ) -> None:
        assert not reporter.reports_replica or reporter.reports_loss
        self._group = group
        self._device = device
        self._reporter = reporter
        self._train_iters = train_iters
        self._throughput = throughput
        self._z_loss = z_loss
        self._in_flight: deque[_InFlight] = deque()
        self._clock = time.perf_counter()
        self._clear()

    def _clear(self) -> None:
        self._losses = torch.zeros(3, dtype=torch.float64, device=self._device)  # as the first columns
        self._last_norm = torch.zeros(2, dtype=torch.float64, device=self._device)  # value, whether finite
        self._norm_max = torch.full((), -math.inf, dtype=torch.float64, device=self._device)
        self._nan_iterations = torch.zeros((), dtype=torch.float64, device=self._device)
        self._has_norm = False
        self._skipped_iterations = 0
        self._iterations = 0
        self._samples = 0

    def accumulate(
        self,
        loss_sum: Tensor | float,
        num_tokens: Tensor | float,
        grad_norm: Tensor | float | None,
        *,
        samples: int = 0,
        skipped: bool = False,
        z_loss_sum: Tensor | float | None = None,
    ) -> None:
        """One iteration of this rank. Tensors (0-d, any dtype) may still be under way on the device; nothing waits.

        `loss_sum`: nats summed over the tokens that counted, `num_tokens` their number; read only where
        `reports_loss`. A non-finite loss is left out of the mean with its tokens, and its iteration counted
        as nan, so that one broken replica does not hide the others' loss. `grad_norm`: of the replica, before
        clipping.
        `samples`: that the replica has read, for the throughput.
        `skipped`: no update was made (fp16 overflow: a non-finite norm is then no nan iteration). `z_loss_sum`: summed
        over the same tokens as `loss_sum`, and not in it.
        """
        self._iterations += 1
        self._samples += samples
        self._skipped_iterations += skipped
        self._has_norm |= grad_norm is not None
        if not self._reporter.reports_loss:
            return
        loss = self._scalar(loss_sum)
        is_finite = torch.isfinite(loss)
        sums = torch.stack([loss, self._scalar(num_tokens), self._scalar(0.0 if z_loss_sum is None else z_loss_sum)])
        self._losses += torch.where(is_finite, sums, 0.0)
        if not self._reporter.reports_replica:
            return
        is_nan = ~is_finite
        if grad_norm is not None:
            norm = self._scalar(grad_norm)
            norm_is_finite = torch.isfinite(norm)
            self._last_norm = torch.where(norm_is_finite, torch.stack([norm, torch.ones_like(norm)]), 0.0)
            self._norm_max = torch.maximum(self._norm_max, torch.where(norm_is_finite, norm, -math.inf))
            if not skipped:
                is_nan = is_nan | ~norm_is_finite
        self._nan_iterations += is_nan

    def _scalar(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float64, non_blocking=True)
        return torch.full((), float(value), dtype=torch.float64, device=self._device)

    def emit(
        self,
        iteration: int,
        *,
        consumed_samples: int,
        learning_rate: float,
        global_batch_size: int,
        local_steps: bool,
        loss_scale: float | None = None,
    ) -> None:
        """Starts the reduction of everything since the last call; returns without waiting for another rank.

        Waits for this rank's own device, once. `local_steps`: replicas have gradient norms of their own, so
        the largest is shown. The other arguments are shown as they are, and equal on all ranks.
        """
        reporter = self._reporter
        slots = torch.zeros(reporter.fleet.num_replicas, len(_Column), dtype=torch.float64)  # [R, columns]
        mine = slots[reporter.fleet.replica]
        mine[: _Column.GRAD_NORM] = self._losses.cpu()  # zeros where the loss is not reported
        if reporter.reports_replica:
            norms = torch.cat([self._last_norm, self._norm_max[None], self._nan_iterations[None]])
            mine[_Column.GRAD_NORM : _Column.SKIPPED_ITERATIONS] = norms.cpu()
            mine[_Column.SKIPPED_ITERATIONS] = self._skipped_iterations
            mine[_Column.ITERATIONS] = self._iterations
            mine[_Column.SAMPLES] = self._samples
        now = time.perf_counter()  # after the copies: the device has done all of it
        if reporter.reports_replica:
            mine[_Column.SECONDS] = now - self._clock
        self._clock = now
        known = TrainReport(
            iteration=iteration,
            train_iters=self._train_iters,
            consumed_samples=consumed_samples,
            iteration_ms=math.nan,
            learning_rate=learning_rate,
            global_batch_size=global_batch_size,
            lm_loss=math.nan,
            replica_losses=(),
            grad_norm=math.nan if self._has_norm else None,
            grad_norm_max=math.nan if self._has_norm and local_steps else None,
            skipped_iterations=0,
            nan_iterations=0,
            loss_scale=loss_scale,
            z_loss=math.nan if self._z_loss else None,
        )
        throughput = self._throughput
        self._clear()
        self._start(slots, f"iteration {iteration}", lambda total: train_report(total, known, throughput))

    def emit_sync(self, report: SyncReport) -> None:
        """Starts the reduction of a sync's report over the pipeline stages, once each rank has completed that sync.

        `report` is this rank's own view: the modules of its stage, and the bytes that it sent itself.
        """
        reporter = self._reporter
        columns = len(_SYNC_COLUMNS)
        slots = torch.zeros(reporter.fleet.num_replicas, reporter.num_stages, columns, dtype=torch.float64)
        mine = slots[reporter.fleet.replica, reporter.stage]
        if reporter.reports_stage:
            mine[:] = torch.tensor([getattr(report, name) for name in _SYNC_COLUMNS], dtype=torch.float64)
        mine[_SYNC_COLUMNS.index("bytes")] = report.bytes
        self._start(slots, f"sync {report.sync}", lambda total: sync_report(total, report))

    def _start(self, slots: Tensor, what: str, report: Callable[[Tensor], Report]) -> None:
        work = dist.all_reduce(slots, group=self._group, async_op=True)
        assert work is not None
        self._in_flight.append(_InFlight(slots, work, what, report))

    def poll(self) -> list[Report]:
        """The reports that have become complete, oldest first; the same on all ranks, if not at the same time.

        Raises MetricsError when a reduction has failed.
        """
        complete: list[Report] = []
        while self._in_flight and self._in_flight[0].work.is_completed():
            first = self._in_flight.popleft()
            try:
                first.work.wait()
            except RuntimeError as error:
                raise MetricsError(f"the log's numbers of {first.what} did not arrive: {error}") from error
            complete.append(first.report(first.slots))
        return complete

    def flush(self, timeout_seconds: float) -> list[Report]:
        """Waits for all that is in flight, at the end of the training. MetricsError after `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        complete = self.poll()
        while self._in_flight:
            if time.monotonic() > deadline:
                raise MetricsError(
                    f"the log's numbers of {self._in_flight[0].what} did not arrive within {timeout_seconds:g} s: "
                    "some rank has not reached it"
                )
            time.sleep(0.001)
            complete += self.poll()
        return complete

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What runs inside (evaluation, saving) does not count as time of the iterations."""
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._clock += time.perf_counter() - entered


def train_report(slots: Tensor, known: TrainReport, throughput: Throughput | None) -> TrainReport:
    """Completes `known` with the sums over all ranks, `slots` [R, columns] float64."""

    def column(which: _Column) -> list[float]:
        return slots[:, which].tolist()

    seconds, iterations = column(_Column.SECONDS), column(_Column.ITERATIONS)
    unequal = len(set(iterations)) > 1
    report = replace(
        known,
        iteration_ms=1000 * _ratio(sum(seconds), sum(iterations)),
        lm_loss=_ratio(sum(column(_Column.LOSS_SUM)), sum(column(_Column.TOKENS))),
        replica_losses=tuple(
            _ratio(*each) for each in zip(column(_Column.LOSS_SUM), column(_Column.TOKENS), strict=True)
        ),
        skipped_iterations=int(max(column(_Column.SKIPPED_ITERATIONS))),
        nan_iterations=int(max(column(_Column.NAN_ITERATIONS))),
        replica_steps=tuple(int(n) for n in iterations) if unequal else (),
    )
    if known.z_loss is not None:
        report = replace(report, z_loss=_ratio(sum(column(_Column.Z_LOSS_SUM)), sum(column(_Column.TOKENS))))
    if known.grad_norm is not None:
        finite = sum(column(_Column.GRAD_NORM_IS_FINITE))
        report = replace(report, grad_norm=_ratio(sum(column(_Column.GRAD_NORM)), finite))
    if known.grad_norm_max is not None:
        largest = max(column(_Column.GRAD_NORM_MAX))
        report = replace(report, grad_norm_max=largest if math.isfinite(largest) else math.nan)
    if throughput is not None:
        samples = [_ratio(*each) for each in zip(column(_Column.SAMPLES), seconds, strict=True)]  # a second, [R]
        per_device = sum(samples) / len(samples) * throughput.seq_length / throughput.replica_devices
        tflops = per_device * throughput.flops_per_token / 1e12
        report = replace(report, tokens_per_second=per_device, tflops=tflops)
    return report


_SYNC_COLUMNS = (
    "modules", "weight_min", "weight_max", "left_out", "of", "effective_replicas_min", "beta_min", "rolled_back",
    "bytes", "exposed_ms", "total_ms",
)  # fmt: skip


def sync_report(slots: Tensor, mine: SyncReport) -> SyncReport:
    """One report of all stages from `slots` [R, stages, columns] float64, the sums over all ranks.

    What the ranks decided is equal in all replicas. Of the times it takes, for each stage, that of the
    replica that waited least (a replica's lateness is not a cost of the sync), and of the stages the largest.
    """
    values = {name: slots[:, :, k] for k, name in enumerate(_SYNC_COLUMNS)}  # [R, stages] each
    decided = {name: value[0] for name, value in values.items()}  # [stages] each

    def extreme(pick: Callable[[list[float]], float], name: str) -> float:
        known = [value for value in decided[name].tolist() if not math.isnan(value)]  # nan: all rolled back
        return pick(known) if known else math.nan

    def total(name: str) -> int:
        return int(decided[name].sum())

    return replace(
        mine,
        modules=total("modules"),
        weight_min=extreme(min, "weight_min"),
        weight_max=extreme(max, "weight_max"),
        left_out=total("left_out"),
        of=total("of"),
        effective_replicas_min=extreme(min, "effective_replicas_min"),
        beta_min=extreme(min, "beta_min"),
        rolled_back=total("rolled_back"),
        bytes=total("bytes"),
        exposed_ms=float(values["exposed_ms"].amin(0).max()),
        total_ms=float(values["total_ms"].amin(0).max()),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
