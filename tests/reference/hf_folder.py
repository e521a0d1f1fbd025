"""A Hugging Face folder with random weights, written with the safetensors library and without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_edit.config.schema import ModelConfig
from megatron_edit.convert.architectures import ARCHITECTURES, architecture_for
from megatron_edit.convert.hf_config import write_config
from megatron_edit.tables.parameters import full_parameter_shapes

VOCABULARY = 259
TINY: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8, "num_query_groups": 2,
    "kv_channels": 8, "seq_length": 32, "max_position_embeddings": 64, "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def write_folder(
    folder: Path, *, architecture: str | None = None, dtype: torch.dtype = torch.float32, shards: int = 1,
    vocab_size: int = VOCABULARY, **settings: Any,
) -> ModelConfig:  # fmt: skip
    """Writes config.json and the weights, in one file or in `shards` with an index; returns the model."""
    model = ModelConfig(**{**TINY, **settings})
    entry = architecture_for(model, architecture) if architecture else ARCHITECTURES["llama"]
    shapes = full_parameter_shapes(model, vocab_size)
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).to(dtype)
        for row in entry.rows_of(model, vocab_size)
        for name, shape in zip(row.theirs, row.transform.shapes(shapes[row.ours], model), strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(entry, model, vocab_size, str(dtype).removeprefix("torch."), {})
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return model
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == number}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
