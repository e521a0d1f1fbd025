"""The loss of a model that knows nothing but how often each token occurs: the bar a trained one must pass."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_edit.data.errors import DataError


def count_tokens(pieces: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """Occurrences [vocab_size] int64 of each id in pieces of ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for piece in pieces:
        found = np.bincount(piece, minlength=vocab_size)
        if len(found) > vocab_size:
            raise DataError(f"token id {len(found) - 1} is outside the vocabulary of {vocab_size}")
        counts += found
    return counts


def unigram_loss(train_counts: np.ndarray, validation_tokens: np.ndarray) -> float:
    """Mean of -ln p(token) in nats, with p = (count + 1) / (sum of counts + vocabulary) (add-one smoothing).

    Args:
        train_counts: [V] occurrences in the training split.
        validation_tokens: [n] ids that are predicted.

    Raises:
        DataError: no validation tokens, or an id outside the vocabulary.
    """
    if len(validation_tokens) == 0:
        raise DataError("a unigram loss needs validation tokens")
    counts = train_counts.astype(np.float64)
    logs = np.log(counts.sum() + len(counts)) - np.log1p(counts)  # [V] nats
    validation_counts = count_tokens([validation_tokens], len(counts))
    return float((logs * validation_counts).sum() / len(validation_tokens))
