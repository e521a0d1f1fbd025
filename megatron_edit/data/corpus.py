"""Text to .bin/.idx: what tools/preprocess_data.py does.

Rules, the same for every tokenizer and every number of workers and partitions:
- A document is a text of a JSON line or Parquet row (one corpus for each key), or of a plain text file (TextUnit).
- Documents without a character other than white space are left out and counted, and so are those that the
  tokenizer turns into nothing. Blank lines of a JSON-lines file are passed over.
- A document becomes the ids of its text, and one end id after them with --append-eod. Nothing else: a special token
  that a text spells is text, and counted; with --parse-special-tokens it becomes its id.
- Half of a surrogate pair, which JSON can spell and UTF-8 cannot, becomes U+FFFD, counted. A byte order mark at the
  start of a file is dropped.
- Bytes that are not UTF-8, a broken JSON line, or one without the key end the work, naming file and line; with
  --on-error skip such a document is left out, counted, and the first ones are named.
- A document of more than LONG characters is encoded in pieces of at most so many, cut before a single space.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, Literal

from megatron_edit.data.batches import TokenBatch, TokenizerSpec, end_with_parent, raw_batches, token_batches
from megatron_edit.data.errors import DataError
from megatron_edit.data.formats import Kind
from megatron_edit.data.indexed import IndexedWriter, token_dtype
from megatron_edit.data.inputs import InputFile, Portion, TextUnit, find_inputs, lines_before, portions
from megatron_edit.data.merge import merge_corpora, remove_corpus
from megatron_edit.data.progress import Progress, log_to_stderr
from megatron_edit.data.restart import Journal, Position
from megatron_edit.data.tokenizers import Tokenizer

__all__ = ["CorpusReport", "TextUnit", "TokenizerSpec", "preprocess"]

OnError = Literal["fail", "skip"]
NAMED_PROBLEMS = 10
NAMED_TOKENS = 5
Log = Callable[[str], None]


@dataclass
class CorpusReport:
    """What became of one key."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    skipped_documents: int = 0
    replaced_characters: int = 0
    failed_documents: int = 0
    marked_documents: int = 0  # that spell special tokens
    special_tokens: dict[str, int] = field(default_factory=dict)  # documents that spell each of them
    parsed: bool = False  # whether those became the ids of the special tokens

    def __str__(self) -> str:
        counts = (
            f"{self.prefix}: {self.documents} documents, {self.tokens} tokens; {self.skipped_documents} "
            f"empty documents skipped, {self.failed_documents} left out for errors, "
            f"{self.replaced_characters} characters replaced"
        )
        if not self.marked_documents:
            return counts
        ordered = sorted(self.special_tokens.items(), key=lambda entry: (-entry[1], entry[0]))
        shown = ", ".join(f"{token} in {count}" for token, count in ordered[:NAMED_TOKENS])
        more = ", ..." if len(ordered) > NAMED_TOKENS else ""
        became = "they became its ids" if self.parsed else (
            "they became plain text like any other; with --parse-special-tokens they become its ids"
        )  # fmt: skip
        return (
            f"{counts}\n{self.marked_documents} documents spell special tokens of the tokenizer ({shown}{more}): "
            f"{became}"
        )

    def add_part(self, part: CorpusReport) -> None:
        """What became of another part of the input."""
        for name, value in vars(part).items():
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(self, name, getattr(self, name) + value)
        self._add_special_tokens(part.special_tokens)

    def add(self, batch: TokenBatch) -> None:
        self.documents += len(batch.lengths) - batch.goes_on
        self.tokens += len(batch.tokens)
        self.skipped_documents += batch.skipped
        self.replaced_characters += batch.replaced
        self.failed_documents += len(batch.problems)
        self.marked_documents += batch.marked
        self._add_special_tokens(batch.special_tokens)

    def _add_special_tokens(self, counts: Mapping[str, int]) -> None:
        for token, count in counts.items():
            self.special_tokens[token] = self.special_tokens.get(token, 0) + count


@dataclass(frozen=True)
class Job:
    """What decides the bytes that are written."""

    files: tuple[InputFile, ...]
    spec: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    text_unit: TextUnit = "file"
    on_error: OnError = "fail"
    part: int = 0
    parts: int = 1


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    spec: TokenizerSpec,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    text_unit: TextUnit = "file",
    input_kind: Kind | None = None,
    on_error: OnError = "fail",
    partitions: int = 1,
    partition: int | None = None,
    log_interval: int = 10000,
    log: Log = log_to_stderr,
    checkpoint_seconds: float = 30.0,
) -> list[CorpusReport]:
    """Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key ("text" for plain text files).

    The files get their names when all are complete. The result is byte-equal for every number of workers and
    partitions. A command that was killed goes on, when it is given again, from what it had noted at most
    `checkpoint_seconds` before.

    Args:
        partitions: parts of the input that are worked on at the same time, by workers / partitions processes each, and
            then merged.
        partition: do only this part, from 0 on, under the prefix PREFIX.part-I-of-N; merge_corpora joins them.

    Raises:
        DataError: an input, key, tokenizer or size that cannot be used (see the top of this file).
        RuntimeError: a worker process died.
    """
    if workers < 1 or log_interval < 1:
        raise DataError(f"--workers {workers} and --log-interval {log_interval} must be 1 or more")
    if not json_keys or len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: give each key once")
    _check_partitions(inputs, workers, partitions, partition)
    files = find_inputs(inputs, json_keys, input_kind, log)
    tokenizer = spec.build()
    if append_eod and tokenizer.eod_id is None:
        raise DataError(f"--append-eod: the {tokenizer.name} given has no end id (eos_token); leave the flag out")
    if spec.parse_special_tokens and not tokenizer.special_tokens:
        raise DataError(
            f"--parse-special-tokens: the {tokenizer.name} given has no special token that a text could spell; leave "
            "the flag out"
        )
    job = Job(tuple(files), spec, tuple(json_keys), append_eod, text_unit, on_error, 0, partitions)
    options: dict[str, Any] = {"log_interval": log_interval, "checkpoint_seconds": checkpoint_seconds}
    if partitions == 1:
        return run_job(job, output_prefix, workers=workers, log=log, **options)
    if partition is not None:
        job = replace(job, part=partition)
        return run_job(job, part_prefix(output_prefix, job), workers=workers, log=log, **options)
    return _run_partitions(job, output_prefix, workers // partitions, log, options)


def _check_partitions(inputs: Sequence[str], workers: int, partitions: int, partition: int | None) -> None:
    if partitions < 1:
        raise DataError(f"--partitions {partitions} must be 1 or more")
    if partition is not None and not 0 <= partition < partitions:
        raise DataError(f"--partition {partition} of --partitions {partitions}: they count from 0 to {partitions - 1}")
    if partition is None and workers % partitions:
        raise DataError(
            f"--workers {workers} cannot be dealt out to --partitions {partitions}: "
            f"{max(1, workers // partitions) * partitions} workers would work"
        )
    if partitions > 1 and "-" in inputs:
        raise DataError(f"--partitions {partitions}: standard input cannot be cut into parts")


def part_prefix(output_prefix: str, job: Job) -> str:
    """Prefix of the output of one part."""
    return f"{output_prefix}.part-{job.part}-of-{job.parts}"


def _run_partitions(
    job: Job, output_prefix: str, workers: int, log: Log, options: dict[str, Any]
) -> list[CorpusReport]:
    """All parts at the same time, then merged; parts that an earlier run has finished are taken as they are."""
    context = get_context("spawn")
    stop = context.Event()
    parts = [replace(job, part=part) for part in range(job.parts)]
    pool = ProcessPoolExecutor(job.parts, context, _start_part, (stop,))
    try:
        running = {
            pool.submit(_run_part, part, part_prefix(output_prefix, part), workers, options): part.part
            for part in parts
        }
        failed: dict[int, BaseException] = {}
        for future in as_completed(running):
            error = future.exception()
            if error is not None and not isinstance(error, Stopped):
                failed[running[future]] = error
                stop.set()
        if failed:
            raise failed[min(failed)]
        results = [future.result() for future in running]
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)

    reports = []
    for index, key in enumerate(job.keys):
        mine = [result[index] for result in results]
        report = CorpusReport(f"{output_prefix}_{key}_document", parsed=job.spec.parse_special_tokens)
        for one in mine:
            report.add_part(one)
        _check_not_empty(report)
        reports.append(report)
    for index, report in enumerate(reports):
        sources = [result[index].prefix for result in results if result[index].documents]
        merge_corpora(sources, report.prefix, left_out=(report.skipped_documents, report.failed_documents))
        log(f"merged {len(sources)} parts into {report.prefix}")
    for part in parts:
        prefix = part_prefix(output_prefix, part)
        for key in job.keys:
            remove_corpus(f"{prefix}_{key}_document")
        Journal(prefix, part, "").remove()
    return reports


class Stopped(RuntimeError):  # noqa: N818  it ends the work of a part, because of another's error
    """Another part failed, or the command was interrupted."""


@dataclass
class _Part:
    """What the process of a part knows; set once by the initializer of the pool."""

    stop: Any = None


_PART = _Part()


def _start_part(stop: Any) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    _PART.stop = stop


def _run_part(job: Job, prefix: str, workers: int, options: dict[str, Any]) -> list[CorpusReport]:
    def log(line: str) -> None:
        log_to_stderr(f"[part {job.part} of {job.parts}] {line}")

    return run_job(job, prefix, workers=workers, log=log, stopped=_PART.stop.is_set, **options)


def _bytes_of(pieces: Sequence[Portion]) -> int:
    return sum(min(portion.stop, portion.file.size) - portion.start for portion in pieces)


def _check_not_empty(report: CorpusReport) -> None:
    if report.documents == 0:
        raise DataError(
            f"no document is left for {report.prefix}: {report.skipped_documents} are empty, "
            f"{report.failed_documents} left out for errors"
        )


def run_job(
    job: Job,
    output_prefix: str,
    *,
    workers: int = 1,
    log_interval: int = 10000,
    log: Log = log_to_stderr,
    checkpoint_seconds: float = 30.0,
    stopped: Callable[[], bool] = lambda: False,
) -> list[CorpusReport]:
    """Writes PREFIX_KEY_document.bin, .idx and .manifest.json for each key; see `preprocess`.

    Every `checkpoint_seconds` what was written is made durable, and noted in PREFIX.progress.json: the same job goes on
    from there. A part of several may be empty: then it is only noted.
    """
    tokenizer = job.spec.build()
    parsed = job.spec.parse_special_tokens
    reports = [CorpusReport(f"{output_prefix}_{key}_document", parsed=parsed) for key in job.keys]
    journal = Journal(output_prefix, job, tokenizer.fingerprint)
    found = journal.read(log)
    if found is not None and found.finished:
        log(f"{output_prefix} was finished by an earlier run of the same command")
        return [CorpusReport(**report) for report in found.reports]
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        states = [None] * len(reports) if found is None else found.writers
        opened = (IndexedWriter(report.prefix, dtype, state) for report, state in zip(reports, states, strict=True))
        writers = [stack.enter_context(writer) for writer in opened]
        start = Position(0, 0)
        if found is None:
            journal.remove()
        else:
            reports = [CorpusReport(**report) for report in found.reports]
            start = found.position
            log(f"going on after {reports[0].documents} documents of an earlier, stopped run of the same command")
        pieces = portions(job.files, job.text_unit, job.part, job.parts)
        progress = Progress(_bytes_of(pieces), log_interval, log, reports[0].documents)
        problems = _Problems(job, log)
        saved = time.monotonic()
        batches = raw_batches(pieces, job.keys, job.text_unit, start)
        for results, batch, complete in token_batches(batches, job.keys, job.spec, tokenizer, job.append_eod, workers):
            for report, writer, result in zip(reports, writers, results, strict=bool(results)):
                problems.take(batch.portion, result.problems)
                writer.add_documents(result.tokens, result.lengths, goes_on=result.goes_on)
                report.add(result)
            if stopped():
                raise Stopped
            if not complete:
                continue
            progress.show(reports[0].documents, batch.bytes_read)
            if time.monotonic() - saved >= checkpoint_seconds and not journal.is_unusable:
                journal.write(batch.after, [writer.checkpoint() for writer in writers], reports)
                saved = time.monotonic()
        problems.tell_rest()
        _finish(job, tokenizer, reports, writers)
        if job.parts > 1:
            journal.write(Position(len(pieces), 0), [], reports, finished=True)
        else:
            journal.remove()
    return reports


def _finish(job: Job, tokenizer: Tokenizer, reports: list[CorpusReport], writers: list[IndexedWriter]) -> None:
    """All corpora are made ready first, so that they appear together."""
    for report, writer in zip(reports, writers, strict=True):
        if job.parts == 1:
            _check_not_empty(report)
        if report.documents:
            writer.prepare(
                tokenizer, job.append_eod, report.skipped_documents, report.replaced_characters,
                report.failed_documents, report.marked_documents,
            )  # fmt: skip
    for report, writer in zip(reports, writers, strict=True):
        if report.documents:
            writer.finish()
        writer.discard()


class _Problems:
    """Documents that cannot be used: the first one ends the work, or the first few are named and all counted."""

    def __init__(self, job: Job, log: Log) -> None:
        self.job, self.log, self.count = job, log, 0
        self._before: dict[Portion, int] = {}

    def take(self, portion: Portion, problems: list[tuple[int, str]]) -> None:
        for line, what in problems:
            self.count += 1
            if self.count > NAMED_PROBLEMS and self.job.on_error == "skip":
                continue
            if portion not in self._before:
                self._before[portion] = lines_before(portion)
            unit = "row" if portion.file.kind == "parquet" else "line"
            place = f"{portion.file.path}, {unit} {line + self._before[portion]}: {what}"
            if self.job.on_error == "fail":
                raise DataError(f"{place}; --on-error skip would leave it out")
            self.log(f"left out: {place}")

    def tell_rest(self) -> None:
        if self.count > NAMED_PROBLEMS:
            self.log(f"left out: {self.count} documents in all, of which the first {NAMED_PROBLEMS} are named above")
