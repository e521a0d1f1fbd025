"""Several corpora laid end to end into one: what tools/merge_corpora.py does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedFiles, Manifest


def merge_corpora(
    prefixes: Sequence[str], output_prefix: str, *, left_out: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Writes OUTPUT_PREFIX.bin, .idx and .manifest.json; returns (documents, tokens). What preprocessing all their
    texts in one go would have written, byte for byte. Documents of several sequences, which other tools write, stay.

    Ids of different width take the width that holds them all. A manifest is written when all corpora have one.

    Args:
        left_out: (empty documents, documents left out for errors) of all, where the manifests do not tell of some.

    Raises:
        DataError: a corpus is missing or damaged, is named twice or is the output itself; they were made with different
            tokenizers or with and without --append-eod; some have a manifest and some have none.
    """
    _check_names(prefixes, output_prefix)
    # Looked at one after the other, and opened again to be copied: there may be more than may be open at a time.
    dtype = np.result_type(*[IndexedFiles(prefix).dtype for prefix in prefixes])
    manifests = [Manifest.read(prefix) for prefix in prefixes]
    known = [manifest for manifest in manifests if manifest is not None]
    if known and len(known) < len(manifests):
        raise DataError(
            f"{prefixes[manifests.index(None)]} has no manifest and others have one: whether all were made with one "
            "tokenizer is not known. If they were, move the manifests away"
        )
    for prefix, manifest in zip(prefixes[1:], known[1:], strict=False):
        _check_alike(prefixes[0], known[0], prefix, manifest)

    documents = 0
    with IndexedWriter(output_prefix, dtype) as writer:
        for prefix in prefixes:
            corpus = IndexedFiles(prefix)
            writer.add_sequences(corpus.tokens, corpus.lengths, corpus.document_marks)
            documents += len(corpus.document_marks) - 1
        writer.write_index()
        if known:
            skipped, failed = left_out or (
                sum(manifest.skipped_documents for manifest in known),
                sum(manifest.failed_documents for manifest in known),
            )
            writer.write_manifest(_merged(known, writer, skipped, failed))
        writer.finish()
        return documents, writer.total_tokens


def _check_names(prefixes: Sequence[str], output_prefix: str) -> None:
    if not prefixes:
        raise DataError("--input is empty")
    twice = [prefix for prefix in prefixes if list(prefixes).count(prefix) > 1]
    if twice:
        raise DataError(f"--input {twice[0]} is there more than once")
    if output_prefix in prefixes:
        raise DataError(f"--output-prefix {output_prefix} is one of the corpora to merge")


def _merged(known: Sequence[Manifest], writer: IndexedWriter, skipped: int, failed: int) -> Manifest:
    """The manifest of what `writer` holds; `skipped`, `failed`: documents that are not in it."""
    return replace(
        known[0],
        largest_token_id=max(manifest.largest_token_id for manifest in known),
        documents=len(writer.lengths),
        tokens=writer.total_tokens,
        sampled_sha256=writer.sampled_sha256(),
        skipped_documents=skipped,
        replaced_characters=sum(manifest.replaced_characters for manifest in known),
        failed_documents=failed,
        parse_special_tokens=any(manifest.parse_special_tokens for manifest in known),
        marked_documents=sum(manifest.marked_documents for manifest in known),
    )


def _check_alike(first: str, known: Manifest, prefix: str, manifest: Manifest) -> None:
    if manifest.tokenizer_fingerprint != known.tokenizer_fingerprint:
        raise DataError(
            f"{prefix} was made with another tokenizer than {first}: {manifest.tokenizer}, vocabulary "
            f"{manifest.vocab_size}, fingerprint {manifest.tokenizer_fingerprint[:12]}; and {known.tokenizer}, "
            f"{known.vocab_size}, {known.tokenizer_fingerprint[:12]}"
        )
    if manifest.append_eod != known.append_eod:
        with_eod, without = (prefix, first) if manifest.append_eod else (first, prefix)
        raise DataError(f"{with_eod} was made with --append-eod and {without} without")


def remove_corpus(prefix: str) -> None:
    """Deletes the files of a corpus, the index first."""
    for suffix in (".idx", ".bin", ".manifest.json"):
        Path(f"{prefix}{suffix}").unlink(missing_ok=True)
