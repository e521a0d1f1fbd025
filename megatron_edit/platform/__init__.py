"""Platforms: `get_platform` chooses between CUDA with NCCL and CPU with gloo."""

import torch

from megatron_edit.platform.base import Platform, PlatformError, quiet_megatron_warnings
from megatron_edit.platform.cpu import CpuPlatform
from megatron_edit.platform.cuda import CudaPlatform

__all__ = ["CpuPlatform", "CudaPlatform", "Platform", "PlatformError", "get_platform"]

quiet_megatron_warnings()  # here too: megatron-core is often imported before a platform is initialised


def get_platform(device: str = "auto", local_rank: int = 0) -> Platform:
    """The platform named by `--device`. Changes nothing in the process yet: `Platform.initialize` does.

    Args:
        device: "cpu", "cuda", or "auto": CUDA when a GPU can be used, else the CPU.
        local_rank: index of this process on its node; on CUDA the index of its GPU.

    Raises:
        PlatformError: an unknown name, "cuda" without a GPU, or more ranks on the node than GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise PlatformError(f"--device {device!r} is unknown: use auto, cpu or cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return CudaPlatform(local_rank) if device == "cuda" else CpuPlatform()
