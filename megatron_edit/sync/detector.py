"""Which replicas are left out of a module's average: an exponentially weighted z-test per replica and module.

Shapes: R replicas, M modules.

The test itself is EDiT's (arXiv 2412.07210: EMA z-test with threshold delta and smoothing alpha). The details
are ours: the bias of the start is removed from mean and variance, and the threshold is corrected for how
little has been seen, so that healthy replicas are flagged at the Gaussian tail rate from the first test on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESTART_AFTER = 3  # syncs in a row with more than half of the replicas flagged: the norms have moved (ours)
WARN_EVERY = 10  # syncs in a row in which one replica was flagged (ours)
RELATIVE_FLOOR = 1e-3  # of the mean: the test's scale is at least this, so that rounding is never an anomaly
MINIMUM_WARMUP = 3  # with fewer observations the threshold's expansion in 1/dof means nothing


@dataclass(frozen=True)
class DetectorVerdict:
    """What one sync's norms showed. Tensors are on the norms' device; the lists read them back to the host.

    flagged     bool [R, M]: far above the replica's own history of that module
    non_finite  bool [R, M]: NaN or infinite; the engine also zeroes the inner moments of these
    left_out    bool [R, M]: flagged, non-finite, or the replica made no step since its last sync
    restarted   bool [M]: this sync was the third in a row with more than half of the replicas flagged; the
                verdict stands, and the module's detectors start anew with the next sync
    streak      int64 [R, M]: flags in a row, this sync's included
    """

    flagged: Tensor
    non_finite: Tensor
    left_out: Tensor
    restarted: Tensor
    streak: Tensor

    @property
    def restarted_modules(self) -> list[int]:
        """Indices of the modules whose detectors start anew."""
        return [int(module) for module in self.restarted.nonzero()]

    @property
    def stays_high(self) -> list[tuple[int, int, int]]:
        """(replica, module, flags in a row) wherever a warning is due now: at every tenth flag in a row."""
        due = self.flagged & (self.streak % WARN_EVERY == 0)
        return [(int(i), int(m), int(self.streak[i, m])) for i, m in due.nonzero()]


class AnomalyDetector:
    """Detectors of R replicas times M modules, float64, updated once per sync from the gathered norms.

    Every rank feeds the same norms and so holds the same state and comes to the same verdict.

    threshold  delta, in standard deviations (3 in the paper). 0 = off: only non-finite and step-less replicas
               are left out; the statistics are kept up, so that a later run can turn the test on
    alpha      smoothing of mean and variance, 0 < alpha < 1 (0.02 in the paper)
    warmup     observations that a replica and module must have had accepted before the first test (20, ours)
    Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        num_replicas: int,
        num_modules: int,
        threshold: float = 3.0,
        alpha: float = 0.02,
        warmup: int = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"anomaly threshold must be 0 (off) or positive, got {threshold}; try 3.0")
        if not 0 < alpha < 1:
            raise ValueError(f"anomaly alpha must be above 0 and below 1, got {alpha}; try 0.02")
        if warmup < MINIMUM_WARMUP:
            raise ValueError(f"anomaly warm-up must be at least {MINIMUM_WARMUP} syncs, got {warmup}; try 20")
        self.threshold, self.alpha, self.warmup = threshold, alpha, warmup

        per_detector = (num_replicas, num_modules)
        self._mean = torch.zeros(per_detector, dtype=torch.float64, device=device)
        self._variance = torch.zeros_like(self._mean)  # weighted, too small by the factor 1 - W2
        self._weight_squares = torch.zeros_like(self._mean)  # W2: sum of the squared weights in the mean
        self._accepted = torch.zeros(per_detector, dtype=torch.int64, device=device)  # n
        self._streak = torch.zeros_like(self._accepted)  # flags in a row
        self._majority_streak = self._streak.new_zeros(num_modules)  # syncs in a row, most replicas flagged

    def observe(self, norms: Tensor, stepped: Tensor, due: Tensor | None = None) -> DetectorVerdict:
        """Judges the norms of one sync, then lets the healthy ones enter the statistics.

        norms    float64 [R, M], L2 norm of each replica's Delta of each module; of a module that is not due: anything
        stepped  bool [R] or [R, M], whether the replica made a step since its last sync (of that module)
        due      bool [M], the modules that this sync is of; None: all. The others are not judged: nothing is true of
                 them in the verdict, and nothing of their detectors changes
        """
        assert norms.shape == self._mean.shape and norms.dtype == torch.float64, (norms.shape, norms.dtype)
        assert stepped.dtype == torch.bool and stepped.shape in (norms.shape, norms.shape[:1]), (norms.shape, stepped)
        if stepped.dim() == 1:
            stepped = stepped[:, None]
        if due is None:
            due = torch.ones_like(self._majority_streak, dtype=torch.bool)
        assert due.shape == norms.shape[1:] and due.dtype == torch.bool, (norms.shape, due)
        non_finite = due & ~norms.isfinite()  # [R, M]
        observed = due & stepped & norms.isfinite()  # [R, M]
        flagged = self._exceeds(norms) & observed
        self._accept(norms, observed & ~flagged)

        # A sync that says nothing about a replica neither ends nor lengthens its row of flags.
        self._streak = torch.where(observed, torch.where(flagged, self._streak + 1, 0), self._streak)
        most = 2 * flagged.sum(0) > norms.shape[0]  # [M]
        majority_streak = torch.where(most, self._majority_streak + 1, 0)
        self._majority_streak = torch.where(due, majority_streak, self._majority_streak)
        restarted = self._majority_streak >= RESTART_AFTER  # [M]
        left_out = due & (~observed | flagged)
        verdict = DetectorVerdict(flagged, non_finite, left_out, restarted, self._streak)
        self._restart(restarted)
        return verdict

    def _exceeds(self, norms: Tensor) -> Tensor:
        """bool [R, M]: z > t, with z's denominator on the other side: it can be 0."""
        if self.threshold == 0:
            return torch.zeros_like(norms, dtype=torch.bool)
        delta = self.threshold
        tested = self._accepted >= self.warmup
        w2 = torch.where(tested, self._weight_squares, 0.5)  # where nothing is tested it may be 0 or 1
        sigma = (self._variance / (1 - w2)).sqrt()
        scale = torch.maximum(sigma * (1 + w2).sqrt(), RELATIVE_FLOOR * self._mean)
        # Student's t quantile with the tail that the normal distribution has beyond delta, to order 1/dof^2.
        dof = 1 / w2 - 1
        first_order = (delta**3 + delta) / (4 * dof)
        second_order = (5 * delta**5 + 16 * delta**3 + 3 * delta) / (96 * dof**2)
        return tested & (norms - self._mean > (delta + first_order + second_order) * scale)

    def _accept(self, norms: Tensor, accepted: Tensor) -> None:
        """Enters the norms where `accepted` [R, M]. The first becomes the mean, with variance 0 and W2 1."""
        n = self._accepted
        a = self.alpha / (1 - (1 - self.alpha) ** (n + 1).double())
        a = torch.where(n == 0, 1.0, a)  # free of rounding, so that the first mean is the norm itself
        d = norms - self._mean
        w2 = self._weight_squares
        self._mean = torch.where(accepted, self._mean + a * d, self._mean)
        self._variance = torch.where(accepted, (1 - a) * (self._variance + a * d**2), self._variance)
        self._weight_squares = torch.where(accepted, (1 - a) ** 2 * w2 + a**2, w2)
        self._accepted = n + accepted

    def _restart(self, restarted: Tensor) -> None:
        """Empties the detectors of the modules where `restarted` [M]."""
        for name, value in self.state_dict().items():
            setattr(self, f"_{name}", value.masked_fill(restarted, 0))

    def follow(self, kept: Sequence[int | None]) -> None:
        """The replicas have changed. `kept` [R]: what the column of each was before; None: a newcomer's starts empty.

        How often most replicas were flagged was counted among other ones: it starts anew.
        """
        old = [index for index in kept if index is not None]
        new = [index for index, before in enumerate(kept) if before is not None]
        for name, value in self.state_dict().items():
            if name == "majority_streak":
                resized = torch.zeros_like(value)
            else:
                resized = value.new_zeros(len(kept), value.shape[1])
                resized[new] = value[old]
            setattr(self, f"_{name}", resized)

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next verdict depends on but the settings: [R, M] each, `majority_streak` [M].

        The tensors are never changed in place, so what was returned stays as it was.
        """
        return {
            "mean": self._mean,
            "variance": self._variance,
            "weight_squares": self._weight_squares,
            "accepted": self._accepted,
            "streak": self._streak,
            "majority_streak": self._majority_streak,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes a state of the same R and M. Raises ValueError for other keys or shapes, changing nothing."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"detector state has keys {sorted(state)}, expected {sorted(own)}")
        for name, value in own.items():
            if state[name].shape != value.shape:
                raise ValueError(
                    f"detector state {name!r} has shape {list(state[name].shape)}, this run has "
                    f"{list(value.shape)} (replicas x modules)"
                )
        for name, value in own.items():
            setattr(self, f"_{name}", state[name].to(device=value.device, dtype=value.dtype))
