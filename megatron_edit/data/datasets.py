"""Samples of one split: megatron-core's GPTDataset for one epoch, in file order.

Order is not this file's business (see order.py). Therefore each rank builds its index by itself, in memory,
and keeps no index files: without shuffling the index is a function of the document lengths alone, 20 million
documents take 0.15 s (one core, 4 + 8 bytes a document and sample). Nothing has to be waited for, shared
between nodes, renamed, or noticed to be stale.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_edit.data.blend import SplitSource, parse_blend, parse_split, resolve_sources
from megatron_edit.data.check import NO_ENDS, DocumentEnds, check_data_files
from megatron_edit.data.errors import DataError
from megatron_edit.data.order import SampleOrder, evaluation_order, mix64
from megatron_edit.data.tokenizers import Tokenizer

__all__ = [
    "DocumentEnds",
    "FileOrderGPTDataset",
    "MockDataset",
    "SampleDataset",
    "SplitDatasets",
    "build_mock_split",
    "build_split",
    "check_data_files",
    "parse_blend",
    "parse_split",
    "resolve_sources",
]

Sample = dict[str, torch.Tensor]


class SampleDataset(Protocol):
    """Sample i: tokens, labels, position_ids [S] int64 and loss_mask [S] float32; label t follows token t.

    With --reset-attention-mask also document_ids, with --reset-position-ids reset_position_ids ([S] int64).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class _CoreTokenizer:
    """The little of a tokenizer that megatron-core's datasets ask for.

    No pad id on purpose: every sample is full, and megatron-core would take the loss of each token that has
    the pad id, which for tokenizers that pad with their end id are the true end marks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod = -2 if tokenizer.eod_id is None else tokenizer.eod_id  # -2: equal to no id
        self.unique_identifiers = OrderedDict(fingerprint=tokenizer.fingerprint)


def number_documents(tokens: torch.Tensor, eod_id: int) -> torch.Tensor:
    """tokens [S] -> number [S] int64 of the document, counted in the sample from 0; an end id ends its own."""
    ends = torch.cumsum(tokens == eod_id, dim=0)
    return torch.cat((ends.new_zeros(1), ends[:-1]))


def positions_in_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Numbers of documents [S], ascending -> position [S] int64 of each token in its document's part here."""
    positions = torch.arange(len(document_ids))
    starts = torch.searchsorted(document_ids, document_ids)  # first token of the same document
    return positions - starts


class FileOrderGPTDataset(GPTDataset):
    """One split of one corpus; sample i is the tokens i*S .. i*S + S of its documents, laid end to end."""

    document_ends = NO_ENDS

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, range]:
        sample_index = helpers.build_sample_idx(
            self.dataset.sequence_lengths,
            self.indices,
            self.config.sequence_length,
            1,  # epoch
            int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64)),
        )
        return self.indices, sample_index, range(len(sample_index) - 1)

    def __getitem__(self, index: int) -> Sample:
        """What GPTDataset gives, read as one piece: the documents of a split lie side by side in the file (the checks
        of `IndexedFiles` include it), and megatron-core collects a sample document by document."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length, stored = self.config.sequence_length, self.dataset.index
        first_byte = int(stored.sequence_pointers[self.indices[0]])
        offset = first_byte + index * length * stored.dtype_size
        ids = self.dataset.bin_reader.read(stored.dtype, length + 1, offset)  # [S + 1]
        text = torch.from_numpy(ids.astype(np.int64))
        if int(text.max()) >= self.config.tokenizer.vocab_size:
            raise DataError(
                f"{self.dataset_path}.bin has token id {int(text.max())} in sample {index}, the vocabulary ends at "
                f"{self.config.tokenizer.vocab_size - 1}"
            )
        sample = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(length, dtype=torch.float32),
            "position_ids": torch.arange(length),
        }
        if self.document_ends.eod_mask_loss:
            sample["loss_mask"][sample["tokens"] == self.config.tokenizer.eod] = 0.0
        if self.document_ends.reset_attention_mask or self.document_ends.reset_position_ids:
            document_ids = number_documents(sample["tokens"], self.config.tokenizer.eod)
            if self.document_ends.reset_attention_mask:
                sample["document_ids"] = document_ids
            if self.document_ends.reset_position_ids:
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
    source: SplitSource, *, seq_length: int, tokenizer: Tokenizer, document_ends: DocumentEnds = NO_ENDS
) -> SplitDatasets:
    """Opens the datasets of one split; `check_data_files` has looked at the files before.

    Raises:
        DataError: a flag of `document_ends` with a tokenizer that has no end id, or a corpus without a sample.
    """
    if document_ends.flags and tokenizer.eod_id is None:
        raise DataError(f"{document_ends.flags[0]} needs an end id, and the {tokenizer.name} given has none")
    datasets = []
    for prefix in source.blend.prefixes:
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=seq_length,
            blend=([prefix], None),
            split="1",
            tokenizer=_CoreTokenizer(tokenizer),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=document_ends.eod_mask_loss,
            create_attention_mask=False,
        )
        indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
        first, last = source.documents(len(indexed.sequence_lengths))
        documents = np.arange(first, last, dtype=np.int32)
        if indexed.sequence_lengths[documents].sum(dtype=np.int64) <= seq_length:
            if source.blend.weights is not None:
                raise DataError(f"{source.flag}: the split of {prefix} is shorter than one sample")
            continue
        dataset = FileOrderGPTDataset(indexed, prefix, documents, None, Split.train, config)
        dataset.document_ends = document_ends
        datasets.append(dataset)
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
