"""Where a flat slice of a parameter lies in the whole tensor: rectangular blocks, so that nothing has to be gathered.

The distributed optimizer cuts parameters into flat pieces. A piece of a matrix is the end of a row, whole rows, and
the beginning of a row; tensor parallelism moves these, a gated projection splits them once more, and the padding of
the vocabulary is left out. Each rank so writes and reads exactly what it owns, whatever the layout on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_edit.tables.parameters import is_gated, is_vocabulary, partition_dim


@dataclass(frozen=True)
class Block:
    """Elements [start, start + prod(shape)) of the slice are the block `shape` at `offset` of the whole tensor."""

    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def blocks_of(
    name: str,
    whole_shape: tuple[int, ...],
    shard_shape: tuple[int, ...],
    tensor_parallel_rank: int,
    start: int,
    length: int,
) -> list[Block]:
    """Blocks of elements [start, start + length) of the flat tensor parallel shard of the parameter `name`.

    whole_shape  of the unsharded tensor, without vocabulary padding
    shard_shape  of this tensor parallel rank's parameter, the padding included
    """
    columns = shard_shape[1] if len(shard_shape) == 2 else 1
    column = tensor_parallel_rank * columns if partition_dim(name) == 1 else 0
    blocks = []
    for first_row, rows, whole_row in _row_ranges(name, whole_shape[0], shard_shape[0], tensor_parallel_rank):
        low = max(start, first_row * columns)
        high = min(start + length, (first_row + rows) * columns)
        for position, row, row_count, first_column, column_count in _rectangles(low, high, columns):
            in_whole = whole_row + row - first_row
            if len(shard_shape) == 1:
                shape: tuple[int, ...] = (row_count,)
                offset: tuple[int, ...] = (in_whole,)
            else:
                shape, offset = (row_count, column_count), (in_whole, column + first_column)
            blocks.append(Block(position - start, shape, offset))
    return blocks


def _row_ranges(name: str, whole_rows: int, rows: int, rank: int) -> list[tuple[int, int, int]]:
    """(first row in the shard, rows, first row in the whole tensor) of the parts that stay together."""
    if partition_dim(name) != 0:
        return [(0, rows, 0)]
    if is_gated(name):  # gate on top of up, each cut by itself
        half, whole_half = rows // 2, whole_rows // 2
        return [(0, half, rank * half), (half, half, whole_half + rank * half)]
    if is_vocabulary(name):
        return [(0, max(0, min(rows, whole_rows - rank * rows)), rank * rows)]
    return [(0, rows, rank * rows)]


def _rectangles(low: int, high: int, columns: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Flat elements [low, high) as (position, row, rows, column, columns): part of a row, whole rows, part of a row."""
    while low < high:
        row, column = divmod(low, columns)
        rows = 1 if column else (high - low) // columns
        count = columns if rows and not column else min(columns - column, high - low)
        rows = max(rows, 1)
        yield low, row, rows, column, count
        low += rows * count
