"""The .bin/.idx files of megatron-core, read and checked with numpy alone.

`PREFIX.bin` holds the token ids of all documents, one after the other. `PREFIX.idx` holds, little endian: the
9 bytes "MMIDIDX" 0 0, version 1 (uint64), a code for the dtype of the ids (uint8), number of sequences and
number of document marks (uint64 each), then length (int32) and byte offset (int64) of each sequence, and the
document marks (int64): the first sequence of each document and the end. Here a document is one sequence.
(Layout: megatron/core/datasets/indexed_dataset.py of megatron-core 0.16.1.)

`PREFIX.manifest.json`, ours, tells which tokenizer made the ids, so that a wrong one is refused at start.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import numpy as np

from megatron_edit.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Documents or tokens that are looked at in one go, so that checks need little memory.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """What made a corpus. Sizes and `sampled_sha256` (of some pieces of the ids) tie it to its .bin file."""

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    append_eod: bool
    largest_token_id: int
    documents: int
    tokens: int
    sampled_sha256: str
    skipped_documents: int = 0  # without text
    replaced_characters: int = 0
    failed_documents: int = 0  # left out by --on-error skip
    parse_special_tokens: bool = False
    marked_documents: int = 0  # that spell special tokens
    format: int = 1

    @staticmethod
    def path(prefix: str) -> Path:
        return Path(f"{prefix}.manifest.json")

    @classmethod
    def read(cls, prefix: str) -> Manifest | None:
        """None when there is none (a corpus made by another tool)."""
        try:
            entries = json.loads(cls.path(prefix).read_text(encoding="utf-8"))
            wanted = [field.name for field in fields(cls) if field.name in entries or field.default is MISSING]
            return cls(**{name: entries[name] for name in wanted})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{cls.path(prefix)} cannot be read ({error!r}); delete it or make it anew") from None


class IndexedFiles:
    """The two files of a corpus, memory mapped, after all that can be wrong with their form was checked.

    Attributes:
        lengths: int32 [sequences] tokens of each sequence.
        document_marks: int64 [documents + 1] first sequence of each document, and the end.
        tokens: [total] ids of all sequences in file order, in the file's dtype.

    Raises:
        DataError: a file is missing, empty, of another format, cut, or does not belong to the other.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (idx_path, bin_path):
            if not os.path.isfile(path):  # unlike Path.is_file, also for a name that is too long
                stem, extension = os.path.splitext(prefix)
                hint = f"; give the prefix, {stem}" if extension in (".bin", ".idx") else ""
                raise DataError(f"{path} does not exist{hint}")
            if not os.access(path, os.R_OK):
                raise DataError(f"{path} may not be read")
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty")

        with open(idx_path, "rb") as stream:
            header = stream.read(HEADER.size)
        if not header.startswith(MAGIC):
            raise DataError(f"{idx_path} is not an index file of megatron-core: it does not begin with MMIDIDX")
        if len(header) < HEADER.size:
            raise DataError(f"{idx_path} is cut: {len(header)} bytes are less than its header")
        _, version, code, sequences, marks = HEADER.unpack(header)
        if version != 1 or code not in DTYPES:
            raise DataError(
                f"{idx_path} has version {version} and dtype code {code}; version 1 with integer ids is read"
            )
        expected = HEADER.size + 12 * sequences + 8 * marks
        if idx_path.stat().st_size < expected:
            raise DataError(f"{idx_path} is cut: {idx_path.stat().st_size} bytes, {expected} wanted")
        if sequences == 0:
            raise DataError(f"{idx_path} holds no document")

        self.dtype = np.dtype(DTYPES[code])
        body = np.memmap(idx_path, mode="r", dtype=np.uint8)[HEADER.size : expected]
        self.lengths: np.ndarray = body[: 4 * sequences].view("<i4")
        self._pointers: np.ndarray = body[4 * sequences : 12 * sequences].view("<i8")
        self.document_marks: np.ndarray = body[12 * sequences :].view("<i8")
        if not np.array_equal(self.document_marks[-1:], [sequences]):
            raise DataError(f"{idx_path} is damaged: its last document does not end at its last sequence")
        self.total_tokens = self._check_index(idx_path)
        size, wanted = bin_path.stat().st_size, self.total_tokens * self.dtype.itemsize
        if size != wanted:
            raise DataError(
                f"{bin_path} has {size} bytes but {idx_path} tells of {wanted}: "
                "they do not belong together, or one is cut"
            )
        self.tokens = np.memmap(bin_path, mode="r", dtype=self.dtype)

    def _check_index(self, idx_path: Path) -> int:
        """Sequences lie one after the other, without gap; returns the number of tokens."""
        end = 0
        for start in range(0, len(self.lengths), CHUNK):
            lengths = self.lengths[start : start + CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths)
            pointers = (ends - lengths) * self.dtype.itemsize
            if lengths.min() < 0 or not np.array_equal(pointers, self._pointers[start : start + CHUNK]):
                raise DataError(f"{idx_path} is damaged: lengths and offsets of its documents do not agree")
            end = int(ends[-1])
        return end

    def documents_range(self, first: int, last: int) -> tuple[int, int]:
        """Token range of the sequences first .. last - 1."""
        begin = self.total_tokens
        if first < len(self.lengths):
            begin = int(self._pointers[first]) // self.dtype.itemsize
        return begin, begin + int(self.lengths[first:last].sum(dtype=np.int64))

    def token_chunks(self, begin: int, end: int) -> Iterator[np.ndarray]:
        """The ids begin .. end - 1 as int64 pieces."""
        for start in range(begin, end, CHUNK):
            yield self.tokens[start : min(start + CHUNK, end)].astype(np.int64)


def sampled_pieces(tokens: np.ndarray, windows: int = 64, width: int = 1 << 14) -> Iterator[np.ndarray]:
    """Evenly spaced pieces of the ids; all of them in a corpus of up to windows * width (a million)."""
    if len(tokens) <= windows * width:
        yield tokens
        return
    for start in np.linspace(0, len(tokens) - width, windows).astype(np.int64):
        yield tokens[start : start + width]


def sampled_sha256(tokens: np.ndarray) -> str:
    digest = hashlib.sha256()
    for piece in sampled_pieces(tokens):
        digest.update(piece.tobytes())
    return digest.hexdigest()
