"""CUDA: one GPU per rank, NCCL between ranks, an own stream for the sync between replicas."""

from contextlib import AbstractContextManager

import torch

from megatron_edit.platform.base import Platform, PlatformError

# Dense bf16 peak with fp32 accumulation, FLOP/s, from NVIDIA's data sheets (half of the figures "with sparsity").
# The first entry whose name occurs in the device's name counts, so special models come before general ones.
_PEAK_BF16_FLOPS = (
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


class CudaPlatform(Platform):
    """One GPU, number `local_rank` of those visible on this node.

    Raises:
        PlatformError: no GPU can be used, or `local_rank` has none.
    """

    name = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            raise PlatformError(
                f"--device cuda: PyTorch {torch.__version__} ({built}) finds no GPU that it can use. Use --device cpu, "
                "or install a CUDA build of PyTorch and see that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES "
                "does not hide it"
            )
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise PlatformError(
                f"--device cuda: local rank {local_rank} has no GPU, this node shows {count}: start at most {count} "
                f"processes per node (torchrun --nproc-per-node {count})"
            )
        self.device = torch.device("cuda", local_rank)
        self._sync_stream: torch.cuda.Stream | None = None

    def initialize(self) -> None:
        torch.cuda.set_device(self.device)

    def sync_stream(self) -> torch.cuda.Stream:
        if self._sync_stream is None:
            self._sync_stream = torch.cuda.Stream(self.device)
        return self._sync_stream

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
        device_name = torch.cuda.get_device_name(self.device)
        return next((peak for name, peak in _PEAK_BF16_FLOPS if name in device_name), None)
