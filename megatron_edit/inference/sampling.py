"""The next token from logits. Pure; every sequence draws from a generator of its own, so that a sequence does not
depend on the others of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0: the most likely token. `top_k`: only the k most likely, 0 = all. `top_p`: only the most likely
    ones that together reach this probability (nucleus sampling, arXiv 1904.09751), 1 = all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def problems(self) -> list[str]:
        """What is wrong with the values, in flag names."""
        found = []
        if self.temperature < 0:
            found.append(f"--temperature {self.temperature} is negative: 0 takes the most likely token")
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k} is negative: 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p {self.top_p} is not above 0 and at most 1")
        return found

    def generator(self, sequence: int) -> torch.Generator:
        """Of the sequence with this number, the same whatever the batch size and the layout."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + sequence)


def next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """logits [B, V] -> ids, int64 [B] on the CPU."""
    logits = logits.detach().to("cpu", torch.float32)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = filtered_probabilities(logits, sampling)
    return torch.stack([
        torch.multinomial(row, 1, generator=generator).squeeze(0)
        for row, generator in zip(probabilities, generators, strict=True)
    ])  # fmt: skip


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [B, V] -> probabilities [B, V] with temperature, top-k and then top-p applied; rows sum to 1."""
    ordered, order = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = float("-inf")
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of those that are more likely
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    probabilities /= probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
