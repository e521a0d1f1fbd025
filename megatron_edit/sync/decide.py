"""What the replicas agree on before anything is averaged: who takes part in which module, and with which weight. Pure.

Rules of all methods (ours where their papers are silent): a replica is left out of a module's average when it is not
finite there, or made no update since the module's last sync, or, with anomaly elimination, is far above its own past.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.config.resolved import ResolvedEdit
from megatron_edit.sync.detector import AnomalyDetector
from megatron_edit.sync.event import SyncDecision
from megatron_edit.sync.penalty import replica_weights
from megatron_edit.tables.methods import Method


class Decider:
    """Holds the detectors. Every rank feeds it the same numbers and so comes to the same decisions.

    replicas     ids [R] of those that the detectors begin with
    num_modules  M, on this rank
    """

    def __init__(self, config: ResolvedEdit, method: Method, replicas: Sequence[int], num_modules: int) -> None:
        self.weighting = config.edit_weighting
        self.temperature = config.edit_softmax_temperature
        self.equal_steps = method.equal_steps
        self.step_weight_ratio = config.edit_step_weight_ratio
        self.detector = AnomalyDetector(
            len(replicas),
            num_modules,
            threshold=config.edit_anomaly_threshold,
            alpha=config.edit_anomaly_alpha,
            warmup=config.edit_anomaly_warmup_syncs,
        )
        self._replicas = tuple(replicas)  # whose columns the detectors hold
        self._num_modules = num_modules

    def decide(
        self,
        index: int,
        iteration: int,
        modules: Sequence[int],
        norms: torch.Tensor,
        steps: torch.Tensor,
        replicas: Sequence[int],
    ) -> SyncDecision:
        """The decision on sync `index` for `modules` (indices, m of them).

        norms     fp64 [R, m], G of each replica; may be NaN or infinite
        steps     int64 [R, m], updates of each replica since the module's last sync
        replicas  their ids [R], in the same order: each is judged by its own past
        """
        if tuple(replicas) != self._replicas:
            before = {replica: column for column, replica in enumerate(self._replicas)}
            self.detector.follow([before.get(replica) for replica in replicas])
            self._replicas = tuple(replicas)
        shape = (len(replicas), self._num_modules)
        columns = torch.tensor(list(modules), dtype=torch.int64)
        due = torch.zeros(self._num_modules, dtype=torch.bool)
        due[columns] = True
        all_norms = torch.zeros(shape, dtype=torch.float64)
        all_norms[:, columns] = norms
        all_steps = torch.zeros(shape, dtype=torch.int64)
        all_steps[:, columns] = steps
        # A slow replica has a small norm: what the detector sees is the norm of a random walk of one step (ours).
        observed = all_norms / all_steps.clamp(min=1).sqrt() if not self.equal_steps else all_norms
        verdict = self.detector.observe(observed, all_steps > 0, due)
        left_out = verdict.left_out | ~due
        weights = replica_weights(
            all_norms,
            left_out,
            self.weighting,
            self.temperature,
            steps=all_steps[:, columns[0]] if not self.equal_steps and len(columns) else None,
            step_weight_ratio=self.step_weight_ratio,
        )
        rolled_back = due & verdict.left_out.all(dim=0)
        return SyncDecision(index, iteration, due, all_norms, all_steps, verdict, weights, rolled_back)
