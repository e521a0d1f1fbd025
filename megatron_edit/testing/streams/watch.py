"""Streams, events and device memory on a CPU: finds races between streams, and places where the host waits.

On a CPU every kernel is over when its call returns, so a `wait_event` that is missing changes no number. Here the same
program runs while a `StreamWatch` notes which bytes each operation reads and writes, on which stream, and what each
stream has waited for (`happens_before.py`); whatever no wait orders is a race, however the CPU has run it.

    stream, event     as `torch.cuda` has them, with names; kernels run on the current stream, after the host's launch
    collective        on a stream of its group, which begins after what the current stream was given so far;
                      `work.wait()` makes the current stream wait (that of a blocking one follows at once)
    device memory     what was made with `device=StreamPlatform.device` or "cuda", and all computed from it. It is
                      known by its storage, as views share it, and forgotten with it, as a CPU uses addresses again
    the host          waits where it reads device memory, or copies to the device or back without non_blocking

Backends stay gloo's, and their results right. Not modelled: that host memory is pageable, and CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from megatron_edit.platform.cpu import CpuPlatform
from megatron_edit.testing.streams import operations
from megatron_edit.testing.streams.happens_before import Timeline
from megatron_edit.testing.streams.machine import Event, Machine, Stream
from megatron_edit.testing.streams.memory import WatchedMemory
from megatron_edit.testing.streams.operations import CPU, DEVICE, is_device, tensors_in
from megatron_edit.testing.streams.places import HostWait, places_now, show

_SHOWN = torch.device("cuda", 0)  # what a tensor on the device says of itself


class StreamPlatform(CpuPlatform):
    """The platform of the ranks of a `StreamWatch`: the CPU, with the streams and the choices of `CudaPlatform`."""

    name = "cuda"
    device = DEVICE

    def __init__(self, machine: Machine, memory: WatchedMemory) -> None:
        self._machine, self._memory = machine, memory
        self._sync_stream, self._copy_stream = Stream(machine, "the sync stream"), Stream(machine, "the copy stream")

    def sync_stream(self) -> Any:
        return self._sync_stream

    def copy_stream(self) -> Any:
        return self._copy_stream

    def used_on_current_stream(self, tensor: Tensor) -> None:
        self._memory.of(tensor).keep_for(self._machine.current.timeline)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        with stream:
            yield stream

    def record_event(self, stream: Any = None) -> Any:
        return (stream or self._machine.current).record_event()

    def wait_event(self, event: Any, stream: Any = None) -> None:
        (stream or self._machine.current).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class StreamWatch:
    """Watches one process, inside `on()`.

    mixed  operations on tensors of the host and of the device together, which CUDA refuses
    """

    def __init__(self) -> None:
        self.mixed: set[str] = set()
        self.machine = Machine()
        self.memory = WatchedMemory(self.machine)
        self._groups: dict[Any, Timeline] = {}
        self._works: dict[int, tuple[Any, dict[Timeline, int]]] = {}
        self._intent = threading.local()  # `to_host`: the copy in progress is to the host

    @property
    def races(self) -> list[str]:
        """Two lines each; no pair of places twice."""
        return self.memory.races

    @property
    def waits(self) -> list[HostWait]:
        """Where the host has waited for the device."""
        return self.machine.waits

    # ---- operations -------------------------------------------------------------------------------------------------

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of torch's dispatcher and notes what it uses."""
        kind = operations.kind_of(function)
        device = kwargs.get("device")
        placed = is_device(device)
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
        if kind.is_view or function.namespace == "c10d":
            return function(*args, **kwargs)
        used = list(kind.tensors(args, kwargs))
        known = [(tensor, writes) for tensor, writes in used if tensor.dim() or self.memory.knows(tensor)]
        any_on_device = placed or any(self.memory.on_device(tensor) for tensor, _ in known)
        line = self.machine.launch() if any_on_device else self.machine.host
        describe = functools.partial(show, places_now(), kind.name)
        work = line.work(describe)
        is_copy = kind.name in operations.COPIES
        for tensor, writes in known:
            if any_on_device and not is_copy and not self.memory.on_device(tensor):
                self.memory.use(self.machine.host.work(describe), tensor, writes=writes)
                if tensor.dim() and kind.name not in operations.TAKE_MASKS:
                    self.mixed.add(describe())
            else:
                self.memory.use(work, tensor, writes=writes)
        result = function(*args, **kwargs)
        made_on_device = placed or (any_on_device and not self._copies_to_host)  # torch's own "cpu" means either
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and not self.memory.knows(tensor):
                self.memory.take_up(tensor, line if made_on_device else None)
                if kind.name not in operations.UNWRITTEN:
                    self.memory.use(work, tensor, writes=True)
        if any_on_device:
            places = {self.memory.on_device(tensor) for tensor, _ in (used if kind.name == "_to_copy" else known)}
            crosses = is_copy and places | {made_on_device} == {True, False}
            counts = kind.name in operations.TAKE_MASKS and self._counts_a_mask(args)
            blocks = crosses and not operations.is_non_blocking(args, kwargs)
            if blocks or counts or kind.name in operations.READ_BY_HOST:
                self.machine.host_waits(kind.name, line)
        return result

    @contextlib.contextmanager
    def copying(self, *, to_host: bool) -> Iterator[None]:
        """Says what the next operation of this thread is for, which torch sees as a copy on the CPU."""
        self._intent.to_host = to_host
        try:
            yield
        finally:
            self._intent.to_host = False

    @property
    def _copies_to_host(self) -> bool:
        return getattr(self._intent, "to_host", False)

    def _counts_a_mask(self, args: tuple[Any, ...]) -> bool:
        """Whether the host reads how many elements a mask among the indices has; not where a number fills them."""
        fills = len(args) > 2 and args[2].numel() == 1 and not self.memory.on_device(args[2])
        return not fills and any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))

    def read_by_host(self, why: str, tensor: Tensor) -> None:
        """The host reads `tensor`, and waits for the current stream if it is on the device."""
        if self.memory.on_device(tensor):
            line = self.machine.launch()
            self.memory.use(line.work(functools.partial(show, places_now(), why)), tensor, writes=False)
            self.machine.host_waits(why, line)
        else:
            self.memory.use(self.machine.host.work(functools.partial(show, places_now(), why)), tensor, writes=False)

    def collective(self, method: str, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a collective of a process group."""
        written = list(tensors_in(args[: operations.WRITTEN[method]]))
        read = list(tensors_in(args[operations.WRITTEN[method] :]))
        on_device = any(self.memory.on_device(tensor) for tensor in written + read)
        if on_device:
            key = (group, args[1], method == "send") if method in operations.TO_ONE_RANK else group
            name = f"the stream of group {group.group_desc or group.group_name}"
            line = self.machine.launch(self._group_line(key, name))
            line.wait(self.machine.current.timeline.now())
        else:
            line = self.machine.host
        work = line.work(functools.partial(show, places_now(), method))
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self.memory.use(work, tensor, writes=writes)
        with _disable_current_modes():
            handle = original(group, *args, **kwargs)
        if on_device and handle is not None:
            self._works[id(handle)] = (handle, line.now())
        return handle

    def _group_line(self, key: Any, name: str) -> Timeline:
        if key not in self._groups:
            self._groups[key] = self.machine.new_line(name)
        return self._groups[key]

    def wait_for(self, original: Callable[..., Any], handle: Any, *args: Any) -> Any:
        """`work.wait()`."""
        with _disable_current_modes():
            done = original(handle, *args)
        _, clock = self._works.pop(id(handle), (None, {}))
        self.machine.launch().wait(clock)
        return done

    # ---- on and off -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self) -> Iterator[StreamPlatform]:
        """Watches the process inside; gives the platform for it. The CPU platform must be initialised."""
        with contextlib.ExitStack() as stack:
            for target, replacements in self._replacements():
                for name, value in replacements.items():
                    stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(self._modes())
            yield StreamPlatform(self.machine, self.memory)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def _replacements(self) -> Iterable[tuple[Any, dict[str, Any]]]:
        tensor, torch_save = torch.tensor, torch.save

        def make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made = tensor(*args, **kwargs)
            return made.to(device) if is_device(device) else made

        def save(value: Any, *args: Any, **kwargs: Any) -> None:
            for part in tree_iter(value):
                if isinstance(part, Tensor):
                    self.read_by_host("save", part)
            torch_save(value, *args, **kwargs)

        yield torch, {"tensor": make_tensor, "Generator": _Generator, "save": save}
        yield torch.Tensor, {"cuda": lambda tensor, *_, **__: tensor.to(DEVICE)}
        yield torch.cuda, {
            "Stream": functools.partial(Stream, self.machine),
            "Event": functools.partial(Event, self.machine),
            "current_stream": lambda device=None: self.machine.current,
            "default_stream": lambda device=None: self.machine.default,
            "set_stream": functools.partial(setattr, self.machine, "current"),
            "stream": lambda stream: stream or contextlib.nullcontext(),
            "synchronize": self.machine.synchronize,
            "current_device": lambda: DEVICE,
        }
        for method in operations.WRITTEN:
            if original := getattr(dist.ProcessGroup, method, None):
                yield dist.ProcessGroup, {method: _method(self.collective, method, original)}
        yield dist.Work, {"wait": _method(self.wait_for, dist.Work.wait)}
        yield threading.Thread, self._thread_methods()

    def _thread_methods(self) -> dict[str, Any]:
        """A thread begins after what the one that starts it has done, which goes on after it once it has joined it."""
        start, join = threading.Thread.start, threading.Thread.join
        ends: weakref.WeakKeyDictionary[threading.Thread, Timeline] = weakref.WeakKeyDictionary()

        def start_watched(thread: threading.Thread) -> None:
            ends[thread] = line = Timeline(f"the thread {thread.name!r}")
            line.wait(self.machine.host.now())
            run = thread.run

            def run_watched() -> None:
                self.machine.begin_thread(line)
                with self._modes():
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
            start(thread)

        def join_watched(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if thread in ends and not thread.is_alive():
                self.machine.host.wait(ends[thread].now())

        return {"start": start_watched, "join": join_watched}


def _method(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*first, *args, **kwargs)


# ---- torch's two kinds of calls -------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """What reaches a kernel."""

    def __init__(self, watch: StreamWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What never reaches one, as all memory is the CPU's."""

    def __init__(self, watch: StreamWatch) -> None:
        super().__init__()
        self._watch = watch
        self._answers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: self._device,
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda tensor, **_: self._to(tensor, CPU),
            torch.Tensor.tolist: self._read(torch.Tensor.tolist),
            torch.Tensor.numpy: self._read(torch.Tensor.numpy),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answers.get(func, func)(*args, **(kwargs or {}))

    def _device(self, tensor: Tensor, *_: Any) -> torch.device:
        return _SHOWN if self._watch.memory.on_device(tensor) else CPU

    def _read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._watch.read_by_host(function.__name__, tensor)
            return function(tensor, *args, **kwargs)

        return read

    def _to(self, tensor: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """`Tensor.to`: device memory and host memory are the same to torch here, so a copy has to be asked for."""
        if args and (args[0] is None or isinstance(args[0], str | torch.device)):
            device, *args = args  # type: ignore[assignment]
        elif args and isinstance(args[0], Tensor):
            device, args = self._device(args[0]), (args[0].dtype, *args[1:])
        if device is None or is_device(device) == self._watch.memory.on_device(tensor):
            return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor
        kwargs.update(dict(zip(("dtype", "non_blocking"), args, strict=False)))
        with self._watch.copying(to_host=not is_device(device)):
            return torch.Tensor.to(tensor, device=DEVICE if is_device(device) else CPU, **{**kwargs, "copy": True})


class _Generator(torch.Generator):
    """A generator of the device draws on the CPU."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, CPU)  # type: ignore[call-arg]
