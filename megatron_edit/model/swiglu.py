"""SwiGLU as the activation of megatron-core's MLP where its compiled one is not used: on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional


class SwiGLU(MegatronModule):
    """silu(gate) * up (arXiv 2002.05202) of [..., 2 F], gate first -> [..., F]."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    """Saves only its input, and writes both halves of the gradient into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_both = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), grad_outputs[0], out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_outputs[0] * up, gate, grad_input=grad_gate)
        return grad_both
