"""The architectures of Hugging Face that can be converted. To add one is to add an entry to ARCHITECTURES: its rows,
what its config.json leaves out, and what its class always does. `hf_config` reads and writes config.json by it.

Sources of names and defaults: the classes of transformers 5.24 (a test compares the defaults with them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.rows import LAYER, FusedQKV, GateOverUp, Row
from megatron_edit.tables.parameters import full_parameter_shapes

_OURS, _THEIRS = f"decoder.layers.{LAYER}.", f"model.layers.{LAYER}."


def _of_layer(ours: str, *theirs: str, **options: Any) -> Row:
    return Row(_OURS + ours, tuple(_THEIRS + name for name in theirs), **options)


def _qkv(kind: str) -> Row:
    parts = (f"self_attn.{projection}_proj.{kind}" for projection in "qkv")
    return _of_layer(f"self_attention.linear_qkv.{kind}", *parts, transform=FusedQKV())


_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    _of_layer("input_layernorm.weight", "input_layernorm.weight"),
    _qkv("weight"),
    _of_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _of_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _of_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", transform=GateOverUp()),
    _of_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",)),
)
_QKV_BIAS = (_qkv("bias"),)
_OUTPUT_BIAS = (_of_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),)
_QK_NORMS = (
    _of_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _of_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "initializer_range": 0.02,
             "attention_dropout": 0.0}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One class of transformers.

    `defaults`: values of config.json that the class assumes when they are left out; "num_key_value_heads" None: as
    many as query heads, "head_dim" None: hidden size / heads.
    `switches`: a key of config.json, and the settings of ours that it turns on together.
    `always`: settings of ours that the class has whatever config.json says.
    """

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any]
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always: Mapping[str, bool] = field(default_factory=dict)

    def their_name(self, ours: str) -> str:
        """Of a tensor that is the same on both sides and in no layer."""
        ((name,),) = (row.theirs for row in self.rows if row.ours == ours)
        return name

    def rows_of(self, model: ResolvedModel, vocab_size: int) -> list[Row]:
        """A row for each tensor of the model, in forward order. Raises ConversionError for one without a place."""
        by_name = {row.ours: row for row in self.rows}
        rows = []
        for name in full_parameter_shapes(model, vocab_size):
            match = re.match(r"decoder\.layers\.(\d+)\.", name)
            pattern = _OURS + name[match.end() :] if match else name
            if pattern not in by_name:
                raise ConversionError(f"{self.class_name} has no tensor for {name}")
            rows.append(by_name[pattern].at(match[1]) if match else by_name[pattern])
        return rows


ARCHITECTURES = {
    entry.model_type: entry
    for entry in (
        Architecture(  # Llama 1 to 3.3, SmolLM2, and many others
            "llama", "LlamaForCausalLM", (*_ROWS, *_QKV_BIAS, *_OUTPUT_BIAS),
            defaults={**_DEFAULTS, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
            switches={"attention_bias": ("add_qkv_bias", "add_attention_output_bias")},
            always={"qk_layernorm": False},
        ),
        Architecture(
            "qwen2", "Qwen2ForCausalLM", (*_ROWS, *_QKV_BIAS),
            defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768,
                      "use_sliding_window": False},
            always={"add_qkv_bias": True, "add_attention_output_bias": False, "qk_layernorm": False},
        ),
        Architecture(
            "qwen3", "Qwen3ForCausalLM", (*_ROWS, *_QKV_BIAS, *_OUTPUT_BIAS, *_QK_NORMS),
            defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
                      "use_sliding_window": False},
            switches={"attention_bias": ("add_qkv_bias", "add_attention_output_bias")},
            always={"qk_layernorm": True},
        ),
        Architecture(
            "mistral", "MistralForCausalLM", _ROWS,
            defaults={**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
                      "sliding_window": 4096},
            always={"add_qkv_bias": False, "add_attention_output_bias": False, "qk_layernorm": False},
        ),
    )
}  # fmt: skip


def misfits(architecture: Architecture, model: ResolvedModel) -> list[str]:
    """Settings of the model that the architecture cannot say."""
    found = [f"{name} {getattr(model, name)}" for name, value in architecture.always.items()
             if getattr(model, name) != value]  # fmt: skip
    for names in architecture.switches.values():
        if len({getattr(model, name) for name in names}) > 1:
            found.append(" with ".join(f"{name} {getattr(model, name)}" for name in names))
    return found


def architecture_for(model: ResolvedModel, wanted: str | None, preferred: str | None = None) -> Architecture:
    """`wanted`, or `preferred` if it can hold the model, or the first that can. Raises ConversionError."""
    if wanted is not None:
        if wanted not in ARCHITECTURES:
            raise ConversionError(f"--architecture {wanted} is unknown; known are {', '.join(ARCHITECTURES)}")
        if problems := misfits(ARCHITECTURES[wanted], model):
            raise ConversionError(f"--architecture {wanted} cannot hold this model: {', '.join(problems)}")
        return ARCHITECTURES[wanted]
    for name in (preferred, *ARCHITECTURES):
        if name in ARCHITECTURES and not misfits(ARCHITECTURES[name], model):
            return ARCHITECTURES[name]
    each = "; ".join(f"{name}: {', '.join(misfits(entry, model))}" for name, entry in ARCHITECTURES.items())
    raise ConversionError(f"no architecture of transformers that is known here can hold this model ({each})")
