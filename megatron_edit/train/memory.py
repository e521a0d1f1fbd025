"""Bytes that a rank keeps for training, by what they are for, counted from the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.log.lines import format_bytes
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.outer_state import HostOuterState
from megatron_edit.train.replica import Replica

KINDS = ("weights", "gradients", "optimizer", "anchor", "outer momentum", "sync buffers", "error feedback")


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of each of KINDS on one rank. `on_host`: anchor and outer momentum are in host memory."""

    bytes: dict[str, int]
    on_host: bool

    def line(self) -> str:
        """One line, for the log."""
        parts = [f"{kind} {format_bytes(self.bytes[kind])}" for kind in KINDS]
        where = " (anchor and outer momentum in host memory)" if self.on_host else ""
        return f"memory of a rank, the largest of each: {' | '.join(parts)}{where}; activations come on top"


def memory_table(replica: Replica, state: TrainingState) -> MemoryTable:
    """Of this rank, when training begins. Adam's moments are made, as zeros, where the first step would make them.

    weights         of the model, in its dtype, padding included
    gradients       the buffers that they are added up in
    optimizer       fp32 masters, where they are not the weights themselves, and both moments
    anchor, outer momentum, sync buffers, error feedback   what the sync adds; 0 in a synchronous warm-up
    """
    engine = replica.engine
    weights = sum(group.bucket.param_data.nbytes for chunk in replica.chunks for group in chunk.bucket_groups)
    gradients = sum(group.bucket.grad_data.nbytes for chunk in replica.chunks for group in chunk.bucket_groups)
    optimizer = 0
    for module in engine.modules:
        for piece in module.slices:
            local = state.local_state(piece)
            is_own_memory = piece.master.untyped_storage().data_ptr() != piece.model.untyped_storage().data_ptr()
            optimizer += sum(flat.nbytes for name, flat in local.items() if name != "param" or is_own_memory)
    stored = engine.state.outer.stored_bytes()
    return MemoryTable(
        {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            **stored,
            "sync buffers": engine.buffers.allocated_bytes,
            "error feedback": sum(error.nbytes for error in engine.state.errors.tensors),
        },
        on_host=isinstance(engine.state.outer, HostOuterState),
    )


def largest_of_all_ranks(table: MemoryTable, mesh: Mesh) -> MemoryTable:
    """The largest of each kind over all ranks; collective over the world."""
    numbers = torch.tensor([table.bytes[kind] for kind in KINDS], dtype=torch.int64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=mesh.world_control_group)
    return MemoryTable(dict(zip(KINDS, numbers.tolist(), strict=True)), table.on_host)
