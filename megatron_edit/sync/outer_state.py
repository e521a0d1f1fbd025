"""Where anchor and outer momentum live: on the device, in host memory, or dealt out over the replicas.

The engine reads and updates them through one interface, so that the place changes no number:

    anchor(module)        [numel] fp32 on the device, to read
    update(module)        (anchor, outer momentum, part): what this rank changes in place; which part of [numel] it is
    updated(module)       the anchor after the update, [numel] on the device, to read; to be followed by `release`
    prefetch, release     reading will begin soon; it has ended

`anchors`, `momenta` are for tests and checkpoints: whole [numel] of each module, views of the state where it is whole.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_edit.platform.base import Platform
from megatron_edit.sync.fleet import Fleet
from megatron_edit.sync.modules import ModuleShard


class OuterState:
    """On the device, where reading and updating need no copy; the other places are made from it."""

    def __init__(self, modules: list[ModuleShard], platform: Platform) -> None:
        self.modules, self.platform = modules, platform
        self._anchors: list[torch.Tensor] = []
        self._momenta: list[torch.Tensor] = []

    @property
    def exists(self) -> bool:
        """Whether the warm-up has ended (or a checkpoint was loaded)."""
        return bool(self._anchors)

    @property
    def anchors(self) -> list[torch.Tensor]:
        """[numel] of each module; [] in the warm-up."""
        return self._anchors

    @property
    def momenta(self) -> list[torch.Tensor]:
        """[numel] of each module; [] in the warm-up."""
        return self._momenta

    def allocate(self) -> None:
        """Memory for both; the outer momentum is 0."""
        self._anchors = [self._empty(self._stored(module)) for module in self.modules]
        self._momenta = [self._empty(self._stored(module)).zero_() for module in self.modules]

    def _stored(self, module: ModuleShard) -> int:
        return module.numel

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.float32, device=self.platform.device)

    def set_anchor(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """anchor := flat [numel] on the device."""
        self._anchors[module.index].copy_(flat)

    def whole(self) -> OuterState:
        """Both as whole tensors, of unknown values, for a checkpoint to be read into; `take` is to follow."""
        return self

    def take(self, whole: OuterState) -> None:
        """Takes up what `whole` gave, after it was changed in place."""

    def prefetch(self, module: ModuleShard, *, momentum: bool = False) -> None:
        """See the module's text."""

    def anchor(self, module: ModuleShard) -> torch.Tensor:
        """See the module's text."""
        return self._anchors[module.index]

    def update(self, module: ModuleShard) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """See the module's text."""
        return self._anchors[module.index], self._momenta[module.index], slice(None)

    def updated(self, module: ModuleShard) -> torch.Tensor:
        """See the module's text."""
        return self._anchors[module.index]

    def release(self, module: ModuleShard) -> None:
        """See the module's text."""

    def stored_bytes(self) -> dict[str, int]:
        """Bytes on this rank of anchor and outer momentum, wherever they are."""
        return {
            "anchor": sum(tensor.nbytes for tensor in self._anchors),
            "outer momentum": sum(tensor.nbytes for tensor in self._momenta),
        }


class HostOuterState(OuterState):
    """In host memory, pinned on CUDA, with copies on a stream of their own: one module moves while another computes."""

    def __init__(self, modules: list[ModuleShard], platform: Platform) -> None:
        super().__init__(modules, platform)
        self._on_device: dict[tuple[str, int], torch.Tensor] = {}
        self._arrived: dict[tuple[str, int], Any] = {}
        self._stored_at: dict[int, Any] = {}  # event after the last copy back of a module

    def _empty(self, numel: int) -> torch.Tensor:
        return self.platform.empty_pinned(numel, torch.float32)

    def prefetch(self, module: ModuleShard, *, momentum: bool = False) -> None:
        """Starts the copies to the device that are not under way."""
        wanted = ["anchor", "momentum"] if momentum else ["anchor"]
        for name in wanted:
            key = (name, module.index)
            if key in self._on_device:
                continue
            host = (self._anchors if name == "anchor" else self._momenta)[module.index]
            stream = self.platform.copy_stream()
            with self.platform.stream(stream):
                if module.index in self._stored_at:
                    self.platform.wait_event(self._stored_at[module.index], stream)
                self._on_device[key] = host.to(self.platform.device, non_blocking=True, copy=True)
                self._arrived[key] = self.platform.record_event(stream)

    def _take(self, name: str, module: ModuleShard) -> torch.Tensor:
        self.prefetch(module, momentum=name == "momentum")
        key = (name, module.index)
        self.platform.wait_event(self._arrived[key])
        self.platform.used_on_current_stream(self._on_device[key])
        return self._on_device[key]

    def anchor(self, module: ModuleShard) -> torch.Tensor:
        """See OuterState; the current stream waits for the copy."""
        return self._take("anchor", module)

    def update(self, module: ModuleShard) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """See OuterState; the current stream waits for the copies."""
        return self._take("anchor", module), self._take("momentum", module), slice(None)

    def updated(self, module: ModuleShard) -> torch.Tensor:
        """See OuterState; starts the copies back to the host."""
        stream = self.platform.copy_stream()
        self.platform.wait_event(self.platform.record_event(), stream)
        with self.platform.stream(stream):
            for name, hosts in (("anchor", self._anchors), ("momentum", self._momenta)):
                device = self._on_device[name, module.index]
                self.platform.used_on_current_stream(device)
                hosts[module.index].copy_(device, non_blocking=True)
            self._stored_at[module.index] = self.platform.record_event(stream)
        return self._on_device["anchor", module.index]

    def release(self, module: ModuleShard) -> None:
        """Gives the copies on the device back; the host's are final once the copy stream has come there."""
        for name in ("anchor", "momentum"):
            self._on_device.pop((name, module.index), None)
            self._arrived.pop((name, module.index), None)

    @property
    def anchors(self) -> list[torch.Tensor]:
        """The host's own; waits for copies under way."""
        self._wait_for_copies()
        return self._anchors

    @property
    def momenta(self) -> list[torch.Tensor]:
        """The host's own; waits for copies under way."""
        self._wait_for_copies()
        return self._momenta

    def _wait_for_copies(self) -> None:
        for event in self._stored_at.values():
            event.synchronize()


class ShardedOuterState(OuterState):
    """Dealt out over the replicas (CO2*, arXiv 2401.16265): each holds 1/R of what a rank would, gathered to read."""

    def __init__(self, modules: list[ModuleShard], platform: Platform, fleet: Fleet) -> None:
        super().__init__(modules, platform)
        self._fleet = fleet

    def _stored(self, module: ModuleShard) -> int:
        return self._part_size(module)

    def _part_size(self, module: ModuleShard) -> int:
        return -(-module.numel // self._fleet.num_replicas)  # the last parts are padded

    def _part(self, module: ModuleShard, replica: int) -> slice:
        size = self._part_size(module)
        return slice(min(replica * size, module.numel), min((replica + 1) * size, module.numel))

    def _own(self, module: ModuleShard, stored: torch.Tensor) -> torch.Tensor:
        part = self._part(module, self._fleet.replica)
        return stored[: part.stop - part.start]

    def set_anchor(self, module: ModuleShard, flat: torch.Tensor) -> None:
        """See OuterState."""
        self._own(module, self._anchors[module.index]).copy_(flat[self._part(module, self._fleet.replica)])

    def anchor(self, module: ModuleShard) -> torch.Tensor:
        """See OuterState; a gather over the sync group, so all its ranks must ask for the same module."""
        return self._fleet.transport.all_gather_parts(self._anchors[module.index])[: module.numel]

    def update(self, module: ModuleShard) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """See OuterState; this replica's part."""
        anchor, momentum = self._anchors[module.index], self._momenta[module.index]
        return self._own(module, anchor), self._own(module, momentum), self._part(module, self._fleet.replica)

    def updated(self, module: ModuleShard) -> torch.Tensor:
        """See OuterState; a gather."""
        return self.anchor(module)

    @property
    def anchors(self) -> list[torch.Tensor]:
        """Whole copies, gathered; collective over the sync group."""
        return [self.anchor(module) for module in self.modules] if self.exists else []

    @property
    def momenta(self) -> list[torch.Tensor]:
        """Whole copies, gathered; collective over the sync group."""
        if not self.exists:
            return []
        gather = self._fleet.transport.all_gather_parts
        return [gather(self._momenta[module.index])[: module.numel] for module in self.modules]

    def whole(self) -> OuterState:
        """See OuterState; on the device."""
        whole = OuterState(self.modules, self.platform)
        whole.allocate()
        return whole

    def take(self, whole: OuterState) -> None:
        """Takes this replica's parts of whole tensors."""
        for module, anchor, momentum in zip(self.modules, whole.anchors, whole.momenta, strict=True):
            part = self._part(module, self._fleet.replica)
            self._own(module, self._anchors[module.index]).copy_(anchor[part])
            self._own(module, self._momenta[module.index]).copy_(momentum[part])


def build_outer_state(
    modules: list[ModuleShard], platform: Platform, fleet: Fleet, *, sharded: bool, on_host: bool
) -> OuterState:
    """The one that a method and --edit-cpu-offload ask for; still empty."""
    if sharded:
        return ShardedOuterState(modules, platform, fleet)
    return (HostOuterState if on_host else OuterState)(modules, platform)
