"""One row of an architecture's table: a tensor of ours, the tensors of Hugging Face that it is made of, and how.

Letters in shapes: H hidden size, F inner width of the MLP, N query heads, G query groups, R = N / G, D size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.config.resolved import ResolvedModel

Shape = tuple[int, ...]
LAYER = "{layer}"  # stands for the layer's number in the names of a row


class Transform(ABC):
    """How parts make a whole tensor, and back; no value changes either way."""

    @abstractmethod
    def shapes(self, whole: Shape, model: ResolvedModel) -> tuple[Shape, ...]:
        """Shapes of the parts."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
        """The whole."""

    @abstractmethod
    def split(self, whole: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
        """The parts, which may be views."""


class Same(Transform):
    """One tensor, the same on both sides."""

    def shapes(self, whole: Shape, model: ResolvedModel) -> tuple[Shape, ...]:
        return (whole,)

    def join(self, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
        (part,) = parts
        return part

    def split(self, whole: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
        return (whole,)


SAME = Same()


class GateOverUp(Transform):
    """Gate and up projection [F, H] on top of each other: [2 F, H]."""

    def shapes(self, whole: Shape, model: ResolvedModel) -> tuple[Shape, ...]:
        half = (whole[0] // 2, *whole[1:])
        return half, half

    def join(self, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
        return whole.chunk(2)


class FusedQKV(Transform):
    """Query [N D, ...], key and value [G D, ...] in one [(N + 2 G) D, ...], group after group: the R query heads of
    a group, its key, its value (megatron-core's order). The halves of a head are paired by the rotary embedding on
    both sides, so that no channel moves."""

    def shapes(self, whole: Shape, model: ResolvedModel) -> tuple[Shape, ...]:
        groups, size = _groups_and_size(model)
        key = (groups * size, *whole[1:])
        return (model.num_attention_heads * size, *whole[1:]), key, key

    def join(self, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
        groups, size = _groups_and_size(model)
        heads = [part.view(groups, -1, size, *part.shape[1:]) for part in parts]  # [G, R or 1, D, ...]
        return torch.cat(heads, dim=1).flatten(0, 2)

    def split(self, whole: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
        groups, size = _groups_and_size(model)
        heads = whole.view(groups, -1, size, *whole.shape[1:])  # [G, R + 2, D, ...]
        return tuple(part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:]))


def _groups_and_size(model: ResolvedModel) -> tuple[int, int]:
    return model.num_query_groups, model.kv_channels


@dataclass(frozen=True)
class Row:
    """`ours`: canonical name (`model.names`); `theirs`: names of the parts. LAYER in all of them, or in none."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME

    def at(self, layer: str) -> Row:
        """The row of one layer."""
        return Row(
            self.ours.replace(LAYER, layer), tuple(name.replace(LAYER, layer) for name in self.theirs), self.transform
        )
