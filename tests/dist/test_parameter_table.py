"""The table of parameters against megatron-core: what `sharded_state_dict` says of each tensor, in several layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_edit.config.schema import ModelConfig, ParallelConfig
from megatron_edit.platform import get_platform

get_platform("cpu").initialize()

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

from megatron_edit.model.llama import build_model_chunks, transformer_config  # noqa: E402
from megatron_edit.model.names import canonical_name  # noqa: E402
from megatron_edit.parallel.layout import Layout  # noqa: E402
from megatron_edit.parallel.mesh import build_mesh  # noqa: E402
from megatron_edit.tables.parameters import (  # noqa: E402
    padded_vocabulary_size,
    parameters_of,
    split_layer,
)
from megatron_edit.testing.ranks import run_ranks  # noqa: E402

VOCABULARY = 259
TIED = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=2, kv_channels=16,
    seq_length=32,
)  # fmt: skip
UNTIED = replace(TIED, untie_embeddings_and_output_weights=True)
BIASES = replace(UNTIED, add_qkv_bias=True, add_attention_output_bias=True)
QK_NORM = replace(TIED, qk_layernorm=True)


@dataclass(frozen=True)
class Stored:
    """What megatron-core says of one tensor on one rank, without the axis of the layers."""

    shape: tuple[int, ...]  # of the whole tensor
    cuts: tuple[int, ...]  # dims that are cut over ranks
    gated: bool  # stored as two halves
    padded: bool


def stored(rank: int, world_size: int, model: ModelConfig, parallel: ParallelConfig) -> dict[str, Stored]:
    """By canonical name, the tensors of this rank's chunks."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    config = transformer_config(model, parallel, params_dtype=torch.float32, device_type="cpu")
    mesh = build_mesh(
        Layout.from_world(world_size, num_replicas=1, tp=tp, pp=pp),
        get_platform("cpu"),
        timeout_seconds=60,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
    )
    found: dict[str, Stored] = {}
    for chunk in build_model_chunks(model, config, VOCABULARY, mesh.process_groups):
        for local_name, value in chunk.sharded_state_dict().items():
            gated = isinstance(value, ShardedTensorFactory)
            tensor = value.build()[0] if gated else value
            if not isinstance(tensor, ShardedTensor):
                continue  # no tensor: a module's empty extra state
            name = canonical_name(chunk, local_name)
            layer = split_layer(name)
            assert tensor.prepend_axis_num == (layer is not None)  # an axis counts the layers
            assert layer is None or tensor.global_offset[0] == layer[0], (name, tensor.global_offset)
            found[name] = _describe(tensor, gated)
    return found


def _describe(tensor: Any, gated: bool) -> Stored:
    layers = tensor.prepend_axis_num
    parts = tensor.axis_fragmentations[layers:]
    halves = [2 if gated and dim == 0 else 1 for dim in range(len(parts))]
    cuts = tuple(dim for dim, (part, half) in enumerate(zip(parts, halves, strict=True)) if part > half)
    return Stored(tensor.global_shape[layers:], cuts, gated, tensor.allow_shape_mismatch)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2-pp2-interleaved": (
        4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1},
    ),
}  # fmt: skip
MODELS = {"tied": TIED, "untied": UNTIED, "biases": BIASES, "qk-norm": QK_NORM}
CASES = [
    ("tied", "one-rank"), ("untied", "one-rank"), ("biases", "tp2"), ("qk-norm", "tp2"), ("tied", "pp2"),
    ("biases", "pp2"), ("qk-norm", "tp2-pp2-interleaved"), ("untied", "tp2-pp2-interleaved"),
]  # fmt: skip


@pytest.mark.parametrize(("which", "layout"), CASES)
def test_the_table_is_what_megatron_core_stores(which: str, layout: str) -> None:
    model, (world_size, settings) = MODELS[which], LAYOUTS[layout]
    tp = settings.get("tensor_model_parallel_size", 1)
    found: dict[str, Stored] = {}
    for of_rank in run_ranks(stored, world_size, model, ParallelConfig(**settings)):
        for name, one in of_rank.items():
            assert found.setdefault(name, one) == one, name  # all ranks say the same of a tensor
    expected = {}
    for row in parameters_of(model, VOCABULARY):
        shape = list(row.shape)
        if row.kind == "vocabulary":
            shape[0] = padded_vocabulary_size(VOCABULARY, model.make_vocab_size_divisible_by, tp)
        cuts = (row.partition_dim,) if tp > 1 and row.partition_dim is not None else ()
        expected[row.name] = Stored(tuple(shape), cuts, row.kind == "gated", row.kind == "vocabulary")
    assert found == expected
