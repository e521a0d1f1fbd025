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
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from megatron_edit.platform import cpu
from megatron_edit.testing.happens_before import Memory, Timeline, Work, ranges_of

_CPU = torch.device("cpu")
_DEVICE = torch.device("cpu", 0)  # its index tells it from the host, where the program names a device
_SHOWN = torch.device("cuda", 0)  # what a tensor on it says of itself

# Of a process group's methods, how many of the first arguments are written; of the others, tensors are read.
_WRITTEN = {
    "allreduce": 1, "allreduce_coalesced": 1, "broadcast": 1, "reduce": 1,
    "allgather": 1, "_allgather_base": 1, "allgather_into_tensor_coalesced": 1, "allgather_coalesced": 1,
    "all_gather_single": 1, "all_gather_single_coalesced": 1,
    "reduce_scatter": 1, "_reduce_scatter_base": 1, "reduce_scatter_tensor_coalesced": 1,
    "reduce_scatter_single": 1, "reduce_scatter_single_coalesced": 1,
    "alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1, "gather": 1, "scatter": 1,
    "send": 0, "recv": 1, "recv_anysource": 1,
}  # fmt: skip
_TO_ONE_RANK = ("send", "recv", "recv_anysource")
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_READ_BY_HOST = (
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "repeat_interleave",
)  # fmt: skip
_TAKE_MASKS = ("index", "index_put_", "_index_put_impl_")
_WITHOUT_KERNEL = ("_unsafe_view", "lift_fresh", "lift", "resize_", "set_", "_reshape_alias", "is_same_size")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class HostWait:
    """The host waited for the device. `why`: the operation; `where`: lines of the program, the innermost first."""

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} at {self.where}"


class Stream:
    """`torch.cuda.Stream`."""

    device = _DEVICE
    cuda_stream = 0

    def __init__(self, watch: StreamWatch, name: str = "") -> None:
        self._watch = watch
        self.timeline = Timeline(name or f"stream {next(watch.numbers)}")

    def wait_stream(self, stream: Stream) -> None:
        self.timeline.wait(stream.timeline.now())

    def wait_event(self, event: Event) -> None:
        self.timeline.wait(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._watch)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._watch.host_waits("synchronize", self.timeline)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._before = self._watch.current
        self._watch.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self._watch.current = self._before


class Event(cpu.Event):
    """`torch.cuda.Event`."""

    def __init__(self, watch: StreamWatch, *_: Any, **__: Any) -> None:
        super().__init__()
        self._watch = watch
        self.clock: dict[Timeline, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        super().record()
        line = (stream or self._watch.current).timeline
        line.wait(self._watch.host.clock)
        self.clock = line.now()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._watch.current).wait_event(self)

    def synchronize(self) -> None:
        self._watch.host.wait(self.clock)


class StreamPlatform(cpu.CpuPlatform):
    """The platform of the ranks of a `StreamWatch`: the CPU, with the streams and the choices of `CudaPlatform`."""

    name = "cuda"
    device = _DEVICE

    def __init__(self, watch: StreamWatch) -> None:
        self._watch = watch
        self._sync_stream, self._copy_stream = Stream(watch, "the sync stream"), Stream(watch, "the copy stream")

    def sync_stream(self) -> Any:
        return self._sync_stream

    def copy_stream(self) -> Any:
        return self._copy_stream

    def used_on_current_stream(self, tensor: Tensor) -> None:
        self._watch.memory(tensor).keep_for(self._watch.current.timeline)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        with stream:
            yield stream

    def record_event(self, stream: Any = None) -> Any:
        return (stream or self._watch.current).record_event()

    def wait_event(self, event: Any, stream: Any = None) -> None:
        (stream or self._watch.current).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@dataclass
class StreamWatch:
    """Watches one process, inside `on()`.

    races       two lines each, no pair of places twice
    host_waits_ where the host has waited for the device
    mixed       operations on tensors of the host and of the device together, which CUDA refuses
    """

    races: list[str] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.numbers = iter(range(1, sys.maxsize))
        self.default = self.current = Stream(self, "the default stream")
        self._hosts = threading.local()
        self._first_host = Timeline("the host")
        self._streams: weakref.WeakSet[Timeline] = weakref.WeakSet()
        self._groups: dict[Any, Timeline] = {}
        self._memory: dict[int, Memory] = {}  # by storage
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        self._works: dict[int, tuple[Any, dict[Timeline, int]]] = {}
        self._seen: set[str] = set()
        self._lines: list[Timeline] = []
        self.copies_to_host = False  # that is what the operation is for

    # ---- what the streams do ----------------------------------------------------------------------------------------

    @property
    def host(self) -> Timeline:
        """Of this thread."""
        return getattr(self._hosts, "line", self._first_host)

    def host_waits(self, why: str, line: Timeline) -> None:
        """The host goes on when `line` is done."""
        self.host.wait(line.now())
        self.waits.append(HostWait(why, _show(_places())))

    def synchronize(self, device: Any = None) -> None:
        """The host goes on when everything is done."""
        for line in [self.current.timeline, *self._lines]:
            self.host.wait(line.now())
        self.waits.append(HostWait("synchronize", _show(_places())))

    def _launch(self, line: Timeline) -> Timeline:
        """What `line` is given now begins after all that this thread has done."""
        if line not in self._streams:
            self._streams.add(line)
            self._lines.append(line)
        if line is not self.host:
            line.wait(self.host.clock)
        return line

    # ---- memory -----------------------------------------------------------------------------------------------------

    def memory(self, tensor: Tensor) -> Memory:
        """Of the tensor's storage; one that is new is the host's."""
        return self._memory.get(_storage(tensor)) or self._take_up(tensor, None)

    def on_device(self, tensor: Tensor) -> bool:
        """Whether it is in device memory."""
        memory = self._memory.get(_storage(tensor))
        return memory is not None and memory.home is not None

    def name(self, tensor: Tensor, name: str) -> None:
        """What reports call these bytes."""
        start = int(tensor.storage_offset()) * tensor.itemsize
        self._names.setdefault(_storage(tensor), []).append((start, start + int(tensor.nbytes), name))

    def _take_up(self, tensor: Tensor, home: Timeline | None) -> Memory:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        memory = self._memory[key] = Memory(home)
        weakref.finalize(storage, self._given_back, key).atexit = False
        return memory

    def _given_back(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._names.pop(key, None)
        if memory.home is not None:
            memory.home.wait(self.host.clock)
        for work in memory.in_use_elsewhere():
            assert memory.home is not None
            self._report(f"memory of {memory.home.name} is given back", f"its use by {work}", places=str(work))

    def _use(self, work: Work, tensor: Tensor, *, writes: bool) -> None:
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            return
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize)
        for before in self.memory(tensor).use(work, _ranges(*view), writes=writes):
            use = f"{'write' if writes else 'read'} of {self._describe(tensor)} by {work}"
            self._report(str(before), use, places=f"{before}, {work}")

    def _describe(self, tensor: Tensor) -> str:
        start = tensor.storage_offset() * tensor.itemsize
        for first, stop, name in self._names.get(_storage(tensor), []):
            if first <= start < stop:
                return name
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    def _report(self, first: str, second: str, *, places: str) -> None:
        if places not in self._seen:
            self._seen.add(places)
            self.races.append(f"{first}\n  not ordered with {second}")

    # ---- operations -------------------------------------------------------------------------------------------------

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of torch's dispatcher and notes what it uses."""
        kind = _kind(function)
        device = kwargs.get("device")
        placed = _is_device(device)
        if device is not None:
            kwargs = {**kwargs, "device": _CPU}
        if kind.is_view or function.namespace == "c10d":
            return function(*args, **kwargs)
        used = list(kind.tensors(args, kwargs))
        known = [(tensor, writes) for tensor, writes in used if tensor.dim() or _storage(tensor) in self._memory]
        any_on_device = placed or any(self.on_device(tensor) for tensor, _ in known)
        line = self._launch(self.current.timeline) if any_on_device else self.host
        describe = functools.partial(_show, _places(), kind.name)
        work = line.work(describe)
        is_copy = kind.name in _COPIES
        for tensor, writes in known:
            if any_on_device and not is_copy and not self.on_device(tensor):
                self._use(self.host.work(describe), tensor, writes=writes)
                if tensor.dim() and kind.name not in _TAKE_MASKS:
                    self.mixed.add(describe())
            else:
                self._use(work, tensor, writes=writes)
        result = function(*args, **kwargs)
        made_on_device = placed or (any_on_device and not self.copies_to_host)  # torch's own "cpu" means either
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._memory:
                self._take_up(tensor, line if made_on_device else None)
                if kind.name not in _UNWRITTEN:
                    self._use(work, tensor, writes=True)
        if any_on_device:
            places = {self.on_device(tensor) for tensor, _ in (used if kind.name == "_to_copy" else known)}
            crosses = is_copy and places | {made_on_device} == {True, False}
            counts = kind.name in _TAKE_MASKS and self._counts_a_mask(args)
            if (crosses and not _non_blocking(args, kwargs)) or kind.name in _READ_BY_HOST or counts:
                self.host_waits(kind.name, line)
        return result

    def _counts_a_mask(self, args: tuple[Any, ...]) -> bool:
        """Whether the host reads how many elements a mask among the indices has; not where a number fills them."""
        fills = len(args) > 2 and args[2].numel() == 1 and not self.on_device(args[2])
        return not fills and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))

    def read_by_host(self, why: str, tensor: Tensor) -> None:
        """The host reads `tensor`, and waits for the current stream if it is on the device."""
        if self.on_device(tensor):
            line = self._launch(self.current.timeline)
            self._use(line.work(functools.partial(_show, _places(), why)), tensor, writes=False)
            self.host_waits(why, line)
        else:
            self._use(self.host.work(functools.partial(_show, _places(), why)), tensor, writes=False)

    def collective(self, method: str, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a collective of a process group."""
        written = list(_tensors(args[: _WRITTEN[method]]))
        read = list(_tensors(args[_WRITTEN[method] :]))
        on_device = any(self.on_device(tensor) for tensor in written + read)
        if on_device:
            key = (group, args[1], method == "send") if method in _TO_ONE_RANK else group
            name = f"the stream of group {group.group_desc or group.group_name}"
            line = self._launch(self._groups.setdefault(key, Timeline(name)))
            line.wait(self.current.timeline.now())
        else:
            line = self.host
        work = line.work(functools.partial(_show, _places(), method))
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self._use(work, tensor, writes=writes)
        with _disable_current_modes():
            handle = original(group, *args, **kwargs)
        if on_device and handle is not None:
            self._works[id(handle)] = (handle, line.now())
        return handle

    def wait_for(self, original: Callable[..., Any], handle: Any, *args: Any) -> Any:
        """`work.wait()`."""
        with _disable_current_modes():
            done = original(handle, *args)
        _, clock = self._works.pop(id(handle), (None, {}))
        self._launch(self.current.timeline).wait(clock)
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
            yield StreamPlatform(self)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def _replacements(self) -> Iterable[tuple[Any, dict[str, Any]]]:
        tensor = torch.tensor

        def make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made = tensor(*args, **kwargs)
            return made.to(device) if _is_device(device) else made

        yield torch, {"tensor": make_tensor, "Generator": _Generator}
        yield torch.Tensor, {"cuda": lambda tensor, *_, **__: tensor.to(_DEVICE)}
        yield torch.cuda, {
            "Stream": functools.partial(Stream, self),
            "Event": functools.partial(Event, self),
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "set_stream": functools.partial(setattr, self, "current"),
            "stream": lambda stream: stream or contextlib.nullcontext(),
            "synchronize": self.synchronize,
            "current_device": lambda: _DEVICE,
        }
        for method in _WRITTEN:
            if original := getattr(dist.ProcessGroup, method, None):
                yield dist.ProcessGroup, {method: _method(self.collective, method, original)}
        yield dist.Work, {"wait": _method(self.wait_for, dist.Work.wait)}
        start, join = threading.Thread.start, threading.Thread.join
        ends: weakref.WeakKeyDictionary[threading.Thread, Timeline] = weakref.WeakKeyDictionary()

        def start_watched(thread: threading.Thread) -> None:
            ends[thread] = line = Timeline(f"the thread {thread.name!r}")
            line.wait(self.host.now())
            run = thread.run

            def run_watched() -> None:
                self._hosts.line = line
                with self._modes():
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
            start(thread)

        def join_watched(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if thread in ends and not thread.is_alive():
                self.host.wait(ends[thread].now())

        yield threading.Thread, {"start": start_watched, "join": join_watched}


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
            torch.Tensor.cpu: lambda tensor, **_: self._to(tensor, _CPU),
            torch.Tensor.tolist: self._read(torch.Tensor.tolist),
            torch.Tensor.numpy: self._read(torch.Tensor.numpy),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answers.get(func, func)(*args, **(kwargs or {}))

    def _device(self, tensor: Tensor, *_: Any) -> torch.device:
        return _SHOWN if self._watch.on_device(tensor) else _CPU

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
        if device is None or _is_device(device) == self._watch.on_device(tensor):
            return torch.Tensor.to(tensor, *args, **kwargs) if args or kwargs else tensor
        kwargs.update(dict(zip(("dtype", "non_blocking"), args, strict=False)))
        self._watch.copies_to_host = not _is_device(device)
        try:
            return torch.Tensor.to(tensor, device=_DEVICE if _is_device(device) else _CPU, **{**kwargs, "copy": True})
        finally:
            self._watch.copies_to_host = False


class _Generator(torch.Generator):
    """A generator of the device draws on the CPU."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, _CPU)  # type: ignore[call-arg]


@dataclass(frozen=True)
class _Kind:
    """What is known of an operation from its schema."""

    name: str
    is_view: bool
    arguments: tuple[tuple[str, bool], ...]  # (name, whether it is written)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Of a call: each tensor, and whether it is written."""
        for (_, writes), value in zip(self.arguments, args, strict=False):
            yield from ((tensor, writes) for tensor in _tensors(value))
        for name, writes in self.arguments[len(args) :]:
            yield from ((tensor, writes) for tensor in _tensors(kwargs.get(name)))


@functools.cache
def _kind(function: Any) -> _Kind:
    schema = function._schema
    name = function.overloadpacket.__name__
    aliases = [value.alias_info for value in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    arguments = tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments)
    return _Kind(name, is_view or name in _WITHOUT_KERNEL, arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _is_device(device: Any) -> bool:
    if isinstance(device, str | int):
        return device != "cpu"
    return device is not None and (device.type == "cuda" or device == _DEVICE)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_ranges = functools.lru_cache(4096)(ranges_of)


# ---- places in the program ------------------------------------------------------------------------------------------

_Place = tuple[Any, int]  # code and line


@functools.cache
def _shown(code: Any) -> str | None:
    """A file of the program; None: not to be shown."""
    file = code.co_filename
    for package in ("/megatron_edit/", "/megatron/core/"):
        _, found, path = file.rpartition(package)
        if found and not path.startswith("testing/"):
            return f"{package.strip('/').replace('/', '.')} {path}" if "core" in package else path
    return None


def _places() -> tuple[_Place, ...]:
    """The four innermost."""
    places: list[_Place] = []
    frame = sys._getframe(2)
    while frame is not None and len(places) < 4:
        if _shown(frame.f_code) is not None:
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(places)


def _show(places: tuple[_Place, ...], operation: str = "") -> str:
    lines = [f"{_shown(code)}:{line}" for code, line in places] or ["no file of the program"]
    return f"{operation} at {' < '.join(lines)}" if operation else " < ".join(lines)


def count_by_place(waits: Iterable[HostWait]) -> str:
    """A table of waits, the most frequent first."""
    return "\n".join(f"{count} x {wait}" for wait, count in Counter(map(str, waits)).most_common())
