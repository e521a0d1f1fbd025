"""Tokenizes batches here or in worker processes, in the order in which they come."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread

from megatron_edit.corpora.batches import (
    Piece,
    RawBatch,
    TokenBatch,
    TokenizerSpec,
    long_document,
    tokenize_batch,
    tokenize_piece,
)
from megatron_edit.data.tokenizers import Tokenizer


@dataclass
class _Worker:
    """A worker process' own tokenizer; set once by the initializer of the pool."""

    tokenizer: Tokenizer | None = field(default=None)


_WORKER = _Worker()


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone: a pool's processes would wait for ever for work."""
    parent = parent_process()
    assert parent is not None

    def watch(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    Thread(target=watch, name="parent", daemon=True).start()


def _start_worker(spec: TokenizerSpec) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that reads decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Hugging Face: a process is one worker, not a pool of threads
    _WORKER.tokenizer = spec.build()


def _work(task: RawBatch | Piece, keys: Sequence[str], append_eod: bool) -> list[TokenBatch]:
    assert _WORKER.tokenizer is not None
    return _tokenize(task, keys, _WORKER.tokenizer, append_eod)


def _tokenize(
    task: RawBatch | Piece | list[TokenBatch], keys: Sequence[str], tokenizer: Tokenizer, append_eod: bool
) -> list[TokenBatch]:
    if isinstance(task, RawBatch):
        return tokenize_batch(task, keys, tokenizer, append_eod)
    return tokenize_piece(task, keys, tokenizer, append_eod) if isinstance(task, Piece) else task


Tokenized = tuple[list[TokenBatch], RawBatch, bool]  # see token_batches


def token_batches(
    batches: Iterator[RawBatch],
    keys: Sequence[str],
    spec: TokenizerSpec,
    tokenizer: Tokenizer,
    append_eod: bool,
    workers: int,
) -> Iterator[Tokenized]:
    """(tokens for each key, their batch, whether that was its last part) in the order of the batches.

    Tokenized here (one worker) or by `workers` processes that hold at most four tasks each.
    """

    def tasks() -> Iterator[tuple[RawBatch | Piece | list[TokenBatch], RawBatch, bool]]:
        for batch in batches:
            if not batch.is_long:
                yield batch, batch, True
                continue
            light = RawBatch(batch.portion, [], batch.after, batch.bytes_read)  # without the long text
            for part in long_document(batch, keys, tokenizer):
                yield part, light, False
            yield [], light, True

    if workers == 1:
        for task, batch, complete in tasks():
            yield _tokenize(task, keys, tokenizer, append_eod), batch, complete
        return
    waiting: deque[tuple[Future[list[TokenBatch]] | list[TokenBatch], RawBatch, bool]] = deque()

    def first() -> Tokenized:
        result, batch, complete = waiting.popleft()
        return result.result() if isinstance(result, Future) else result, batch, complete

    # Started afresh, not forked: a tokenizer library may run threads in this process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (spec,))
    try:
        for task, batch, complete in tasks():
            result = task if isinstance(task, list) else pool.submit(_work, task, keys, append_eod)
            light = RawBatch(batch.portion, [], batch.after, batch.bytes_read)
            waiting.append((result, light, complete))
            if len(waiting) >= 4 * workers:
                yield first()
        while waiting:
            yield first()
    except BrokenProcessPool:
        raise RuntimeError(
            f"a worker ended unexpectedly (out of memory?); try fewer --workers than {workers}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
