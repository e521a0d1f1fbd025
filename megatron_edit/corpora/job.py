"""One run over a part of the inputs, or over all of them: from raw documents to the files of each key's corpus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from megatron_edit.corpora.batches import TokenBatch, TokenizerSpec, raw_batches
from megatron_edit.corpora.indexed_writer import IndexedWriter, token_dtype
from megatron_edit.corpora.inputs import InputFile, Portion, TextUnit, lines_before, portions
from megatron_edit.corpora.progress import Progress, log_to_stderr
from megatron_edit.corpora.restart import Journal, Position
from megatron_edit.corpora.workers import token_batches
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import Tokenizer

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


class Stopped(RuntimeError):  # noqa: N818  it ends the work of a part, because of another's error
    """Another part failed, or the command was interrupted."""


def check_not_empty(report: CorpusReport) -> None:
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


def _bytes_of(pieces: Sequence[Portion]) -> int:
    return sum(min(portion.stop, portion.file.size) - portion.start for portion in pieces)


def _finish(job: Job, tokenizer: Tokenizer, reports: list[CorpusReport], writers: list[IndexedWriter]) -> None:
    """All corpora are made ready first, so that they appear together."""
    for report, writer in zip(reports, writers, strict=True):
        if job.parts == 1:
            check_not_empty(report)
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
