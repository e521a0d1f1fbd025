"""The sync of one replica's modules with the other replicas: every method of `tables/methods.py` on one engine.

    after_step       the trigger says whether a sync is due; if so, the replicas exchange norms and step counts
                     (`exchange.py`), and the placement (`placements.py`) sends the modules out and updates them
    drain, sync_now  complete what is due: before a save or an evaluation; one sync more at the end of the run
    take_results, take_warnings, agreed_parameters   what the log and an evaluation read

Formulas: arXiv 2412.07210 and docs/methods.md; where this project decided, the docstring says ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_edit.config.resolved import ResolvedEdit
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.averages import ModuleAverages, Observer
from megatron_edit.sync.buffers import BufferPool
from megatron_edit.sync.compression import codec_of
from megatron_edit.sync.counts import SyncCounts
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.error_feedback import ErrorFeedback
from megatron_edit.sync.event import Meeting, SyncDecision, SyncEvent, SyncResult
from megatron_edit.sync.exchange import Exchange
from megatron_edit.sync.fleet import FixedFleet, Fleet
from megatron_edit.sync.inner_moments import InnerMoments
from megatron_edit.sync.modules import (
    GradientReducer,
    MegatronOptimizer,
    ModuleShard,
    ReplicaDataParallel,
    collect_modules,
)
from megatron_edit.sync.notices import IdleWatch, SyncWarnings
from megatron_edit.sync.outer_state import build_outer_state
from megatron_edit.sync.outer_update import OuterUpdate
from megatron_edit.sync.placements import Placement, build_placement
from megatron_edit.sync.state import SyncState
from megatron_edit.sync.tied import TiedCopies
from megatron_edit.sync.transport import SyncTransport
from megatron_edit.sync.trigger import build_trigger
from megatron_edit.tables.methods import get_method


class SyncEngine:
    """The sync of one rank's modules with the other replicas.

    module_keys  all modules of the whole model, in forward order (`tables/parameters.py`)
    seed         of the random sparsification
    """

    def __init__(
        self,
        config: ResolvedEdit,
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
        self.trigger = build_trigger(config, self.method, len(module_keys))
        fragments = _fragments(len(module_keys), self.trigger.num_fragments)
        self.modules = collect_modules(chunks, optimizer, mesh)
        for module in self.modules:
            module.position = module_keys.index(module.key)
            module.fragment = fragments[module.position]
        self.fleet: Fleet = FixedFleet(_transport(config, mesh))
        self.buffers = BufferPool(mesh.platform.device)
        self.last_decision: SyncDecision | None = None
        self._finished: list[SyncEvent] = []  # complete; their times are read when the device has done the step
        tied = TiedCopies(mesh, chunks, self.modules)
        told_elsewhere = [tied.is_copy(module) and not mesh.is_first_stage for module in self.modules]
        self._warnings = SyncWarnings([module.key for module in self.modules], told_elsewhere)
        self._warning_lines: list[str] = []
        self._idle = IdleWatch()

        counts = SyncCounts(fragments, self.trigger.num_fragments)
        decider = Decider(config, self.method, self.fleet.ids, len(self.modules))
        inner_moments = InnerMoments(optimizer)
        outer_state = build_outer_state(
            self.modules, mesh.platform, self.fleet,
            sharded=self.method.shards_over_sync, on_host=config.edit_cpu_offload,
        )  # fmt: skip
        update = OuterUpdate(config, self.method, mesh.norm_group)
        compresses = self.fleet.transport.codec is not None
        errors = ErrorFeedback(self.modules, mesh.platform.device, compresses=compresses)
        self.averages = ModuleAverages(
            config, self.method, mesh, self.fleet, self.modules, self.trigger, outer_state, update, errors,
            self.buffers, inner_moments, counts, seed=seed, observer=observer,
        )  # fmt: skip
        self.exchange = Exchange(
            config, self.method, mesh, self.fleet, self.averages, outer_state, self.buffers, inner_moments, counts,
            decider, tied,
        )  # fmt: skip
        self.placement = build_placement(config, self.method, self.averages, self._finished, chunks, self.trigger)
        self.state = SyncState(
            config, self.method, mesh, self.fleet, chunks, self.modules, self.trigger, counts, decider, outer_state,
            update, errors, self.placement, self.buffers, reducer,
        )  # fmt: skip
        self.state.start()

    # ---- called by the trainer -------------------------------------------------------------------------------

    @property
    def synchronous(self) -> bool:
        """True while every step averages gradients over all replicas (warm-up and `baseline`)."""
        return self.trigger.in_warmup

    @property
    def equal_steps(self) -> bool:
        """Whether all replicas take the next step together; in the warm-up they do with every method."""
        return self.method.equal_steps or self.synchronous

    @torch.no_grad()
    def after_step(self, updated: bool = True, *, learning_rate: float = 0.0, asked: bool = False) -> Meeting | None:
        """Once per optimizer step, whether or not it changed the parameters (`updated`).

        `learning_rate`: the step's; `asked`: what the replica agreed on, see `Trigger.wants_sync`. Returns what the
        replicas learnt of each other when a sync was due.
        """
        self.state.counts.inner_lr = learning_rate
        self.state.counts.step(updated)
        if self.trigger.in_warmup:
            self._idle.after_synchronous_step(updated)
        steps = self.trigger.steps_since_sync + 1
        step = self.trigger.advance(asked)
        self.placement.after_step(step.step)
        if step.set_anchor:
            self.state.leave_warmup()
        return self._sync(step.due, steps, self.placement) if step.due else None

    @torch.no_grad()
    def drain(self) -> None:
        """Completes a due sync now: before an evaluation, a save or the end. A delayed one is left alone."""
        self.placement.drain()

    @torch.no_grad()
    def sync_now(self) -> None:
        """One more sync, whatever the trigger says, and nothing in flight after it: the end of a run."""
        self.drain()
        if self.trigger.in_warmup:
            return
        placement = self.placement.for_last_sync()
        if placement is not self.placement:
            self.placement.apply_all()
        if fragments := self._fragments_with_updates():
            steps = self.trigger.steps_since_sync
            self.trigger.syncs += 1
            self.trigger.last_sync_step = self.trigger.steps
            self._sync(fragments, steps, placement, always=True)
        placement.apply_all()

    def take_results(self) -> list[SyncResult]:
        """The syncs that were completed since the last call. Waits for the device, which a step has just done.

        A sync ends after the same step on all ranks, so all take it at the same call.
        """
        if self._finished:
            self.mesh.platform.synchronize()
        results = [event.result() for event in self._finished]
        self._finished.clear()
        return results

    def take_warnings(self) -> list[str]:
        """Lines on this stage's modules since the last call, for one rank of the stage to print."""
        lines, self._warning_lines = self._warning_lines, []
        return lines

    @torch.no_grad()
    def agreed_parameters(self, module: ModuleShard) -> torch.Tensor:
        """[numel] fp32: the anchor, or where the method keeps none the mean over the replicas; not in the warm-up.

        Collective over the sync group for methods without an anchor, and for one that is dealt out over the replicas.
        `release` is to follow.
        """
        if self.method.has_anchor:
            return self.state.outer.anchor(module)
        transport = self.fleet.transport
        mean = torch.empty(module.numel, dtype=torch.float32, device=self.mesh.platform.device)
        module.copy_masters_to(mean)
        squares = module.counted_square_sum(mean)
        if self.mesh.norm_group.size() > 1:
            dist.all_reduce(squares, group=self.mesh.norm_group)
        finite = transport.all_gather(squares.isfinite().cpu().reshape(1).long()).flatten()  # [R]
        if not finite.any() or finite[self.fleet.replica]:
            mean.div_(max(int(finite.sum()), 1))
        else:  # as in a sync: what is not finite is not averaged
            mean.zero_()
        if (handle := transport.all_reduce(mean)) is not None:
            handle.wait()
        return mean

    def release(self, module: ModuleShard) -> None:
        """What `agreed_parameters` gave is not read any more."""
        self.state.outer.release(module)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _sync(
        self, fragments: tuple[int, ...], steps: int, placement: Placement, *, always: bool = False
    ) -> Meeting:
        """Decides the sync of `fragments` and hands its modules to `placement`.

        `steps`: of this replica since the last meeting; `always`: also with fewer than --edit-min-total-steps.
        """
        self.drain()  # only ever something to do when no forward pass came between
        modules = [module for module in self.modules if module.fragment in fragments]
        outcome = self.exchange.agree(
            modules,
            self.trigger.syncs,
            self.trigger.steps,
            steps=steps,
            keep=placement.launched_at_once(len(modules)),
            always=always,
        )
        self.trigger.restart_clock()
        self._warning_lines += self._warnings.anchors_apart(self.trigger.syncs, outcome.anchors_apart)
        if outcome.event is not None:
            self.state.counts.launched(fragments)
            self.state.counts.steps_at_average = self.trigger.steps
            decision = self.last_decision = outcome.event.decision
            self._warning_lines += self._warnings.after_sync(decision)
            self._idle.after_sync(decision)
            placement.begin(outcome.event, outcome.pending)
        return outcome.meeting

    def _fragments_with_updates(self) -> tuple[int, ...]:
        """Those that some replica has updated since their last sync; all where a mixture left replicas apart."""
        if self.config.edit_mixing_alpha is not None:
            return tuple(range(self.trigger.num_fragments))
        mine = torch.tensor(self.state.counts.of_fragments, dtype=torch.int64)
        return tuple(self.fleet.transport.all_gather(mine).any(dim=0).nonzero().flatten().tolist())


def _fragments(num_modules: int, num_fragments: int) -> list[int]:
    """Fragment of each module of the whole model: runs of neighbours, as equal as they can be."""
    return [position * num_fragments // num_modules for position in range(num_modules)]


def _transport(config: ResolvedEdit, mesh: Mesh) -> SyncTransport:
    return SyncTransport(
        mesh.platform,
        mesh.sync_group,
        mesh.sync_control_group,
        codec=None if config.edit_comm_dtype == "fp32" else codec_of(config.edit_comm_dtype),
        consensus=config.edit_consensus,
    )
