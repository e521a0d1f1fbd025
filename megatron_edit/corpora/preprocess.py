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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from megatron_edit.corpora.batches import TokenizerSpec
from megatron_edit.corpora.formats import Kind
from megatron_edit.corpora.inputs import TextUnit, find_inputs
from megatron_edit.corpora.job import CorpusReport, Job, Log, OnError, Stopped, check_not_empty, run_job
from megatron_edit.corpora.merge import merge_corpora, remove_corpus
from megatron_edit.corpora.progress import log_to_stderr
from megatron_edit.corpora.restart import Journal
from megatron_edit.corpora.workers import end_with_parent
from megatron_edit.data.errors import DataError

__all__ = ["CorpusReport", "TextUnit", "TokenizerSpec", "preprocess"]


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
        check_not_empty(report)
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
