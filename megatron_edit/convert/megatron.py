"""Checkpoints of this program: weights of a training checkpoint are read, weights-only checkpoints are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import CheckpointFolder, is_checkpoint, write_durably
from megatron_edit.checkpoint.inspect import choose
from megatron_edit.checkpoint.manifest import MANIFEST, Manifest, content_problem, describe_file
from megatron_edit.checkpoint.torch_dist import TensorReader, write_whole_tensors
from megatron_edit.checkpoint.training_state import MODEL, local_key, shared_key
from megatron_edit.config.check_layout import check_model, check_pipeline
from megatron_edit.config.resolved import ResolvedModel, UnresolvedError, resolved_model
from megatron_edit.config.schema import Config, ConfigError, ModelConfig
from megatron_edit.config.settings import SETTINGS, as_written, value_problem, with_values
from megatron_edit.convert.assets import ASSETS, copy_assets, tokenizer_settings
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.folder import Written, check_output, new_folder
from megatron_edit.convert.weights import Weights, cast, verified

SETTINGS_FILE = "model.yaml"  # beside a converted checkpoint: --config for training
_FILE_BYTES = 5_000_000_000.0
_SHOWN = 8
_NOT_OF_THE_MODEL = ("model_size", "transformer_impl", "make_vocab_size_divisible_by", "hidden_dropout")


class MegatronWeights(Weights):
    """Weights in a checkpoint of this program: the anchor where there is one, or one replica's local weights.

    `directory`: one checkpoint or a folder of them; then its `final/` when that is the newest, else what its pointer
    names, or `step`. Raises CheckpointError, and ConversionError for tensors that are missing or too many.
    """

    def __init__(self, directory: Path, *, step: int | None = None, replica: int | None = None) -> None:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a folder")
        self._candidate = _newest(directory) if step is None and replica is None else choose(directory, step)
        self.folder = self._candidate.folder
        content = self._candidate.manifest.content
        self._prefix, what = _prefix(self.folder, content, replica)
        self.model, self.vocab_size = _model_of(content["model"], self.folder), int(content["vocab_size"])
        self._reader = TensorReader(self.folder)
        self._check()
        self.tokenizer = content.get("tokenizer")
        if (self.folder / ASSETS).is_dir():
            self.assets = self.folder / ASSETS
        origin = content.get("converted_from", {})
        self.origin = {**origin, "format": "megatron_edit", "iteration": content["iteration"], "weights": what}

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.stored[self._prefix + name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._reader.read(self._prefix + name)

    def verify(self) -> None:
        files = self._candidate.manifest.files
        for name in sorted(self._reader.files_of(self._prefix + name for name in self.shapes)):
            if problem := content_problem(self.folder, name, files[name]):
                raise CheckpointError(problem)

    def _check(self) -> None:
        stored, problems = self._reader.stored, []
        for name, shape in self.shapes.items():
            entry = stored.get(self._prefix + name)
            if entry is None:
                problems.append(f"{name} {list(shape)} is missing")
            elif entry.shape != shape:
                problems.append(f"{name} has shape {list(entry.shape)}, expected {list(shape)}")
            elif not entry.complete:
                problems.append(f"{name} {list(shape)}: only {entry.elements_written} of its elements are there")
        problems += [
            f"{name.removeprefix(self._prefix)} {list(entry.shape)} is not expected"
            for name, entry in stored.items()
            if name.startswith(self._prefix) and name.removeprefix(self._prefix) not in self.shapes
        ]
        if problems:
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ConversionError(f"{self.folder} does not fit its model:\n  " + "\n  ".join(problems[:_SHOWN]) + more)


def _newest(directory: Path) -> Any:
    """`final/` has the last sync of a run that ended, which the resumable checkpoint of that iteration lacks."""
    final = None if is_checkpoint(directory) else CheckpointFolder(directory).final_to_load()
    return final or choose(directory, None)


def _prefix(folder: Path, content: dict[str, Any], replica: int | None) -> tuple[str, str]:
    """What stands before the names of the wanted tensors, and what these are, in words."""
    if content["scope"] == "weights":
        if replica is not None:
            raise ConversionError(f"{folder} holds weights of no single replica: leave --replica out")
        return MODEL, "weights"
    if replica is None:
        return (shared_key("anchor", ""), "anchor") if content["has_anchor"] else (local_key(0, "param", ""), "weights")
    count = len(content["replicas"])
    if content["scope"] == "compact":
        raise ConversionError(f"{folder} is a compact checkpoint, without local weights: leave --replica out")
    if not 0 <= replica < count:
        raise ConversionError(f"--replica {replica}: {folder} holds replicas 0 to {count - 1}")
    return local_key(replica, "param", ""), f"replica {replica}"


def _model_of(saved: dict[str, Any], folder: Path) -> ResolvedModel:
    known = {field.name for field in fields(ModelConfig)}
    if unknown := sorted(saved.keys() - known):
        raise CheckpointError(f"{folder} was saved with model settings unknown here: {', '.join(unknown)}")
    if wrong := [f"{name} {problem}" for name in saved if (problem := value_problem(SETTINGS[name], saved[name]))]:
        raise CheckpointError(f"{folder} was saved with model settings that cannot be: {'; '.join(wrong)}")
    try:
        return resolved_model(ModelConfig(**saved))
    except UnresolvedError as error:
        raise CheckpointError(f"{folder} was saved with model settings that cannot be: {error}") from None


def layout_settings(weights: Weights, tensor: int, pipeline: int, layers_per_chunk: int | None) -> dict[str, Any]:
    """Settings of the layout that training is meant to have. Raises ConfigError when the model does not fit it."""
    settings: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    if layers_per_chunk is not None:
        settings["num_layers_per_virtual_pipeline_stage"] = layers_per_chunk
    config = with_values(Config(model=weights.model), settings, "flag")
    problems = [*check_model(config, fixed=True), *check_pipeline(config, tensor * pipeline, fixed=True)]
    if problems:
        raise ConfigError(problems)
    return {name: value for name, value in settings.items() if value != SETTINGS[name].default}


def write_megatron(
    weights: Weights,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    layout: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Written:
    """Writes `weights` as a weights-only checkpoint, which any layout loads with --finetune; whole or not at all.

    `dtype`: None keeps each tensor's. `layout`: settings for SETTINGS_FILE, see `layout_settings`.
    Raises ConversionError, CheckpointError, and OSError when the disk is full.
    """
    check_output(output, overwrite, weights.folder)
    kept = {name: dtype or weights.dtype(name) for name in weights.shapes}
    tensors = {MODEL + name: (shape, kept[name]) for name, shape in weights.shapes.items()}

    def produce(key: str) -> torch.Tensor:
        name = key.removeprefix(MODEL)
        progress(name)
        return cast(name, weights.read(name), kept[name])

    with new_folder(output, overwrite, weights.folder) as folder, verified(weights):
        files = write_whole_tensors(folder, tensors, produce, _FILE_BYTES)
        copied = copy_assets(weights, folder / ASSETS)
        settings, tokenizer, notes = tokenizer_settings(folder / ASSETS, output / ASSETS, weights)
        write_durably(folder / SETTINGS_FILE, _settings_file(weights, {**(layout or {}), **settings}).encode())
        files |= {name: describe_file(folder / name) for name in (SETTINGS_FILE, *(f"{ASSETS}/{n}" for n in copied))}
        content = {
            "iteration": 0,
            "scope": "weights",
            "layout": {"sync": 1, "dp": 1, "pp": 1, "cp": 1, "tp": 1, "chunks": 1},
            "vocab_size": weights.vocab_size,
            "model": asdict(weights.model),
            "tokenizer": tokenizer,
            "converted_from": weights.origin,
            "versions": {name: version(name) for name in ("megatron-core", "torch")},
        }
        write_durably(folder / MANIFEST, Manifest(content, files).to_json().encode())
    size = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    return Written(output, len(tensors), sum(name.endswith(".distcp") for name in files), size, notes)


def _settings_file(weights: Weights, others: dict[str, Any]) -> str:
    model = {
        name: value
        for name, value in asdict(weights.model).items()
        if name not in _NOT_OF_THE_MODEL and value is not None
    }
    return (
        "# Settings of the converted model, for `pretrain_llama.py --config`. seq_length is a proposal.\n"
        + yaml.safe_dump({n: as_written(n, v) for n, v in {**model, **others}.items()}, sort_keys=False)
    )
