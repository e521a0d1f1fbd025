"""One optimizer step of a replica: forward and backward over its microbatches, reduce, update, sync."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_edit.platform.megatron_core import gradients_for_norm
from megatron_edit.sync.event import Meeting
from megatron_edit.train.replica import Replica

Microbatch = dict[str, torch.Tensor]  # tokens, labels, position_ids [b, S] int64; loss_mask [b, S] fp32


@dataclass(frozen=True)
class StepOutcome:
    """What one step did. `loss_sum` and `tokens` are this rank's and stay on the device: reading them waits."""

    loss_sum: torch.Tensor  # 0-d fp32, sum of masked token losses; 0 except on the last pipeline stage
    tokens: torch.Tensor  # 0-d, tokens that count; 0 except on the last pipeline stage
    grad_norm: float | None  # of the replica's gradient, before clipping; None: not computed
    updated: bool  # False: no token counted, or a gradient that is not finite; the parameters are as before
    meeting: Meeting | None = None  # what the replicas learnt of each other, when a sync was due after the step
    z_loss_sum: torch.Tensor | None = None  # as `loss_sum`, of the z-losses, which are not in it; None: there are none


def _asks_nothing() -> bool:
    return False


class TrainStep:
    """Runs steps of one replica. The sync happens inside the forward pass; see `sync/engine.py`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._any_token: torch.Tensor | None = None  # 0-d bool, of the step in progress
        config = replica.transformer_config
        config.grad_scale_func = replica.optimizer.scale_loss
        config.finalize_model_grads_func = self._finalize_gradients
        no_sync = [chunk.no_sync for chunk in replica.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def run(
        self,
        microbatches: list[Microbatch],
        learning_rate: float,
        asks_for_sync: Callable[[], bool] = _asks_nothing,
    ) -> StepOutcome:
        """One step on this rank's microbatches with the inner optimizer at `learning_rate`.

        `asks_for_sync`: called once, when the gradients are ready; what any rank of the replica answers is the
        replica's, see `Trigger.wants_sync`. The answers travel with the gradient's norm.
        """
        replica = self.replica
        for chunk in replica.chunks:
            chunk.zero_grad_buffer()
        replica.optimizer.zero_grad()
        replica.set_learning_rate(learning_rate)
        losses = replica.forward_backward(microbatches)
        grad_norm, asked = self._clipped_gradient(asks_for_sync)
        updated = grad_norm is not None and math.isfinite(grad_norm)
        if updated:  # else left out (ours): one bad batch then costs a step, not weights that no sync could bring back;
            replica.optimizer.step_with_ready_grads()  # and without a token Adam would decay them
        meeting = replica.engine.after_step(updated, learning_rate=learning_rate, asked=asked)
        loss_sum, tokens, *z_loss_sum = sum_losses(losses, replica.mesh.platform.device)
        return StepOutcome(loss_sum, tokens, grad_norm, updated, meeting, *z_loss_sum)

    @torch.no_grad()
    def _clipped_gradient(self, asks_for_sync: Callable[[], bool]) -> tuple[float | None, bool]:
        """Makes the gradient ready for the inner optimizer: (norm before clipping, what the replica's ranks asked).

        The norm is the replica's, so its ranks agree; in synchronous steps it is everybody's. None: no token counted,
        or fp16 overflow. The host waits for the device once, in fp16 three times: its scaler needs two answers before.
        """
        replica, optimizer = self.replica, self.replica.optimizer
        assert self._any_token is not None
        if (replica.config.training.fp16 and not self._any_token) or optimizer.prepare_grads():
            return None, self._agree(asks_for_sync())
        norm, asked, any_token = self.norm_and_flags(asks_for_sync(), self._any_token)
        if not any_token:
            return None, asked and not replica.engine.equal_steps  # see `_agree`
        clip_grad = replica.config.optimizer.clip_grad
        if clip_grad > 0 and math.isfinite(norm):
            for part in optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=clip_grad, total_norm=norm)
        return norm, asked

    def norm_and_flags(self, flag: bool, own_flag: torch.Tensor) -> tuple[float, bool, bool]:
        """Norm of the replica's gradient, whether any of its ranks has `flag` set, and `own_flag` [] as it is here.

        One reduction, and one read of device memory. The norm is megatron-core's `get_grad_norm`, up to fp32 rounding:
        the same elements over the same group.
        """
        optimizer = self.replica.optimizer
        gradients = [gradient for part in optimizer.chained_optimizers for gradient in gradients_for_norm(part)]
        numbers = torch.zeros(3, dtype=torch.float32, device=self.replica.mesh.platform.device)
        if gradients:
            numbers[0] = torch.stack(torch._foreach_norm(gradients)).square().sum()
        numbers[1] = float(flag)
        numbers[2] = own_flag
        dist.all_reduce(numbers[:2], group=optimizer.get_grad_stats_parallel_group())
        square_sum, flags, own = numbers.tolist()
        return math.sqrt(square_sum), flags > 0, own > 0

    def _agree(self, flag: bool) -> bool:
        """Whether any rank of the replica has `flag` set, in a step without a norm: in a reduction of its own.

        Only where it decides something: a replica that never has a norm (all of its tokens masked) would otherwise
        never come to the sync at which the others wait.
        """
        if self.replica.engine.equal_steps:
            return False
        flags = torch.tensor([float(flag)], device=self.replica.mesh.platform.device)
        dist.all_reduce(flags, group=self.replica.optimizer.get_grad_stats_parallel_group())
        return bool(flags > 0)

    def _finalize_gradients(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor, **megatron_arguments: Any
    ) -> None:
        """megatron-core's own, inside the replica; in synchronous steps tokens are counted over all replicas.

        Its last part, 1 / tokens, is done here: it reads the count back for each chunk, to leave a gradient without any
        token as it is. Here the factor is then 1, and the host does not wait.
        """
        mesh, groups = self.replica.mesh, self.replica.mesh.process_groups
        if self.replica.engine.synchronous and self.replica.engine.fleet.num_replicas > 1:
            dist.all_reduce(num_tokens, group=mesh.sync_group)
        finalize_model_grads(model, None, **megatron_arguments)
        if groups.pp.size() > 1:  # only the last stage has counted
            dist.broadcast(num_tokens, group_src=groups.pp.size() - 1, group=groups.pp)
        dist.all_reduce(num_tokens, group=groups.dp_cp)
        self._any_token = num_tokens > 0
        scale = torch.where(self._any_token, 1.0 / num_tokens, 1.0)
        for chunk in self.replica.chunks:
            chunk.scale_gradients(scale)


def sum_losses(losses: list[dict[str, torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """(loss sum, tokens) of one pass over the microbatches, and the z-loss sum where there is one; zeros where the loss
    is not computed."""
    if not losses:
        return torch.zeros((), device=device), torch.zeros((), device=device)
    return torch.stack([loss["lm loss"].detach().float() for loss in losses]).sum(dim=0).unbind()

