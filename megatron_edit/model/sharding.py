"""Full tensors and their tensor parallel shards, by canonical name.

"Full" is always the tensor of the unsharded model without vocabulary padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.model.names import canonical_name
from megatron_edit.tables.parameters import (
    EMBEDDING,
    HEAD,
    is_gated,
    is_vocabulary,
    padded_vocabulary_size,
    partition_dim,
)


def local_parameter_count(chunks: Sequence[nn.Module], vocab_size: int, tp_group: dist.ProcessGroup) -> int:
    """This rank's part of the count: summed over tensor and pipeline parallel ranks it is `parameter_count`.

    A tensor that all tensor parallel ranks hold counts on the first of them, a tied matrix on the first
    stage, padding never.
    """
    count = 0
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = canonical_name(chunk, local_name)
            is_tied_copy = name == EMBEDDING and local_name.endswith(HEAD)
            if is_tied_copy or (partition_dim(name) is None and tp_group.rank() != 0):
                continue
            rows = parameter.shape[0]
            if is_vocabulary(name):
                rows = min(max(vocab_size - tp_group.rank() * rows, 0), rows)
            count += rows * prod(parameter.shape[1:])
    return count


def tensor_parallel_slice(full: Tensor, name: str, model: ResolvedModel, tp_rank: int, tp_size: int) -> Tensor:
    """Shard of the full tensor on one tensor parallel rank.

    The fused QKV is ordered by query group, so ranks hold contiguous groups, or with more ranks than groups equal
    parts of one; vocabulary rows are padded with zeros.
    """
    dim = partition_dim(name)
    if dim is None:
        return full
    if is_vocabulary(name):
        padded = padded_vocabulary_size(full.shape[0], model.make_vocab_size_divisible_by, tp_size)
        rows = padded // tp_size
        shard = full[tp_rank * rows : (tp_rank + 1) * rows]  # possibly shorter, or empty
        return torch.cat((shard, full.new_zeros(rows - shard.shape[0], *full.shape[1:])))
    if is_gated(name):
        gate, up = full.chunk(2)
        return torch.cat((gate.chunk(tp_size)[tp_rank], up.chunk(tp_size)[tp_rank]))
    assert full.shape[dim] % tp_size == 0, f"{name}: {full.shape[dim]} does not divide over {tp_size} ranks"
    return full.chunk(tp_size, dim)[tp_rank]


def tensor_parallel_join(shards: Sequence[Tensor], name: str, vocab_size: int) -> Tensor:
    """Full tensor from the shards of all tensor parallel ranks in order: undoes `tensor_parallel_slice`."""
    dim = partition_dim(name)
    if dim is None:
        return shards[0]
    if is_gated(name):
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat((*gates, *ups))
    full = torch.cat(list(shards), dim)
    return full[:vocab_size] if is_vocabulary(name) else full


def gather_full_parameters(
    chunks: Sequence[nn.Module],
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    pp_group: dist.ProcessGroup,
    read: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach(),
) -> dict[str, Tensor]:
    """Full tensors by canonical name on the CPU of every rank of both groups. Collective; the whole model.

    `read` picks what is gathered of a parameter, of its shape: itself, its `main_grad`, ...
    """
    stage: dict[str, Tensor] = {}
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = canonical_name(chunk, local_name)
            shard = read(parameter).contiguous()
            shards = [torch.empty_like(shard) for _ in range(tp_group.size())]
            dist.all_gather(shards, shard, group=tp_group)
            stage[name] = tensor_parallel_join(shards, name, vocab_size).cpu()
    stages: list[dict[str, Tensor]] = [{} for _ in range(pp_group.size())]
    dist.all_gather_object(stages, stage, group=pp_group)
    return {name: tensor for each in stages for name, tensor in each.items()}
