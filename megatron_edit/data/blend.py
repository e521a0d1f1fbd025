"""--data-path, --split and their relatives, parsed strictly. Pure: strings and numbers, no file is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_edit.config.values import parse_named_sets
from megatron_edit.data.errors import DataError

SPLITS = ("train", "valid", "test")
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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


@dataclass(frozen=True)
class SplitSource:
    """Where one split comes from: of each corpus of `blend` the documents between two fractions."""

    flag: str
    blend: Blend
    start: float = 0.0
    end: float = 1.0

    def documents(self, count: int) -> tuple[int, int]:
        """First document and the one after the last, of a corpus of `count`, in file order; rounded as
        megatron-core rounds, so that the same --split gives the same documents."""
        return round(self.start * count), round(self.end * count)


def parse_split(text: str, flag: str = "--split") -> tuple[float, float, float]:
    """Shares of training, validation and test, scaled to a sum of 1: "99.5,0.5" is (0.995, 0.005, 0).

    One to three numbers with commas between them; absent ones are 0.

    Raises:
        DataError: a field that is not a plain number (sign, letter, nan, nothing), more than three, all 0.
    """
    fields = [field.strip() for field in text.split(",")]
    if len(fields) > len(SPLITS):
        raise DataError(f"{flag} {text}: {len(fields)} numbers, but there are three splits (training, "
                        "validation, test); 99,1,0 would work")  # fmt: skip
    for field in fields:
        if not _NUMBER.fullmatch(field) or float(field) == float("inf"):
            raise DataError(f"{flag} {text}: {field!r} is not a number from 0 up; 99,1,0 would work")
    shares = [float(field) for field in fields] + [0.0] * (len(SPLITS) - len(fields))
    total = sum(shares)
    if total == 0 or total == float("inf"):
        raise DataError(f"{flag} {text}: the shares sum to {total:g}; 99,1,0 would work")
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_blend(fields: str | Sequence[str], flag: str = "--data-path") -> Blend:
    """PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...; a single string is split at blanks.

    A first field that is a number means weights. A prefix that looks like a number is written ./123.

    Raises:
        DataError: nothing given, a weight that is not above 0 or not finite, a number in the place of a
            prefix or the other way round, one prefix twice.
    """
    fields = fields.split() if isinstance(fields, str) else [str(field) for field in fields]
    shown = f"{flag} {' '.join(fields)}"
    if not fields:
        raise DataError(f"{flag} is empty; give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights: list[Fraction] | None = None
    prefixes = fields
    if _like_number(fields[0]):
        if len(fields) % 2:
            raise DataError(f"{shown}: {len(fields)} fields, but weights and prefixes come in pairs")
        weights, prefixes = [_weight(field, shown) for field in fields[::2]], fields[1::2]
    for prefix in prefixes:
        if _like_number(prefix):
            raise DataError(
                f"{shown}: {prefix} stands where a prefix should; give every corpus a weight before it "
                "(WEIGHT PREFIX WEIGHT PREFIX ...) or none"
            )
    twice = {prefix for prefix in prefixes if prefixes.count(prefix) > 1}
    if twice:
        raise DataError(f"{shown}: {sorted(twice)[0]} is there more than once")
    return Blend(tuple(prefixes), None if weights is None else tuple(weights))


def _like_number(field: str) -> bool:
    """Also nan, inf, signs and underscores: what float() reads was meant as a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def _weight(field: str, shown: str) -> Fraction:
    if not _NUMBER.fullmatch(field) or Fraction(field) == 0:
        reason = "is not a weight" if not _like_number(field) else "is not above 0 and finite"
        raise DataError(f"{shown}: {field!r} {reason}; 0.3 A 0.7 B would work")
    return Fraction(field)


def resolve_sources(
    *,
    data_path: Sequence[str] | None = None,
    split: str | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
) -> dict[str, SplitSource | None]:
    """Source of each split ("train", "valid", "test"; None where there is none).

    Either --data-path with --split, or a path for each split; `split` does nothing in the second case. Of several named
    validation sets each is a split of its own, "valid:NAME" in the place of "valid", see `validation_splits`.

    Raises:
        DataError: both ways or none given, no training data, or what the parsers raise.
    """
    per_split: Mapping[str, Sequence[str] | None] = {
        "train": train_data_path, "valid": valid_data_path, "test": test_data_path
    }  # fmt: skip
    given = [name for name in SPLITS if per_split[name]]
    if data_path and given:
        raise DataError(f"--data-path and --{given[0]}-data-path exclude each other")
    sources: dict[str, SplitSource | None] = dict.fromkeys(SPLITS)
    if not data_path:
        if "train" not in given:
            raise DataError("no training data: give --data-path, or --train-data-path, or --mock-data")
        for name in given:
            flag = f"--{name}-data-path"
            if name == "valid":
                sources |= _validation_sources(per_split[name] or (), flag)
            else:
                sources[name] = SplitSource(flag, parse_blend(per_split[name] or (), flag))
        return sources
    blend = parse_blend(data_path)
    start = 0.0
    for name, share in zip(SPLITS, parse_split(split or "969,30,1"), strict=True):
        if share:
            sources[name] = SplitSource("--data-path", blend, start, start + share)
        start += share
    if sources["train"] is None:
        raise DataError(f"--split {split}: the share of training is 0")
    return sources


def _validation_sources(words: Sequence[str], flag: str) -> dict[str, SplitSource]:
    try:
        sets = parse_named_sets([str(word) for word in words])
    except ValueError as error:
        raise DataError(f"{flag} {' '.join(map(str, words))} {error}") from None
    sources = {}
    for name, blend in sets.items():
        shown = f"{flag} {name}=" if name else flag
        sources[f"valid:{name}" if name else "valid"] = SplitSource(shown, parse_blend(blend, shown))
    return sources


def validation_splits(sources: Mapping[str, SplitSource | None]) -> list[str]:
    """The splits to validate on that have a source: "valid", or "valid:NAME" of each set in the order given."""
    return [split for split, source in sources.items() if source is not None and is_validation(split)]


def is_validation(split: str) -> bool:
    """Whether it is "valid", or a named set of it."""
    return split.partition(":")[0] == "valid"


def set_name(split: str) -> str | None:
    """NAME of "valid:NAME"; None of a split that is not a named set."""
    return split.partition(":")[2] or None
