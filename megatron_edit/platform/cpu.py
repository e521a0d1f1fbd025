"""CPU: gloo between ranks, and answers to what megatron-core asks of `torch.cuda`.

megatron-core has no CPU mode: it names "cuda" as the device of its tensors, and uses streams, events, memory
statistics and the generator of the current GPU. `CpuPlatform.initialize` makes those calls work on the CPU.
It is the only place of the project where attributes of torch are replaced, and importing this file replaces
nothing.

Tensors: a factory called with device="cuda" ends in torch's dispatcher, in `aten::empty.memory_format` or
`aten::empty_strided` for the dispatch key CUDA. Kernels for these two that allocate on the CPU make the
factories work, in every thread, context and mode, while the factories themselves, and every call without a
CUDA device, stay as they are. Wrapping the factories would not do: torch knows its constructors by identity,
so that the context `torch.device("meta")` no longer reaches the wrapped ones, and models that transformers
builds on the meta device keep uninitialised buffers (rotary frequencies among them). Only `torch.tensor`
needs a wrapper: it asks for the index of the current GPU before it dispatches.
"""

import contextlib
import functools
import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.utils._device import _device_constructors

from megatron_edit.platform.base import Platform, ordered_gloo_backend, quiet_megatron_warnings

_CPU = torch.device("cpu")
_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def _about_anything_but_cpu_rng_state(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


def _resident_bytes(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _max_resident_bytes(*_: Any, **__: Any) -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak if sys.platform == "darwin" else peak * 1024, _resident_bytes())


class Event:
    """`torch.cuda.Event` on a CPU: all work given before `record` has finished, so it is a point in time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to `end_event`."""
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1e3


class Stream:
    """`torch.cuda.Stream` on a CPU: there is one order of execution, so there is nothing to wait for."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class CpuPlatform(Platform):
    """CPU with gloo: real training for laptops, tests and CI."""

    name = "cpu"
    backend = "gloo"
    device = _CPU

    def initialize(self) -> None:
        quiet_megatron_warnings()
        # about a variable of the CUDA runtime
        warnings.filterwarnings("ignore", r"When using (sequence parallelism|async grad allreduce)", UserWarning)
        # the generator of "the GPU" is the CPU's own here, so a fork of it always finds the latter changed
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_about_anything_but_cpu_rng_state)
        _answer_for_cuda()

    def sync_stream(self) -> Stream:
        return _STREAM

    def copy_stream(self) -> Stream:
        return _STREAM

    def used_on_current_stream(self, tensor: torch.Tensor) -> None:
        """Nothing: there is one stream."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def record_event(self, stream: Any = None) -> Event:
        return _STREAM.record_event()

    def wait_event(self, event: Event, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def memory_allocated(self) -> int:
        return _resident_bytes()

    def max_memory_allocated(self) -> int:
        return _max_resident_bytes()

    def peak_flops(self) -> float | None:
        return None

    def sync_backend(self) -> str:
        return ordered_gloo_backend()


_STREAM = Stream()


@functools.cache  # once per process; a forked process inherits the result and the knowledge of it
def _answer_for_cuda() -> torch.library.Library:
    """Replaces what megatron-core asks of CUDA; returns the registration of the allocation kernels."""
    allocation = _allocate_on_cpu()
    _replace_tensor_functions()
    _replace_device_functions()
    _replace_rng_functions()
    _replace_streams()
    _replace_memory_statistics()
    return allocation


def _allocate_on_cpu() -> torch.library.Library:
    def empty(size: Any, *, dtype: Any = None, layout: Any = None, memory_format: Any = None, **_: Any) -> Any:
        return torch.ops.aten.empty.memory_format(
            size, dtype=dtype, layout=layout, device=_CPU, memory_format=memory_format
        )

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, **_: Any) -> Any:
        return torch.ops.aten.empty_strided.default(size, stride, dtype=dtype, layout=layout, device=_CPU)

    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", empty, allow_override=True)  # a CUDA build has its own
    library.impl("empty_strided", empty_strided, allow_override=True)
    return library


def _replace_tensor_functions() -> None:
    tensor, tensor_type = torch.tensor, torch.Tensor.type

    @functools.wraps(tensor)
    def tensor_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return tensor(*args, **kwargs)

    def type_named_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # megatron-core compares the name
            name = tensor_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    # torch looks its own functions up by identity in two tables: the constructors that a default device
    # reaches (filled on first use: fill it before the replacement), and what TorchScript can call.
    _device_constructors()
    torch.jit._builtins._register_builtin(tensor_on_cpu, "aten::tensor")
    torch.tensor = tensor_on_cpu
    torch.Tensor.type = type_named_cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in _TENSOR_TYPES:  # the CPU types construct, cast and answer isinstance as they are
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _replace_device_functions() -> None:
    properties = SimpleNamespace(
        name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=psutil.virtual_memory().total
    )
    _replace(
        torch.cuda,
        is_available=lambda: False,
        device=lambda device=None: contextlib.nullcontext(),
        device_count=lambda: 1,
        current_device=lambda: _CPU,
        set_device=lambda device: None,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (0, 0),
        synchronize=lambda device=None: None,
        is_bf16_supported=lambda *_, **__: True,
        is_current_stream_capturing=lambda: False,
        init=lambda: None,
        _lazy_init=lambda: None,
    )


def _replace_rng_functions() -> None:
    """One generator: what is drawn "on the GPU" is drawn by the CPU's default generator."""
    import megatron.core.tensor_parallel.random as megatron_random  # late: it takes seconds

    generator = torch.default_generator

    def set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        generator.set_state(new_state)

    def get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return generator.get_state()

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    # Functions, not the generator's own methods: torch.compile knows those by identity, under another rule.
    def seed_from_system() -> int:
        return generator.seed()

    def initial_seed() -> int:
        return generator.initial_seed()

    for module in (torch.cuda, torch.cuda.random):
        _replace(
            module,
            get_rng_state=get_rng_state,
            set_rng_state=set_rng_state,
            get_rng_state_all=lambda: [generator.get_state()],
            set_rng_state_all=lambda new_states: generator.set_state(new_states[0]),
            manual_seed=manual_seed,
            manual_seed_all=manual_seed,
            seed=seed_from_system,
            seed_all=seed_from_system,
            initial_seed=initial_seed,
        )
    _replace(megatron_random, _get_cuda_rng_state=get_rng_state, _set_cuda_rng_state=set_rng_state)


def _replace_streams() -> None:
    _replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: _STREAM,
        default_stream=lambda device=None: _STREAM,
        set_stream=lambda stream: None,
        stream=lambda stream: contextlib.nullcontext(stream),
    )


def _replace_memory_statistics() -> None:
    def memory_stats(device: Any = None) -> dict[str, int]:
        now, peak = _resident_bytes(), _max_resident_bytes()
        return {
            f"{kind}_bytes.all.{when}": size
            for kind in ("allocated", "active", "reserved")
            for when, size in (("current", now), ("peak", peak))
        }

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    for module in (torch.cuda, torch.cuda.memory):
        _replace(
            module,
            memory_allocated=_resident_bytes,
            memory_reserved=_resident_bytes,
            max_memory_allocated=_max_resident_bytes,
            max_memory_reserved=_max_resident_bytes,
            memory_stats=memory_stats,
            mem_get_info=mem_get_info,
            reset_peak_memory_stats=lambda device=None: None,
            empty_cache=lambda: None,
        )


def _replace(module: Any, **replacements: Callable[..., Any]) -> None:
    for name, replacement in replacements.items():
        assert hasattr(module, name), f"{module.__name__}.{name} is gone: not the tested version of torch"
        setattr(module, name, replacement)
