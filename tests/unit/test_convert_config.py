"""config.json: whatever it says, in whichever spelling, is what transformers understands, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.config.schema import ModelConfig
from megatron_edit.convert.architectures import ARCHITECTURES
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.hf_config import read_config

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "vocab_size": 259, "rms_norm_eps": 1e-5,
    "sliding_window": None,
}  # fmt: skip
# values of the wrong kind for most keys, and some of the right one
ODD: list[Any] = [None, "8", "linear", "false", 0, -1, 0.5, 7, 1e6, True, False, float("nan"), float("inf"), [], [1],
                  {}, {"a": 1}]  # fmt: skip
KEYS = (*BASE, "initializer_range", "attention_dropout", "attention_bias", "mlp_bias", "hidden_act", "rope_theta",
        "tie_word_embeddings", "rope_scaling", "rope_parameters", "partial_rotary_factor", "use_sliding_window",
        "layer_types", "is_causal", "per_layer_config", "model_type", "architectures", "dtype", "torch_dtype",
        "quantization_config")  # fmt: skip
SCALINGS: list[Any] = [
    None, {}, LINEAR, LLAMA3, {**LINEAR, "factor": 2.0}, {**LINEAR, "rope_theta": 5e5},
    {"type": "linear", "factor": 4.0},
    {**LINEAR, "type": "default"}, {"rope_type": "default", "rope_theta": 5e5}, {**LLAMA3, "rope_theta": 1e4},
    {**LLAMA3, "original_max_position_embeddings": None}, {**LINEAR, "partial_rotary_factor": 0.5},
]  # fmt: skip


def ours(folder: Path, name: str, config: dict[str, Any]) -> ModelConfig | str:
    """The model, or what it was refused for."""
    entry = ARCHITECTURES[name]
    raw = {"model_type": name, "architectures": [entry.class_name], **config}
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        return read_config(folder).model
    except ConversionError as error:
        return str(error)


def theirs(name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The same settings as transformers understands them; None for what it refuses and older releases read."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    kind = getattr(transformers, ARCHITECTURES[name].class_name.replace("ForCausalLM", "Config"))
    try:
        found = kind(**json.loads(json.dumps(config)))  # a copy: it changes what it is given
    except StrictDataclassError:
        return None
    rope = found.rope_parameters
    kind = rope["rope_type"]
    window = getattr(found, "sliding_window", None) if name != "llama" else None
    heads = found.num_attention_heads
    return {
        "num_layers": found.num_hidden_layers, "hidden_size": found.hidden_size,
        "ffn_hidden_size": found.intermediate_size, "num_attention_heads": heads,
        "num_query_groups": found.num_key_value_heads,
        "kv_channels": getattr(found, "head_dim", None) or found.hidden_size // heads,
        "max_position_embeddings": found.max_position_embeddings, "norm_epsilon": found.rms_norm_eps,
        "init_method_std": found.initializer_range, "attention_dropout": found.attention_dropout or 0,
        "untie_embeddings_and_output_weights": not found.tie_word_embeddings,
        "rotary_base": rope["rope_theta"], "rope_scaling_type": "none" if kind == "default" else kind,
        **{f"rope_scaling_{key}": rope[key] for key in rope.keys() - {"rope_type", "type", "rope_theta"}
           if rope[key] is not None and key != "partial_rotary_factor"},
        "what is not built": [window, getattr(found, "layer_types", None), rope.get("partial_rotary_factor", 1) or 1],
    }  # fmt: skip


def assert_same_or_refused(folder: Path, name: str, config: dict[str, Any]) -> bool:
    """Whether both read it."""
    model = ours(folder, name, config)
    if isinstance(model, str):
        return False
    expected = theirs(name, {key: value for key, value in config.items() if key not in ("model_type", "architectures")})
    if expected is None:
        return False
    window, kinds, partial = expected.pop("what is not built")
    assert window is None or window >= config["max_position_embeddings"], config
    assert set(kinds or ()) <= {"full_attention"} and partial == 1, config
    for key, value in expected.items():
        assert getattr(model, key) == value, (key, config)
    return True


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_odd_values_are_refused_or_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Never another exception, and never another model."""
    accepted = [
        (key, value)
        for key in KEYS for value in ODD
        if assert_same_or_refused(tmp_path, name, {**BASE, key: value})
    ]  # fmt: skip
    assert ("rope_theta", 1e6) in accepted and ("rope_scaling", None) in accepted
    assert len(accepted) > 40


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_spellings_are_refused_or_mean_what_transformers_takes(name: str, tmp_path: Path) -> None:
    accepted = 0
    for theta in ({}, {"rope_theta": 1e4}, {"rope_theta": 5e5}, {"rope_theta": None}):
        for parameters in SCALINGS:
            for scaling in SCALINGS:
                both = {"rope_parameters": parameters, "rope_scaling": scaling, **theta}
                accepted += assert_same_or_refused(tmp_path, name, {**BASE, **both})
    assert accepted >= 60
