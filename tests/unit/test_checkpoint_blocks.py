"""Blocks of flat slices: put together from every rank's slices, they are the whole tensor, each element once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.checkpoint.blocks import blocks_of
from megatron_edit.config.schema import ModelConfig
from megatron_edit.model.sharding import tensor_parallel_slice
from megatron_edit.tables.parameters import EMBEDDING, FINAL_NORM

LAYER = "decoder.layers.3."
SHAPES: dict[str, tuple[int, ...]] = {
    EMBEDDING: (37, 6),
    FINAL_NORM: (10,),
    LAYER + "self_attention.linear_qkv.weight": (24, 5),
    LAYER + "self_attention.linear_qkv.bias": (24,),
    LAYER + "self_attention.linear_proj.weight": (5, 16),
    LAYER + "mlp.linear_fc1.weight": (32, 7),
    LAYER + "mlp.linear_fc2.weight": (7, 16),
}
MODEL = ModelConfig(make_vocab_size_divisible_by=8)


@given(
    name=st.sampled_from(sorted(SHAPES)),
    tensor_parallel_size=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
def test_slices_of_all_ranks_make_the_whole(name: str, tensor_parallel_size: int, cuts: list[int]) -> None:
    shape = SHAPES[name]
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    seen, copies = torch.zeros_like(whole), torch.zeros_like(whole)
    duplicates = name == FINAL_NORM
    for rank in range(1 if duplicates else tensor_parallel_size):
        shard = tensor_parallel_slice(whole, name, MODEL, rank, tensor_parallel_size)
        edges = sorted({0, shard.numel(), *(cut for cut in cuts if cut < shard.numel())})
        for start, end in pairwise(edges):
            flat = shard.reshape(-1)[start:end]
            for block in blocks_of(name, shape, tuple(shard.shape), rank, start, end - start):
                count = torch.Size(block.shape).numel()
                assert block.start >= 0 and block.start + count <= len(flat)
                place = tuple(slice(o, o + s) for o, s in zip(block.offset, block.shape, strict=True))
                seen[place] += flat[block.start : block.start + count].view(block.shape)
                copies[place] += 1
    assert copies.eq(1).all()
    assert torch.equal(seen, whole)


def test_a_slice_of_a_matrix_is_three_blocks() -> None:
    """Elements 3 to 20 of rows of 7: the end of row 0, rows 1 and 2 whole would end at 21, so row 1 and most of 2."""
    name = LAYER + "mlp.linear_fc2.weight"
    blocks = blocks_of(name, (4, 7), (4, 7), 0, 3, 17)
    assert [(block.start, block.shape, block.offset) for block in blocks] == [
        (0, (1, 4), (0, 3)),
        (4, (1, 7), (1, 0)),
        (11, (1, 6), (2, 0)),
    ]
