"""One optimizer step of a replica: forward and backward over its microbatches, reduce, update, sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_edit.sync.modules import ModuleShard
from megatron_edit.train.replica import Replica

Microbatch = dict[str, torch.Tensor]  # tokens, labels, position_ids [b, S] int64; loss_mask [b, S] fp32


@dataclass(frozen=True)
class StepOutcome:
    """What one step did. `loss_sum` and `tokens` are this rank's and stay on the device: reading them waits."""

    loss_sum: torch.Tensor  # 0-d fp32, sum of masked token losses; 0 except on the last pipeline stage
    tokens: torch.Tensor  # 0-d, tokens that count; 0 except on the last pipeline stage
    grad_norm: float | None  # of the replica's gradient, before clipping; None: not computed
    updated: bool  # False: no token counted, or a gradient that is not finite; the parameters are as before


class TrainStep:
    """Runs steps of one replica. The sync happens inside the forward pass; see `sync/engine.py`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._tokens_in_step: torch.Tensor | None = None
        config = replica.transformer_config
        config.grad_scale_func = replica.optimizer.scale_loss
        config.finalize_model_grads_func = self._finalize_gradients
        no_sync = [chunk.no_sync for chunk in replica.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def run(self, microbatches: list[Microbatch], learning_rate: float) -> StepOutcome:
        """One step on this rank's microbatches with the inner optimizer at `learning_rate`."""
        replica = self.replica
        for chunk in replica.chunks:
            chunk.zero_grad_buffer()
        replica.optimizer.zero_grad()
        replica.set_learning_rate(learning_rate)
        losses = replica.forward_backward(microbatches)
        if self._counts_no_token():
            updated, grad_norm = False, None  # Adam would decay the weights and move on its momentum
        else:
            updated, grad_norm = self._update()
        if not updated and (leading := self._leading_modules()):
            replica.engine.begin_sync(leading, updated=False)  # the other replicas do, and wait for this one
        replica.engine.after_step(updated, learning_rate=learning_rate)
        loss_sum, tokens = sum_losses(losses, replica.mesh.platform.device)
        return StepOutcome(loss_sum, tokens, grad_norm, updated)

    @torch.no_grad()
    def _update(self) -> tuple[bool, float | None]:
        """megatron-core's optimizer step, left out when the gradient's norm is not finite (ours): (done, norm).

        The norm is the replica's, so its ranks agree; in synchronous steps it is everybody's. One bad batch then costs
        a step, not the weights: without a sync (`baseline`, warm-up) nothing could bring them back.
        """
        optimizer, clip_grad = self.replica.optimizer, self.replica.config.optimizer.clip_grad
        if optimizer.prepare_grads():  # fp16 overflow
            return False, None
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return False, norm
        if clip_grad > 0:
            for part in optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=clip_grad, total_norm=norm)
        self._step_optimizer()
        return True, norm

    def _step_optimizer(self, asked: bool = False) -> None:
        """The inner optimizer's update. When a sync is due the modules that it begins with come first, so that their
        messages are under way while the others are updated."""
        optimizer, engine = self.replica.optimizer, self.replica.engine
        leading = self._leading_modules(asked)
        if not leading:
            optimizer.step_with_ready_grads()
            return
        first = {id(piece.optimizer_parameter) for module in leading for piece in module.slices}
        with only_parameters(optimizer, lambda parameter: id(parameter) in first):
            for part in optimizer.chained_optimizers:
                part.optimizer.step()
        engine.begin_sync(leading)
        with only_parameters(optimizer, lambda parameter: id(parameter) not in first):
            optimizer.step_with_ready_grads()

    def _leading_modules(self, asked: bool = False) -> list[ModuleShard]:
        """See `SyncEngine.leading_modules`; [] too where the inner optimizer cannot update them first."""
        return self.replica.engine.leading_modules(asked) if counts_steps_per_parameter(self.replica.optimizer) else []

    def _finalize_gradients(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor, **megatron_arguments: Any
    ) -> None:
        """megatron-core's own, inside the replica; in synchronous steps tokens are counted over all replicas."""
        if self.replica.engine.synchronous and self.replica.mesh.num_replicas > 1:
            dist.all_reduce(num_tokens, group=self.replica.mesh.sync_group)
        finalize_model_grads(model, num_tokens, **megatron_arguments)
        self._tokens_in_step = num_tokens

    def _counts_no_token(self) -> bool:
        assert self._tokens_in_step is not None
        return not bool(self._tokens_in_step > 0)  # megatron-core has just read the same number


def counts_steps_per_parameter(optimizer: MegatronOptimizer) -> bool:
    """Whether parts of the parameters may be updated one after the other: torch's AdamW counts steps for each.

    The fused Adams of Transformer Engine and apex count a step of a whole parameter group at each call.
    """
    adams = (torch.optim.AdamW, torch.optim.Adam)
    return all(isinstance(part.optimizer, adams) for part in optimizer.chained_optimizers)


@contextmanager
def only_parameters(optimizer: MegatronOptimizer, chosen: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Inside, the inner optimizers update the `chosen` parameters alone."""
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    everything = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if chosen(parameter)]
        yield
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters


def sum_losses(losses: list[dict[str, torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss sum, tokens) of one pass over the microbatches; zeros where the loss is not computed."""
    if not losses:
        return torch.zeros((), device=device), torch.zeros((), device=device)
    total = torch.stack([loss["lm loss"].detach().float() for loss in losses]).sum(dim=0)  # [2]
    return total[0], total[1]

