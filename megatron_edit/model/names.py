"""From a chunk's own names to the canonical ones of `tables/parameters.py`, which are the same in every layout.

Initial weights, sync and checkpoints go by them.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from megatron_edit.tables.parameters import EMBEDDING, HEAD, split_layer

# Transformer Engine keeps a norm inside the linear layer that follows it.
_NORMS_INSIDE_LINEAR = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def unwrap(chunk: nn.Module) -> nn.Module:
    """The GPTModel inside wrappers such as DistributedDataParallel."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def canonical_name(chunk: nn.Module, name: str) -> str:
    """Canonical name of the parameter that `chunk.named_parameters()` calls `name`; wrapped chunks are fine.

    The copy of a tied matrix on the last pipeline stage has the embedding's name.
    """
    model = unwrap(chunk)
    name = re.sub(r"^(module\.)+", "", name)
    if name == HEAD and model.share_embeddings_and_output_weights:
        return EMBEDDING
    if found := split_layer(name):
        number, rest = found
        layer: Any = model.decoder.layers[number]  # type: ignore[index, union-attr]
        return f"decoder.layers.{layer.layer_number - 1}.{_NORMS_INSIDE_LINEAR.get(rest, rest)}"
    return name
