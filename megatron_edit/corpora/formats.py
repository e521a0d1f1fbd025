"""What an input file holds: read off its name, and off its first bytes where the name says nothing or cannot be true.

Endings count without regard to case: `.jsonl`, `.json`, `.ndjson` JSON lines, `.parquet` columns, `.txt` plain text;
`.gz`, `.bz2` or `.zst` behind them is unpacked. Under any other name a file is JSON lines when its first line begins a
JSON object, and otherwise plain text. A binary file is never read as text.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal

from megatron_edit.data.errors import DataError

Kind = Literal["jsonl", "text", "parquet"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text"
}  # fmt: skip
PACKED = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
READ_BYTES = 1 << 20
LOOKED_AT = 1 << 16  # bytes of a file, unpacked
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# A JSON object and its first key, or an empty one; a first line may be longer than what is looked at.
_OBJECT = re.compile(rb'\{\s*(\}|"(?:[^"\\]|\\.)*"\s*:)')
_SIGNS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PAR1", "a Parquet file (--input-format parquet, or an ending .parquet)"),
    (0, b"MMIDIDX\x00\x00", "the index of a corpus that is ready for training"),
    (0, b"\xfd7zXZ\x00", "xz, which is not supported: unpack it (unxz)"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z, which is not supported: unpack it"),
    (0, b"\x04\x22\x4d\x18", "lz4, which is not supported: unpack it"),
    (0, b"Rar!\x1a\x07", "a rar archive: unpack it"),
    (0, b"PK\x03\x04", "a zip archive, or one of the formats that are one (.docx, .npz, ...)"),
    (257, b"ustar", "a tar archive: unpack it"),
    (0, b"\xff\xfe", "UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (0, b"\xfe\xff", "UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (0, b"%PDF-", "PDF"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"\x93NUMPY", "a numpy array"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"Obj\x01", "Avro"),
    (0, b"\x7fELF", "a program"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF87a", "a GIF image"),
    (0, b"GIF89a", "a GIF image"),
)


@dataclass(frozen=True)
class Format:
    """`packed`: a key of PACKED, or "". `note`: what the user should know about the choice."""

    kind: Kind
    packed: str = ""
    note: str = ""


def kind_of_name(path: str) -> Kind | None:
    """What the ending says, if anything."""
    stem, suffix = os.path.splitext(path.lower())
    return KINDS.get(os.path.splitext(stem)[1] if suffix in PACKED else suffix)


def find_format(path: str, kind: Kind | None) -> Format:
    """Looks at name and content; with `kind` only at how the file is packed.

    Raises:
        DataError: an empty file, a binary one, or one whose name and content contradict each other.
        OSError: it cannot be read.
    """
    with open(path, "rb") as raw:
        begin = raw.read(LOOKED_AT)
        if not begin:
            raise DataError(f"--input {path} is empty")
        packed = _packed_by_content(begin)
        by_name = os.path.splitext(path.lower())[1]
        if by_name in PACKED and packed != by_name:
            raise DataError(f"--input {path} is not a {PACKED[by_name]} file")
        if kind is not None:
            return Format(kind, packed)
        raw.seek(0)
        content = _begin_of(unpacked(raw, packed, path)) if packed else begin
    named = kind_of_name(path)
    notes = [] if packed == by_name or not packed else [f"{path} is {PACKED[packed]} by its content: it is unpacked"]
    if named == "parquet" or (named is None and not packed and content.startswith(b"PAR1")):
        return Format("parquet", packed)  # what can be wrong with it is found when it is opened
    if binary := _binary(content):
        raise DataError(f"--input {path} does not hold text but {binary} (--input-format text would read it as text)")
    first_line = content.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0]
    if named is None and _OBJECT.match(first_line):
        notes.append(f"{path} is read as JSON lines, by its content; --input-format text would read it as text")
        return Format("jsonl", packed, "; ".join(notes))
    if named == "text" and _is_object(first_line):
        raise DataError(
            f"--input {path}: the name says plain text, and its first line is a JSON object. Say which it is: "
            "--input-format jsonl, or --input-format text"
        )
    if named != "jsonl" and re.match(rb"\{|\[\s*[\{\"]", first_line):
        notes.append(
            f"*** {path} begins like JSON ({first_line[:20].decode(errors='replace')!r}), and is read as plain text, "
            "braces and all; --input-format jsonl would read it as JSON lines ***"
        )
    return Format(named or "text", packed, "; ".join(notes))


def _packed_by_content(begin: bytes) -> str:
    if begin.startswith(b"\x1f\x8b"):
        return ".gz"
    if re.match(rb"BZh[1-9](\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)", begin):
        return ".bz2"
    if begin.startswith(b"\x28\xb5\x2f\xfd") or begin[1:4] == b"\x2a\x4d\x18":  # a frame, or a skippable frame
        return ".zst"
    return ""


def _begin_of(stream: IO[bytes]) -> bytes:
    """What there is, of a damaged file too: reading it names the place."""
    found = b""
    try:
        while len(found) < LOOKED_AT and (piece := stream.read(1024)):
            found += piece
    except (OSError, EOFError, zlib.error, Damaged):
        pass
    return found


def _binary(content: bytes) -> str:
    for offset, sign, name in _SIGNS:
        if content.startswith(sign, offset):
            return name
    if content.count(0) * 10 > len(content):
        return "many zero bytes: UTF-16 without its mark (iconv -f UTF-16LE -t UTF-8), or another binary format"
    return ""


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


# ---- unpacking -------------------------------------------------------------------------------------------------------


class Damaged(Exception):  # noqa: N818  becomes a DataError with file and place
    pass


def unpacked(raw: IO[bytes], packed: str, path: str) -> IO[bytes]:
    """The bytes that `raw` packs, after its beginning. Raises DataError where a package is missing."""
    if packed == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if packed == ".bz2":
        return io.BufferedReader(_FrameStream(raw, bz2.BZ2Decompressor, OSError, "bzip2 stream"), READ_BYTES)
    if packed == ".zst":
        package = zstandard(path)
        stream = _FrameStream(
            raw, lambda: package.ZstdDecompressor().decompressobj(), package.ZstdError, "zstd frame"
        )
        return io.BufferedReader(stream, READ_BYTES)
    return raw


class _FrameStream(io.RawIOBase):
    """Unpacked bytes of one frame after the other. Unlike the libraries' own readers it notices a file that is cut,
    and bytes behind a frame that are none."""

    def __init__(self, raw: IO[bytes], new_frame: Callable[[], Any], error: type[Exception], name: str) -> None:
        self._raw, self._new_frame, self._error, self._name = raw, new_frame, error, name
        self._frame: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(READ_BYTES // 64)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError(f"the file ends before its {self._name} does")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._error as error:
                raise Damaged(str(error)) from None
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def zstandard(path: str) -> Any:
    """The package. Raises DataError."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs the package zstandard: pip install -e '.[data]'") from None
    return zstandard
