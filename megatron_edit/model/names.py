"""One name for each tensor of the model whatever the layout: initial weights, sync and checkpoints go by it.

Canonical names are megatron-core's for the unsharded model with local layers, layers counted globally from 0:
`embedding.word_embeddings.weight`, `decoder.layers.7.mlp.linear_fc1.weight`,
`decoder.final_layernorm.weight`, `output_layer.weight` (untied models only).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
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
    if match := _LAYER.fullmatch(name):
        layer: Any = model.decoder.layers[int(match[1])]  # type: ignore[index, union-attr]
        rest = match[2]
        return f"decoder.layers.{layer.layer_number - 1}.{_NORMS_INSIDE_LINEAR.get(rest, rest)}"
    return name


def module_key(canonical: str, modules: str = "layer") -> str:
    """Module of the sync that a canonical name belongs to: "embedding", "layers.N" or "head".

    A tied matrix is in "embedding" on both stages; "head" is then the final norm alone. With `modules` "sublayer" a
    layer is two, "layers.N.attention" and "layers.N.mlp", each with the norm before it.
    """
    if canonical == EMBEDDING:
        return "embedding"
    if match := _LAYER.fullmatch(canonical):
        if modules == "layer":
            return f"layers.{match[1]}"
        in_mlp = match[2].startswith(("mlp.", "pre_mlp_layernorm."))
        return f"layers.{match[1]}.{'mlp' if in_mlp else 'attention'}"
    assert canonical in (HEAD, FINAL_NORM), canonical
    return "head"


def module_keys(num_layers: int, modules: str = "layer") -> list[str]:
    """All modules of the whole model, in forward order."""
    parts = [""] if modules == "layer" else [".attention", ".mlp"]
    return ["embedding", *(f"layers.{n}{part}" for n in range(num_layers) for part in parts), "head"]
