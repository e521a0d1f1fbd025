"""Looking into corpora and into the order of samples: what tools/inspect_data.py prints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles, Manifest
from megatron_edit.data.order import SampleOrder, replica_positions
from megatron_edit.data.tokenizers import Tokenizer

SHOWN_IDS = 8


def corpus_lines(prefix: str) -> Iterator[str]:
    """Statistics of a corpus. Raises DataError when its files are missing or damaged."""
    files = IndexedFiles(prefix)
    lengths = np.sort(files.lengths)
    documents = len(files.document_marks) - 1
    yield f"{prefix}: {documents} documents, {files.total_tokens} tokens, ids of {files.dtype.itemsize} bytes"
    if len(lengths) != documents:
        yield f"  {len(lengths)} sequences"
    shares = ", ".join(f"{name} {lengths[int(at * (len(lengths) - 1))]}" for name, at in QUANTILES)
    yield f"  tokens of a document: {shares}, mean {files.total_tokens / len(lengths):.1f}"
    manifest = Manifest.read(prefix)
    if manifest is None:
        yield "  no manifest: made by another tool"
        return
    yield (
        f"  {manifest.tokenizer}, vocabulary {manifest.vocab_size}, fingerprint "
        f"{manifest.tokenizer_fingerprint[:12]}, largest id {manifest.largest_token_id}, "
        f"{'with' if manifest.append_eod else 'without'} end ids"
    )
    yield (
        f"  {manifest.skipped_documents} empty documents skipped, {manifest.failed_documents} left out for errors, "
        f"{manifest.replaced_characters} characters replaced"
    )
    if manifest.marked_documents:
        became = "its ids" if manifest.parse_special_tokens else "plain text"
        yield f"  {manifest.marked_documents} documents spell special tokens of the tokenizer: they became {became}"


QUANTILES = (("least", 0.0), ("median", 0.5), ("9 of 10 up to", 0.9), ("most", 1.0))


def document_lines(prefix: str, document: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Ids of a document, or its text with a tokenizer. Raises DataError when there is no such document."""
    files = IndexedFiles(prefix)
    documents = len(files.document_marks) - 1
    if not 0 <= document < documents:
        raise DataError(f"--document {document}: {prefix} has documents 0 to {documents - 1}")
    begin, end = files.documents_range(*files.document_marks[document : document + 2].tolist())
    ids = files.tokens[begin:end].tolist()
    yield f"document {document}: tokens {begin} to {end - 1}"
    yield tokenizer.detokenize(ids) if tokenizer is not None else " ".join(map(str, ids))


def order_lines(
    order: SampleOrder, names: Sequence[str], position: int, count: int, samples_per_epoch: int
) -> Iterator[str]:
    """What comes at the positions position .. position + count - 1. `names`: of the datasets."""
    positions = np.arange(position, position + count, dtype=np.int64)
    ids = order.sample_ids(positions).tolist()
    for k, dataset, sample, sample_id in zip(positions, *order.lookup(positions), ids, strict=True):
        epoch = "" if order.weights is not None else f"epoch {k // samples_per_epoch}, "
        yield f"position {k}: {epoch}id {sample_id} = sample {sample} of {names[dataset]}"


def replica_lines(
    order: SampleOrder, consumed_samples: int, global_batch_size: int, num_replicas: int
) -> Iterator[str]:
    """The ids that each replica takes in the iteration after `consumed_samples`. Raises DataError when they do not
    divide the batch."""
    for replica in range(num_replicas):
        mine = replica_positions(consumed_samples, global_batch_size, num_replicas, replica)
        ids = order.sample_ids(np.arange(mine.start, mine.stop, dtype=np.int64)).tolist()
        more = f" ... ({len(ids)} in all)" if len(ids) > SHOWN_IDS else ""
        shown = " ".join(map(str, itertools.islice(ids, SHOWN_IDS)))
        yield f"replica {replica}: positions {mine.start} to {mine.stop - 1}, ids {shown}{more}"
