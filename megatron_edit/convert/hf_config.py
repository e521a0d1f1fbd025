"""config.json of Hugging Face <-> the model's settings. What cannot be said on the other side is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.config.settings import SETTINGS, value_problem
from megatron_edit.convert.architectures import ARCHITECTURES, Architecture
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.hf_rope import KEYS as ROPE_KEYS
from megatron_edit.convert.hf_rope import read_rope

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")

_SETTING_OF = {  # keys whose value is a setting's
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
    "attention_dropout": "attention_dropout",
}
_ONLY: dict[str, tuple[Any, ...]] = {  # keys that would change the result, and the values with which they do not
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_causal": (True,),
    "per_layer_config": ({},),
    "transformers_weights": ("model.safetensors",),  # another file with the weights
    "quantization_config": (),
    "compression_config": (),
}
_NULLS = ("num_key_value_heads", "head_dim", "attention_dropout")  # keys for which null has a meaning
_LONGEST_SAMPLE = 4096  # seq_length of a converted model unless it is meant for less; training flags change it


@dataclass(frozen=True)
class HuggingFaceConfig:
    """What config.json says."""

    architecture: Architecture
    model: ResolvedModel
    vocab_size: int | None
    raw: dict[str, Any]


def read_config(folder: Path, max_position_embeddings: int | None = None) -> HuggingFaceConfig:
    """config.json of `folder`. `max_position_embeddings`: use the model for sequences of at most so many tokens.

    Raises ConversionError: no such file, unknown architecture, values that this program's model cannot have.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{folder} is not a Hugging Face model: there is no {CONFIG} in it") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConversionError(f"{path} holds no mapping")
    architecture = _architecture(path, raw)
    values = _values(raw, architecture)
    if max_position_embeddings is not None:
        values["max_position_embeddings"] = max_position_embeddings
    rope, rope_problems = read_rope(raw, architecture.defaults["rope_theta"])
    problems = [*_wrong_values(values, architecture), *_refused(values), *rope_problems]
    if problems:
        raise ConversionError("\n".join(f"{path}: {problem}" for problem in problems))
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values["head_dim"] is None:
        if values["hidden_size"] % values["num_attention_heads"]:
            raise ConversionError(
                f"{path}: hidden_size {values['hidden_size']} is not a multiple of num_attention_heads "
                f"{values['num_attention_heads']}, and there is no head_dim"
            )
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    settings = {setting: values[key] for key, setting in _SETTING_OF.items()}
    settings["untie_embeddings_and_output_weights"] = not values["tie_word_embeddings"]
    settings["seq_length"] = min(values["max_position_embeddings"], _LONGEST_SAMPLE)
    for key, names in architecture.switches.items():
        settings |= dict.fromkeys(names, bool(values.get(key, False)))
    model = ResolvedModel(**{**settings, **rope, **architecture.always})
    if model.num_attention_heads % (model.num_query_groups or 1):
        raise ConversionError(
            f"{path}: num_attention_heads {model.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{model.num_query_groups}"
        )
    return HuggingFaceConfig(architecture, model, raw.get("vocab_size"), raw)


def _architecture(path: Path, raw: dict[str, Any]) -> Architecture:
    known = ", ".join(entry.class_name for entry in ARCHITECTURES.values())
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        name = classes[0] if isinstance(classes, list) and classes else f"model_type {kind}"
        raise ConversionError(f"{path}: architecture {name} is not known here; known are {known}")
    entry = ARCHITECTURES[kind]
    if isinstance(classes, list) and classes and classes != [entry.class_name]:
        raise ConversionError(f"{path}: {classes[0]} is not the language model {entry.class_name}; known are {known}")
    return entry


def _values(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json with the class's defaults; a null that has no meaning stays for the check to find."""
    absent = {key for key, value in raw.items() if value is None and key not in _SETTING_OF}
    values = {**architecture.defaults, **{key: value for key, value in raw.items() if key not in absent}}
    if values["attention_dropout"] is None:
        values["attention_dropout"] = 0.0
    # transformers reads `use_sliding_window` only in classes that have it: a Mistral's window cannot be switched off
    off = "use_sliding_window" in architecture.defaults and values["use_sliding_window"] is False
    if off or raw.get("sliding_window", 0) is None:
        values["sliding_window"] = None
    return values


def _wrong_values(values: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Missing keys, wrong types, values out of bounds."""
    for key, setting in _SETTING_OF.items():
        value = values.get(key)
        if key not in values:
            yield f"{key} is missing"
        elif value is None:
            if key not in _NULLS or (key == "head_dim" and architecture.defaults[key] is not None):
                yield f"{key} is null, and {architecture.class_name} has no meaning for that"
        elif problem := value_problem(SETTINGS[setting], value):
            yield f"{key} {problem}"
    for key in ("tie_word_embeddings", *architecture.switches):
        if type(values.get(key, False)) is not bool:
            yield f"{key} must be true or false, not {values[key]!r}"
    for key in ("vocab_size", "sliding_window"):
        if values.get(key) is not None and type(values[key]) is not int:
            yield f"{key} must be an integer, not {values[key]!r}"
    if not isinstance(values.get("layer_types", []), list):
        yield f"layer_types must be a list, not {values['layer_types']!r}"
    dtype = values.get("dtype", values.get("torch_dtype"))  # as in transformers; the weights' own dtype is what counts
    if dtype is not None and dtype not in DTYPES:
        yield f"dtype {dtype!r} is not one of {', '.join(DTYPES)}"


def _refused(values: Mapping[str, Any]) -> Iterator[str]:
    for key, allowed in _ONLY.items():
        if key in values and values[key] not in allowed:
            works = f": only {', '.join(map(str, allowed))} can be represented" if allowed else " cannot be represented"
            yield f"{key} {values[key]!r}{works}"
    window, longest = values.get("sliding_window"), values.get("max_position_embeddings")
    if isinstance(window, int) and isinstance(longest, int) and window < longest:
        yield (
            f"sliding_window {window} is below max_position_embeddings {longest}, and windows are not built here; "
            f"with at most {window} tokens it makes no difference: --max-position-embeddings {window} would work"
        )
    kinds = values.get("layer_types")
    others = {str(kind) for kind in kinds if kind != "full_attention"} if isinstance(kinds, list) else set()
    if others:
        yield f"layer_types {', '.join(sorted(others))}: only full_attention can be represented"


def write_config(
    architecture: Architecture, model: ResolvedModel, vocab_size: int, dtype: str, ids: Mapping[str, int]
) -> dict[str, Any]:
    """config.json for `model`, in the spelling that transformers 4 and 5 read.

    `ids`: `bos_token_id` and the like, where they are known.
    """
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **ids,
        **{key: getattr(model, setting) for key, setting in _SETTING_OF.items()},
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "rope_theta": model.rotary_base,
        "rope_scaling": _written_rope(model),
        "torch_dtype": dtype,
        "use_cache": True,
    }
    for key, names in architecture.switches.items():
        config[key] = getattr(model, names[0])
    if "sliding_window" in architecture.defaults:
        config["sliding_window"] = None
    return config


def _written_rope(model: ResolvedModel) -> dict[str, Any] | None:
    kind = model.rope_scaling_type
    if kind == "none":
        return None
    return {"rope_type": kind, **{key: getattr(model, f"rope_scaling_{key}") for key in ROPE_KEYS[kind]}}
