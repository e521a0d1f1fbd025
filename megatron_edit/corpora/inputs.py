"""The inputs of tools/preprocess_data.py: which files they are, and their raw documents one after the other.

An input is a file, a folder (all text in it, by name, subfolders too), a pattern such as `web/*.jsonl.gz`, or `-` for
standard input. What a file holds is found by formats.py. Everything that can be found wrong with a file without
reading it to the end is found before any work begins.
"""

from __future__ import annotations

import glob
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_edit.corpora.formats import (
    BYTE_ORDER_MARK,
    KINDS,
    READ_BYTES,
    Damaged,
    Kind,
    find_format,
    kind_of_name,
    unpacked,
)
from megatron_edit.corpora.progress import log_to_stderr
from megatron_edit.data.errors import DataError

# One file one document, or cut at blank lines, or line by line.
TextUnit = Literal["file", "paragraph", "line"]
STANDARD_INPUT = "-"
NAMED = 10  # notes on single files that are shown, of each kind
ROWS = 256  # of a Parquet file that are decoded at a time


@dataclass(frozen=True)
class InputFile:
    """A file that was looked at. `size` in bytes on disk, 0 for standard input; `packed` as in formats.py."""

    path: str
    kind: Kind
    size: int
    modified_ns: int
    packed: str = ""


@dataclass(frozen=True)
class Portion:
    """The documents of a file that begin in the bytes start .. stop - 1."""

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True)
class RawDocument:
    """`content`: bytes of a JSON line or of a text; of a Parquet row the bytes (or None) of each column asked for.

    `line`: the number of its (first) line in the portion, or of its row in the file, from 1.
    """

    line: int
    content: bytes | tuple[bytes | None, ...]

    @property
    def size(self) -> int:
        if isinstance(self.content, bytes):
            return len(self.content)
        return sum(len(column or b"") for column in self.content)


def find_inputs(
    inputs: Sequence[str],
    keys: Sequence[str] = ("text",),
    kind: Kind | None = None,
    log: Callable[[str], None] = log_to_stderr,
) -> list[InputFile]:
    """The files of the inputs, in the order given; those of a folder or pattern by name.

    Args:
        keys: keys of JSON lines or columns of Parquet files.
        kind: what all of them hold; None: what name and content say (standard input: JSON lines).
        log: takes what was chosen by content, and what of a folder is passed over.

    Raises:
        DataError: an input that is not there, not readable, empty or damaged, or that needs a missing package.
    """
    if not inputs:
        raise DataError("--input is empty")
    paths = [path for name in inputs for path in _paths_of(name, log)]
    twice = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else set()
    if twice:
        raise DataError(f"--input {sorted(twice)[0]} is there more than once")
    looked_at = [_look_at(path, keys, kind) for path in paths]
    notes = [note for _, note in looked_at if note]
    for note in notes[:NAMED]:
        log(note)
    if len(notes) > NAMED:
        log(f"{len(notes)} such files in all, of which the first {NAMED} are named above")
    files = [file for file, _ in looked_at]
    plain = [file.path for file in files if file.kind == "text"]
    if plain and list(keys) != ["text"]:
        raise DataError(f"--json-keys is for JSON lines and Parquet files, {plain[0]} is plain text")
    return files


def _paths_of(name: str, log: Callable[[str], None]) -> list[str]:
    if name == STANDARD_INPUT or os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        return _paths_in(name, log)
    if any(character in name for character in "*?["):
        found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
        if not found:
            raise DataError(f"--input {name}: no file has such a name")
        return found
    raise DataError(f"--input {name} is not a file")


def _paths_in(folder: str, log: Callable[[str], None]) -> list[str]:
    """Files of a folder whose endings say that they are text, also links that lead nowhere, so that they are reported.
    Hidden files are passed over; others too, but that is said."""
    visible = [
        path
        for path in sorted(Path(folder).rglob("*"))
        if not path.is_dir() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    found = sorted(str(path) for path in visible if kind_of_name(str(path)) is not None)
    others = [str(path.relative_to(folder)) for path in visible if kind_of_name(str(path)) is None]
    named = f"{', '.join(others[:NAMED])}{', ...' if len(others) > NAMED else ''}"
    hint = f"as a pattern, '{os.path.join(folder, '**', '*')}', all files are taken"
    if not found:
        raise DataError(
            f"--input {folder} is a folder without files whose names end in {', '.join(KINDS)}"
            + (f"; it holds {named}: {hint}" if others else "")
        )
    if others:
        log(f"{folder}: files with other endings are passed over, {len(others)} of them ({named}); {hint}")
    return found


def _look_at(path: str, keys: Sequence[str], kind: Kind | None) -> tuple[InputFile, str]:
    """The file, and a note for the user."""
    if path == STANDARD_INPUT:
        if kind == "parquet":
            raise DataError("--input -: Parquet files cannot be read from standard input")
        return InputFile(path, kind or "jsonl", 0, 0), ""
    try:
        status = os.stat(path)
        found = find_format(path, kind)
    except OSError as error:
        raise DataError(f"--input {path} may not be read: {error.strerror}") from None
    file = InputFile(path, found.kind, status.st_size, status.st_mtime_ns, found.packed)
    if file.kind == "parquet":
        _check_parquet(file, keys)
    return file, found.note


def portions(files: Sequence[InputFile], text_unit: TextUnit, part: int = 0, parts: int = 1) -> list[Portion]:
    """What part `part` of `parts` reads: laid end to end, the parts are all documents once, in order.

    Parts are cut at equal numbers of bytes: JSON lines and lines of text anywhere, Parquet files between row groups;
    packed files and other text are not cut.
    """
    total = sum(file.size for file in files)
    begin, end = total * part // parts, total * (part + 1) // parts
    found, offset = [], 0
    for file in files:
        start, stop = max(begin - offset, 0), min(end - offset, file.size)
        cuttable = not file.packed and (file.kind != "text" or text_unit == "line")
        if cuttable and parts > 1 and start < stop:
            found.append(Portion(file, start, stop))
        elif parts == 1 or (not cuttable and begin <= offset < end):
            found.append(Portion(file, 0, sys.maxsize))
        offset += file.size
    return found


class Reader:
    """Raw documents of a portion, in order; `bytes_read` tells how far it has come, in bytes on disk."""

    def __init__(self, portion: Portion, keys: Sequence[str], text_unit: TextUnit) -> None:
        self.portion, self.keys, self.text_unit = portion, keys, text_unit
        self.bytes_read = 0
        self._last_line = 0

    def __iter__(self) -> Iterator[RawDocument]:
        """
        Raises:
            DataError: the file cannot be read to its end; file and place are named.
        """
        path = self.portion.file.path
        try:
            for document in self._parquet() if self.portion.file.kind == "parquet" else self._text():
                self._last_line = document.line
                yield document
        except (OSError, EOFError, zlib.error, Damaged) as error:
            unit = "row" if self.portion.file.kind == "parquet" else "line"
            after = f"after {unit} {self._last_line + lines_before(self.portion)}"
            raise DataError(f"{path} is damaged or cut, {after}: {error}") from None

    def _text(self) -> Iterator[RawDocument]:
        file, start = self.portion.file, self.portion.start
        raw: IO[bytes] = sys.stdin.buffer if file.path == STANDARD_INPUT else open(file.path, "rb")  # noqa: SIM115
        try:
            stream = unpacked(raw, file.packed, file.path)
            for document in self._documents(stream, start):
                self.bytes_read = raw.tell() - start if file.size else 0
                yield document
        finally:
            if raw is not sys.stdin.buffer:
                raw.close()

    def _documents(self, stream: IO[bytes], start: int) -> Iterator[RawDocument]:
        if self.portion.file.kind == "text" and self.text_unit == "file":
            mark = stream.read(3)
            yield RawDocument(1, stream.read() if mark == BYTE_ORDER_MARK else b"".join((mark, stream.read())))
            return
        if start:  # the line in which the portion begins is its own only if it begins there
            stream.seek(start - 1)
            start += len(stream.readline()) - 1
        lines = self._lines(stream, start)
        if self.portion.file.kind == "jsonl" or self.text_unit == "line":
            for number, line in lines:
                yield RawDocument(number, line.rstrip(b"\r\n"))
            return
        first, paragraph = 1, list[bytes]()
        for number, line in lines:
            if line.strip():
                first = first if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield RawDocument(first, b"".join(paragraph).rstrip(b"\r\n"))
                paragraph = []
        if paragraph:
            yield RawDocument(first, b"".join(paragraph).rstrip(b"\r\n"))

    def _lines(self, stream: IO[bytes], offset: int) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of the lines that begin before the portion's end."""
        for number, line in enumerate(stream, 1):
            if offset >= self.portion.stop:
                return
            yield number, line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line
            offset += len(line)

    def _parquet(self) -> Iterator[RawDocument]:
        import pyarrow

        file = self.portion.file
        row = 0
        try:
            with _parquet_file(file.path) as parquet:
                groups = parquet.metadata.num_row_groups
                for group in range(groups):
                    begin = file.size * group // groups
                    if not self.portion.start <= begin < self.portion.stop:
                        row += parquet.metadata.row_group(group).num_rows
                        continue
                    self._last_line = row
                    batches = parquet.iter_batches(ROWS, [group], list(self.keys), use_threads=False)
                    for batch in batches:
                        columns = [batch.column(key).cast(pyarrow.binary()).to_pylist() for key in self.keys]
                        for content in zip(*columns, strict=True):
                            row += 1
                            yield RawDocument(row, content)
                    self.bytes_read = file.size * (group + 1) // groups - self.portion.start
        except pyarrow.ArrowException as error:
            raise Damaged(_first_line(error)) from None


def lines_before(portion: Portion) -> int:
    """Lines of the file before the portion's first: found only for a message, by reading up to there."""
    if portion.start == 0 or portion.file.kind == "parquet":
        return 0
    lines, left = 0, portion.start - 1
    with open(portion.file.path, "rb") as stream:
        while left > 0:
            piece = stream.read(min(READ_BYTES, left))
            lines, left = lines + piece.count(b"\n"), left - len(piece)
    return lines + 1  # the one that is skipped, or ends at the start


def _parquet_file(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs the package pyarrow: pip install -e '.[data]'") from None
    return pyarrow.parquet.ParquetFile(path, memory_map=True)


def _check_parquet(file: InputFile, keys: Sequence[str]) -> None:
    try:
        parquet = _parquet_file(file.path)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        if isinstance(error, DataError):
            raise
        raise DataError(f"--input {file.path} is not a whole Parquet file: {_first_line(error)}") from None
    with parquet:
        schema = parquet.schema_arrow
        for key in keys:
            if key not in schema.names:
                raise DataError(f"--input {file.path} has no column {key!r} (columns {', '.join(schema.names)})")
            if not any(word in str(schema.field(key).type) for word in ("string", "binary")):
                raise DataError(f"--input {file.path}: column {key!r} is {schema.field(key).type}, not text")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
