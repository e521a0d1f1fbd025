"""Keys and values of earlier positions, so that a new token costs one position and not all.

Sequences of one batch may differ in length: prompts are padded on the right, which a causal model does not see, and
each sequence then goes on at its own length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.model.rope import rotary_inverse_frequencies


class KeyValueCache:
    """Of all layers of one pipeline stage. `capacity`: positions; `lengths` [B]: positions that are filled.

    First one pass over all prompts at once, then passes of one token each; `advance` after each.
    """

    def __init__(self, model: ResolvedModel, batch_size: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.filled = False
        self._frequencies = rotary_inverse_frequencies(model).to(device)

    def layer(self) -> CachedLayer:
        """An empty cache for one more layer."""
        return CachedLayer(self)

    def angles(self, count: int) -> Tensor:
        """Of the `count` new positions: fp32 [count, 1, 1, D], or of one each [1, B, 1, D]."""
        positions = self.lengths if self.filled else torch.arange(count, device=self.lengths.device)
        half = torch.outer(positions.float(), self._frequencies)
        both = torch.cat((half, half), dim=-1)
        return both[None, :, None] if self.filled else both[:, None, None]

    def advance(self, lengths: Tensor) -> None:
        """`lengths` [B]: positions that are filled now."""
        self.lengths, self.filled = lengths, True


class CachedLayer:
    """One layer's part of the cache; see `model.attention.LayerCache`."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._keys: Tensor | None = None  # [B, capacity, G, D]
        self._values: Tensor | None = None

    def rotary_angles(self, count: int) -> Tensor:
        return self._cache.angles(count)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, (count, batch_size, groups, size) = self._cache, key.shape
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # [B, S, heads, D]
        mask = None
        if not cache.filled:
            self._keys = key.new_zeros(batch_size, cache.capacity, groups, size)
            self._values = torch.zeros_like(self._keys)
            self._keys[:, :count], self._values[:, :count] = key, value
        else:
            assert self._keys is not None and self._values is not None and count == 1
            rows = torch.arange(batch_size, device=key.device)
            self._keys[rows, cache.lengths], self._values[rows, cache.lengths] = key[:, 0], value[:, 0]
            longest = int(cache.lengths.max()) + 1
            key, value = self._keys[:, :longest], self._values[:, :longest]
            mask = torch.arange(longest, device=key.device) <= cache.lengths[:, None]  # [B, L]
            mask = mask[:, None, None]
        out = functional.scaled_dot_product_attention(  # [B, N, S, D]
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[2] != groups,
        )
        return out.permute(2, 0, 1, 3).flatten(2)  # [S, B, N D]
