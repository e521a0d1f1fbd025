"""The sync of one replica's modules with the other replicas: every method of `methods.py` on one engine.

    after_step    the trigger; when a sync is due, one small exchange of norms and step counts tells every rank all
                  weights, flags and rollbacks (`decide`), and the first pseudo gradients set out (`launch`)
    hooks         with placement "forward": as the forward pass reaches a module its sync is completed (`complete`) and
                  the modules after it are launched
    complete      wait, clip, outer step on the anchor, local parameters := anchor

With a delay, a module is completed so many steps later; with placement "round", at the next sync. The trainer calls
`after_step` and nothing else (and `begin_sync`, if it can update the first modules before the others).
Formulas: arXiv 2412.07210 and docs/methods.md; where this project decided, the docstring says ours.
Longer than other files: the way of one sync, in every placement, is to be read in one place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron_edit.config.schema import EditConfig
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.buffers import BufferPool, most_at_once
from megatron_edit.sync.compression import codec_of
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.event import Meeting, Pending, SyncDecision, SyncEvent, SyncResult
from megatron_edit.sync.inner_moments import InnerMoments
from megatron_edit.sync.methods import get_method
from megatron_edit.sync.modules import GradientReducer, ModuleShard, ReplicaDataParallel, collect_modules
from megatron_edit.sync.notices import IdleWatch, SyncWarnings
from megatron_edit.sync.outer import OUTER_STEPS, OuterSettings
from megatron_edit.sync.outer_state import build_outer_state
from megatron_edit.sync.penalty import clip_coefficient
from megatron_edit.sync.reducers import generator_of, sparsify_
from megatron_edit.sync.tied import COPIES_DIFFER, TiedCopies
from megatron_edit.sync.transport import SyncTransport
from megatron_edit.sync.trigger import StepTrigger, build_trigger

Observer = Callable[[str, ModuleShard], None]
MOST_LEADING = 4  # modules that set out before the optimizer has updated the others, or nothing is left to update then


class NonFiniteSyncError(RuntimeError):
    """Every replica is non-finite in a module, and the method keeps no anchor to go back to."""


class SyncEngine:
    """The sync of one rank's modules with the other replicas.

    module_keys  all modules of the whole model, in forward order (`model.names.module_keys`)
    seed         of the random sparsification
    """

    def __init__(
        self,
        config: EditConfig,
        mesh: Mesh,
        chunks: list[ReplicaDataParallel],
        optimizer: MegatronOptimizer,
        reducer: GradientReducer,
        *,
        module_keys: Sequence[str],
        seed: int = 0,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.chunks = chunks
        self.method = get_method(config.edit_method)
        self.modules = collect_modules(chunks, optimizer, mesh)
        self.tied = TiedCopies(mesh, chunks, self.modules)
        self.trigger = build_trigger(config, self.method, len(module_keys))
        self.num_fragments = self.trigger.num_fragments if isinstance(self.trigger, StepTrigger) else 1
        for module in self.modules:
            module.fragment = module_keys.index(module.key) * self.num_fragments // len(module_keys)
        self.transport = SyncTransport(
            mesh.platform,
            mesh.sync_group,
            mesh.sync_control_group,
            codec=None if config.edit_comm_dtype == "fp32" else codec_of(config.edit_comm_dtype),
            consensus=config.edit_consensus,
        )
        self.outer_state = build_outer_state(
            self.modules,
            mesh.platform,
            self.transport,
            sharded=self.method.shards_over_sync,
            on_host=config.edit_cpu_offload,
        )
        self.buffers = BufferPool(mesh.platform.device)
        self.decider = Decider(config, self.method, mesh.num_replicas, len(self.modules))
        self.errors: list[torch.Tensor] = []  # [numel] fp32 of each module: what compression has not sent yet
        self.last_decision: SyncDecision | None = None
        self.pending: list[Pending | None] = [None] * len(self.modules)
        self.events: list[SyncEvent] = []  # in progress, oldest first
        self.updates = 0  # steps that changed this replica's parameters
        self.updates_at_sync = [0] * self.num_fragments
        self.steps_at_average = 0  # iterations of this replica up to its last sync that averaged something
        self.inner_moments = InnerMoments(optimizer)
        self._reducer = reducer
        self._observer = observer
        self._seed = seed
        self._order: list[int] = []  # indices of the modules of the syncs in the forward pass, in forward order
        self._launched = 0  # so many of them are
        self._begun: tuple[SyncEvent | None, Meeting, list[ModuleShard]] | None = None
        self.inner_lr = 0.0  # of the last step
        self._finished: list[SyncEvent] = []  # complete; their times are read when the device has done the step
        told_elsewhere = [self.tied.is_copy(module) and not mesh.is_first_stage for module in self.modules]
        self._warnings = SyncWarnings([module.key for module in self.modules], mesh.num_replicas, told_elsewhere)
        self._warning_lines: list[str] = []
        self._idle = IdleWatch()
        for module in self.modules:
            module.bucket_group.sync = self
        self._reducer.enabled = self.trigger.in_warmup and mesh.num_replicas > 1
        if not self.trigger.in_warmup:
            self._leave_warmup()

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
        self.inner_lr = learning_rate
        self.updates += int(updated)
        if self.trigger.in_warmup:
            self._idle.after_synchronous_step(updated)
        steps = self.trigger.steps_since_sync + 1
        step = self.trigger.advance(asked)
        self._finish_events_of_other_stages()
        if step.set_anchor:
            self._leave_warmup()
        self._complete_delayed(step.step)
        return self._meet(step.due, steps) if step.due else None

    def leading_modules(self, asked: bool = False) -> list[ModuleShard]:
        """Modules whose sync is due after the step in progress and sets out at once: it may begin before the others'.

        [] when none is, or when nothing is won: the trainer then updates all parameters, and calls `after_step`.
        """
        trigger, config = self.trigger, self.config
        if trigger.in_warmup or config.edit_sync_placement != "forward" or config.edit_sync_delay:
            return []
        due = trigger.due_after(trigger.steps + 1, asked)
        first = min(config.edit_prefetch_depth + 1, MOST_LEADING)
        modules = [module for module in self.modules if module.fragment in due][:first]
        # A tied matrix waits for its copy on the other stage, where it is the last module to be updated.
        return list(takewhile(lambda module: not self.tied.is_copy(module), modules))

    @torch.no_grad()
    def begin_sync(self, modules: list[ModuleShard], updated: bool = True, *, learning_rate: float = 0.0) -> None:
        """Decides and launches `leading_modules()`, whose parameters are updated, while the others are yet to be.

        The first messages so travel during the update; `after_step` follows. Called by all replicas or by none: also
        by one whose step does not change its parameters (`updated`).
        """
        assert self._begun is None
        self.inner_lr = learning_rate
        self.drain()
        trigger = self.trigger
        self.updates += int(updated)
        event, meeting = self._decide(
            modules, trigger.syncs + 1, trigger.steps + 1, steps=trigger.steps_since_sync + 1, keep=len(modules)
        )
        self.updates -= int(updated)
        if event is not None:
            event.in_forward = True
            self._order, self._launched = [module.index for module in modules], 0
            self._launch_first(len(modules))
        self._begun = event, meeting, modules

    @torch.no_grad()
    def drain(self) -> None:
        """Completes a due sync now: before an evaluation, a save or the end. A delayed one is left alone."""
        if any(pending is not None and pending.event.in_forward for pending in self.pending):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self._finish_events_of_other_stages()

    @torch.no_grad()
    def agreed_parameters(self, module: ModuleShard) -> torch.Tensor:
        """[numel] fp32: the anchor, or where the method keeps none the mean over the replicas; not in the warm-up.

        Collective over the sync group for methods without an anchor, and for one that is dealt out over the replicas.
        """
        if self.method.has_anchor:
            return self.outer_state.anchor(module)
        mean = torch.empty(module.numel, dtype=torch.float32, device=self.mesh.platform.device)
        module.copy_masters_to(mean)
        squares = module.counted_square_sum(mean)
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(squares, group=self.mesh.norm_group)
        finite = self.transport.all_gather(squares.isfinite().cpu().reshape(1).long()).flatten()  # [R]
        if not finite.any() or finite[self.mesh.replica]:
            mean.div_(max(int(finite.sum()), 1))
        else:  # as in a sync: what is not finite is not averaged
            mean.zero_()
        if (handle := self.transport.all_reduce(mean)) is not None:
            handle.wait()
        return mean

    @torch.no_grad()
    def sync_now(self) -> None:
        """One more sync, whatever the trigger says, and nothing in flight after it: the end of a run."""
        self.drain()
        if self.trigger.in_warmup:
            return
        if self.config.edit_sync_delay:
            self.complete_in_flight()
        if fragments := self._fragments_with_updates():
            steps = self.trigger.steps_since_sync
            self.trigger.syncs += 1
            self.trigger.last_sync_step = self.trigger.steps
            self._meet(fragments, steps, at_end=True)
        self.complete_in_flight()
        self.drain()

    @torch.no_grad()
    def complete_in_flight(self) -> None:
        """Applies every average that is under way, now."""
        for module in self.modules:
            if (pending := self.pending[module.index]) is not None:
                self._apply(module, pending)
        self._finish(self.events)

    def take_results(self) -> list[SyncResult]:
        """The syncs that were completed since the last call. Waits for the device, which a step has just done.

        A sync ends after the same step on all ranks, so all take it at the same call.
        """
        if self._finished:
            self.mesh.platform.synchronize()
        results = [event.result() for event in self._finished]
        self._finished = []
        return results

    def take_warnings(self) -> list[str]:
        """Lines on this stage's modules since the last call, for one rank of the stage to print."""
        lines, self._warning_lines = self._warning_lines, []
        return lines

    # ---- state, for checkpoints ------------------------------------------------------------------------------

    @property
    def has_anchor(self) -> bool:
        """Whether there is an anchor now."""
        return self.outer_state.exists

    @property
    def anchor(self) -> list[torch.Tensor]:
        """[numel] fp32 of each module, [] in the warm-up. Of `co2-sharded` a gathered copy, collective."""
        return self.outer_state.anchors

    @property
    def outer_momentum(self) -> list[torch.Tensor]:
        """As `anchor`."""
        return self.outer_state.momenta

    @property
    def updates_since_sync(self) -> list[int]:
        """For each fragment, updates of this replica since its last sync."""
        return [self.updates - at for at in self.updates_at_sync]

    @property
    def schedule_of_syncs(self) -> list[Any]:
        """What decides when a module is due again: with another one, averages under way cannot stay there."""
        config = self.config
        return [self.method.trigger, config.edit_sync_interval, self.num_fragments, config.edit_sync_delay]

    @property
    def replicas_agree(self) -> bool:
        """Whether all replicas hold the same parameters once a due sync is completed, and nothing else is under way.

        The same on every rank.
        """
        if self.trigger.in_warmup:
            return True
        under_way = any(not event.in_forward for event in self.events)
        return self.num_fragments == 1 and self.trigger.steps_since_sync == 0 and not under_way

    def ensure_anchor(self) -> None:
        """Anchor and outer momentum exist afterwards, for a checkpoint to be read into them."""
        if self.method.has_anchor and not self.outer_state.exists:
            self.outer_state.allocate()
        self.ensure_errors()

    def ensure_errors(self) -> None:
        """What compression carries over exists afterwards, as zeros if it is new."""
        if self.transport.codec is not None and not self.errors:
            device = self.mesh.platform.device
            self.errors = [torch.zeros(module.numel, dtype=torch.float32, device=device) for module in self.modules]

    @torch.no_grad()
    def resume(
        self,
        trigger: dict[str, int | None],
        *,
        detector: dict[str, torch.Tensor] | None = None,
        updates_since_sync: Sequence[int] = (),
        steps_since_average: int = 0,
        has_anchor: bool = False,
    ) -> None:
        """Goes on from saved counters, when masters and, with `has_anchor`, anchor and outer momentum are loaded.

        Without an anchor, outside the warm-up, the masters become it. `detector`: its state for this stage's modules;
        None starts it anew. Collective. Raises ValueError as `Trigger.load_state_dict` does.
        """
        self.trigger.load_state_dict(trigger)
        if detector is not None:
            self.decider.detector.load_state_dict(detector)
        since = list(updates_since_sync) or [0]
        if len(since) != self.num_fragments:  # --edit-num-fragments has changed
            since = [max(since)] * self.num_fragments
        self.updates = max(since)
        self.updates_at_sync = [self.updates - count for count in since]
        self.steps_at_average = self.trigger.steps - steps_since_average
        self._reducer.enabled = self.trigger.in_warmup and self.mesh.num_replicas > 1
        if not has_anchor and not self.trigger.in_warmup and self.method.has_anchor:
            self._leave_warmup()
        elif not self.trigger.in_warmup:
            self.ensure_errors()
            self._allocate_buffers()

    def take_up(self, event: SyncEvent, pending: dict[int, Pending]) -> None:
        """Adds a sync that a checkpoint has left under way: its modules, by index."""
        event.modules_left = len(pending)
        self.events.append(event)
        for index, entry in pending.items():
            self.pending[index] = entry
            if not entry.rolled_back:
                module = self.modules[index]
                event.bytes_sent += self.transport.message_bytes(module.numel, module.num_duplicated)

    # ---- called by the bucket groups, as the forward pass reaches their modules ----------------------------------

    @torch.no_grad()
    def launch_after(self, module: ModuleShard, *, computes: bool) -> None:
        """Launch the modules after `module`; one more when `module` computes now instead of the one before it."""
        if self._launched < len(self._order):
            reached = bisect_right(self._order, module.index)
            self._launch_first(reached + self.config.edit_prefetch_depth + int(computes))

    @torch.no_grad()
    def complete(self, module: ModuleShard) -> None:
        """Outer step of `module` with the averaged pseudo gradient; nothing to do unless its sync is due now."""
        pending = self.pending[module.index]
        if pending is None or not pending.event.in_forward:
            return
        self._launch_first(bisect_right(self._order, module.index))
        self._apply(module, pending)
        if not pending.event.modules_left:
            self._finish([pending.event])

    # ---- the sync ------------------------------------------------------------------------------------------------

    def _meet(self, due: tuple[int, ...], steps: int, *, at_end: bool = False) -> Meeting:
        """Decides the sync of the fragments `due` and sends their modules out, or, blocking, completes them."""
        config, step = self.config, self.trigger.steps
        modules = [module for module in self.modules if module.fragment in due]
        delayed = bool(config.edit_sync_delay) and not at_end
        in_forward = config.edit_sync_placement == "forward" and not delayed and not at_end
        in_rounds = self.method.placement == "round"
        if self._begun is None:
            self.drain()  # only ever something to do when no forward pass came between
            self._order, self._launched = [], 0
            keep = len(modules) if delayed else config.edit_prefetch_depth + 1 if in_forward else 0
            event, meeting = self._decide(modules, self.trigger.syncs, step, steps=steps, keep=keep, at_end=at_end)
        else:
            event, meeting, leading = self._begun
            self._begun = None
            if event is not None:
                rest = [module for module in modules if module not in leading]
                keep = config.edit_prefetch_depth + 1 - len(leading)
                self._decide(rest, event.decision.index, step, steps=steps, keep=keep, event=event)
        self.trigger.restart_clock()
        if event is None:
            return meeting
        self.steps_at_average = step
        for fragment in due:
            self.updates_at_sync[fragment] = self.updates
        decision = self.last_decision = event.decision
        self._warning_lines += self._warnings.after_sync(decision)
        self._idle.after_sync(decision)
        if in_rounds:
            self._next_round(event, modules)
        elif delayed:
            event.apply_after = step + config.edit_sync_delay
            for module in modules:
                self._launch(module)
        elif in_forward:
            event.in_forward = True
            self._order = [module.index for module in modules]
            self._launch_first(config.edit_prefetch_depth + 1)
        else:  # the naive twin of the sync in the forward pass: the same two calls per module, one after the other
            for module in modules:
                self._launch(module)
                self._apply(module, self.pending[module.index])
            self._finish([event])
        return meeting

    def _decide(
        self,
        modules: list[ModuleShard],
        index: int,
        iteration: int,
        *,
        steps: int,
        keep: int = 0,
        event: SyncEvent | None = None,
        at_end: bool = False,
    ) -> tuple[SyncEvent | None, Meeting]:
        """Exchanges norms and step counts; weights, flags and rollbacks follow on every rank alike.

        `steps`: iterations of this replica since the last meeting. The pseudo gradients of the first `keep` modules are
        kept: they are launched at once. `event`: the sync whose first modules were decided before.
        """
        decided_at = self.mesh.platform.record_event()
        norms, buffers, apart = self._measure(modules, keep)
        since = [float(self.updates - self.updates_at_sync[module.fragment]) for module in modules]
        total = float(iteration - self.steps_at_average)
        mine = torch.cat([norms, torch.tensor([*since, apart, total, float(steps)], dtype=torch.float64)])
        if modules or not self.method.equal_steps:
            gathered = self.transport.all_gather(mine)  # [R, 2 m + 3]
        else:  # this stage has no part in it, and need not wait for the other replicas
            gathered = mine.expand(self.mesh.num_replicas, -1)
        self._warning_lines += self._warnings.anchors_apart(index, gathered[:, -3].tolist())
        norms, updates = gathered[:, : len(modules)], gathered[:, len(modules) : -3].long()
        enough = at_end or int(gathered[:, -2].sum()) >= self.config.edit_min_total_steps
        meeting = Meeting(index, tuple(int(count) for count in gathered[:, -1]), averaged=enough)
        if not enough:
            self.buffers.give_back(*buffers)
            return None, meeting
        decision = self.decider.decide(index, iteration, [module.index for module in modules], norms, updates)
        if event is None:
            ones = [torch.ones((), dtype=torch.float64) for _ in self.modules]
            event = SyncEvent(decision, decided_at, ones, inner_lr=self.inner_lr)
            self.events.append(event)
        else:
            event.decision = event.decision.merged(decision)
        event.modules_left += len(modules)
        self._refuse_without_anchor(decision)
        self._zero_moments_of_non_finite(decision)
        replica = self.mesh.replica
        for module in modules:
            m = module.index
            pending = Pending(
                event,
                weight=float(decision.weights[replica, m]),
                rolled_back=bool(decision.rolled_back[m]),
                kept=not bool(decision.verdict.left_out[replica, m]),
                buffer=buffers.pop(0) if buffers else None,
                previous=self.pending[m],
            )
            self.pending[m] = pending
        return event, meeting

    def _measure(self, modules: list[ModuleShard], keep: int) -> tuple[torch.Tensor, list[torch.Tensor], float]:
        """(norms [m] fp64 on the CPU, pseudo gradients of the first `keep` modules [numel] fp32 each, how far the
        anchors of a tied matrix were apart)."""
        squares, buffers, differ, apart = [], [], False, 0.0
        for position, module in enumerate(modules):
            if position + 1 < len(modules):
                self.outer_state.prefetch(modules[position + 1])
            if self.tied.is_copy(module):
                anchor = self.outer_state.anchor(module) if self.method.has_anchor else None
                differ, apart = self.tied.compare(anchor, self.outer_state, self.buffers)
            buffer = self._pseudo_gradient(module)
            squares.append(module.counted_square_sum(buffer))
            if position < keep:
                buffers.append(buffer)
            else:
                self.buffers.give_back(buffer)
            self.outer_state.release(module)
        if not squares:
            return torch.zeros(0, dtype=torch.float64), [], 0.0
        total = torch.stack(squares)  # [m]
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(total, group=self.mesh.norm_group)
        norms = total.sqrt().cpu()
        for position, module in enumerate(modules):
            if self.tied.is_copy(module):
                larger = self.tied.larger(norms[position])  # on both stages, whatever is known here
                norms[position] = COPIES_DIFFER if differ else larger
        return norms, buffers, apart

    def _pseudo_gradient(self, module: ModuleShard) -> torch.Tensor:
        """Delta of this replica, [numel] fp32; of a method without an anchor the parameters themselves."""
        buffer = self.buffers.take(module.numel)
        if self.method.has_anchor:
            module.write_pseudo_gradient(self.outer_state.anchor(module), buffer)
        else:
            module.copy_masters_to(buffer)
        return buffer

    def _next_round(self, event: SyncEvent, modules: list[ModuleShard]) -> None:
        """CO2 (arXiv 2401.16265): this round's average sets out, the last is applied, all go on from the anchor."""
        for module in modules:
            pending = self.pending[module.index]
            assert pending is not None
            self._launch(module)
            if pending.previous is not None:
                self._apply(module, pending.previous)
                pending.previous = None
            else:
                module.write_masters(self.outer_state.anchor(module))
                self.outer_state.release(module)
        self._finish([other for other in self.events if other is not event])

    def _complete_delayed(self, step: int) -> None:
        for event in [event for event in self.events if event.apply_after == step]:
            waiting = [(m, p) for m, p in zip(self.modules, self.pending, strict=True) if p and p.event is event]
            for position, (module, pending) in enumerate(waiting):
                for following, _ in waiting[position + 1 : position + 2]:
                    self.outer_state.prefetch(following, momentum=True)
                self._apply(module, pending)
            self._finish([event])

    def _launch_first(self, count: int) -> None:
        """Launch the first `count` modules of the order, those that are not yet: one order on all ranks of a group."""
        while self._launched < min(count, len(self._order)):
            module = self.modules[self._order[self._launched]]
            self._launched += 1
            self._launch(module)
            if self._launched < len(self._order):
                self.outer_state.prefetch(self.modules[self._order[self._launched]])

    def _launch(self, module: ModuleShard) -> None:
        """Sends this replica's part of the module's average out; the module's sync must have been decided."""
        pending = self.pending[module.index]
        assert pending is not None
        if pending.rolled_back:
            if pending.buffer is not None:
                self.buffers.give_back(pending.buffer)
                pending.buffer = None
            return
        platform, config, event = self.mesh.platform, self.config, pending.event
        platform.wait_event(platform.record_event(), platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            if pending.buffer is None:
                pending.buffer = self._pseudo_gradient(module)
                self.outer_state.release(module)
            if config.edit_sparsity > 0 and pending.weight > 0:
                place = self.mesh.place  # not the stage: the copies of a tied matrix stay the same
                shard = (place.sync, place.dp, place.cp, place.tp)
                generator = generator_of(pending.buffer.device, self._seed, event.decision.index, module.key, *shard)
                own = pending.buffer[: module.numel - module.num_duplicated]
                sparsify_(own, config.edit_sparsity, config.edit_sparsity_method, generator)
            error = self.errors[module.index] if self.errors else None
            pending.handles += self.transport.weighted_sum(
                pending.buffer, pending.weight, error, exact=module.num_duplicated
            )
            event.bytes_sent += self.transport.message_bytes(module.numel, module.num_duplicated)
            if config.edit_inner_moments == "average" and self._averages_moments(module, event):
                pending.moments = self._moments_to_average(module, pending)
                pending.handles.append(self.transport.all_reduce(pending.moments))
                event.bytes_sent += pending.moments.nbytes
            if event.apply_after is not None and pending.kept:
                pending.at_launch = self.buffers.take(module.numel)
                module.copy_masters_to(pending.at_launch)
            if event.in_forward:  # else the update is many steps away, or now
                self.outer_state.prefetch(module, momentum=True)
        self._observe("launch", module)

    def _apply(self, module: ModuleShard, pending: Pending | None) -> None:
        """The module's update: outer step with what has arrived, and this replica's parameters."""
        assert pending is not None
        platform, event, state = self.mesh.platform, pending.event, self.outer_state
        started = platform.record_event()
        if not event.in_forward:  # the optimizer has just been told to write the masters, and nobody has waited for it
            platform.wait_event(started, platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            pending.wait()
            if pending.rolled_back:
                synchronised = state.anchor(module) if self.method.has_anchor else None
            elif self.method.has_anchor:
                assert pending.buffer is not None
                event.clip_coefficients[module.index] = beta = self.clip_coefficient_of(module, pending.buffer)
                anchor, momentum, part = state.update(module)
                self.outer_step(anchor, momentum, pending.buffer[part], beta, event.inner_lr)
                synchronised = state.updated(module)
            else:
                synchronised = pending.buffer
            if synchronised is not None:
                self._write_masters(module, synchronised, pending)
            if pending.moments is not None:
                self.inner_moments.write(module, pending.moments)
            state.release(module)
            self.buffers.give_back(*(b for b in (pending.buffer, pending.at_launch, pending.moments) if b is not None))
            updated = platform.record_event()
        platform.wait_event(updated)
        event.updated_at = platform.record_event()
        event.exposed.append((started, event.updated_at))
        event.modules_left -= 1
        if self.pending[module.index] is pending:
            self.pending[module.index] = None
        self._observe("complete", module)

    def outer_step(
        self,
        anchor: torch.Tensor,
        momentum: torch.Tensor,
        averaged: torch.Tensor,
        beta: torch.Tensor | float,
        inner_lr: float,
    ) -> None:
        """The method's outer step, in place on flat shards; `averaged` is overwritten."""
        config = self.config
        assert config.edit_outer_lr is not None and config.edit_outer_momentum is not None
        settings = OuterSettings(
            outer_lr=config.edit_outer_lr,
            outer_momentum=config.edit_outer_momentum,
            inner_lr=inner_lr,
            gap_penalty=config.edit_co2_gap_penalty,
            momentum_clip=config.edit_co2_momentum_clip,
        )
        OUTER_STEPS[self.method.outer_step](anchor, momentum, averaged, beta, settings)

    def clip_coefficient_of(self, module: ModuleShard, averaged: torch.Tensor) -> torch.Tensor:
        """beta of an averaged pseudo gradient [numel], 0-d fp64 on the device; the host does not wait for it."""
        phi = self.config.edit_pseudo_grad_clip
        if not phi:
            return torch.ones((), dtype=torch.float64, device=averaged.device)
        squares = module.counted_square_sum(averaged)
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(squares, group=self.mesh.norm_group)
        return clip_coefficient(squares.sqrt(), phi)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _write_masters(self, module: ModuleShard, synchronised: torch.Tensor, pending: Pending) -> None:
        """This replica's parameters: the synchronised ones; with a delay its progress since the launch is added."""
        alpha = self.config.edit_mixing_alpha
        if pending.at_launch is None or pending.rolled_back:
            module.write_masters(synchronised)
        elif alpha is None:
            module.add_local_progress(synchronised, pending.at_launch)
        else:
            module.mix_with_local(synchronised, alpha)

    def _finish(self, events: Sequence[SyncEvent]) -> None:
        for event in list(events):
            assert event.modules_left == 0, "a module of this sync has not been updated"
            self.events.remove(event)
            self._finished.append(event)

    def _finish_events_of_other_stages(self) -> None:
        """Syncs in the forward pass none of whose modules lies here end with that forward pass all the same."""
        self._finish([event for event in self.events if event.in_forward and not event.modules_left])

    def _leave_warmup(self) -> None:
        """anchor := parameters, those of replica 0 everywhere: bit-equal even where kernels round differently."""
        self._reducer.enabled = False
        self.updates_at_sync = [self.updates] * self.num_fragments
        self.steps_at_average = self.trigger.steps
        self.ensure_anchor()
        for module in self.modules:
            flat = self.buffers.take(module.numel)
            module.copy_masters_to(flat)
            self.transport.broadcast(flat)
            module.write_masters(flat)
            if self.method.has_anchor:
                self.outer_state.set_anchor(module, flat)
            self.buffers.give_back(flat)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        """All that a sync takes, now: so the memory is known from the start, and no step allocates."""
        config = self.config
        sizes = [[m.numel for m in self.modules if m.fragment == f] for f in range(self.num_fragments)]
        for sizes_at_once in most_at_once(
            sizes,
            config.edit_sync_placement or self.method.placement,
            ahead=config.edit_prefetch_depth,
            delay=config.edit_sync_delay,
            timetable=self.trigger.timetable if isinstance(self.trigger, StepTrigger) else None,
            with_moments=config.edit_inner_moments == "average",
        ):
            self.buffers.hold_at_once(sizes_at_once)

    def _refuse_without_anchor(self, decision: SyncDecision) -> None:
        if self.method.has_anchor:
            return
        for m in (decision.rolled_back & decision.verdict.non_finite.any(dim=0)).nonzero().flatten().tolist():
            raise NonFiniteSyncError(
                f"sync {decision.index}: {self.modules[m].key} is not finite in any replica that made a step"
                f"{' (or its two copies differ)' if self.tied.is_copy(self.modules[m]) else ''}, and "
                f"--edit-method {self.method.name} keeps no anchor to go back to: resume from the last checkpoint"
            )

    def _zero_moments_of_non_finite(self, decision: SyncDecision) -> None:
        """Inner moments of this replica's non-finite modules := 0, or its next step is non-finite again (ours)."""
        for module in self.modules:
            if decision.verdict.non_finite[self.mesh.replica, module.index] and decision.due[module.index]:
                self.inner_moments.zero_(module)

    def _averages_moments(self, module: ModuleShard, event: SyncEvent) -> bool:
        count = event.decision.index
        if self.num_fragments > 1:
            count = self.trigger.count_of(module.fragment, event.decision.iteration)
        return count % self.config.edit_inner_moments_interval == 0

    def _moments_to_average(self, module: ModuleShard, pending: Pending) -> torch.Tensor:
        """[2 numel] fp32: this replica's share of the mean of Adam's moments over the replicas in the average."""
        flat = self.buffers.take(2 * module.numel)
        if pending.kept:
            self.inner_moments.read(module, flat)
            flat.div_(int((~pending.event.decision.verdict.left_out[:, module.index]).sum()))
        else:
            flat.zero_()
        return flat

    def _fragments_with_updates(self) -> tuple[int, ...]:
        """Those that some replica has updated since their last sync; all where a mixture left replicas apart."""
        if self.config.edit_mixing_alpha is not None:
            return tuple(range(self.num_fragments))
        mine = torch.tensor(self.updates_since_sync, dtype=torch.int64)
        return tuple(self.transport.all_gather(mine).any(dim=0).nonzero().flatten().tolist())

    def _observe(self, event: str, module: ModuleShard) -> None:
        if self._observer is not None:
            self._observer(event, module)
