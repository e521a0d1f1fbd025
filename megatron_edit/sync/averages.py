"""One module's average: its pseudo gradient, the message that sums it over the replicas, and the update that follows.

    pseudo_gradient   Delta = masters - anchor
    launch            weight it and send it out, on the stream of the sync
    apply             wait, clip, outer step on the anchor, local parameters := anchor

When either is done is the placement's business (`placements.py`). Formulas: arXiv 2412.07210 and docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_edit.config.schema import EditConfig
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.buffers import BufferPool
from megatron_edit.sync.counts import SyncCounts
from megatron_edit.sync.error_feedback import ErrorFeedback
from megatron_edit.sync.event import Pending, SyncEvent
from megatron_edit.sync.fleet import Fleet
from megatron_edit.sync.inner_moments import InnerMoments
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.outer_update import OuterUpdate
from megatron_edit.sync.reducers import generator_of, sparsify_
from megatron_edit.sync.trigger import Trigger
from megatron_edit.tables.methods import Method

Observer = Callable[[str, ModuleShard], None]


class ModuleAverages:
    """Sends this replica's part of a module's average out, and updates the module with what has arrived.

    seed      of the random sparsification
    observer  called with "launch" and "complete" and the module
    """

    def __init__(
        self,
        config: EditConfig,
        method: Method,
        mesh: Mesh,
        fleet: Fleet,
        modules: list[ModuleShard],
        trigger: Trigger,
        outer_state: OuterState,
        update: OuterUpdate,
        errors: ErrorFeedback,
        buffers: BufferPool,
        inner_moments: InnerMoments,
        counts: SyncCounts,
        *,
        seed: int,
        observer: Observer | None,
    ) -> None:
        self.modules = modules
        self.observer = observer
        self._config, self._method, self._mesh, self._fleet = config, method, mesh, fleet
        self._trigger, self._outer, self._update, self._errors = trigger, outer_state, update, errors
        self._buffers, self._inner_moments, self._counts = buffers, inner_moments, counts
        self._seed = seed

    def pseudo_gradient(self, module: ModuleShard) -> torch.Tensor:
        """Delta of this replica, [numel] fp32; of a method without an anchor the parameters themselves."""
        buffer = self._buffers.take(module.numel)
        if self._method.has_anchor:
            module.write_pseudo_gradient(self._outer.anchor(module), buffer)
        else:
            module.copy_masters_to(buffer)
        return buffer

    # ---- out -------------------------------------------------------------------------------------------------------

    def launch(self, pending: Pending, *, applied_soon: bool = False) -> None:
        """Sends this replica's part of the module's average out; the module's sync must have been decided.

        `applied_soon`: in the forward pass that follows, so that what the update needs is fetched from now on. Else the
        computing stream may write the masters before the update, and reads them itself, before it goes on.
        """
        module, platform = self.modules[pending.module], self._mesh.platform
        if pending.rolled_back:
            if pending.buffer is not None:
                self._buffers.give_back(pending.buffer)
                pending.buffer = None
            return
        if not applied_soon:
            self._read_masters(module, pending)
        platform.wait_event(platform.record_event(), platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            if applied_soon:
                self._read_masters(module, pending)
            assert pending.buffer is not None
            self._send(module, pending, pending.buffer)
            if applied_soon:
                self._outer.prefetch(module, momentum=True)
        self._observe("launch", module)

    def _read_masters(self, module: ModuleShard, pending: Pending) -> None:
        """The pseudo gradient, unless the decision has kept it, and with a delay the masters as they are now."""
        if pending.buffer is None:
            pending.buffer = self.pseudo_gradient(module)
            self._outer.release(module)
        if pending.event.apply_after is not None and pending.kept:
            pending.at_launch = self._buffers.take(module.numel)
            module.copy_masters_to(pending.at_launch)

    def _send(self, module: ModuleShard, pending: Pending, buffer: torch.Tensor) -> None:
        """The weighted pseudo gradient [numel], and every so many syncs Adam's moments."""
        config, event, transport = self._config, pending.event, self._fleet.transport
        pending.carrier = transport
        if config.edit_sparsity > 0 and pending.weight > 0:
            place = self._mesh.place  # not the stage: the copies of a tied matrix stay the same
            shard = (self._fleet.replica, place.dp, place.cp, place.tp)
            generator = generator_of(buffer.device, self._seed, event.decision.index, module.key, *shard)
            own = buffer[: module.numel - module.num_duplicated]
            sparsify_(own, config.edit_sparsity, config.edit_sparsity_method, generator)
        error = self._errors.of(module)
        if error is not None and transport.may_lose_messages:
            pending.owed_before = self._buffers.take(module.numel).copy_(error)
        pending.handles += transport.weighted_sum(buffer, pending.weight, error, exact=module.num_duplicated)
        event.bytes_sent += transport.message_bytes(module.numel, module.num_duplicated)
        if config.edit_inner_moments == "average" and self._averages_moments(module, event):
            pending.moments = self._moments_to_average(module, pending)
            pending.handles.append(transport.all_reduce(pending.moments))
            event.bytes_sent += pending.moments.nbytes

    def _averages_moments(self, module: ModuleShard, event: SyncEvent) -> bool:
        trigger, count = self._trigger, event.decision.index
        if trigger.num_fragments > 1:
            count = trigger.count_of(module.fragment, event.decision.iteration)
        return count % self._config.edit_inner_moments_interval == 0

    def _moments_to_average(self, module: ModuleShard, pending: Pending) -> torch.Tensor:
        """[2 numel] fp32: this replica's share of the mean of Adam's moments over the replicas in the average."""
        flat = self._buffers.take(2 * module.numel)
        if pending.kept:
            self._inner_moments.read(module, flat)
            flat.div_(int((~pending.event.decision.verdict.left_out[:, module.index]).sum()))
        else:
            flat.zero_()
        return flat

    # ---- in --------------------------------------------------------------------------------------------------------

    def apply(self, pending: Pending, *, in_forward: bool = False) -> bool:
        """The module's update: outer step with what has arrived, and this replica's parameters.

        Returns whether it was made. False: the message was lost, and all is as if it had never been sent: the module
        goes on with its local parameters. In a static job it is always made, as a collective that fails ends the job.
        `in_forward`: the forward pass has waited for the optimizer; elsewhere it may just have been told to write the
        masters.
        """
        module, platform, event = self.modules[pending.module], self._mesh.platform, pending.event
        started = platform.record_event()
        if not in_forward:
            platform.wait_event(started, platform.sync_stream())
        with platform.stream(platform.sync_stream()):
            made = self._arrived(pending)
            if made:
                self._make_update(module, pending)
            else:
                self._take_back(module, pending)
            self._outer.release(module)
            self._buffers.give_back(*pending.buffers)
            updated = platform.record_event()
        platform.wait_event(updated)
        event.updated_at = platform.record_event()
        event.exposed.append((started, event.updated_at))
        event.modules_left -= 1
        self._observe("complete", module)
        return made

    def _arrived(self, pending: Pending) -> bool:
        """The same on all ranks that hold a part of the module: a part that is lost is lost for all of them."""
        arrived, group = pending.arrived(), self._mesh.norm_group
        if pending.carrier is None or not pending.carrier.may_lose_messages or group.size() == 1:
            return arrived
        lost = torch.tensor(int(not arrived), device=self._mesh.platform.device)
        dist.all_reduce(lost, group=group)
        return not lost

    def _make_update(self, module: ModuleShard, pending: Pending) -> None:
        synchronised = self._synchronised(module, pending)
        if synchronised is not None:
            self._write_masters(module, synchronised, pending)
        if pending.moments is not None:
            self._inner_moments.write(module, pending.moments)

    def _take_back(self, module: ModuleShard, pending: Pending) -> None:
        """The launch changed two things: the count of updates, and what compression owes."""
        self._counts.not_applied(module.position, pending.updates)
        error = self._errors.of(module)
        if error is not None and pending.owed_before is not None:
            error.copy_(pending.owed_before)

    def _synchronised(self, module: ModuleShard, pending: Pending) -> torch.Tensor | None:
        """[numel] fp32, what all replicas now agree on; None: there is no anchor to go back to."""
        if pending.rolled_back:
            return self._outer.anchor(module) if self._method.has_anchor else None
        assert pending.buffer is not None
        if not self._method.has_anchor:
            return pending.buffer
        beta = self._update(module, self._outer, pending.buffer, pending.event.inner_lr)
        pending.event.clip_coefficients[module.index] = beta
        return self._outer.updated(module)

    def _write_masters(self, module: ModuleShard, synchronised: torch.Tensor, pending: Pending) -> None:
        """This replica's parameters: the synchronised ones; with a delay its progress since the launch is added."""
        alpha = self._config.edit_mixing_alpha
        if pending.at_launch is None or pending.rolled_back:
            module.write_masters(synchronised)
        elif alpha is None:
            module.add_local_progress(synchronised, pending.at_launch)
        else:
            module.mix_with_local(synchronised, alpha)

    def go_on_from_anchor(self, module: ModuleShard) -> None:
        """This replica's parameters := anchor, while its progress travels."""
        module.write_masters(self._outer.anchor(module))
        self._outer.release(module)

    def prefetch(self, module: ModuleShard, *, momentum: bool = False) -> None:
        """The anchor (and the momentum) of `module` will be read soon."""
        self._outer.prefetch(module, momentum=momentum)

    def _observe(self, event: str, module: ModuleShard) -> None:
        if self.observer is not None:
            self.observer(event, module)
