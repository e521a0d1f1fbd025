"""The inputs of tools/preprocess_data.py: which files they are, and their raw documents one after the other.

An input is a file, a folder (all text in it, by name, subfolders too), a pattern such as `web/*.jsonl.gz`, or `-` for
standard input. What a file holds is read off its name: `.jsonl`, `.json`, `.ndjson` JSON lines, `.parquet` columns,
anything else plain text; `.gz` or `.zst` behind the name is unpacked. Everything that can be found wrong with a file
without reading it to the end is found before any work begins.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_edit.data.errors import DataError

# One file one document, or cut at blank lines, or line by line.
TextUnit = Literal["file", "paragraph", "line"]
Kind = Literal["jsonl", "text", "parquet"]
STANDARD_INPUT = "-"
PACKED = (".gz", ".zst")
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text"
}  # fmt: skip
READ_BYTES = 1 << 20
ROWS = 256  # of a Parquet file that are decoded at a time


@dataclass(frozen=True)
class InputFile:
    """A file that was looked at. `size` in bytes as it lies on disk, 0 for standard input."""

    path: str
    kind: Kind
    size: int
    modified_ns: int

    @property
    def packed(self) -> str:
        """ ".gz", ".zst" or ""."""
        return next((suffix for suffix in PACKED if self.path.endswith(suffix)), "")


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


def find_inputs(inputs: Sequence[str], keys: Sequence[str] = ("text",), kind: Kind | None = None) -> list[InputFile]:
    """The files of the inputs, in the order given; those of a folder or pattern by name.

    Args:
        keys: keys of JSON lines or columns of Parquet files.
        kind: what all of them hold, whatever their names; None: as the name says (standard input: JSON lines).

    Raises:
        DataError: an input that is not there, not readable, empty or damaged, or that needs a missing package.
    """
    if not inputs:
        raise DataError("--input is empty")
    paths = [path for name in inputs for path in _paths_of(name)]
    twice = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else set()
    if twice:
        raise DataError(f"--input {sorted(twice)[0]} is there more than once")
    files = [_look_at(path, keys, kind) for path in paths]
    plain = [file.path for file in files if file.kind == "text"]
    if plain and list(keys) != ["text"]:
        raise DataError(f"--json-keys is for JSON lines and Parquet files, {plain[0]} is plain text")
    return files


def _paths_of(name: str) -> list[str]:
    if name == STANDARD_INPUT or os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        found = sorted(str(path) for path in Path(name).rglob("*") if _is_text_file(path, Path(name)))
        if not found:
            raise DataError(f"--input {name} is a folder without files whose names end in {', '.join(KINDS)}")
        return found
    if any(character in name for character in "*?["):
        found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
        if not found:
            raise DataError(f"--input {name}: no file has such a name")
        return found
    raise DataError(f"--input {name} is no file")


def _is_text_file(path: Path, folder: Path) -> bool:
    """Also a link that leads nowhere, so that it is reported. Hidden files and other endings are passed over."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and not path.is_dir() and _suffix(str(path)) in KINDS


def _suffix(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


def _look_at(path: str, keys: Sequence[str], kind: Kind | None) -> InputFile:
    if path == STANDARD_INPUT:
        if kind == "parquet":
            raise DataError("--input -: Parquet files cannot be read from standard input")
        return InputFile(path, kind or "jsonl", 0, 0)
    try:
        status = os.stat(path)
        with open(path, "rb") as stream:
            begin = stream.read(4)
    except OSError as error:
        raise DataError(f"--input {path} may not be read: {error.strerror}") from None
    if not begin:
        raise DataError(f"--input {path} is empty")
    file = InputFile(path, kind or KINDS.get(_suffix(path), "text"), status.st_size, status.st_mtime_ns)
    if file.packed == ".gz" and begin[:2] != b"\x1f\x8b":
        raise DataError(f"--input {path} is no gzip file")
    if file.packed == ".zst":
        _zstandard(path)
        # a frame, or a skippable frame
        if begin != b"\x28\xb5\x2f\xfd" and begin[1:] != b"\x2a\x4d\x18":
            raise DataError(f"--input {path} is no zstd file")
    if file.kind == "parquet":
        _check_parquet(file, keys)
    return file


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
        except (OSError, EOFError, zlib.error, _Damaged) as error:
            unit = "row" if self.portion.file.kind == "parquet" else "line"
            after = f"after {unit} {self._last_line + lines_before(self.portion)}"
            raise DataError(f"{path} is damaged or cut, {after}: {error}") from None

    def _text(self) -> Iterator[RawDocument]:
        file, start = self.portion.file, self.portion.start
        raw: IO[bytes] = sys.stdin.buffer if file.path == STANDARD_INPUT else open(file.path, "rb")  # noqa: SIM115
        try:
            stream = _unpacked(raw, file)
            for document in self._documents(stream, start):
                self.bytes_read = raw.tell() - start if file.size else 0
                yield document
        finally:
            if raw is not sys.stdin.buffer:
                raw.close()

    def _documents(self, stream: IO[bytes], start: int) -> Iterator[RawDocument]:
        if self.portion.file.kind == "text" and self.text_unit == "file":
            mark = stream.read(3)
            yield RawDocument(1, stream.read() if mark == b"\xef\xbb\xbf" else b"".join((mark, stream.read())))
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
            yield number, line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line
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
            raise _Damaged(_first_line(error)) from None


class _Damaged(Exception):  # noqa: N818  becomes a DataError with file and place
    pass


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


def _unpacked(raw: IO[bytes], file: InputFile) -> IO[bytes]:
    if file.packed == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if file.packed == ".zst":
        return io.BufferedReader(_ZstdStream(raw, file.path), READ_BYTES)
    return raw


class _ZstdStream(io.RawIOBase):
    """Unpacked bytes of one zstd frame after the other. Unlike the package's own reader it notices a cut file."""

    def __init__(self, raw: IO[bytes], path: str) -> None:
        self._raw, self._zstandard = raw, _zstandard(path)
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(READ_BYTES // 64)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends before its zstd frame does")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._zstandard.ZstdError as error:
                raise _Damaged(str(error)) from None
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _zstandard(path: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs the package zstandard: pip install -e '.[data]'") from None
    return zstandard


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
        raise DataError(f"--input {file.path} is no whole Parquet file: {_first_line(error)}") from None
    with parquet:
        schema = parquet.schema_arrow
        for key in keys:
            if key not in schema.names:
                raise DataError(f"--input {file.path} has no column {key!r} (columns {', '.join(schema.names)})")
            if not any(word in str(schema.field(key).type) for word in ("string", "binary")):
                raise DataError(f"--input {file.path}: column {key!r} is {schema.field(key).type}, not text")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
