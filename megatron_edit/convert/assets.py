"""Tokenizer files travel with the weights, so that a converted folder can be used alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.manifest import MANIFEST
from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.tokenizer_json import write_byte_tokenizer, write_sentencepiece_tokenizer
from megatron_edit.convert.weights import Weights
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import ALIASES, Tokenizer, build_tokenizer

JSON, SENTENCEPIECE, GENERATION = "tokenizer.json", "tokenizer.model", "generation_config.json"
ASSETS = "tokenizer"  # folder of these files in a converted checkpoint
FILES = (
    JSON, SENTENCEPIECE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION,
)  # fmt: skip
_ROLES = {"bos_token_id": "bos_id", "eos_token_id": "eod_id", "pad_token_id": "pad_id"}


def copy_assets(weights: Weights, folder: Path) -> list[str]:
    """Copies the tokenizer's files of the origin into `folder`, which is made when there are any; their names."""
    names = [name for name in FILES if weights.assets is not None and (weights.assets / name).is_file()]
    for name in names:
        assert weights.assets is not None
        folder.mkdir(exist_ok=True)
        shutil.copyfile(weights.assets / name, folder / name)
    return names


def tokenizer_settings(
    folder: Path, final: Path, weights: Weights
) -> tuple[dict[str, Any], dict[str, Any] | None, list[str]]:
    """Settings for training with the tokenizer in `folder`, which will be `final`; its record; what is to be said.

    A vocabulary with rows that no token uses (Qwen's) gets the setting `vocab_size`.
    """
    if (folder / JSON).exists():
        kind, path, later = "HuggingFaceTokenizer", folder, final
    elif (folder / SENTENCEPIECE).exists():
        kind, path, later = "SentencePieceTokenizer", folder / SENTENCEPIECE, final / SENTENCEPIECE
    else:
        return {}, weights.tokenizer, [f"no {JSON} and no {SENTENCEPIECE} came with the weights: training needs one"]
    record = {"type": kind, "model": str(later.absolute())}
    settings = {"tokenizer_type": kind, "tokenizer_model": record["model"]}
    try:
        own = build_tokenizer(kind, path).vocab_size
    except DataError as error:
        return settings, record, [f"the tokenizer that came with the weights cannot be used here: {error}"]
    if own > weights.vocab_size:
        return settings, record, [f"the tokenizer has {own} ids, the model {weights.vocab_size} rows: they do not fit"]
    return settings | ({"vocab_size": weights.vocab_size} if own < weights.vocab_size else {}), record, []


def write_assets(weights: Weights, folder: Path, tokenizer: Path | None) -> list[str]:
    """Puts the tokenizer's files into the Hugging Face `folder`; returns what is to be said.

    `tokenizer`: a folder or file that the user names; None: the files that came with the weights, or the tokenizer
    of the training run. Raises ConversionError when the named one is none, DataError when it cannot be read.
    """
    if tokenizer is not None:
        return _write_given(folder, tokenizer)
    if copy_assets(weights, folder):
        return []
    record = weights.tokenizer
    if record is None:
        return ["the checkpoint does not say which tokenizer it was trained with: give --tokenizer-model"]
    kind = ALIASES.get(record["type"], record["type"])
    if kind == "ByteTokenizer":
        write_byte_tokenizer(folder)
        return []
    if kind == "NullTokenizer":
        return ["NullTokenizer has no files: the folder holds no tokenizer"]
    path = Path(record["model"])
    if not path.exists():
        raise ConversionError(f"the tokenizer of the run, {path}, is not there any more: give --tokenizer-model PATH")
    if (generation := generation_config(weights)) is not None:
        shutil.copyfile(generation, folder / GENERATION)
    return _write_given(folder, path)


def generation_config(weights: Weights) -> Path | None:
    """generation_config.json of the weights, or of the converted ones that their run began with; None without one."""
    if weights.assets is not None:
        path = weights.assets / GENERATION
        return path if path.is_file() else None
    folder = Path((weights.tokenizer or {}).get("model") or "")
    is_of_weights = folder.name == ASSETS and (folder.parent / MANIFEST).is_file()  # not just a tokenizer's folder
    return folder / GENERATION if is_of_weights and (folder / GENERATION).is_file() else None


def _write_given(folder: Path, path: Path) -> list[str]:
    if path.is_dir():
        names = [name for name in FILES if (path / name).is_file() and name != GENERATION]
        if not names:
            raise ConversionError(f"--tokenizer-model {path} holds no tokenizer's files ({', '.join(FILES[:4])}, ...)")
        for name in names:
            shutil.copyfile(path / name, folder / name)
        return []
    if path.suffix == ".json":
        build_tokenizer("HuggingFaceTokenizer", path)
        shutil.copyfile(path, folder / JSON)
        for name in FILES[2:5]:
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, folder / name)
        return []
    build_tokenizer("SentencePieceTokenizer", path)
    shutil.copyfile(path, folder / SENTENCEPIECE)
    return write_sentencepiece_tokenizer(path, folder)


def asset_ids(folder: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """`bos_token_id` and the like for config.json: those of the origin, else the tokenizer's in `folder`."""
    config = origin.get("config", {})
    ids = {key: config[key] for key in _ROLES if config.get(key) is not None}
    if ids or not (folder / JSON).exists():
        return ids
    try:
        tokenizer: Tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    except DataError:
        return {}
    found = {key: getattr(tokenizer, role) for key, role in _ROLES.items()}
    return {key: value for key, value in found.items() if value is not None}
