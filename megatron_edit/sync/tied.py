"""The matrix of a tied model that is cut into pipeline stages: the first and the last stage each hold a copy (ours).

Both copies get the same gradients and the same syncs, so they are the same bits, and one decision is made for both. A
fault in one of them would otherwise stay for good: each stage would go on from its own. So before a sync is decided:

    anchors differ          the last stage takes anchor and masters of the first. By rounding that is normal (each stage
                            sums over more than two replicas in an order of its own); by more, a warning says it
    masters alone differ    this replica has no single matrix to give: its norm is COPIES_DIFFER, which counts as not
                            finite. So it is left out, set back to the anchor, and its inner moments are zeroed, on both
    else                    the norm is the larger of the two, so that both stages compute with the same number
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_edit.model.names import unwrap
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.buffers import BufferPool
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.tables.parameters import EMBEDDING, module_key

COPIES_DIFFER = -math.inf  # in place of a norm, which is never negative
PART = 1 << 22  # elements that are added up at once: torch makes a copy of them as int64


class TiedCopies:
    """This rank's copy, where it has one: `module`, else None. Its methods are collective over all ranks that do."""

    def __init__(self, mesh: Mesh, chunks: Sequence[torch.nn.Module], modules: Sequence[ModuleShard]) -> None:
        self._mesh = mesh
        tied = any(unwrap(chunk).share_embeddings_and_output_weights for chunk in chunks)
        key = module_key(EMBEDDING)
        copies = [module for module in modules if module.key == key] if tied and mesh.layout.pp > 1 else []
        self.module = copies[0] if copies else None

    def is_copy(self, module: ModuleShard) -> bool:
        """Whether `module` is the matrix that another stage holds too."""
        return module is self.module

    def compare(self, anchor: torch.Tensor | None, state: OuterState, buffers: BufferPool) -> tuple[bool, float]:
        """(whether the masters alone differ, how far the anchors were apart) on this replica; see the module's text.

        `anchor` [numel] as `state` gave it; without one the masters stand for it. How far: relative L2 distance, 0 on
        the first stage and where the anchors were equal.
        """
        module = self.module
        assert module is not None
        masters = [run.master for run in module.runs]
        device = self._mesh.platform.device
        of_masters = _bit_sum(masters, device)
        sums = torch.stack([of_masters if anchor is None else _bit_sum([anchor], device), of_masters])
        self._sum_over_shards(sums)
        first, last = self._of_both(sums)
        if first[0] == last[0]:
            return bool(first[1] != last[1]), 0.0
        return False, self._take_those_of_the_first_stage(module, anchor, state, buffers)

    def larger(self, norm: torch.Tensor) -> torch.Tensor:
        """The larger of both copies' norms, 0-d fp64 on the CPU; NaN where one is."""
        return self._of_both(norm.to(self._mesh.platform.device)).amax()

    def _take_those_of_the_first_stage(
        self, module: ModuleShard, anchor: torch.Tensor | None, state: OuterState, buffers: BufferPool
    ) -> float:
        flat, is_first = buffers.take(module.numel), self._mesh.is_first_stage
        squares = torch.zeros(2, dtype=torch.float64, device=flat.device)  # of the distance, of the first stage's
        if anchor is not None:
            flat.copy_(anchor)
            dist.broadcast(flat, group_src=0, group=self._mesh.process_groups.embd)
            if not is_first:
                squares = _squares(flat, anchor)
                state.set_anchor(module, flat)
                state.release(module)
        module.copy_masters_to(flat)
        own = None if is_first or anchor is not None else flat.clone()
        dist.broadcast(flat, group_src=0, group=self._mesh.process_groups.embd)
        if not is_first:
            squares = squares if own is None else _squares(flat, own)
            module.write_masters(flat)
        buffers.give_back(flat)
        self._sum_over_shards(squares)
        distance, length = squares.sqrt().tolist()
        return distance / length if length else distance

    def _of_both(self, numbers: torch.Tensor) -> torch.Tensor:
        """[2, ...] on the CPU: of the first stage and of the last."""
        rows = [torch.empty_like(numbers) for _ in range(2)]
        dist.all_gather(rows, numbers, group=self._mesh.process_groups.embd)
        return torch.stack(rows).cpu()

    def _sum_over_shards(self, numbers: torch.Tensor) -> None:
        if self._mesh.norm_group.size() > 1:
            dist.all_reduce(numbers, group=self._mesh.norm_group)


def _bit_sum(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the bit patterns of fp32 vectors modulo 2^32, 0-d fp64: exact, in whatever order it is added up."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in pieces:
        for part in piece.view(torch.int32).split(PART):
            total += part.sum(dtype=torch.int64)
    return (total % 2**32).double()


def _squares(first: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[2] fp64: squared norms of first - own and of first."""
    return torch.stack([torch.dist(first, own), first.norm()]).double().square()
