"""What `plain_methods` does to vectors [n], one a replica: sparsification, sign consensus, compression. Torch only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.plain_edit import sum_of


def sparse(delta: Tensor, sparsity: float) -> Tensor:
    """The n - floor(sparsity n) largest elements; of equal ones those that come first."""
    n = delta.numel()
    values = delta.tolist()
    order = sorted(range(n), key=lambda k: (-abs(values[k]), k))
    kept = order[: n - math.floor(sparsity * n)]
    result = torch.zeros_like(delta)
    result[kept] = delta[kept]
    return result


def agreeing_average(deltas: list[Tensor], weights: list[float], consensus: str) -> Tensor:
    """The weighted average over those whose sign is that of the sum, or that of most; 0 where there is none."""
    if consensus == "sum":
        winner = sum_of([weight * delta for weight, delta in zip(weights, deltas, strict=True)]).sign()
    else:
        winner = sum_of([delta.sign() for delta in deltas]).sign()
    numerator, denominator = torch.zeros_like(winner), torch.zeros_like(winner)
    for weight, delta in zip(weights, deltas, strict=True):
        agrees = (delta.sign() == winner) & (winner != 0)
        numerator[agrees] += weight * delta[agrees]
        denominator[agrees] += weight
    denominator[denominator == 0] = 1.0
    return numerator / denominator


def compressed_sum(contributions: list[Tensor | None], errors: list[Tensor], dtype: str) -> Tensor:
    """Two stages over R chunks with error feedback; `errors` are changed. None sends zeros and keeps what it owes."""
    replicas, n = len(contributions), errors[0].numel()
    result = torch.zeros_like(errors[0])
    for owner in range(replicas):
        chunk = slice(owner * n // replicas, (owner + 1) * n // replicas)
        total = torch.zeros_like(result[chunk])
        for contribution, error in zip(contributions, errors, strict=True):
            if contribution is not None:
                x = contribution[chunk] + error[chunk]
                sent = quantised(x, dtype)
                error[chunk] = x - sent
                total = total + sent
        result[chunk] = quantised(total, dtype)
        errors[owner][chunk] += total - result[chunk]
    return result


def quantised(x: Tensor, dtype: str) -> Tensor:
    """To bfloat16; or, block after block, to multiples of largest / 127 (int8, 256) or largest / 7 (int4, 128)."""
    if dtype == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    block, levels = {"int8": (256, 127), "int4": (128, 7)}[dtype]
    parts = []
    for part in x.split(block):
        step = part.abs().max() / levels if part.numel() and part.abs().max() > 0 else 1.0
        parts.append((part / step).round() * step)
    return torch.cat(parts) if parts else x
