"""CUDA: one GPU per rank, NCCL between ranks, an own stream for the sync between replicas."""

import re
from contextlib import AbstractContextManager

import torch

from megatron_edit.platform.base import Platform, PlatformError, quiet_megatron_warnings

# Peak FLOP/s of dense bf16 matrix products with fp32 accumulation, from NVIDIA's data sheets (half of what
# they give "with sparsity"). The first name that is a word of the device's name counts.
_PEAK_BF16_FLOPS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak FLOP/s in dense bf16 of the GPU that `torch.cuda.get_device_name` calls so; None if unknown."""
    for name, peak in _PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None


class CudaPlatform(Platform):
    """One GPU, number `local_rank` of those visible on this node.

    Raises:
        PlatformError: no GPU can be used, or `local_rank` has none.
    """

    name = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        if not torch.cuda.is_available():
            raise PlatformError(
                f"--device cuda: PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'}) "
                "finds no GPU that it can use. Give --device cpu; or install a CUDA build of PyTorch, and "
                "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it"
            )
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise PlatformError(
                f"--device cuda: local rank {local_rank} has no GPU of its own, this node shows {count}: "
                f"start at most {count} processes per node (torchrun --nproc-per-node {count})"
            )
        self.device = torch.device("cuda", local_rank)
        self._sync_stream: torch.cuda.Stream | None = None
        self._copy_stream: torch.cuda.Stream | None = None

    def initialize(self) -> None:
        quiet_megatron_warnings()
        torch.cuda.set_device(self.device)

    def sync_stream(self) -> torch.cuda.Stream:
        if self._sync_stream is None:
            self._sync_stream = torch.cuda.Stream(self.device)
        return self._sync_stream

    def copy_stream(self) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)
        return self._copy_stream

    def used_on_current_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def record_event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def peak_flops(self) -> float | None:
        return peak_bf16_flops(torch.cuda.get_device_name(self.device))

    def sync_backend(self) -> str:
        return self.backend
