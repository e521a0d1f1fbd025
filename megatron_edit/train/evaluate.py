"""Loss on held-out samples, on the anchor: the weights of the last completed sync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_edit.sync.anchor_weights import anchor_weights
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import Microbatch, sum_losses


@dataclass(frozen=True)
class EvaluationResult:
    """Token-weighted mean over all replicas, equal on every rank."""

    loss: float  # nats per token; nan when no token counted
    tokens: int


@torch.no_grad()
def evaluate(replica: Replica, batches: Iterable[list[Microbatch]]) -> EvaluationResult:
    """Loss of the anchor on `batches` (this rank's share); training goes on bit for bit as if it had not run.

    Completes a due sync first. Dropout is off, so no generator advances. Collective over the world.
    """
    total = torch.zeros(2, dtype=torch.float64)
    with anchor_weights(replica.engine):
        for chunk in replica.chunks:
            chunk.eval()
        try:
            for microbatches in batches:
                losses = replica.forward_backward(microbatches, forward_only=True)
                loss_sum, tokens = sum_losses(losses, replica.mesh.platform.device)
                if replica.mesh.reports_loss:
                    total += torch.stack([loss_sum, tokens]).double().cpu()
        finally:
            for chunk in replica.chunks:
                chunk.train()
    dist.all_reduce(total, group=replica.mesh.world_control_group)
    loss_sum, tokens = total.tolist()
    return EvaluationResult(loss=loss_sum / tokens if tokens else float("nan"), tokens=int(tokens))
