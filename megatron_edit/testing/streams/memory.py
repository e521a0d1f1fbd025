"""Memory in use, by storage, and the races that were found in it."""

from __future__ import annotations

import functools
import threading
import weakref

import torch
from torch import Tensor

from megatron_edit.testing.streams.happens_before import Memory, Timeline, Work, ranges_of
from megatron_edit.testing.streams.machine import Machine
from megatron_edit.testing.streams.operations import storage_of

_ranges = functools.lru_cache(4096)(ranges_of)


class WatchedMemory:
    """All storages that an operation has used. `races`: two lines each, no pair of places twice."""

    def __init__(self, machine: Machine) -> None:
        self.races: list[str] = []
        self._machine = machine
        self._memory: dict[int, Memory] = {}
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        self._seen: set[str] = set()
        self._lock = threading.RLock()

    def knows(self, tensor: Tensor) -> bool:
        """Whether its storage has been used."""
        return storage_of(tensor) in self._memory

    def of(self, tensor: Tensor) -> Memory:
        """Of the tensor's storage; one that is new is the host's."""
        return self._memory.get(storage_of(tensor)) or self.take_up(tensor, None)

    def on_device(self, tensor: Tensor) -> bool:
        """Whether it is in device memory."""
        memory = self._memory.get(storage_of(tensor))
        return memory is not None and memory.home is not None

    def name(self, tensor: Tensor, name: str) -> None:
        """What reports call these bytes."""
        start = int(tensor.storage_offset()) * tensor.itemsize
        self._names.setdefault(storage_of(tensor), []).append((start, start + int(tensor.nbytes), name))

    def take_up(self, tensor: Tensor, home: Timeline | None) -> Memory:
        """A new storage, allocated on `home`; None: on the host."""
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        memory = self._memory[key] = Memory(home)
        weakref.finalize(storage, self._given_back, key).atexit = False
        return memory

    def _given_back(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._names.pop(key, None)
        if memory.home is not None:
            memory.home.wait(self._machine.host.clock)
        for work in memory.in_use_elsewhere():
            assert memory.home is not None
            self._report(f"memory of {memory.home.name} is given back", f"its use by {work}", places=str(work))

    def use(self, work: Work, tensor: Tensor, *, writes: bool) -> None:
        """Notes that `work` reads or writes `tensor`."""
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            return
        with self._lock:
            self._use(work, tensor, writes=writes)

    def _use(self, work: Work, tensor: Tensor, *, writes: bool) -> None:
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize)
        for before in self.of(tensor).use(work, _ranges(*view), writes=writes):
            use = f"{'write' if writes else 'read'} of {self._describe(tensor)} by {work}"
            self._report(str(before), use, places=f"{before}, {work}")

    def _describe(self, tensor: Tensor) -> str:
        start = tensor.storage_offset() * tensor.itemsize
        for first, stop, name in self._names.get(storage_of(tensor), []):
            if first <= start < stop:
                return name
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    def _report(self, first: str, second: str, *, places: str) -> None:
        if places not in self._seen:
            self._seen.add(places)
            self.races.append(f"{first}\n  not ordered with {second}")
