"""EDiT on one replica's modules: decide after a step, then complete module by module inside the next forward pass.

    after_step      the trigger; when a sync is due, one vector of norms is exchanged and every weight, flag and
                    rollback is known, before the forward pass needs them
    launch_after    pseudo gradient of the next modules -> asynchronous all-reduce over the sync group
    complete        wait, clip, outer Nesterov step on the anchor, local parameters := anchor

`ModuleBucketGroup` calls the last two as the forward pass reaches each module, so the trainer calls `after_step` and
nothing else. All steps and formulas: arXiv 2412.07210; where this project decided, the docstring says ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron_edit.config.schema import EditConfig
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.detector import AnomalyDetector, DetectorVerdict
from megatron_edit.sync.methods import get_method
from megatron_edit.sync.modules import GradientReducer, ModuleShard, ReplicaDataParallel, collect_modules
from megatron_edit.sync.notices import SyncWarnings
from megatron_edit.sync.outer import nesterov_step_
from megatron_edit.sync.penalty import clip_coefficient, replica_weights
from megatron_edit.sync.transport import SyncTransport
from megatron_edit.sync.trigger import StepTrigger, TimeTrigger, Trigger

Observer = Callable[[str, ModuleShard], None]


@dataclass(frozen=True)
class SyncDecision:
    """What all replicas know of one sync before any parameter travels. M: this stage's modules."""

    index: int  # 1 for the first sync
    iteration: int  # optimizer steps before it
    norms: torch.Tensor  # [R, M] fp64, G of arXiv 2412.07210
    stepped: torch.Tensor  # [R] bool
    verdict: DetectorVerdict
    weights: torch.Tensor  # [R, M] fp64, 0 where left out
    rolled_back: torch.Tensor  # [M] bool: every replica left out


@dataclass(frozen=True)
class SyncResult:
    """One completed sync, as this rank saw it."""

    decision: SyncDecision
    clip_coefficients: torch.Tensor  # [M] fp64; 1 where rolled back
    bytes_sent: int
    exposed_ms: float
    total_ms: float  # from the decision to the last module's update


@dataclass(frozen=True)
class Meeting:
    """All replicas have met: a sync was decided (or, too early for it, put off), and these are its step counts."""

    index: int  # of the sync, 1 for the first
    steps: tuple[int, ...]  # [R] iterations of each replica since the meeting before, or since the warm-up ended
    averaged: bool  # False: fewer steps than --edit-min-total-steps, the replicas go on as they are


@dataclass
class _Pending:
    """State of one module between the decision and its update."""

    weight: float
    rolled_back: bool
    buffer: torch.Tensor | None = None
    work: dist.Work | None = None


class SyncEngine:
    """The sync of one rank's modules with the other replicas."""

    def __init__(
        self,
        config: EditConfig,
        mesh: Mesh,
        chunks: list[ReplicaDataParallel],
        optimizer: MegatronOptimizer,
        reducer: GradientReducer,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.chunks = chunks
        self.method = get_method(config.edit_method)
        self.modules = collect_modules(chunks, optimizer, mesh)
        self.transport = SyncTransport(mesh.platform, mesh.sync_group, mesh.sync_control_group)
        warmup_steps = config.edit_warmup_steps if self.method.is_local else None
        self.trigger: Trigger
        if self.method.trigger == "time":
            assert config.edit_sync_time is not None
            self.trigger = TimeTrigger(config.edit_sync_time, warmup_steps)
        else:
            self.trigger = StepTrigger(max(config.edit_sync_interval, 1), warmup_steps)
        self.detector = AnomalyDetector(
            mesh.num_replicas,
            len(self.modules),
            threshold=config.edit_anomaly_threshold,
            alpha=config.edit_anomaly_alpha,
            warmup=config.edit_anomaly_warmup_syncs,
        )
        self.anchor: list[torch.Tensor] = []  # per module [numel] fp32; empty until the warm-up has ended
        self.outer_momentum: list[torch.Tensor] = []
        self.last_decision: SyncDecision | None = None
        self._optimizer = optimizer
        self._reducer = reducer
        self._observer = observer
        self._pending: list[_Pending | None] = [None] * len(self.modules)
        self._launched = len(self.modules)  # modules before this index have been launched
        self._free_buffers: dict[int, list[torch.Tensor]] = {}
        self._clip_coefficients: list[torch.Tensor] = []
        self._decided_at: Any = None
        self._steps_since_sync = 0
        self._completed_at: Any = None
        self._result: SyncResult | None = None
        self._warnings = SyncWarnings([module.key for module in self.modules], mesh.num_replicas)
        self._warning_lines: list[str] = []
        for module in self.modules:
            module.bucket_group.sync = self
        self._reducer.enabled = self.trigger.in_warmup and mesh.num_replicas > 1
        if not self.trigger.in_warmup:
            self._set_anchor()

    # ---- called by the trainer -------------------------------------------------------------------------------

    @property
    def synchronous(self) -> bool:
        """True while every step averages gradients over all replicas (warm-up and `baseline`)."""
        return self.trigger.in_warmup

    @torch.no_grad()
    def after_step(self, updated: bool = True, *, learning_rate: float = 0.0, asked: bool = False) -> Meeting | None:
        """Once per optimizer step, whether or not it changed the parameters (`updated`).

        `learning_rate`: the step's; `asked`: what the replica agreed on, see `Trigger.wants_sync`. Returns what the
        replicas learnt of each other when a sync was due.
        """
        self._steps_since_sync += int(updated)
        steps_since_meeting = self.trigger.steps_since_sync + 1
        step = self.trigger.advance(asked)
        if step.set_anchor:
            self._set_anchor()
            self._reducer.enabled = False
            self._steps_since_sync = 0
        if not step.due:
            return None
        self.drain()  # only ever something to do when no forward pass came between
        steps = self._decide(step.syncs, steps_since_meeting)
        averaged = any(self._pending)
        if averaged and self.config.edit_sync_placement == "step":
            self._sync_blocking()
        elif averaged:
            self._launch_through(self.config.edit_prefetch_depth)
        self.trigger.restart_clock()
        return Meeting(step.syncs, steps, averaged)

    @torch.no_grad()
    def drain(self) -> None:
        """Completes a due sync now: before an evaluation, a save or the end."""
        if any(self._pending):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The model computes with the anchor inside; the local parameters come back bit for bit.

        In warm-up and `baseline`, which have no anchor, the current parameters are used.
        """
        self.drain()
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
        local = [[piece.model.clone() for piece in module.slices] for module in self.modules if self.anchor]
        for module, anchor in zip(self.modules, self.anchor, strict=False):
            self._write_model(module, module.views(anchor))
        if self.anchor:
            self._gather_parameters()
        try:
            yield
        finally:
            for module, pieces in zip(self.modules, local, strict=False):
                self._write_model(module, pieces)
            if self.anchor:
                self._gather_parameters()
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()

    @torch.no_grad()
    def sync_now(self) -> None:
        """One more sync, whatever the trigger says: the last one of a run, before the final weights are written."""
        self.drain()
        if self.anchor and self._steps_since_sync_anywhere():
            self.trigger.syncs += 1
            self._decide(self.trigger.syncs)
            self.drain()

    def take_result(self) -> SyncResult | None:
        """The sync that was completed since the last call, once. Waits for the device, which a step has just done."""
        self._close_result()
        result, self._result = self._result, None
        return result

    def _close_result(self) -> None:
        """Reads what a completed sync has left behind, before the next one overwrites it."""
        if self._completed_at is None:
            return
        assert self.last_decision is not None
        bytes_sent, exposed_ms = self.transport.take_traffic()
        self._result = SyncResult(
            decision=self.last_decision,
            clip_coefficients=torch.stack([beta.cpu() for beta in self._clip_coefficients]),
            bytes_sent=bytes_sent,
            exposed_ms=exposed_ms,
            total_ms=self._decided_at.elapsed_time(self._completed_at),
        )
        self._completed_at = None

    def take_warnings(self) -> list[str]:
        """Lines on this stage's modules since the last call, for one rank of the stage to print."""
        lines, self._warning_lines = self._warning_lines, []
        return lines

    @property
    def steps_since_sync(self) -> int:
        """Steps of this replica that changed its parameters since the last completed sync."""
        return self._steps_since_sync

    def ensure_anchor(self) -> None:
        """Anchor and outer momentum exist afterwards, for a checkpoint to be read into them."""
        if not self.anchor:
            self._allocate_anchor()

    @torch.no_grad()
    def resume(
        self,
        trigger: dict[str, int | None],
        *,
        detector: dict[str, torch.Tensor] | None = None,
        steps_since_sync: int = 0,
        has_anchor: bool = False,
    ) -> None:
        """Goes on from saved counters, when masters and, with `has_anchor`, anchor and outer momentum are loaded.

        Without an anchor, outside the warm-up, the masters become it. `detector`: its state for this stage's modules;
        None starts it anew. Collective. Raises ValueError as `StepTrigger.load_state_dict` does.
        """
        self.trigger.load_state_dict(trigger)
        if detector is not None:
            self.detector.load_state_dict(detector)
        self._steps_since_sync = steps_since_sync
        self._reducer.enabled = self.trigger.in_warmup and self.mesh.num_replicas > 1
        if not has_anchor and not self.trigger.in_warmup:
            self._set_anchor()

    # ---- called by the bucket groups, as the forward pass reaches their modules ----------------------------------

    @torch.no_grad()
    def launch_after(self, module: ModuleShard, *, computes: bool) -> None:
        """Launch the modules after `module`; one more when `module` computes now instead of the one before it."""
        self._launch_through(module.index + self.config.edit_prefetch_depth + int(computes))

    @torch.no_grad()
    def complete(self, module: ModuleShard) -> None:
        """Outer step of `module` with the averaged pseudo gradient; nothing to do unless its sync is pending."""
        pending = self._pending[module.index]
        if pending is None:
            return
        self._launch_through(module.index)
        anchor, momentum = self.anchor[module.index], self.outer_momentum[module.index]
        platform = self.mesh.platform
        started = platform.record_event()
        with platform.stream(platform.sync_stream()):
            if not pending.rolled_back:
                assert pending.buffer is not None
                if pending.work is not None:
                    pending.work.wait()
                beta = self.clip_coefficient_of(module, pending.buffer)
                self._clip_coefficients[module.index] = beta
                nesterov_step_(
                    anchor, momentum, pending.buffer, beta,
                    self.config.edit_outer_lr, self.config.edit_outer_momentum,
                )  # fmt: skip
                self._free_buffers.setdefault(pending.buffer.numel(), []).append(pending.buffer)
            module.write_masters(anchor)
            updated = platform.record_event()
        platform.wait_event(updated)
        self.transport.add_exposed(started, platform.record_event())
        self._pending[module.index] = None
        self._observe("complete", module)
        if not any(self._pending):
            self._completed_at = platform.record_event()

    # ---- the sync ------------------------------------------------------------------------------------------------

    def _decide(self, index: int, steps_since_meeting: int | None = None) -> tuple[int, ...]:
        """Exchange norms and step counts; weights, flags and rollbacks follow on every rank alike.

        Returns the steps of each replica since the meeting before. With `steps_since_meeting` (of this replica) and
        fewer of all than --edit-min-total-steps nothing else happens.
        """
        self._close_result()  # with an interval of 1 the sync before has ended in this step
        self._decided_at = self.mesh.platform.record_event()
        squares = torch.stack([self._pseudo_gradient_square_sum(module) for module in self.modules])  # [M]
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(squares, group=self.mesh.norm_group)
        counts = torch.tensor([self._steps_since_sync, steps_since_meeting or 0], dtype=torch.float64)
        gathered = self.transport.all_gather(torch.cat([squares.sqrt().cpu(), counts]))  # [R, M + 2]
        norms, steps, met = gathered[:, :-2], gathered[:, -2], tuple(int(n) for n in gathered[:, -1].tolist())
        if steps_since_meeting is not None and sum(met) < self.config.edit_min_total_steps:
            return met
        stepped = steps > 0
        unequal = not self.method.equal_steps
        verdict = self.detector.observe(norms / steps.clamp(min=1).sqrt()[:, None] if unequal else norms, stepped)
        weights = replica_weights(
            norms, verdict.left_out, self.config.edit_weighting, self.config.edit_softmax_temperature
        )
        if unequal:
            shares = torch.where(verdict.left_out, 0.0, steps[:, None])  # [R, M]
            ratio = self.config.edit_step_weight_ratio
            weights = (1 - ratio) * weights + ratio * shares / shares.sum(dim=0).clamp(min=1)
        rolled_back = verdict.left_out.all(dim=0)  # [M]
        self.last_decision = SyncDecision(
            index, self.trigger.steps, norms, stepped, verdict, weights, rolled_back
        )
        self._warning_lines += self._warnings.after_sync(index, verdict, weights, rolled_back)
        self._zero_moments_of_non_finite(verdict)
        mine_weights = weights[self.mesh.replica].tolist()
        self._pending = [
            _Pending(weight, back) for weight, back in zip(mine_weights, rolled_back.tolist(), strict=True)
        ]
        self._clip_coefficients = [torch.ones((), dtype=torch.float64) for _ in self.modules]
        self._launched = 0
        self._steps_since_sync = 0
        return met

    def _sync_blocking(self) -> None:
        """The naive twin of the sync in the forward pass: the same two calls per module, one after the other."""
        for module in self.modules:
            self._launch_through(module.index)
            self.complete(module)

    def _launch_through(self, last: int) -> None:
        """Launch all-reduces in module order up to index `last`: one order on all ranks of a group."""
        while self._launched <= min(last, len(self.modules) - 1):
            module = self.modules[self._launched]
            self._launched += 1
            pending = self._pending[module.index]
            if pending is not None and not pending.rolled_back:
                self._launch(module, pending)

    def _launch(self, module: ModuleShard, pending: _Pending) -> None:
        platform = self.mesh.platform
        platform.wait_event(platform.record_event(), platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            pending.buffer = self._take_buffer(module.numel)
            if pending.weight > 0:
                module.write_pseudo_gradient(self.anchor[module.index], pending.buffer)
                pending.buffer.mul_(pending.weight)
            else:
                pending.buffer.zero_()  # never 0 x its values: they may be NaN
            pending.work = self.transport.all_reduce(pending.buffer)
        self._observe("launch", module)

    def clip_coefficient_of(self, module: ModuleShard, averaged: torch.Tensor) -> torch.Tensor:
        """beta of an averaged pseudo gradient [numel], 0-d fp64 on the device; the host does not wait for it."""
        if self.config.edit_pseudo_grad_clip == 0:
            return torch.ones((), dtype=torch.float64, device=averaged.device)
        squares = module.counted_square_sum(averaged)
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(squares, group=self.mesh.norm_group)
        return clip_coefficient(squares.sqrt(), self.config.edit_pseudo_grad_clip)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _pseudo_gradient_square_sum(self, module: ModuleShard) -> torch.Tensor:
        buffer = self._take_buffer(module.numel)
        module.write_pseudo_gradient(self.anchor[module.index], buffer)
        squares = module.counted_square_sum(buffer)
        self._free_buffers.setdefault(buffer.numel(), []).append(buffer)
        return squares

    def _take_buffer(self, numel: int) -> torch.Tensor:
        free = self._free_buffers.get(numel)
        return free.pop() if free else torch.empty(numel, dtype=torch.float32, device=self.mesh.platform.device)

    def _allocate_anchor(self) -> None:
        device = self.mesh.platform.device
        self.anchor = [torch.empty(m.numel, dtype=torch.float32, device=device) for m in self.modules]
        self.outer_momentum = [torch.zeros_like(anchor) for anchor in self.anchor]

    @torch.no_grad()
    def _set_anchor(self) -> None:
        """anchor := parameters, those of replica 0 everywhere: bit-equal even where kernels round differently."""
        self._allocate_anchor()
        for module, anchor in zip(self.modules, self.anchor, strict=True):
            module.copy_masters_to(anchor)
            self.transport.broadcast(anchor)
            module.write_masters(anchor)

    def _zero_moments_of_non_finite(self, verdict: DetectorVerdict) -> None:
        """Inner moments of this replica's non-finite modules := 0, or its next step is non-finite again (ours)."""
        for module in self.modules:
            if verdict.non_finite[self.mesh.replica, module.index]:
                for piece in module.slices:
                    for part in self._optimizer.chained_optimizers:
                        state = part.optimizer.state.get(piece.optimizer_parameter, {})
                        for name in ("exp_avg", "exp_avg_sq"):
                            if name in state:
                                state[name].zero_()

    def _steps_since_sync_anywhere(self) -> bool:
        mine = torch.tensor([self._steps_since_sync], dtype=torch.int64)
        return bool(self.transport.all_gather(mine).any())

    def _write_model(self, module: ModuleShard, pieces: list[torch.Tensor]) -> None:
        for piece, value in zip(module.slices, pieces, strict=True):
            piece.model.data.copy_(value)

    def _gather_parameters(self) -> None:
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def _observe(self, event: str, module: ModuleShard) -> None:
        if self._observer is not None:
            self._observer(event, module)
