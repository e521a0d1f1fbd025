"""What a user should be told about the replicas that a sync averaged, beside its line in the log."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.sync.detector import WARN_EVERY, DetectorVerdict
from megatron_edit.sync.penalty import effective_replicas

COLLAPSED_SYNCS = 3  # in a row below half of the replicas, before the weights count as collapsed (ours)


class SyncWarnings:
    """Turns verdicts and weights into lines; keeps how long the weights have been collapsed."""

    def __init__(self, module_keys: Sequence[str]) -> None:
        self._keys = list(module_keys)
        self._collapsed = 0  # syncs in a row

    def after_sync(
        self, index: int, verdict: DetectorVerdict, weights: torch.Tensor, rolled_back: torch.Tensor
    ) -> list[str]:
        """Lines on sync `index`; weights [R, M] fp64, rolled_back [M] bool."""
        lines = [
            f"warning: sync {index}: replica {replica} left out of {self._keys[module]} for {count} syncs in a row"
            for replica, module, count in verdict.stays_high
        ]
        for module in verdict.restarted_modules:
            lines.append(
                f"warning: sync {index}: most replicas were flagged in {self._keys[module]} in 3 syncs in a row: "
                "its norms have moved, its detectors start anew"
            )
        if rolled_back.any():
            keys = [key for key, back in zip(self._keys, rolled_back.tolist(), strict=True) if back]
            lines.append(f"warning: sync {index}: every replica left out, rolled back to the anchor: {', '.join(keys)}")
        for replica in range(len(weights)):
            keys = [k for k, bad in zip(self._keys, verdict.non_finite[replica].tolist(), strict=True) if bad]
            if keys:
                lines.append(
                    f"warning: sync {index}: replica {replica} is not finite in {len(keys)} modules, {keys[0]} first: "
                    "left out there, set back to the anchor, its inner moments zeroed"
                )
        return [*lines, *self._collapse(index, weights)]

    def _collapse(self, index: int, weights: torch.Tensor) -> list[str]:
        averaged, num_replicas = weights[:, weights.sum(0) > 0], len(weights)
        if num_replicas == 1 or averaged.numel() == 0:
            return []
        lowest = float(effective_replicas(averaged).min())
        self._collapsed = self._collapsed + 1 if lowest < num_replicas / 2 else 0
        if self._collapsed % WARN_EVERY != COLLAPSED_SYNCS:
            return []
        return [
            f"note: sync {index}: the softmax weights have been close to one replica for {self._collapsed} syncs "
            f"(N_eff {lowest:.2f} of {num_replicas}): a higher --edit-softmax-temperature, or "
            "--edit-weighting mean, would use more of the replicas"
        ]
