"""Settings that are small languages: the shares of --split, the blend of --data-path, named validation sets.

The only parsers of them: checks and data read the same. Pure: strings and numbers, no file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # no sign, no underscore, no nan


@dataclass(frozen=True)
class Blend:
    """Corpora, and a weight for each or none at all (then the corpora count as one)."""

    prefixes: tuple[str, ...]
    weights: tuple[Fraction, ...] | None = None

    def __str__(self) -> str:
        if self.weights is None:
            return " ".join(self.prefixes)
        total = sum(self.weights, Fraction(0))
        pairs = zip(self.weights, self.prefixes, strict=True)
        return " ".join(f"{float(weight / total):.6g} {prefix}" for weight, prefix in pairs)


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of (training, validation, test), scaled to a sum of 1: "99.5,0.5" is (0.995, 0.005, 0).

    `text`: one to three numbers with commas; missing ones are 0. Raises ValueError that names the bad field: a sign, a
    letter, nan, nothing; more than three; all 0.
    """
    fields = [field.strip() for field in text.split(",")]
    if len(fields) > 3:
        raise ValueError(f"has {len(fields)} fields, but there are three: training,validation,test, like 969,30,1")
    for field in fields:
        if not _is_number(field):
            raise ValueError(f"has the field {field!r}: shares are plain numbers from 0 on, like 969,30,1")
    shares = [float(field) for field in fields] + [0.0] * (3 - len(fields))
    total = sum(shares)
    if total == 0 or total == inf:
        raise ValueError(f"has shares that sum to {total:g}: at least one must be above 0, like 969,30,1")
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_blend(fields: Sequence[str]) -> Blend:
    """PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ...

    A first field that is a number means weights. A prefix that looks like a number is written ./123. Raises ValueError
    that names the bad field: a weight that is not a plain number above 0, a number in the place of a prefix or the
    other way round, one prefix twice, no field.
    """
    if not fields:
        raise ValueError("is empty: give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights: Sequence[str] | None = None
    prefixes: Sequence[str] = fields
    if _like_number(fields[0]):
        if len(fields) % 2:
            raise ValueError(
                f"has {len(fields)} fields, and the first, {fields[0]}, is a number: weights and prefixes come in "
                "pairs, like 0.3 A 0.7 B; a prefix that looks like a number is written ./123"
            )
        weights, prefixes = fields[::2], prefixes[1::2]
    for prefix in prefixes:
        if _like_number(prefix):
            raise ValueError(
                f"has {prefix!r} where a prefix is expected: give every corpus a weight before it, like 0.3 A 0.7 B, "
                "or none"
            )
    if twice := sorted(prefix for prefix in set(prefixes) if prefixes.count(prefix) > 1):
        raise ValueError(f"has {twice[0]} more than once: give a corpus once, with the sum of its weights")
    return Blend(tuple(prefixes), None if weights is None else tuple(_weight(field) for field in weights))


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


def _weight(field: str) -> Fraction:
    if not _is_number(field) or float(field) == 0:
        raise ValueError(f"has the weight {field!r}: weights are plain numbers above 0, like 0.3 A 0.7 B")
    return Fraction(field)


def _is_number(field: str) -> bool:
    """A plain finite number, as all programs read it."""
    return _NUMBER.fullmatch(field) is not None and float(field) != inf


def _like_number(field: str) -> bool:
    """Also nan, inf, signs and underscores: what float() reads was meant as a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True
