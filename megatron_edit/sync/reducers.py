"""What may be done to the pseudo gradients beside averaging them: dropping elements, and agreeing on signs.

Sparsification drops elements of each replica's Delta before the average. Keeping the largest is TIES-Merging's trim
(arXiv 2306.01708); keeping random ones, scaled up or not, is DARE's drop and rescale (arXiv 2311.03099).

Sign consensus is TIES-Merging's elect and disjoint mean (arXiv 2306.01708): element by element the replicas vote on the
sign, and the average is over those that agree. By "sum" the votes are weighted values, by "count" one replica has one
vote. Ours: that the replicas' weights enter both, and that an element without a majority does not move.

All on flat fp32 [n] on any device; the host does not wait for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

SPARSITY_METHODS = ("magnitude", "random", "rescaled-random")
CONSENSUS_MODES = ("sum", "count")


@torch.no_grad()
def sparsify_(delta: Tensor, sparsity: float, method: str, generator: torch.Generator | None = None) -> None:
    """Sets elements of delta [n] to zero, in place.

    magnitude        keeps the n - floor(sparsity n) largest absolute values; of equal ones those that come first
    random           keeps each with probability 1 - sparsity, independently
    rescaled-random  likewise, and divides what stays by 1 - sparsity: the expectation is delta

    sparsity   0 (nothing is done) to below 1
    generator  of the random numbers, on delta's device; equal states drop equal positions
    Raises ValueError for another method or a sparsity out of range.
    """
    if method not in SPARSITY_METHODS:
        raise ValueError(f"unknown sparsity method {method!r}; known: {', '.join(SPARSITY_METHODS)}")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity}; try 0.5")
    if sparsity == 0 or delta.numel() == 0:
        return
    if method == "magnitude":
        _keep_largest_(delta, delta.numel() - math.floor(sparsity * delta.numel()))
        return
    draws = torch.empty_like(delta).uniform_(generator=generator)  # in [0, 1)
    delta.masked_fill_(draws < sparsity, 0.0)
    if method == "rescaled-random":
        delta.div_(1 - sparsity)


def _keep_largest_(delta: Tensor, kept: int) -> None:
    size = delta.abs()
    smallest_kept = size.kthvalue(delta.numel() - kept + 1).values  # 0-d
    larger, equal = size > smallest_kept, size == smallest_kept
    places = kept - larger.sum()  # for those that are equal
    first = equal & (equal.cumsum(0, dtype=torch.int32) <= places)
    delta.masked_fill_(~(larger | first), 0.0)


def generator_of(device: torch.device, *place: object) -> torch.Generator:
    """The generator of a `place` (seed, sync, module, rank): training's own generators draw nothing (ours)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def votes(delta: Tensor, weight: float, mode: str) -> Tensor:
    """One replica's votes [n], to be summed over the replicas: weight x delta ("sum"), or its sign ("count").

    A replica of weight 0 has no vote; its delta may then hold anything. Raises ValueError for another mode.
    """
    if mode not in CONSENSUS_MODES:
        raise ValueError(f"unknown consensus {mode!r}; known: {', '.join(CONSENSUS_MODES)}")
    if weight <= 0:
        return torch.zeros_like(delta)
    return delta * weight if mode == "sum" else delta.sign()


def consensus_mask(delta: Tensor, vote_sum: Tensor) -> Tensor:
    """bool [n]: where delta has the sign that won; nowhere that the votes add up to 0."""
    return (delta.sign() == vote_sum.sign()) & (vote_sum != 0)


@torch.no_grad()
def consensus_average(flat: Tensor, weight: float, mode: str, sum_: Callable[[Tensor], None]) -> None:
    """flat [n] := sum_i w_i mask_i Delta_i / sum_i w_i mask_i over the replicas, in place; 0 where nobody agrees.

    flat    this replica's Delta; of weight 0 anything
    weight  w_i, at least 0
    sum_    sums a tensor [n] over the replicas, in place; called three times, by all replicas alike
    """
    ballot = votes(flat, weight, mode)
    sum_(ballot)
    if weight > 0:
        mask = consensus_mask(flat, ballot)
        flat.mul_(weight).masked_fill_(~mask, 0.0)
        agreeing = torch.mul(mask, weight, out=ballot)  # w_i mask_i, in the votes' memory
    else:
        flat.zero_()
        agreeing = ballot.zero_()
    sum_(flat)
    sum_(agreeing)
    flat.div_(agreeing.masked_fill_(agreeing == 0, 1.0))
