"""What the rest of the program asks of the machine: one interface for GPUs (NCCL) and for CPUs (gloo)."""

import logging
import os
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

_ORDERED_GLOO = "gloo_ordered"


class PlatformError(ValueError):
    """The device that was asked for cannot be had; the message says what to do instead."""


class Platform(ABC):
    """The device of this rank, and the few things that differ between devices.

    Streams and events are `torch.cuda.Stream` and `torch.cuda.Event` on CUDA, and null objects with the same
    methods on a CPU, where every kernel has finished when its call returns.
    """

    name: str
    """"cpu" or "cuda"."""
    backend: str
    """Backend of `torch.distributed` for the groups that carry tensors of this device: "gloo" or "nccl"."""
    device: torch.device
    """Device of this rank."""

    @abstractmethod
    def initialize(self) -> None:
        """Prepares this process, before megatron-core builds anything; a second call does nothing."""

    @abstractmethod
    def sync_stream(self) -> Any:
        """The stream of the sync group's copies and kernels, always the same one."""

    @abstractmethod
    def copy_stream(self) -> Any:
        """The stream of copies between host and device that run beside computation and sync, always the same one."""

    @abstractmethod
    def used_on_current_stream(self, tensor: torch.Tensor) -> None:
        """`tensor` was allocated on another stream: its memory is not given away before the current one is done."""

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which `stream` is the current stream."""

    @abstractmethod
    def record_event(self, stream: Any = None) -> Any:
        """An event, usable for timing, after all that `stream` (default: the current one) was given."""

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
        """Peak FLOP/s of this device in dense bf16 matrix products, the base of MFU; None if unknown."""

    @abstractmethod
    def sync_backend(self) -> str:
        """Backend for the `new_group` of the sync group: operations finish in the order of issue."""


def ordered_gloo_backend() -> str:
    """Registers the backend "gloo_ordered", gloo with one worker thread per group, and returns its name.

    With gloo's default of two threads a later operation takes bandwidth from the one that is needed first.
    `new_group(backend="gloo", pg_options=...)` ignores the options (torch 2.13), hence a registered backend.
    """
    if _ORDERED_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(_ORDERED_GLOO, _new_ordered_gloo, extended_api=True, devices=["cpu", "cuda"])
    return _ORDERED_GLOO


def _new_ordered_gloo(group: Any, _: Any) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch's own "gloo": comma-separated
    create = dist.ProcessGroupGloo.create_device
    options._devices = (
        [create(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [dist.ProcessGroupGloo.create_default_device()]
    )
    options._timeout = group.timeout
    options._threads = 1
    backend = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)
    backend._set_sequence_number_for_group()
    return backend


def quiet_megatron_warnings() -> None:
    """Drops warnings about megatron-core's own choices, which a user can do nothing about.

    On import it misses Apex and Transformer Engine (neither is needed); its config deprecates its own default;
    it warns of selective recompute with Transformer Engine when that is not used; in training it calls two
    collectives by names that torch 2.13 has deprecated, and looks at gradients of views.
    """
    for category, message in (
        (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed"),
        (UserWarning, r"full scope is deprecated"),
        (UserWarning, r"If you are using transformer_engine as the transformer implementation, the core_attn"),
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),
        (FutureWarning, r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"),
    ):
        warnings.filterwarnings("ignore", message, category)
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_about_anything_but_the_model_class)


def _about_anything_but_the_model_class(record: logging.LogRecord) -> bool:
    """From 0.19 on megatron-core recommends another class than `GPTModel`, once per chunk that is built."""
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")
