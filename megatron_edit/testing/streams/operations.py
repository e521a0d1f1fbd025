"""What is known of torch's operations and of a process group's methods: what they write, and where the host waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
DEVICE = torch.device("cpu", 0)  # its index tells it from the host, where the program names a device

# Of a process group's methods: how many of the first arguments are written; of the others, tensors are read.
WRITTEN = {
    "allreduce": 1, "allreduce_coalesced": 1, "broadcast": 1, "reduce": 1,
    "allgather": 1, "_allgather_base": 1, "allgather_into_tensor_coalesced": 1, "allgather_coalesced": 1,
    "all_gather_single": 1, "all_gather_single_coalesced": 1,
    "reduce_scatter": 1, "_reduce_scatter_base": 1, "reduce_scatter_tensor_coalesced": 1,
    "reduce_scatter_single": 1, "reduce_scatter_single_coalesced": 1,
    "alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1, "gather": 1, "scatter": 1,
    "send": 0, "recv": 1, "recv_anysource": 1,
}  # fmt: skip
TO_ONE_RANK = ("send", "recv", "recv_anysource")
COPIES = ("copy_", "_to_copy", "_foreach_copy_")
READ_BY_HOST = (
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "repeat_interleave",
)  # fmt: skip
TAKE_MASKS = ("index", "index_put_", "_index_put_impl_")
_WITHOUT_KERNEL = ("_unsafe_view", "lift_fresh", "lift", "resize_", "set_", "_reshape_alias", "is_same_size")
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Kind:
    """What is known of an operation from its schema."""

    name: str
    is_view: bool
    arguments: tuple[tuple[str, bool], ...]  # (name, whether it is written)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Of a call: each tensor, and whether it is written."""
        for (_, writes), value in zip(self.arguments, args, strict=False):
            yield from ((tensor, writes) for tensor in tensors_in(value))
        for name, writes in self.arguments[len(args) :]:
            yield from ((tensor, writes) for tensor in tensors_in(kwargs.get(name)))


@functools.cache
def kind_of(function: Any) -> Kind:
    """Of an operation of torch's dispatcher."""
    schema = function._schema
    name = function.overloadpacket.__name__
    aliases = [value.alias_info for value in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    arguments = tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments)
    return Kind(name, is_view or name in _WITHOUT_KERNEL, arguments)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in lists of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy is; of its arguments."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def is_device(device: Any) -> bool:
    """Whether a name of a device is that of the device; not the host's, and not None."""
    if isinstance(device, str | int):
        return device != "cpu"
    return device is not None and (device.type == "cuda" or device == DEVICE)


def storage_of(tensor: Tensor) -> int:
    """What its views share; not used again while a finalizer is set on the storage."""
    return tensor.untyped_storage()._cdata
