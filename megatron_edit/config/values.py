"""Settings that are small languages: the shares of --split, the blend of --data-path."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
