"""Writes the .bin/.idx files of megatron-core and the manifest; what they hold is told in data/indexed.py."""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import CHUNK, DTYPES, HEADER, MAGIC, Manifest, sampled_sha256
from megatron_edit.data.tokenizers import Tokenizer


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Width of the ids by the largest that the tokenizer has, so that it is known before the first is written:
    megatron-core's rule, uint16 below a vocabulary of 65,500, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


@dataclass(frozen=True)
class WriterState:
    """How much of a corpus is safely on disk, so that a killed command can go on from there."""

    sequences: int
    tokens: int
    largest_token_id: int


class IndexedWriter:
    """Writes a corpus beside its final name; `finish` moves it there, an error before that removes it.

    After a `checkpoint` the unfinished files stay when the writer is left, and another writer can take them up.
    Memory is 4 bytes a sequence. The .idx file, without which nobody reads a corpus, comes last, so that no moment
    leaves a readable pair that does not belong together.

    Args:
        resume: go on with the files that an earlier writer left at this checkpoint.

    Raises:
        DataError: the folder cannot be written, another command is writing here, or what `resume` tells of is gone.
    """

    def __init__(self, prefix: str, dtype: np.typing.DTypeLike, resume: WriterState | None = None) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.lengths = array("i")
        self.largest_token_id = -1
        self._marks: array[int] | None = None  # None: each sequence is a document
        self._keep = False
        self._lengths_saved = 0
        suffixes = (".bin", ".idx", ".manifest.json", ".lengths")
        self._parts = {suffix: f"{prefix}{suffix}.partial" for suffix in suffixes}
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._parts[".bin"], "ab")  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise DataError(f"{prefix}.bin cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bin.close()
            raise DataError(f"{prefix} is being written by another command") from None
        except OSError:
            pass  # a file system without locks
        if resume is not None:
            self._take_up(resume)
        self._bin.truncate(self.total_tokens * self.dtype.itemsize)

    def _take_up(self, state: WriterState) -> None:
        self._keep = True
        if self._bin.tell() < state.tokens * self.dtype.itemsize:
            raise DataError(f"{self._parts['.bin']} is shorter than its checkpoint")
        try:
            with open(self._parts[".lengths"], "rb") as stream:
                self.lengths.fromfile(stream, state.sequences)
        except (OSError, EOFError):
            raise DataError(f"{self._parts['.lengths']} is shorter than its checkpoint") from None
        if self.total_tokens != state.tokens:
            raise DataError(f"{self._parts['.lengths']} does not belong to its checkpoint")
        self.largest_token_id, self._lengths_saved = state.largest_token_id, state.sequences
        os.truncate(self._parts[".lengths"], state.sequences * self.lengths.itemsize)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        if not self._keep:
            self.discard()

    def discard(self) -> None:
        """Removes the unfinished files; after `finish` there are none."""
        for part in self._parts.values():
            Path(part).unlink(missing_ok=True)

    @property
    def total_tokens(self) -> int:
        return int(np.frombuffer(self.lengths, dtype=np.int32).sum(dtype=np.int64)) if self.lengths else 0

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int], *, goes_on: bool = False) -> None:
        """Documents of `lengths` tokens each, their ids one after the other in `tokens` [sum(lengths)].

        goes_on: the first of them is the rest of the last document so far.
        """
        assert len(tokens) == sum(lengths)
        if len(tokens):
            self.largest_token_id = max(self.largest_token_id, int(tokens.max()))
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        try:
            if goes_on:
                self.lengths[-1] += lengths[0]
                lengths = lengths[1:]
            self.lengths.extend(lengths)
        except OverflowError:
            raise DataError(f"{self.prefix}: a document has more than 2147483647 tokens; cut it") from None

    def add_sequences(self, tokens: np.ndarray, lengths: np.ndarray, document_marks: np.ndarray) -> None:
        """Sequences as another corpus holds them, and its document marks, which count its own sequences."""
        before = len(self.lengths)
        if self._marks is None and not np.array_equal(document_marks, np.arange(len(lengths) + 1)):
            self._marks = array("q", range(before + 1))
        if self._marks is not None:
            self._marks.extend((document_marks[1:] + before).tolist())
        self.lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).tobytes())
        for start in range(0, len(tokens), CHUNK):
            self._bin.write(np.ascontiguousarray(tokens[start : start + CHUNK], dtype=self.dtype).data)

    def checkpoint(self) -> WriterState:
        """Makes all so far durable; from now on the unfinished files outlive this writer."""
        _sync(self._bin)
        with open(self._parts[".lengths"], "ab") as stream:
            stream.truncate(self._lengths_saved * self.lengths.itemsize)
            stream.write(self.lengths[self._lengths_saved :].tobytes())
            _sync(stream)
        self._keep, self._lengths_saved = True, len(self.lengths)
        return WriterState(len(self.lengths), self.total_tokens, self.largest_token_id)

    def prepare(
        self,
        tokenizer: Tokenizer,
        append_eod: bool,
        skipped_documents: int = 0,
        replaced_characters: int = 0,
        failed_documents: int = 0,
        marked_documents: int = 0,
    ) -> None:
        """Completes the three files under their temporary names and makes them durable."""
        self.write_index()
        self.write_manifest(
            Manifest(
                tokenizer=tokenizer.name,
                tokenizer_fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                append_eod=append_eod,
                largest_token_id=self.largest_token_id,
                documents=len(self.lengths),
                tokens=self.total_tokens,
                sampled_sha256=self.sampled_sha256(),
                skipped_documents=skipped_documents,
                replaced_characters=replaced_characters,
                failed_documents=failed_documents,
                parse_special_tokens=tokenizer.parse_special_tokens,
                marked_documents=marked_documents,
            )
        )

    def sampled_sha256(self) -> str:
        """Of what was written so far."""
        self._bin.flush()
        return sampled_sha256(np.memmap(self._parts[".bin"], mode="r", dtype=self.dtype))

    def write_index(self) -> None:
        """The .idx file, under its temporary name; the .bin file is made durable."""
        assert self.total_tokens > 0, "a corpus without tokens cannot be read"
        _sync(self._bin)
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        marks = len(lengths) + 1 if self._marks is None else len(self._marks)
        with open(self._parts[".idx"], "wb") as stream:
            stream.write(HEADER.pack(MAGIC, 1, code, len(lengths), marks))
            stream.write(lengths.astype("<i4", copy=False).data)
            end = 0
            for start in range(0, len(lengths), CHUNK):
                piece = lengths[start : start + CHUNK].astype(np.int64)
                ends = end + np.cumsum(piece)
                stream.write(((ends - piece) * self.dtype.itemsize).astype("<i8").tobytes())
                end = int(ends[-1])
            for start in range(0, marks, CHUNK):
                stop = min(start + CHUNK, marks)
                piece = np.arange(start, stop) if self._marks is None else np.array(self._marks[start:stop])
                stream.write(piece.astype("<i8").tobytes())
            _sync(stream)

    def write_manifest(self, manifest: Manifest) -> None:
        """The manifest, under its temporary name."""
        with open(self._parts[".manifest.json"], "w", encoding="utf-8") as text:
            json.dump(asdict(manifest), text, indent=2)
            _sync(text)

    def finish(self) -> None:
        """Gives the prepared files their names, over those of an earlier corpus."""
        self._bin.close()
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        Path(f"{self.prefix}.manifest.json").unlink(missing_ok=True)
        for suffix in (".bin", ".manifest.json", ".idx"):
            with suppress(FileNotFoundError) if suffix == ".manifest.json" else nullcontext():
                os.replace(self._parts[suffix], f"{self.prefix}{suffix}")
        self._keep = False


def _sync(stream: object) -> None:
    stream.flush()  # type: ignore[attr-defined]
    os.fsync(stream.fileno())  # type: ignore[attr-defined]
