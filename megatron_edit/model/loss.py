"""From logits to the loss that megatron-core's schedules want, over a vocabulary that is split and padded.

Letters in shapes: S sequence, B batch, V columns of this rank's part of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = dict[str, Tensor]


def forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Forward pass of one microbatch on this stage, in the form that megatron-core's schedules call.

    A microbatch has `tokens` and `labels` (int64 [B, S]) and `loss_mask` ([B, S], 1 where the loss counts). With
    --reset-attention-mask it also has `document_ids`, with --reset-position-ids `reset_position_ids` (int64 [B, S]).
    Returns this stage's output (on the last one, the token losses [B, S], or with a z-loss [2, B, S]) and the function
    that reduces it.
    """
    batch = next(data_iterator)
    document_ids = batch.get("document_ids")
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch.get("reset_position_ids"),  # None: rotary positions count from 0
        attention_mask=None if document_ids is None else document_attention_mask(document_ids),  # None: causal
        labels=batch["labels"],
    )
    return output, partial(loss_function, batch["loss_mask"])


def document_attention_mask(document_ids: Tensor) -> Tensor:
    """bool [B, 1, S, S], True where query s may look at key t: t <= s, and both in one document.

    document_ids: int64 [B, S], equal within a document. As torch's SDPA wants it, so the opposite of the mask that
    megatron-core's own attention takes.
    """
    same_document = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)  # [B, S, S]
    return same_document.tril_().unsqueeze(1)


def loss_function(loss_mask: Tensor, token_losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of the tokens that count, and their number; nothing is divided and no host waits.

    With `calculate_per_token_loss` megatron-core divides the gradients by the tokens of the whole batch, so a
    batch share with no token that counts adds 0.

    Args:
        loss_mask: [B, S], 1 where the loss counts, else 0.
        token_losses: [B, S], nats; or [2, B, S], these and the z-losses, which are added.

    Returns:
        loss sum (0-dim, fp32, differentiable), tokens (0-dim, int32), {"lm loss": fp32 [loss sum, tokens]}, the sum in
        it without z-losses, whose own sum is then the third number.
    """
    mask = loss_mask.float()
    tokens = mask.sum()
    if token_losses.dim() == 2:
        loss_sum = torch.sum(token_losses.float() * mask)
        return loss_sum, tokens.to(torch.int), {"lm loss": torch.stack((loss_sum.detach(), tokens))}
    sums = torch.sum(token_losses.float() * mask, dim=(1, 2))  # [2]
    lm_sum, z_sum = sums.detach()
    return sums.sum(), tokens.to(torch.int), {"lm loss": torch.stack((lm_sum, tokens, z_sum))}


def valid_columns(columns: int, vocab_size: int, tp_rank: int) -> int:
    """How many of this rank's `columns` of the padded vocabulary are real ids; the padded ones come last."""
    return min(max(vocab_size - tp_rank * columns, 0), columns)


def vocabulary_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, tp_group: dist.ProcessGroup, z_loss_coeff: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Cross entropy of every token over the vocabulary of all tensor parallel ranks, in fp32; and its z-loss.

    Padded ids have probability 0 and gradient 0. fp32 logits are overwritten: they are the largest tensor of
    a training step and nobody reads them after the loss.

    Args:
        logits: [S, B, V], this rank's columns.
        labels: int64 [S, B], ids in [0, vocab_size).
        vocab_size: ids without padding.
        z_loss_coeff: c of the z-loss c (log Z)^2, Z = sum_v exp(z_v), of PaLM (arXiv 2204.02311, section 5; on a
            router's logits in ST-MoE, arXiv 2202.08906). It needs no more than log Z [S, B], which the cross entropy
            computes anyhow: the gradient of both is one pass over the softmax.

    Returns:
        losses in nats, fp32 [S, B]; z-losses, fp32 [S, B], None where the coefficient is 0.
    """
    if not z_loss_coeff:
        return _VocabularyParallelCrossEntropy.apply(logits, labels, vocab_size, tp_group, 0.0), None
    return _VocabularyParallelCrossEntropy.apply(logits, labels, vocab_size, tp_group, z_loss_coeff)


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """loss = log Z - z_label, log Z = log sum_v exp(z_v - m) + m, m the largest logit; dz = softmax - onehot(label).

    z-loss = c (log Z)^2; dz = 2 c log Z softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp_group: dist.ProcessGroup, z_loss_coeff: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.dtype = logits.dtype
        columns = logits.shape[-1]
        scores = logits.detach().float()  # a view of fp32 logits, which become the softmax in place
        scores[..., valid_columns(columns, vocab_size, tp_group.rank()) :] = float("-inf")

        largest = scores.amax(-1)  # [S, B]
        if tp_group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
        scores.sub_(largest.unsqueeze(-1))

        column = labels - tp_group.rank() * columns  # [S, B]
        is_mine = (column >= 0) & (column < columns)
        column = column.clamp(0, columns - 1).unsqueeze(-1)  # [S, B, 1]
        label_score = scores.gather(-1, column).squeeze(-1).masked_fill(~is_mine, 0.0)  # [S, B]

        exponentials = scores.exp_()
        sums = torch.stack((exponentials.sum(-1), label_score))  # [2, S, B]
        if tp_group.size() > 1:
            dist.all_reduce(sums, group=tp_group)
        softmax = exponentials.div_(sums[0].unsqueeze(-1))
        losses = sums[0].log() - sums[1]
        ctx.z_loss_coeff = z_loss_coeff
        if not z_loss_coeff:
            ctx.save_for_backward(softmax, column, is_mine)
            return losses
        log_z = sums[0].log() + largest  # [S, B]
        ctx.save_for_backward(softmax, column, is_mine, log_z)
        return losses, z_loss_coeff * log_z.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, column, is_mine, *log_z = ctx.saved_tensors
        grad = softmax  # in place: it is needed no more
        if log_z:
            of_loss, of_z_loss = grad_outputs  # [S, B] each
            grad.mul_((of_loss + 2 * ctx.z_loss_coeff * log_z[0] * of_z_loss).unsqueeze(-1))
            grad.scatter_add_(-1, column, -(is_mine * of_loss).unsqueeze(-1))
        else:
            grad.scatter_add_(-1, column, -is_mine.to(grad.dtype).unsqueeze(-1))
            grad.mul_(grad_outputs[0].unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None
