"""Weights in a torch_dist checkpoint of Megatron-LM's own training loop.

Its model is megatron-core's GPTModel, as ours, so that no value moves: only names and the stacking of layers differ.

| Megatron-LM's key | ours |
|---|---|
| `embedding.word_embeddings.weight`, padded | the same, without the padding |
| `decoder.layers.REST` [L, ...], or `decoder.layers.N.REST` | `decoder.layers.N.REST` |
| `...self_attention.linear_qkv.layer_norm_weight` | `...input_layernorm.weight` |
| `...mlp.linear_fc1.layer_norm_weight` | `...pre_mlp_layernorm.weight` |
| `...mlp.linear_fc1.weight`, or `..._w` and `..._v` | `...mlp.linear_fc1.weight` |
| `decoder.final_layernorm.weight`, `output_layer.weight` | the same |
| `*._extra_state`, `optimizer.*`, `chained_*`, `rng_state*`, `rerun_state_machine_state*` | not read |

The model's settings are the arguments of the run, which the checkpoint holds in `common.pt`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.torch_dist import METADATA, TensorReader
from megatron_edit.config.resolved import ResolvedModel, UnresolvedError, resolved_model
from megatron_edit.config.schema import ModelConfig
from megatron_edit.config.settings import SETTINGS, value_problem
from megatron_edit.config.yaml_file import read_yaml
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.weights import Weights
from megatron_edit.tables.parameters import is_gated, is_vocabulary

POINTER = "latest_checkpointed_iteration.txt"
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length",
    "max_position_embeddings", "rotary_base", "norm_epsilon", "untie_embeddings_and_output_weights", "add_qkv_bias",
    "qk_layernorm", "attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by",
)  # fmt: skip
# arguments that would change the result, and the values with which they do not
_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",), "normalization": ("RMSNorm",), "swiglu": (True,),
    "add_bias_linear": (False,), "rotary_percent": (1, 1.0), "rotary_interleaved": (False, None),
    "num_experts": (None, 0), "multi_latent_attention": (False, None), "apply_layernorm_1p": (False, None),
    "window_size": (None,), "qk_l2_norm": (False, None), "mtp_num_layers": (None, 0),
    "apply_residual_connection_post_layernorm": (False, None),
}  # fmt: skip


class MegatronLMWeights(Weights):
    """`directory`: folder of checkpoints, or one of them. `vocab_size`: ids of the tokenizer, without padding; None: as
    the run's arguments say. `config`: YAML with model settings that win over the arguments. `assets`: folder of the
    tokenizer's files. Raises ConversionError, CheckpointError."""

    def __init__(
        self, directory: Path, *, vocab_size: int | None = None, config: Path | None = None, assets: Path | None = None
    ) -> None:
        self.folder = _checkpoint(directory)
        self.assets = assets
        arguments = _arguments(self.folder)
        self.model = _model(self.folder, arguments, config)
        self._reader = TensorReader(self.folder)
        embedding = self._reader.stored.get("embedding.word_embeddings.weight")
        if embedding is None:
            raise ConversionError(f"{self.folder}: embedding.word_embeddings.weight is missing")
        known = vocab_size or arguments.get("vocab_size")
        if known is None:
            raise ConversionError(
                f"{self.folder} does not say how many of the {embedding.shape[0]} rows of its embedding are padding: "
                "give --vocab-size, the number of ids of the tokenizer"
            )
        if known > embedding.shape[0]:
            raise ConversionError(f"--vocab-size {known} is above the {embedding.shape[0]} rows of the embedding")
        self.vocab_size = int(known)
        self._places = self._find()
        self.origin = {"format": "megatron-lm", "iteration": arguments.get("iteration")}

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.stored[self._places[name][0][0]].dtype

    def read(self, name: str) -> torch.Tensor:
        keys, row = self._places[name]
        parts = [self._reader.read(key, row) for key in keys]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[: self.vocab_size].clone() if is_vocabulary(name) else whole

    def _find(self) -> dict[str, tuple[list[str], int | None]]:
        """Keys and row of each tensor of ours. Raises ConversionError with everything that does not fit."""
        stored = {key: entry for key, entry in self._reader.stored.items() if key.startswith(_MODEL_KEYS)}
        places: dict[str, tuple[list[str], int | None]] = {}
        problems = []
        for name, shape in self.shapes.items():
            keys, row = self._place(name)
            places[name] = keys, row
            if missing := [key for key in keys if key not in stored]:
                problems.append(f"{name} {list(shape)}: {missing[0]} is missing")
                continue
            found = [stored[key].shape[row is not None :] for key in keys]
            rows = sum(one[0] for one in found)
            if found[0][1:] != shape[1:] or (rows != shape[0] and not is_vocabulary(name)):
                problems.append(f"{name}: {keys[0]} has shape {[rows, *found[0][1:]]}, expected {list(shape)}")
            elif row is not None and stored[keys[0]].shape[0] != self.model.num_layers:
                problems.append(f"{keys[0]} has {stored[keys[0]].shape[0]} layers, expected {self.model.num_layers}")
            problems += [f"{key}: parts of it were not written" for key in keys if not stored[key].complete]
        used = {key for keys, _ in places.values() for key in keys}
        problems += [f"{key} {list(entry.shape)} is not expected" for key, entry in stored.items() if key not in used]
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ConversionError(f"{self.folder} does not fit its model:\n  " + "\n  ".join(problems[:8]) + more)
        return places

    def _place(self, name: str) -> tuple[list[str], int | None]:
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if not match:
            return [name], None
        rest = match[2]
        stored = self._reader.stored
        for prefix, row in ((f"decoder.layers.{match[1]}.", None), ("decoder.layers.", int(match[1]))):
            for own in (rest, _NORMS.get(rest, rest)):
                if prefix + own in stored:
                    return [prefix + own], row
            halves = [f"{prefix}{rest}_{half}" for half in "wv"]
            if is_gated(name) and halves[0] in stored:
                return halves, row
        return [f"decoder.layers.{rest}"], int(match[1])


def _checkpoint(directory: Path) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder")
    folder = directory
    if (directory / POINTER).exists():
        text = (directory / POINTER).read_text().strip()
        folder = directory / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not (folder / METADATA).exists():
        raise ConversionError(
            f"{folder} is not a torch_dist checkpoint: {METADATA} is missing. Older formats: save once more with "
            "Megatron-LM's --ckpt-format torch_dist"
        )
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{folder / 'metadata.json'} cannot be read: {error!r}") from None
    if backend != "torch_dist":
        raise ConversionError(f"{folder} has the format {backend}; torch_dist can be converted")
    return folder


class _Anything:
    """Stands in for objects of classes that are not needed: a checkpoint must not run code of its choice."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("argparse", "Namespace"), ("collections", "OrderedDict")):
            return super().find_class(module, name)
        return _Anything


class _SafePickle:
    """What `torch.load` needs of a pickle module."""

    Unpickler = _SafeUnpickler
    load = staticmethod(pickle.load)


def _arguments(folder: Path) -> dict[str, Any]:
    """The run's arguments, and `iteration`; empty when the checkpoint has none."""
    path = folder / "common.pt"
    try:
        common = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_SafePickle)
    except FileNotFoundError:
        return {}
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    arguments = common.get("args") if isinstance(common, dict) else None
    values = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
    return {**values, "iteration": common.get("iteration")}


def _model(folder: Path, arguments: dict[str, Any], config: Path | None) -> ResolvedModel:
    given: dict[str, Any] = {}
    if config is not None:
        values, problems, _ = read_yaml(str(config))
        if problems:
            raise ConversionError("\n".join(problems))
        given = {name: value for name, value in values.items() if SETTINGS[name].section == "model"}
    if arguments.get("num_layers") is None and not given:
        raise ConversionError(
            f"{folder / 'common.pt'} holds no arguments of the run: give the model's settings with --config FILE.yaml"
        )
    problems = [
        f"{name} {arguments[name]!r}: only {', '.join(map(str, allowed))} can be represented"
        for name, allowed in _ONLY.items()
        if name in arguments and arguments[name] not in allowed
    ]
    if problems:
        raise ConversionError(f"{folder}, arguments of the run:\n  " + "\n  ".join(problems))
    settings = {name: arguments[name] for name in _SAME if arguments.get(name) is not None}
    if arguments.get("group_query_attention"):
        settings["num_query_groups"] = arguments["num_query_groups"]
    if arguments.get("use_rope_scaling"):
        settings |= {"rope_scaling_type": "llama3", "rope_scaling_factor": arguments.get("rope_scaling_factor", 8.0)}
    elif (factor := arguments.get("rotary_seq_len_interpolation_factor")) is not None:
        settings |= {"rope_scaling_type": "linear", "rope_scaling_factor": factor}
    settings["rotary_base"] = settings.get("rotary_base", 10000.0)
    problems = [f"{name} {problem}" for name in settings if (problem := value_problem(SETTINGS[name], settings[name]))]
    if problems:
        raise ConversionError(f"{folder}, arguments of the run:\n  " + "\n  ".join(problems))
    settings["rotary_base"] = float(settings["rotary_base"])
    try:
        return resolved_model(ModelConfig(**{**settings, **given}))
    except UnresolvedError:
        problem = "hidden_size is not a multiple of num_attention_heads, kv_channels is missing"
        raise ConversionError(f"{folder}: {problem}") from None
