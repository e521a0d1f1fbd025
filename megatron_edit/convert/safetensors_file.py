"""safetensors files, one tensor at a time: each is mapped when it is read, and written as it comes.

The library maps a whole file into memory when it reads and wants all tensors at once when it writes. The format: an
unsigned 64-bit little-endian length, a JSON header of that many bytes that gives each tensor's dtype, shape and place
behind the header, and the values (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megatron_edit.convert.errors import ConversionError

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `dtype`: the file's name of it, which may be one that is not converted ("I8")."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    bytes: int

    def read(self) -> torch.Tensor:
        """The values: mapped from the file, and let go with the tensor; writing to them does not reach the file."""
        dtype = _DTYPES[self.dtype]
        if not self.bytes:
            return torch.empty(self.shape, dtype=dtype)
        first = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), self.start + self.bytes - first, offset=first, access=mmap.ACCESS_COPY)
        values: Any = mapped
        place = self.start - first
        if place % dtype.itemsize:  # a header of odd length
            values, place = bytearray(mapped[place:]), 0
        return torch.frombuffer(values, dtype=dtype, offset=place).view(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for one that is not converted."""
        return _DTYPES.get(self.dtype)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by name. Raises ConversionError for a file that is missing, cut short or damaged."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"{size} bytes are fewer than its header says")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
            dtype = tensor.torch_dtype
            if dtype is not None and tensor.bytes != math.prod(tensor.shape) * dtype.itemsize:
                raise ValueError(f"{name} has {tensor.bytes} bytes, which is not its shape {list(tensor.shape)}")
            if begin < 0 or end < begin or 8 + length + end > size:
                raise ValueError(f"{name} ends at byte {8 + length + end}, the file has {size}")
            tensors[name] = tensor
        return tensors
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is damaged: {error}") from None


class Writer:
    """Writes one file; every tensor that was announced must be written, in that order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (shape, dtype) in tensors.items():
            end = position + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes
        self._expected = dict(tensors)
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  closed by `close`
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor."""
        assert next(iter(self._expected)) == name, f"{name} is not the next tensor"
        assert self._expected.pop(name) == (tuple(tensor.shape), tensor.dtype), name
        if tensor.numel():
            self._file.write(_bytes_of(tensor.contiguous()))

    def close(self) -> None:
        """Makes the file durable."""
        assert not self._expected, f"{next(iter(self._expected))} was not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes the file of a conversion that failed."""
        self._file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()
    return memoryview(array)
