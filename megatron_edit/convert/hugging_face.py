"""Folders of Hugging Face: config.json, safetensors in one file or in shards with an index, tokenizer files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_edit.checkpoint.folders import write_durably
from megatron_edit.convert.architectures import architecture_for
from megatron_edit.convert.assets import asset_ids, write_assets
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.folder import Written, check_output, new_folder
from megatron_edit.convert.hf_config import CONFIG, read_config, write_config
from megatron_edit.convert.rows import Row
from megatron_edit.convert.safetensors_file import StoredTensor, Writer, read_header
from megatron_edit.convert.weights import Weights, cast, verified
from megatron_edit.tables.parameters import EMBEDDING, HEAD

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
MAX_SHARD_BYTES = 5_000_000_000  # as transformers writes them
_NO_WEIGHTS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed, not learned
_SHOWN = 8


class HuggingFaceWeights(Weights):
    """Weights of a Hugging Face folder, checked in full by their headers when it is opened.

    `max_position_embeddings`: use the model for so many tokens at most. Raises ConversionError.
    """

    def __init__(self, folder: Path, *, max_position_embeddings: int | None = None) -> None:
        self.folder = self.assets = folder
        config = read_config(folder, max_position_embeddings)
        self.architecture, self.model = config.architecture, config.model
        stored, self.notes = _stored_tensors(folder)
        embedding = self.architecture.their_name(EMBEDDING)
        if embedding not in stored:
            raise ConversionError(f"{folder}: {embedding} is missing")
        self.vocab_size = stored[embedding].shape[0]
        if config.vocab_size not in (None, self.vocab_size):
            raise ConversionError(
                f"{folder}: {embedding} has {self.vocab_size} rows, {CONFIG} says vocab_size {config.vocab_size}"
            )
        rows = self.architecture.rows_of(self.model, self.vocab_size)
        self._rows = {row.ours: row for row in rows}
        self._stored = stored
        self._check()
        self.origin = {"format": "huggingface", "model_type": self.architecture.model_type, "config": config.raw}

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._stored[self._rows[name].theirs[0]].torch_dtype
        assert dtype is not None, "checked when the folder was opened"
        return dtype

    def read(self, name: str) -> torch.Tensor:
        row = self._rows[name]
        return row.transform.join([self._stored[part].read() for part in row.theirs], self.model)

    def _check(self) -> None:
        """Every tensor is there with its shape and a dtype that is converted, and no other."""
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            row = self._rows[name]
            expected |= dict(zip(row.theirs, row.transform.shapes(shape, self.model), strict=True))
        problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in self._stored]
        for name, tensor in self._stored.items():
            if name not in expected:
                if not _NO_WEIGHTS.fullmatch(name) and not self._is_tied_head(name):
                    problems.append(f"{name} {list(tensor.shape)} is not expected")
            elif tensor.shape != expected[name]:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
            elif tensor.torch_dtype is None:
                problems.append(f"{name} has dtype {tensor.dtype}; F32, BF16 and F16 can be converted")
        if not problems:
            for row in self._rows.values():
                if len({self._stored[part].dtype for part in row.theirs}) > 1:
                    each = ", ".join(f"{part} {self._stored[part].dtype}" for part in row.theirs)
                    problems.append(f"{each}: parts of one tensor need one dtype")
        if problems:
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ConversionError(
                f"{self.folder} does not fit its {CONFIG}:\n  " + "\n  ".join(problems[:_SHOWN]) + more
            )

    def _is_tied_head(self, name: str) -> bool:
        """Some tied models are stored with a head; it must be the embedding's copy."""
        head, embedding = self.architecture.their_name(HEAD), self.architecture.their_name(EMBEDDING)
        if name != head or self.model.untie_embeddings_and_output_weights:
            return False
        copy, original = self._stored[head], self._stored[embedding]
        if copy.shape != original.shape or not torch.equal(copy.read(), original.read()):
            raise ConversionError(
                f"{self.folder}: {CONFIG} says tie_word_embeddings, but {head} and {embedding} differ"
            )
        return True


def _stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """All tensors by name, and what is to be said. Where the weights stand twice, those that transformers takes.

    Raises ConversionError for shards that are missing or do not hold what the index says.
    """
    index = folder / INDEX
    if (folder / ADAPTER).exists():
        raise ConversionError(
            f"{folder} holds an {ADAPTER}, so that transformers (with peft) puts an adapter on top of these weights: "
            "merge it into them (merge_and_unload) and save, or move the adapter's files away"
        )
    if (folder / SINGLE).exists():
        notes = []
        if index.exists():
            notes = [f"{folder} holds {SINGLE} and {INDEX}: {SINGLE} is read, as transformers does"]
        return read_header(folder / SINGLE), notes
    if not index.exists():
        old = " (pytorch_model*.bin are not read: save them as safetensors)" if any(folder.glob("*.bin*")) else ""
        raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}{old}")
    return _sharded(folder), []


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} cannot be read: {error!r}") from None
    if missing:
        raise ConversionError(f"{index} names {', '.join(missing)}, which is missing")
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        header = read_header(folder / shard)
        absent = [name for name, place in places.items() if place == shard and name not in header]
        if absent:
            raise ConversionError(f"{index} says that {absent[0]} is in {shard}, which does not hold it")
        unknown = [name for name in header if name not in places]
        if unknown:
            raise ConversionError(f"{folder / shard} holds {unknown[0]}, which is not in {INDEX}")
        stored |= {name: header[name] for name, place in places.items() if place == shard}
    return stored


def write_hugging_face(
    weights: Weights,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    architecture: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    tokenizer: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Written:
    """Writes `weights` as a Hugging Face folder that is complete by itself; it appears whole or not at all.

    `dtype`: None keeps each tensor's. `architecture`: a key of `architectures.ARCHITECTURES`; None: that of the
    origin, or the first that fits. `tokenizer`: folder or file that takes the place of the recorded one.
    Raises ConversionError, CheckpointError, and OSError when the disk is full.
    """
    check_output(output, overwrite, weights.folder)
    entry = architecture_for(weights.model, architecture, weights.origin.get("model_type"))
    rows = entry.rows_of(weights.model, weights.vocab_size)
    kept = {row.ours: dtype or weights.dtype(row.ours) for row in rows}
    shards = _plan(weights, rows, kept, max_shard_bytes)
    with new_folder(output, overwrite, weights.folder) as folder, verified(weights):
        notes = write_assets(weights, folder, tokenizer)
        name = str(kept[EMBEDDING]).removeprefix("torch.")
        config = write_config(entry, weights.model, weights.vocab_size, name, asset_ids(folder, weights.origin))
        write_durably(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        _write_shards(weights, rows, kept, shards, folder, progress)
    values = [math.prod(shape) * kind.itemsize for shard in shards for shape, kind in shard.values()]
    return Written(output, len(values), len(shards), sum(values), notes)


Shard = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _plan(weights: Weights, rows: Iterable[Row], kept: dict[str, torch.dtype], max_shard_bytes: int) -> list[Shard]:
    """Which tensor goes into which file, in order; a file is closed before it would exceed the limit."""
    shards: list[Shard] = [{}]
    size = 0
    shapes = weights.shapes
    for row in rows:
        parts = row.transform.shapes(shapes[row.ours], weights.model)
        for name, shape in zip(row.theirs, parts, strict=True):
            count = math.prod(shape) * kept[row.ours].itemsize
            if shards[-1] and size + count > max_shard_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = (shape, kept[row.ours])
            size += count
    return shards


def _write_shards(
    weights: Weights,
    rows: Iterable[Row],
    kept: dict[str, torch.dtype],
    shards: list[Shard],
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    waiting = list(zip(files, shards, strict=True))
    writer: Writer | None = None
    left = 0
    try:
        for row in rows:
            progress(row.ours)
            whole = cast(row.ours, weights.read(row.ours), kept[row.ours])
            for name, part in zip(row.theirs, row.transform.split(whole, weights.model), strict=True):
                if left == 0:
                    if writer is not None:
                        writer.close()
                    file, shard = waiting.pop(0)
                    writer, left = Writer(folder / file, shard), len(shard)
                assert writer is not None
                writer.write(name, part)
                left -= 1
            del whole, part  # before the next one is read
        assert writer is not None and left == 0 and not waiting
        writer.close()
    finally:
        if writer is not None:
            writer.abandon()
    if len(files) > 1:
        total = sum(math.prod(shape) * kind.itemsize for shard in shards for shape, kind in shard.values())
        places: dict[str, Any] = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_durably(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
