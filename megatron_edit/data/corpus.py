"""Text to .bin/.idx: what tools/preprocess_data.py does.

Rules, the same for every tokenizer and every number of workers:
- A document is a text of a JSON line (one corpus for each key), or of a plain text file (see TextUnit).
- Documents without a character other than white space are left out and counted, and so are those that the
  tokenizer turns into nothing. Blank lines of a JSON-lines file are passed over.
- A document becomes the ids of its text, and one end id after them with --append-eod. Nothing else.
- What UTF-8 cannot spell (broken bytes in a file, lone surrogates in JSON) becomes U+FFFD, counted. A byte
  order mark at the start of a file is dropped.
- A broken JSON line, or one without the key, ends the work, naming file and line; no file is left behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import IndexedWriter, token_dtype
from megatron_edit.data.tokenizers import Tokenizer, build_tokenizer, replace_surrogates

# One file one document, or cut at blank lines, or line by line.
TextUnit = Literal["file", "paragraph", "line"]
BATCH_BYTES = 1 << 18


@dataclass(frozen=True)
class TokenizerSpec:
    """What `build_tokenizer` needs; travels to the workers, which build their own."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None

    def build(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, self.tokenizer_model, self.vocab_size)


@dataclass(frozen=True)
class RawBatch:
    """Documents that are not yet decoded: lines of a JSON-lines file, or pieces of a text file."""

    file: str
    is_json: bool
    first_line: int
    documents: list[bytes]


@dataclass
class TokenBatch:
    """The documents of a batch for one key: ids one after the other, and lengths; what was left out."""

    tokens: np.ndarray
    lengths: list[int]
    skipped: int
    replaced: int


@dataclass
class CorpusReport:
    """What became of one key."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    skipped_documents: int = 0
    replaced_characters: int = 0

    def __str__(self) -> str:
        return (
            f"{self.prefix}: {self.documents} documents, {self.tokens} tokens; {self.skipped_documents} "
            f"empty documents skipped, {self.replaced_characters} characters replaced"
        )


def is_json_lines(path: str) -> bool:
    return path.endswith((".jsonl", ".json"))


def check_inputs(inputs: Sequence[str]) -> None:
    """Raises DataError unless every input is a readable file with something in it."""
    if not inputs:
        raise DataError("--input is empty")
    for name in inputs:
        path = Path(name)
        if not path.is_file():
            raise DataError(f"--input {name} is {'a folder' if path.is_dir() else 'no file'}")
        if not os.access(path, os.R_OK):
            raise DataError(f"--input {name} may not be read")
        if path.stat().st_size == 0:
            raise DataError(f"--input {name} is empty")


def read_raw(path: str, text_unit: TextUnit = "file") -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of each document of a file; the lines of a JSON-lines file as they are."""
    with open(path, "rb") as stream:
        start = stream.read(3)
        if start != b"\xef\xbb\xbf":
            stream.seek(0)
        if not is_json_lines(path) and text_unit == "file":
            yield 1, stream.read()
            return
        if is_json_lines(path) or text_unit == "line":
            for number, line in enumerate(stream, 1):
                yield number, line.rstrip(b"\r\n")
            return
        first, lines = 1, []
        for number, line in enumerate(stream, 1):
            if line.strip():
                lines.append(line)
            elif lines:
                yield first, b"".join(lines).rstrip(b"\r\n")
                lines = []
            if not lines:
                first = number + 1
        if lines:
            yield first, b"".join(lines).rstrip(b"\r\n")


def raw_batches(inputs: Sequence[str], text_unit: TextUnit) -> Iterator[RawBatch]:
    """All documents of the inputs in order, in batches of about BATCH_BYTES; no batch spans two files."""
    for path in inputs:
        batch = RawBatch(path, is_json_lines(path), 1, [])
        size = 0
        for number, document in read_raw(path, text_unit):
            if not batch.documents:
                batch = RawBatch(path, batch.is_json, number, [])
            batch.documents.append(document)
            size += len(document)
            # Only lines have numbers that can be counted on inside a batch.
            if size >= BATCH_BYTES or not (batch.is_json or text_unit == "line"):
                yield batch
                batch, size = RawBatch(path, batch.is_json, number + 1, []), 0
        if batch.documents:
            yield batch


def decode(raw: bytes) -> tuple[str, int]:
    """Text of UTF-8 bytes, and how many characters had to be replaced."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - raw.count("\ufffd".encode())


def document_texts(batch: RawBatch, key: str | None) -> Iterator[tuple[str, int] | None]:
    """(text, replaced characters) of each document; None for a blank line of a JSON-lines file.

    Raises:
        DataError: a line that is no JSON object, or has no string under `key`.
    """
    for number, raw in enumerate(batch.documents, batch.first_line):
        text, replaced = decode(raw)
        if batch.is_json:
            if not text.strip():
                yield None
                continue
            try:
                entry = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{batch.file}, line {number}: no JSON ({error})") from None
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
                found = f"keys {sorted(entry)}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
                if isinstance(entry, dict) and key in entry:
                    found = f"{key!r} is a {type(entry[key]).__name__}"
                raise DataError(f"{batch.file}, line {number}: no text under the key {key!r} ({found})")
            text = entry[key]
        text, surrogates = replace_surrogates(text)
        yield text, replaced + surrogates


def tokenize_batch(batch: RawBatch, keys: Sequence[str], tokenizer: Tokenizer, append_eod: bool) -> list[TokenBatch]:
    """Tokens of a batch for each key."""
    results = []
    for key in keys:
        ids: list[int] = []
        result = TokenBatch(np.empty(0), [], 0, 0)
        for entry in document_texts(batch, key):
            if entry is None:
                continue
            text, replaced = entry
            tokens = tokenizer.tokenize(text) if text.strip() else []
            if not tokens:
                result.skipped += 1
                continue
            if append_eod:
                assert tokenizer.eod_id is not None
                tokens.append(tokenizer.eod_id)
            ids.extend(tokens)
            result.lengths.append(len(tokens))
            result.replaced += replaced
        result.tokens = np.array(ids, dtype=token_dtype(tokenizer.vocab_size))
        results.append(result)
    return results


@dataclass
class _Worker:
    """A worker process' own tokenizer; set once by the initializer of the pool."""

    tokenizer: Tokenizer | None = field(default=None)


_WORKER = _Worker()


def _start_worker(spec: TokenizerSpec) -> None:
    _WORKER.tokenizer = spec.build()


def _work(batch: RawBatch, keys: Sequence[str], append_eod: bool) -> list[TokenBatch]:
    assert _WORKER.tokenizer is not None
    return tokenize_batch(batch, keys, _WORKER.tokenizer, append_eod)


def token_batches(
    batches: Iterator[RawBatch],
    keys: Sequence[str],
    spec: TokenizerSpec,
    tokenizer: Tokenizer,
    append_eod: bool,
    workers: int,
) -> Iterator[list[TokenBatch]]:
    """The batches in their order, tokenized here (one worker) or by `workers` processes that hold at most
    four batches each."""
    if workers == 1:
        for batch in batches:
            yield tokenize_batch(batch, keys, tokenizer, append_eod)
        return
    waiting: deque[Future[list[TokenBatch]]] = deque()
    # Started afresh, not forked: a tokenizer library may run threads in this process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (spec,))
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch, keys, append_eod))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"a worker ended unexpectedly (out of memory?); try fewer --workers than {workers}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    spec: TokenizerSpec,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    text_unit: TextUnit = "file",
    log_interval: int = 1000,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> list[CorpusReport]:
    """Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key ("text" for plain text files).

    The files get their names when all are complete. The result is byte-equal for every number of workers.

    Raises:
        DataError: an input, key, tokenizer or size that cannot be used (see the top of this file).
        RuntimeError: a worker process died.
    """
    check_inputs(inputs)
    if workers < 1 or log_interval < 1:
        raise DataError(f"--workers {workers} and --log-interval {log_interval} must be 1 or more")
    if not json_keys or len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: give each key once")
    plain = [name for name in inputs if not is_json_lines(name)]
    if plain and list(json_keys) != ["text"]:
        raise DataError(f"--json-keys is for .jsonl and .json files, {plain[0]} is plain text")
    tokenizer = spec.build()
    if append_eod and tokenizer.eod_id is None:
        raise DataError(f"--append-eod: the {tokenizer.name} given has no end id (eos_token); leave the flag out")

    reports = [CorpusReport(f"{output_prefix}_{key}_document") for key in json_keys]
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(IndexedWriter(report.prefix, dtype)) for report in reports]
        started, next_log = time.monotonic(), log_interval
        batches = raw_batches(inputs, text_unit)
        for results in token_batches(batches, json_keys, spec, tokenizer, append_eod, workers):
            for report, writer, result in zip(reports, writers, results, strict=True):
                writer.add_documents(result.tokens, result.lengths)
                report.documents += len(result.lengths)
                report.tokens += len(result.tokens)
                report.skipped_documents += result.skipped
                report.replaced_characters += result.replaced
            if reports[0].documents >= next_log:
                rate = reports[0].documents / max(time.monotonic() - started, 1e-9)
                log(f"{reports[0].documents} documents, {rate:.0f} a second")
                next_log = reports[0].documents + log_interval
        for report, writer in zip(reports, writers, strict=True):
            if report.documents == 0:
                raise DataError(f"no document is left for {report.prefix}: all {report.skipped_documents} are empty")
            writer.prepare(tokenizer, append_eod, report.skipped_documents, report.replaced_characters)
        for writer in writers:
            writer.finish()
    return reports
