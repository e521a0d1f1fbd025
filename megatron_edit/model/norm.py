"""RMSNorm (arXiv 1910.07467) as a norm module of megatron-core.

megatron-core's own choice without Transformer Engine, `torch.nn.RMSNorm`, is refused with sequence
parallelism, and its CPU backward is a chain of a dozen elementwise operations; the closed-form gradient below
costs a third of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class NormConfig(Protocol):
    """What is read of megatron-core's config of a transformer."""

    params_dtype: torch.dtype
    sequence_parallel: bool
    use_cpu_initialization: bool


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 whatever the dtype of x.

    The weight's gradient is a sum over tokens: with sequence parallelism each tensor parallel rank has a part
    of them, which the attribute `sequence_parallel` tells megatron-core to add up.

    Args:
        config: megatron-core's own.
        hidden_size: size of the last dim.
        eps: added to the mean square.
        The rest is what megatron-core passes to every norm; it has no effect here.
    """

    def __init__(self, config: NormConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        if x.device.type == "cpu":
            return _RMSNormOnCPU.apply(x, self.weight, self.eps)
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """With n = x r, r = 1 / sqrt(mean(x^2) + eps): y = n w, dx = r (g w - n mean(g w n)), dw = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_fp32, weight_fp32 = x.float(), weight.float()
        norm = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True)  # [..., 1]
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        normalized = x_fp32 * inverse_rms  # [..., hidden]
        ctx.save_for_backward(normalized, weight, inverse_rms)
        return (normalized * weight_fp32).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        normalized, weight, inverse_rms = ctx.saved_tensors
        grad = grad_outputs[0].float()  # [..., hidden]
        weight_fp32 = weight.float()
        grad_normalized = grad * normalized  # [..., hidden]
        grad_weight = grad_normalized.flatten(0, -2).sum(0)  # [hidden]
        mean = grad_normalized.matmul(weight_fp32).div_(normalized.shape[-1]).unsqueeze(-1)  # [..., 1]
        grad_x = (grad * weight_fp32).addcmul_(normalized, mean, value=-1).mul_(inverse_rms)
        return grad_x.to(grad_outputs[0].dtype), grad_weight.to(weight.dtype), None
