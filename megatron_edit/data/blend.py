"""Which documents of which corpora each split reads, from --data-path, --split and their relatives. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_edit.config.values import Blend, parse_blend, parse_named_sets, parse_split
from megatron_edit.data.errors import DataError

SPLITS = ("train", "valid", "test")


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
        DataError: both ways or none given, no training data, or what `config/values.py` refuses.
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
                sources[name] = SplitSource(flag, _blend(flag, per_split[name] or ()))
        return sources
    blend, split = _blend("--data-path", data_path), split or "969,30,1"
    with _named(f"--split {split}"):
        shares = parse_split(split)
    start = 0.0
    for name, share in zip(SPLITS, shares, strict=True):
        if share:
            sources[name] = SplitSource("--data-path", blend, start, start + share)
        start += share
    if sources["train"] is None:
        raise DataError(f"--split {split}: the share of training is 0")
    return sources


def _validation_sources(words: Sequence[str], flag: str) -> dict[str, SplitSource]:
    words = [str(word) for word in words]
    with _named(f"{flag} {' '.join(words)}"):
        sets = parse_named_sets(words)
    sources = {}
    for name, blend in sets.items():
        shown = f"{flag} {name}=" if name else flag
        sources[f"valid:{name}" if name else "valid"] = SplitSource(shown, _blend(shown, blend))
    return sources


def _blend(flag: str, fields: Sequence[str]) -> Blend:
    fields = [str(field) for field in fields]
    with _named(f"{flag} {' '.join(fields)}"):
        return parse_blend(fields)


@contextmanager
def _named(flag_and_value: str) -> Iterator[None]:
    """A parser's ValueError becomes a DataError with the flag before it."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{flag_and_value} {error}") from None


def validation_splits(sources: Mapping[str, SplitSource | None]) -> list[str]:
    """The splits to validate on that have a source: "valid", or "valid:NAME" of each set in the order given."""
    return [split for split, source in sources.items() if source is not None and is_validation(split)]


def is_validation(split: str) -> bool:
    """Whether it is "valid", or a named set of it."""
    return split.partition(":")[0] == "valid"


def set_name(split: str) -> str | None:
    """NAME of "valid:NAME"; None of a split that is not a named set."""
    return split.partition(":")[2] or None
