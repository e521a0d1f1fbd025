"""Writing and reading megatron-core's `torch_dist` format, in this process: what `dist_checkpointing.load` reads.

megatron-core maps tensors to places in global ones (`ShardedTensor`) and plans; the files are written here, one per
rank, one tensor after another, their SHA-256 on the way. megatron-core's own writer copies the whole state into other
processes first, which outlive a rank that is killed.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, MCoreSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_edit.checkpoint.errors import CheckpointError, SaveError
from megatron_edit.checkpoint.manifest import FileEntry, describe_file

Shape = tuple[int, ...]
METADATA = ".metadata"  # torch's: which tensor lies where
_MEGATRON_FILES = ("metadata.json", "common.pt")  # what megatron-core's own loader looks for


@dataclass(frozen=True)
class StoredTensor:
    """One global tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements_written: int  # fewer than the shape has: a part was never written

    @property
    def complete(self) -> bool:
        """Whether all of its elements are there."""
        return self.elements_written == math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, tensors: Iterable[ShardedTensor], group: dist.ProcessGroup, expected: Mapping[str, Shape]
) -> dict[str, FileEntry]:
    """Writes every rank's `tensors` into `folder`, durably; returns the files that this rank has written.

    `expected`: shapes of whole tensors that the ranks together must have written. Collective over `group`, whose
    first rank must be rank 0. Raises SaveError on all ranks when one fails or a part of a tensor was not written.
    """
    writer = _StreamingWriter(folder, expected)
    try:
        dcp.save(
            _for_torch(tensors),
            storage_writer=writer,
            planner=MCoreSavePlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as failure:
        raise SaveError(_causes(failure)) from failure
    return writer.files | (_write_megatron_files(folder) if dist.get_rank(group) == 0 else {})


def write_whole_tensors(
    folder: Path,
    tensors: Mapping[str, tuple[Shape, torch.dtype]],
    produce: Callable[[str], torch.Tensor],
    file_bytes: float,
) -> dict[str, FileEntry]:
    """Writes whole tensors into `folder`, durably, by this process alone; returns the files.

    `produce` is called once for each name, in order, and its tensor is forgotten before the next. Raises what
    `produce` raises, and OSError.
    """
    writer = _StreamingWriter(folder, {name: shape for name, (shape, _) in tensors.items()}, file_bytes)
    planner = _ProducingPlanner(produce)
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
    try:
        with _without_warnings(), _without_crc32():
            dcp.save(empty, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise next(iter(failure.failures.values()))[0] from failure
    return writer.files | _write_megatron_files(folder)


def _write_megatron_files(folder: Path) -> dict[str, FileEntry]:
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    torch.save({}, folder / "common.pt")
    for name in _MEGATRON_FILES:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return {name: describe_file(folder / name) for name in (METADATA, *_MEGATRON_FILES)}


def read_tensors(folder: Path, tensors: Iterable[ShardedTensor], group: dist.ProcessGroup | None) -> None:
    """Fills the data of `tensors` in place from whatever pieces they were written in.

    Collective over `group`; None: this process alone. Raises CheckpointError on all ranks when one fails.
    """
    try:
        with _without_warnings():
            dcp.load(
                _for_torch(tensors),
                storage_reader=dcp.FileSystemReader(folder),
                planner=MCoreLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as failure:
        raise CheckpointError(f"{folder} cannot be loaded: {_causes(failure)}") from failure


def read_whole_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, by this process alone."""
    stored = stored_tensors(folder)
    whole = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
    if whole:
        read_tensors(folder, [whole_tensor(name, tensor) for name, tensor in whole.items()], None)
    return whole


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`. Raises CheckpointError when the index cannot be read."""
    return TensorReader(folder).stored


def _stored(metadata: Metadata) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            tuple(entry.size), entry.properties.dtype, sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class TensorReader:
    """Whole tensors of one checkpoint, one after another, by this process alone; the index is read once.

    Raises CheckpointError when the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._metadata = dcp.FileSystemReader(folder).read_metadata()
        except Exception as error:  # a damaged pickle raises whatever it likes
            raise CheckpointError(f"{folder / METADATA} cannot be read: {error!r}") from error
        self.stored = _stored(self._metadata)

    def files_of(self, names: Iterable[str]) -> set[str]:
        """Names of the files that hold these tensors."""
        wanted = set(names)
        return {info.relative_path for index, info in self._metadata.storage_data.items() if index.fqn in wanted}

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype; `row`: its part at this place of the first dim, of which only
        the pieces are read. Raises CheckpointError."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        first, size = (0, list(entry.size)) if row is None else (row, [1, *entry.size[1:]])
        whole: torch.Tensor | None = None
        for chunk in entry.chunks:
            if row is not None and not chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]:
                continue
            part = self._read_part(self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]).view(chunk.sizes)
            offsets = list(chunk.offsets)
            if row is not None:
                part, offsets[0] = part[row - chunk.offsets[0]][None], row
            if list(part.shape) == size:
                whole = part
                break
            if whole is None:
                whole = torch.empty(size, dtype=entry.properties.dtype)
            offsets[0] -= first
            place = tuple(slice(at, at + count) for at, count in zip(offsets, part.shape, strict=True))
            whole[place] = part
        assert whole is not None, name
        return whole if row is None else whole[0]

    def _read_part(self, info: _StorageInfo) -> torch.Tensor:
        path = self.folder / info.relative_path
        try:
            with open(path, "rb") as file:
                view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))  # read without a copy
                part = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive raises whatever it likes
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        assert isinstance(part, torch.Tensor)
        return part


class _ProducingPlanner(dcp.DefaultSavePlanner):
    """Plans with empty tensors; the values come when they are written."""

    def __init__(self, produce: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._produce = produce

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of one whole tensor."""
        return self._produce(write_item.index.fqn)


def whole_tensor(key: str, data: torch.Tensor) -> ShardedTensor:
    """`data` as all of the global tensor `key`."""
    return block_of(key, data, tuple(data.shape), (0,) * data.ndim)


def block_of(
    key: str, data: torch.Tensor, global_shape: tuple[int, ...], global_offset: tuple[int, ...]
) -> ShardedTensor:
    """`data` as the block at `global_offset` of the global tensor `key`; blocks need not form a regular grid."""
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), global_shape, global_offset, axis_fragmentations=None
    )


class _StreamingWriter(dcp.FileSystemWriter):
    """torch's writer with one open file a rank, one tensor in flight, and a checksum of what was written.

    A file that has reached `file_bytes` is followed by another.
    """

    def __init__(self, folder: Path, expected: Mapping[str, Shape], file_bytes: float = math.inf) -> None:
        super().__init__(folder)
        self.folder = folder
        self._expected = expected
        self._file_bytes = file_bytes
        self.files: dict[str, FileEntry] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items in the order of the plan."""
        results: list[WriteResult] = []
        items = deque(plan.items)
        while items:
            name = f"{plan.storage_data.prefix}{len(self.files)}.distcp"
            with open(self.folder / name, "wb") as file:
                stream = _HashingStream(file)
                while items and stream.size < self._file_bytes:
                    item, start = items.popleft(), stream.size
                    data = planner.resolve_data(item)
                    assert isinstance(data, torch.Tensor), "everything is stored as tensors"
                    stream.save(_alone(data.detach()))
                    del data  # before the next one is made
                    length = stream.size - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                file.flush()
                os.fsync(file.fileno())
            self.files[name] = FileEntry(stream.size, stream.digest.hexdigest())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The first rank writes the index. Raises SaveError when a tensor was not written as a whole."""
        stored = _stored(metadata)
        for key, shape in self._expected.items():
            if key not in stored or stored[key].shape != shape:
                raise SaveError(f"{key} {list(shape)} was not written")
        for key, entry in stored.items():
            if not entry.complete:
                raise SaveError(f"{key} {list(entry.shape)}: {entry.elements_written} elements were written")
        super().finish(metadata, results)


class _HashingStream:
    """A file that knows the SHA-256 of what went through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None
        self.digest = hashlib.sha256()
        self.size = 0

    def save(self, tensor: torch.Tensor) -> None:
        """torch.save of `tensor`. Raises OSError when the file cannot be written; torch.save would hide it."""
        try:
            torch.save(tensor, cast(IO[bytes], self))
        except RuntimeError:
            if self._error is not None:
                raise self._error from None
            raise

    def write(self, data: Any) -> int:
        """All of `data`."""
        try:
            self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self.digest.update(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        """torch.save calls it after each tensor; the file is flushed at its end."""


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU with a storage of its own size: torch.save writes the whole storage under a view."""
    tensor = tensor.to("cpu")
    if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _for_torch(tensors: Iterable[ShardedTensor]) -> dict[str, torch.Tensor]:
    """As torch's planners take them: one object per global tensor, which knows its blocks on this rank."""
    blocks: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        blocks[tensor.key].append(CheckpointableShardedTensor.from_sh_ten(tensor))
    return {key: LocalShardsContainer(parts) for key, parts in blocks.items()}


def _causes(failure: CheckpointException) -> str:
    """The first failing rank's own words."""
    rank, (error, _) = next(iter(sorted(failure.failures.items())))
    return f"rank {rank}: {type(error).__name__}: {error}"


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save's own checksums, which nothing reads, cost as much as the SHA-256 of the manifest."""
    computed = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(computed)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch warns that a load by one process is one by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
