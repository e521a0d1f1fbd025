"""--data-args-path and --per-split-data-args-path: files that hold what --data-path and its relatives take.

The first holds the words of --data-path, with blanks or line ends between them; what follows a `#` is a comment. The
second is JSON: {"train": [...], "valid": [...], "test": [...]}, each the words of --train-data-path and so on, as a
list or as one string. Both as Megatron-LM reads them; comments are ours, and so are named validation sets, {"valid":
{NAME: [...], ...}}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_edit.config.values import words_of_named_sets

SPLITS = ("train", "valid", "test")


def read_data_args(path: str) -> dict[str, Any]:
    """{"data_path": words of the file}. Raises ValueError that says what is wrong with the file."""
    lines = _read(path).splitlines()
    words = [word for line in lines for word in line.split("#", 1)[0].split()]
    if not words:
        raise ValueError("holds no corpus: write PREFIX, or WEIGHT PREFIX on each line")
    return {"data_path": words}


def read_per_split_data_args(path: str) -> dict[str, Any]:
    """{"train_data_path": words, ...} of the splits in the file. Raises ValueError likewise."""
    try:
        entries = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(entries, dict) or not entries.get("train"):
        raise ValueError('is not a JSON object with "train" corpora: {"train": [...], "valid": [...], "test": [...]}')
    unknown = sorted(set(entries) - set(SPLITS))
    if unknown:
        raise ValueError(f"has the key {unknown[0]!r}; there are train, valid and test")
    values = {}
    for name, words in entries.items():
        words = words.split() if isinstance(words, str) else words
        if name == "valid" and isinstance(words, dict):
            words = words_of_named_sets(words)
        if words is None or words == []:
            continue
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            raise ValueError(f"has under {name!r} no list of prefixes and weights")
        values[f"{name}_data_path"] = [str(word) for word in words]
    return values


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # a byte order mark, as Windows editors write, is not text
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8") from None
