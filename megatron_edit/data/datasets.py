"""Samples of one split: those of megatron-core's GPTDataset for one epoch, in file order.

Order is not this file's business (see order.py). Without shuffling, a sample is one piece of the file, at a place
that follows from its number. So there is no index of samples: nothing has to be built, waited for, shared between
nodes, renamed, or noticed to be stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from megatron_edit.data.blend import SplitSource, resolve_sources
from megatron_edit.data.check import NO_ENDS, DocumentEnds, check_data_files, samples_of
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles
from megatron_edit.data.open_files import OpenFiles, TokenFile
from megatron_edit.data.order import SampleOrder, evaluation_order, mix64
from megatron_edit.data.tokenizers import Tokenizer

__all__ = [
    "CorpusDataset",
    "DocumentEnds",
    "MockDataset",
    "SampleDataset",
    "SplitDatasets",
    "build_mock_split",
    "build_split",
    "check_data_files",
    "resolve_sources",
]

Sample = dict[str, torch.Tensor]


class SampleDataset(Protocol):
    """Sample i: tokens, labels, position_ids [S] int64 and loss_mask [S] float32; label t follows token t.

    With --reset-attention-mask also document_ids, with --reset-position-ids reset_position_ids ([S] int64).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def number_documents(tokens: torch.Tensor, eod_id: int) -> torch.Tensor:
    """tokens [S] -> number [S] int64 of the document, counted in the sample from 0; an end id ends its own."""
    ends = torch.cumsum(tokens == eod_id, dim=0)
    return torch.cat((ends.new_zeros(1), ends[:-1]))


def positions_in_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Numbers of documents [S], ascending -> position [S] int64 of each token in its document's part here."""
    positions = torch.arange(len(document_ids))
    starts = torch.searchsorted(document_ids, document_ids)  # first token of the same document
    return positions - starts


class CorpusDataset:
    """One split of one corpus; sample i is the tokens i*S .. i*S + S of its documents, laid end to end: neighbours
    share one token, a rest that is too short is dropped.

    Args:
        tokens: the ids of the corpus, of `dtype`.
        begin, end: range of the split in them; its documents lie side by side (the checks of `IndexedFiles` say so).
    """

    def __init__(
        self, tokens: TokenFile, dtype: np.dtype, begin: int, end: int, *, seq_length: int, tokenizer: Tokenizer,
        document_ends: DocumentEnds = NO_ENDS,
    ) -> None:  # fmt: skip
        self.tokens, self._dtype, self._begin = tokens, dtype, begin
        self._num_samples, self._seq_length = samples_of(end - begin, seq_length), seq_length
        self._vocab_size, self._document_ends = tokenizer.vocab_size, document_ends
        self._eod = -2 if tokenizer.eod_id is None else tokenizer.eod_id  # -2: equal to no id

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError: the file is not what it was, or holds an id outside the vocabulary."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        length = self._seq_length
        offset = (self._begin + index * length) * self._dtype.itemsize
        ids = self.tokens.read(self._dtype, length + 1, offset)  # [S + 1]
        for wrong in (int(ids.max()), int(ids.min())):
            if not 0 <= wrong < self._vocab_size:
                raise DataError(
                    f"{self.tokens.path} has token id {wrong} in sample {index}, the vocabulary ends at "
                    f"{self._vocab_size - 1}{self.tokens.changed()}"
                )
        text = torch.from_numpy(ids.astype(np.int64))
        sample = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(length, dtype=torch.float32),
            "position_ids": torch.arange(length),
        }
        ends = self._document_ends
        if ends.eod_mask_loss:
            sample["loss_mask"][sample["tokens"] == self._eod] = 0.0
        if ends.reset_attention_mask or ends.reset_position_ids:
            document_ids = number_documents(sample["tokens"], self._eod)
            if ends.reset_attention_mask:
                sample["document_ids"] = document_ids
            if ends.reset_position_ids:
                sample["reset_position_ids"] = positions_in_documents(document_ids)
        return sample


@dataclass(frozen=True)
class SplitDatasets:
    """The datasets of one split and the weights of their blend."""

    datasets: tuple[SampleDataset, ...]
    weights: tuple[Fraction, ...] | None = None

    @property
    def sizes(self) -> list[int]:
        return [len(dataset) for dataset in self.datasets]

    def training_order(self, seed: int) -> SampleOrder:
        return SampleOrder(self.sizes, self.weights, seed=seed)

    def evaluation_order(self) -> SampleOrder:
        return evaluation_order(self.sizes, self.weights)


def build_split(
    source: SplitSource, *, seq_length: int, tokenizer: Tokenizer, document_ends: DocumentEnds = NO_ENDS,
    files: OpenFiles | None = None,
) -> SplitDatasets:  # fmt: skip
    """Opens the datasets of one split; `check_data_files` has looked at the files before.

    files: descriptors that all splits share.

    Raises:
        DataError: a flag of `document_ends` with a tokenizer that has no end id, files that are not as they were
            checked, or a corpus without a sample.
    """
    if document_ends.flags and tokenizer.eod_id is None:
        raise DataError(f"{document_ends.flags[0]} needs an end id, and the {tokenizer.name} given has none")
    files = OpenFiles() if files is None else files
    datasets = []
    for prefix in source.blend.prefixes:
        indexed = IndexedFiles(prefix)
        begin, end = indexed.documents_range(*source.documents(len(indexed.lengths)))
        if samples_of(end - begin, seq_length) == 0:
            if source.blend.weights is not None:
                raise DataError(f"{source.flag}: the split of {prefix} is shorter than one sample")
            continue
        tokens = TokenFile(Path(f"{prefix}.bin"), indexed.total_tokens * indexed.dtype.itemsize, files)
        datasets.append(
            CorpusDataset(
                tokens, indexed.dtype, begin, end, seq_length=seq_length, tokenizer=tokenizer,
                document_ends=document_ends,
            )
        )  # fmt: skip
    if not datasets:
        raise DataError(f"{source.flag} {source.blend}: the split is shorter than one sample of {seq_length}")
    return SplitDatasets(tuple(datasets), source.blend.weights)


class MockDataset:
    """Token sequences that a model can learn, a pure function of (seed, index).

    Sample i counts up from a random start in steps of 1 to 4 inside the first 256 ids of the vocabulary; one
    token in sixteen is random instead.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int = 0) -> None:
        assert num_samples > 0 and seq_length > 0 and vocab_size > 0
        self.num_samples, self.seq_length, self.seed = num_samples, seq_length, seed
        self.used_vocab_size = min(vocab_size, 256)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        positions = np.arange(self.seq_length + 1, dtype=np.uint64)
        key = mix64(np.array([self.seed], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(index))
        start, step = int(key[0] >> np.uint64(32)), 1 + int(key[0] & np.uint64(3))
        draws = mix64(mix64(positions + np.uint64(1)) ^ key)
        counting = (np.uint64(start) + np.uint64(step) * positions) % np.uint64(self.used_vocab_size)
        noise = (draws >> np.uint64(8)) % np.uint64(self.used_vocab_size)
        ids = np.where(draws % np.uint64(16) == 0, noise, counting).astype(np.int64)
        return {
            "tokens": torch.from_numpy(ids[:-1].copy()),
            "labels": torch.from_numpy(ids[1:].copy()),
            "loss_mask": torch.ones(self.seq_length, dtype=torch.float32),
            "position_ids": torch.arange(self.seq_length, dtype=torch.int64),
        }


def build_mock_split(
    name: str, *, seq_length: int, vocab_size: int, seed: int, num_samples: int = 1 << 20
) -> SplitDatasets:
    """--mock-data: the split "train", "valid" or "test", each with sequences of its own."""
    number = ("train", "valid", "test").index(name)
    return SplitDatasets((MockDataset(num_samples, seq_length, vocab_size, seed=3 * seed + number),))
