"""What the rest of the program asks of the machine: one interface for GPUs (NCCL) and for CPUs (gloo)."""

import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class PlatformError(ValueError):
    """The device that was asked for cannot be had; the message says what to do instead."""


class Platform(ABC):
    """The device of this rank, and the few things that differ between devices.

    Streams and events are `torch.cuda.Stream` and `torch.cuda.Event` on CUDA, and null objects with the same methods
    on a CPU, where every kernel has finished when its call returns.
    """

    name: str
    """"cpu" or "cuda"."""
    backend: str
    """Backend of `torch.distributed` for the groups that carry tensors of this device: "gloo" or "nccl"."""
    device: torch.device
    """Device of this rank."""

    @abstractmethod
    def initialize(self) -> None:
        """Prepares this process. Call it before megatron-core builds anything; calling it again does nothing."""

    @abstractmethod
    def sync_stream(self) -> Any:
        """The stream of the sync group's copies and kernels, always the same one."""

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which `stream` is the current stream."""

    @abstractmethod
    def record_event(self, stream: Any = None) -> Any:
        """An event at the end of what `stream` (default: the current one) was given so far; it can be timed."""

    @abstractmethod
    def wait_event(self, event: Any, stream: Any = None) -> None:
        """Makes `stream` (default: the current one) wait for `event`. The host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits until the device has finished everything."""

    @abstractmethod
    def empty_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory [numel], pinned where copies to and from the device gain by it."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Bytes in use now: tensors on the device, or the resident set of the process on a CPU."""

    @abstractmethod
    def max_memory_allocated(self) -> int:
        """Largest value of `memory_allocated` so far, in bytes."""

    @abstractmethod
    def peak_flops(self) -> float | None:
        """Peak of this device for dense bf16 matrix products in FLOP/s, to express throughput as MFU; None if unknown."""

    @staticmethod
    def new_gloo_options(timeout: timedelta, threads: int = 1) -> Any:
        """`pg_options` for `torch.distributed.new_group(backend="gloo")` with that many worker threads.

        With one thread the operations of a group finish in the order in which they were issued; with gloo's default
        of two, a later one can take bandwidth from the one that is needed first. `new_group` ignores its own
        `timeout` argument when it gets options, so the time-out is given here.
        """
        options = dist.ProcessGroupGloo._Options()
        options._threads = threads
        options._timeout = timeout
        return options


def quiet_megatron_warnings() -> None:
    """Drops megatron-core's import warnings about missing Apex and Transformer Engine: plain PyTorch is supported."""
    for message in (r"(Transformer Engine and )?Apex (is|are) not installed", r"Transformer Engine is not installed"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning, module=r"megatron\.core\.")
