"""Loss of a model over a corpus or a text, in windows of the length that training evaluates with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles
from megatron_edit.inference.start import Started


@dataclass(frozen=True)
class Perplexity:
    """Token-weighted. `seq_length`: tokens of a window, which is all that a token is predicted from; `loss`: nats a
    token; `bits_per_byte`: of the text, where it is known."""

    source: str
    tokens: int
    seq_length: int
    loss: float
    bits_per_byte: float | None = None

    @property
    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "perplexity": math.exp(min(self.loss, 700))}


def corpus_tokens(prefix: str, split: str, name: str) -> np.ndarray:
    """Ids of the split "train", "valid" or "test" of one corpus, document after document. Raises DataError."""
    source = resolve_sources(data_path=[prefix], split=split)[name]
    if source is None:
        raise DataError(f"--split {split} has no share for {name}; 0,100,0 would take all documents for valid")
    files = IndexedFiles(prefix)
    begin, end = files.documents_range(*source.documents(len(files.lengths)))
    return np.asarray(files.tokens[begin:end])


def perplexity(
    started: Started, tokens: np.ndarray, *, source: str, seq_length: int, batch_size: int,
    max_tokens: int | None = None, text_bytes: int | None = None,
) -> Perplexity:  # fmt: skip
    """Every token but the first is predicted once, from those before it in its window of `seq_length`.

    Windows begin where the one before ends, as the samples of a validation split do; the last may be shorter.
    `max_tokens`: predict only so many. `text_bytes`: of the whole text, for bits per byte.
    """
    predicted = min(len(tokens) - 1, max_tokens or len(tokens) - 1)
    if predicted < 1:
        raise DataError(f"{source} has {len(tokens)} tokens: nothing to predict")
    largest = int(tokens[: predicted + 1].max())
    if largest >= started.model.vocab_size:
        raise DataError(f"{source} has token id {largest}, the model knows ids below {started.model.vocab_size}")
    total = 0.0
    for window in _windows(tokens[: predicted + 1].astype(np.int64), seq_length, batch_size):
        scores, _ = started.model.log_probabilities(torch.from_numpy(window))
        total -= scores.double().sum().item()
    bits = total / math.log(2) / text_bytes if text_bytes and max_tokens is None else None
    return Perplexity(source, predicted, seq_length, total / predicted, bits)


def _windows(tokens: np.ndarray, seq_length: int, batch_size: int) -> Iterator[np.ndarray]:
    """[B, seq_length + 1] each, then one shorter row if something is left; neighbours share a token."""
    full = (len(tokens) - 1) // seq_length
    for first in range(0, full, batch_size):
        starts = range(first * seq_length, min(first + batch_size, full) * seq_length, seq_length)
        yield np.stack([tokens[start : start + seq_length + 1] for start in starts])
    if len(rest := tokens[full * seq_length :]) > 1:
        yield rest[None]


def text_tokens(started: Started, path: Path) -> tuple[np.ndarray, int]:
    """Ids of a text file as one document, and its bytes. Raises DataError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"--text-file {path}: {error.strerror}") from None
    return np.array(started.encode(content.decode("utf-8", errors="replace")), dtype=np.int64), len(content)
