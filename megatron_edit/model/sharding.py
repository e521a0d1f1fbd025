"""Full tensors and their tensor parallel shards, by canonical name; shapes and the number of parameters.

"Full" is always the tensor of the unsharded model without vocabulary padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_edit.config.schema import ModelConfig
from megatron_edit.model.names import EMBEDDING, FINAL_NORM, HEAD, canonical_name

_PARTITION_DIMS = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
}


def partition_dim(name: str) -> int | None:
    """Dim along which tensor parallelism cuts the tensor; None for one that every rank holds whole: norms."""
    return _PARTITION_DIMS.get(name.removeprefix("decoder.layers.").lstrip("0123456789").removeprefix("."))


def is_gated(name: str) -> bool:
    """Whether the tensor is gate and up projection on top of each other; each half is cut by itself."""
    return name.endswith("mlp.linear_fc1.weight")


def is_vocabulary(name: str) -> bool:
    """Whether the rows of the tensor are the vocabulary, so that it is padded."""
    return name in (EMBEDDING, HEAD)


def padded_vocabulary_size(vocab_size: int, divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Smallest multiple of divisible_by x tensor_model_parallel_size that holds the vocabulary.

    As in Megatron-LM.
    """
    multiple = divisible_by * tensor_model_parallel_size
    return ceil(vocab_size / multiple) * multiple


def full_parameter_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of every full tensor by canonical name, in forward order."""
    assert model.ffn_hidden_size and model.num_query_groups and model.kv_channels, "resolve the config first"
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    query_size = model.num_attention_heads * model.kv_channels
    qkv_size = query_size + 2 * model.num_query_groups * model.kv_channels
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, hidden)}
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attention.linear_qkv.weight"] = (qkv_size, hidden)
        if model.add_qkv_bias:
            shapes[prefix + "self_attention.linear_qkv.bias"] = (qkv_size,)
        if model.qk_layernorm:
            shapes[prefix + "self_attention.q_layernorm.weight"] = (model.kv_channels,)
            shapes[prefix + "self_attention.k_layernorm.weight"] = (model.kv_channels,)
        shapes[prefix + "self_attention.linear_proj.weight"] = (hidden, query_size)
        if model.add_attention_output_bias:
            shapes[prefix + "self_attention.linear_proj.bias"] = (hidden,)
        shapes[prefix + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.linear_fc1.weight"] = (2 * ffn, hidden)
        shapes[prefix + "mlp.linear_fc2.weight"] = (hidden, ffn)
    shapes[FINAL_NORM] = (hidden,)
    if model.untie_embeddings_and_output_weights:
        shapes[HEAD] = (vocab_size, hidden)
    return shapes


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, each counted once and without vocabulary padding.

    V H (2 V H untied) + L (H (N + 2 G) D + H N D + 3 H F + 2 H, and (N + 2 G) D with a QKV bias, H with an output
    bias, 2 D with norms of queries and keys) + H.
    """
    assert model.ffn_hidden_size and model.num_query_groups and model.kv_channels, "resolve the config first"
    hidden = model.hidden_size
    query_size = model.num_attention_heads * model.kv_channels
    qkv_size = query_size + 2 * model.num_query_groups * model.kv_channels
    layer = hidden * (qkv_size + query_size + 3 * model.ffn_hidden_size + 2) + model.add_qkv_bias * qkv_size
    layer += model.add_attention_output_bias * hidden + model.qk_layernorm * 2 * model.kv_channels
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    return matrices * vocab_size * hidden + model.num_layers * layer + hidden


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


def tensor_parallel_slice(full: Tensor, name: str, model: ModelConfig, tp_rank: int, tp_size: int) -> Tensor:
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
