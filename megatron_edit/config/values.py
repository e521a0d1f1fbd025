"""Settings that are small languages: the shares of --split, the blend of --data-path, named validation sets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of (training, validation, test), each from 0 to 1 with sum 1; missing ones are 0.

    `text`: one to three numbers with commas, e.g. "969,30,1". Raises ValueError that names the bad field.
    """
    parts = text.split(",")
    if len(parts) > 3:
        raise ValueError(f"has {len(parts)} fields, but there are three: training,validation,test, like 969,30,1")
    shares = [_number(part) for part in parts] + [0.0] * (3 - len(parts))
    for part, share in zip(parts, shares, strict=False):
        if share is None or share < 0:
            raise ValueError(f"has the field {part.strip()!r}: shares are numbers from 0 on, like 969,30,1")
    total = sum(share for share in shares if share is not None)
    if total <= 0:
        raise ValueError("has only zeros: at least one share must be above 0, like 969,30,1")
    train, valid, test = (share / total for share in shares if share is not None)
    return train, valid, test


def parse_blend(entries: Sequence[str]) -> list[tuple[float, str]]:
    """(weight, prefix) of each corpus, weights with sum 1; without weights all are equal.

    `entries`: PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ... Raises ValueError that names the bad field.
    """
    numbers = [_number(entry) for entry in entries]
    if len(entries) == 1 or all(not _looks_like_number(entry) for entry in entries):
        return [(1.0 / len(entries), entry) for entry in entries]
    if len(entries) % 2:
        raise ValueError(
            f"has {len(entries)} fields: with weights they are WEIGHT PREFIX pairs, "
            "without weights no field is a number"
        )
    pairs = []
    for weight, text, prefix in zip(numbers[::2], entries[::2], entries[1::2], strict=True):
        if weight is None or weight <= 0:
            raise ValueError(f"has the weight {text!r} for {prefix!r}: weights are numbers above 0")
        if _looks_like_number(prefix):
            raise ValueError(f"has {prefix!r} where the prefix for the weight {text} is expected")
        pairs.append((weight, prefix))
    total = sum(weight for weight, _ in pairs)
    return [(weight / total, prefix) for weight, prefix in pairs]


def parse_named_sets(entries: Sequence[str]) -> dict[str, list[str]]:
    """{name: the words of its blend} of NAME=PREFIX ... or NAME=WEIGHT PREFIX WEIGHT PREFIX ... NAME=...; without any
    name {"": entries}, one set.

    A word begins a set where it has a "=" with no "/" before it; a prefix that looks like that is written ./a=b. Raises
    ValueError that names the word: a bad name, one that stands twice, a set of nothing, a word before the first name.
    """
    sets: dict[str, list[str]] = {}
    words: list[str] | None = None
    for entry in entries:
        name, equals, first = entry.partition("=")
        if not equals or "/" in name:
            if words is None:
                sets[""] = words = []
            words.append(entry)
            continue
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"has the name {name!r}: names are letters, digits, '_', '-' and '.', a letter first, as wiki=PREFIX; "
                f"a prefix with '=' is written ./{entry}"
            )
        if name in sets:
            raise ValueError(f"has the name {name} twice; one set of several corpora is {name}=PREFIX PREFIX ...")
        if not first:
            raise ValueError(f"has nothing behind {entry}: write {name}=PREFIX")
        sets[name] = words = [first]
    if "" in sets and len(sets) > 1:
        raise ValueError(f"has {sets[''][0]!r} before the first NAME=: give every set a name, or none")
    return sets


def words_of_named_sets(sets: Mapping[Any, Any]) -> list[str]:
    """A mapping of a file, {name: prefix, or list of prefixes and weights}, as `parse_named_sets` takes it.

    Raises ValueError for a name or a value that it cannot have.
    """
    if not sets:
        raise ValueError("is an empty mapping: write {NAME: PREFIX}, or leave the key out")
    words = []
    for name, blend in sets.items():
        items = blend if isinstance(blend, list) else [blend]
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"has the name {name!r}: names are letters, digits, '_', '-' and '.', a letter first")
        if not items or not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise ValueError(f"has under {name} no list of prefixes and weights, but {blend!r}")
        first, *rest = map(str, items)
        words += [f"{name}={first}", *rest]
    return words


def _number(text: str) -> float | None:
    """A finite number, else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _looks_like_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
