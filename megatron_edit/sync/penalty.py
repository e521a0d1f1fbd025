"""EDiT's pseudo-gradient penalty: the weights of the average and the clip of its result (arXiv 2412.07210).

Anomaly elimination, the penalty's third part, is in detector.py. Shapes: R replicas, M modules.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replica_weights(
    norms: Tensor,
    left_out: Tensor,
    weighting: str,
    temperature: float = 1.0,
    steps: Tensor | None = None,
    step_weight_ratio: float = 0.5,
) -> Tensor:
    """Weight of each replica in each module's average, float64 [R, M].

    softmax: w_i = exp(-G_i/T) / sum_j exp(-G_j/T) over the replicas that remain (arXiv 2412.07210, T = 1).
    mean: equal weights, as in its ablation. With `steps` (A-EDiT) the weight is (1 - r) times that plus r times
    the replica's share of the steps that the remaining replicas made. A replica that is left out weighs 0; a module
    from which every replica is left out has only zeros, which means a rollback.

    norms        float64 [R, M], finite wherever the replica is not left out
    left_out     bool [R, M], `DetectorVerdict.left_out`
    weighting    softmax or mean
    temperature  T > 0, in units of the norms; not used by mean
    steps        [R], steps of each replica since its last sync, above 0 wherever it is not left out; None: shares of
                 steps do not count
    step_weight_ratio  r, 0 to 1
    Raises ValueError for another weighting, T <= 0 or r out of range.
    """
    if weighting not in ("softmax", "mean"):
        raise ValueError(f"unknown weighting {weighting!r}; known: softmax, mean")
    if not temperature > 0:
        raise ValueError(f"softmax temperature must be positive, got {temperature}; try 1.0")
    if not 0 <= step_weight_ratio <= 1:
        raise ValueError(f"step weight ratio must be from 0 to 1, got {step_weight_ratio}; try 0.5")
    assert norms.shape == left_out.shape and norms.dtype == torch.float64, (norms.shape, norms.dtype)
    if weighting == "mean":
        scores = (~left_out).double()  # [R, M]
    else:
        # The smallest norm has the largest exponent. It is subtracted before the division, so that no
        # temperature, however small, sends all exponents to minus infinity.
        kept = norms.masked_fill(left_out, torch.inf)  # [R, M]
        smallest = kept.amin(0)  # [M], infinite where all are left out
        smallest = smallest.masked_fill(smallest.isinf(), 0.0)
        scores = torch.exp((smallest - kept) / temperature)
    weights = _shares(scores)
    if steps is None:
        return weights
    assert steps.shape == norms.shape[:1], (steps.shape, norms.shape)
    remaining_steps = steps.double()[:, None].masked_fill(left_out, 0.0)  # [R, M]
    return (1 - step_weight_ratio) * weights + step_weight_ratio * _shares(remaining_steps)


def _shares(scores: Tensor) -> Tensor:
    """Scores [R, M] over their sum of each module; zeros where that is 0."""
    total = scores.sum(0)  # [M]
    return scores / total.masked_fill(total == 0, 1.0)


def effective_replicas(weights: Tensor) -> Tensor:
    """N_eff = 1 / sum_i w_i^2 of each module, float64 [M] from [R, M] (ours).

    R when all replicas weigh the same, 1 when one has taken over, 0 on a rollback.
    """
    squares = weights.square().sum(0)  # [M]
    rolled_back = squares == 0
    return squares.masked_fill(rolled_back, 1.0).reciprocal().masked_fill(rolled_back, 0.0)


def clip_coefficient(norm: Tensor, phi: float, eps: float = 1e-6) -> Tensor:
    """beta = min(phi / (||Dbar|| + eps), 1), so that ||beta Dbar|| <= phi (arXiv 2412.07210, phi = 10).

    norm  0-d, ||Dbar|| of one whole module, on any device and of any floating dtype, which beta shares
    phi   largest norm of the pseudo gradient; 0 = off, beta = 1
    The host does not wait for the device. Raises ValueError for phi < 0.
    """
    if not phi >= 0:
        raise ValueError(f"pseudo-gradient clip must be 0 (off) or positive, got {phi}; try 10.0")
    if phi == 0:
        return torch.ones_like(norm)
    return (phi / (norm + eps)).clamp(max=1.0)
