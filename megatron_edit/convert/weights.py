"""Whole tensors of one model by canonical name, wherever they are stored: what every conversion reads from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.convert.errors import ConversionError
from megatron_edit.tables.parameters import full_parameter_shapes

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip


class Weights(ABC):
    """One model's weights, not yet read. Tensors are whole, without padding, on the CPU, in their stored dtype.

    `vocab_size`: rows of the embedding. `origin`: JSON that says where they come from, for the record.
    `assets`: folder with the tokenizer's files, None when none is known. `notes`: what the user should know.
    """

    folder: Path
    model: ResolvedModel
    vocab_size: int
    origin: dict[str, Any]
    assets: Path | None = None
    notes: Sequence[str] = ()
    tokenizer: dict[str, Any] | None = None  # type and model of --tokenizer-type and --tokenizer-model

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Of the stored tensor."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; it may be mapped from a file."""

    def verify(self) -> None:  # noqa: B027  most formats have no checksums
        """Reads what has checksums and compares them. Raises CheckpointError."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor by canonical name, in forward order."""
        return full_parameter_shapes(self.model, self.vocab_size)


@contextmanager
def verified(weights: Weights) -> Iterator[None]:
    """Verifies `weights` while the block runs; raises at its end what is wrong with them."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        outcome = threads.submit(weights.verify)
        yield
        outcome.result()


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Raises ConversionError for a name that is none of DTYPES; None stays None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ConversionError(f"--dtype {name} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`. Raises ConversionError when a finite value would become infinite."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not result.isfinite().all() and tensor.isfinite().all():
        largest = tensor.abs().max().item()
        raise ConversionError(f"{name} does not fit {dtype}: its largest value is {largest:g}; bfloat16 would work")
    return result
