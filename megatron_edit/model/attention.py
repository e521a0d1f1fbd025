"""Self attention for megatron-core's local layers: fused rotary split of the QKV projection, and torch SDPA.

Letters in shapes: S sequence, B batch, G key/value heads (query groups) of this rank, N query heads of this
rank, R = N / G query heads of a group, D size of a head, H hidden size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class SDPACoreAttention(nn.Module):
    """Core attention on `torch.nn.functional.scaled_dot_product_attention`: causal, without a mask, or with one.

    Without one it keeps no attention matrix and picks torch's fastest kernel for the device.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine's attention"
        assert config.window_size is None and attention_type == "self"
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(D)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D] -> [S, B, N D].

        attention_mask: None, or bool [B, 1, S, S], True where a query may look, in place of the causal mask.
        """
        assert attention_bias is None and packed_seq_params is None
        assert attention_mask is None or attention_mask.dtype == torch.bool
        mask_type = attn_mask_type or self.attn_mask_type
        assert mask_type in (AttnMaskType.causal, AttnMaskType.no_mask), mask_type
        dropout = self.dropout if self.training else 0.0
        if attention_mask is not None:  # torch's memory-saving CUDA kernel takes a mask, but not grouped heads
            repeats = query.shape[2] // key.shape[2]
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))  # [S, B, N, D]
        with self._dropout_stream(dropout):
            out = functional.scaled_dot_product_attention(  # [B, N, S, D]
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=attention_mask,
                is_causal=mask_type == AttnMaskType.causal and attention_mask is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _dropout_stream(self, dropout: float) -> Any:
        """Tensor parallel ranks hold different heads, so each draws from its own generator.

        With sequence parallelism the whole layer already runs under that generator.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()


class LayerCache(Protocol):
    """Keys and values of earlier positions of one layer, for generation (`inference.cache`)."""

    def rotary_angles(self, count: int) -> Tensor:
        """Angles of the `count` new positions, fp32 [S, B or 1, 1, D]."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Takes up the new keys and values [S, B, G, D]; the new queries [S, B, N, D] attend to all -> [S, B, N D]."""


class RotarySelfAttention(SelfAttention):
    """megatron-core's self attention with the steps between the QKV projection and the core fused into one.

    Parameters, names and checkpoint layout are the parent's; only the forward pass is ours. With more tensor parallel
    ranks than query groups the ranks of a group share its rows of the projection, and compute its key and value each.
    `cache`: set while a model generates, None otherwise. `add_output_bias`: a bias on `linear_proj`.
    """

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, add_output_bias: bool, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)
        self.cache: LayerCache | None = None
        if add_output_bias:  # the parent has one flag for this bias and those of the MLP
            self.linear_proj = build_module(
                submodules.linear_proj,
                self.query_projection_size,
                config.hidden_size,
                config=config,
                init_method=config.output_layer_init_method,
                bias=True,
                input_is_parallel=True,
                skip_bias_add=True,
                is_expert=False,
                tp_comm_buffer_name="proj",
                tp_group=self.pg_collection.tp,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [S, B, H] (S / TP of them with sequence parallelism) -> (the same shape, None).

        rotary_pos_emb: angles, fp32 [S, 1 or B, 1, D], second half equal to the first. attention_mask: None (causal),
        or as the core attention takes it.
        """
        assert inference_context is None and packed_seq_params is None
        assert rotary_pos_emb is not None
        mixed, _bias = self.linear_qkv(hidden_states)  # [S, B, G (R+2) D]
        mixed = self._heads_of_groups(mixed)  # [S, B, G, R+2, D]
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(mixed[..., :-2, :]), self.k_layernorm(mixed[..., -2:-1, :])
            mixed = torch.cat((query, key, mixed[..., -1:, :]), dim=-2)
        if self.cache is not None:
            rotary_pos_emb = self.cache.rotary_angles(mixed.shape[0])
        angles = rotary_pos_emb[..., None, : mixed.shape[-1] // 2]  # [S, 1 or B, 1, 1, D/2]
        cosine, sine = angles.cos().to(mixed.dtype), angles.sin().to(mixed.dtype)
        query, key, value = _SplitAndRotate.apply(mixed, cosine, sine)
        if self.cache is not None:
            out = self.cache.attend(query, key, value)
        elif self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(
                query, key, value, attention_mask, attn_mask_type=self.attn_mask_type
            )
        else:
            out = self.core_attention(query, key, value, attention_mask)  # [S, B, N D]
        return self.linear_proj(out)

    def _heads_of_groups(self, mixed: Tensor) -> Tensor:
        """This rank's columns of the projection -> [S, B, G, R+2, D]: its groups' queries, key and value."""
        groups, head_size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        all_groups = self.config.num_query_groups
        if all_groups >= self.world_size:
            return mixed.view(*mixed.shape[:2], groups, -1, head_size)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, self.pg_collection.tp)
        mixed = mixed.view(*mixed.shape[:2], all_groups, -1, head_size)
        sharers = self.world_size // all_groups  # ranks of a group, each with its part of the query heads
        group, part = divmod(self.pg_collection.tp.rank(), sharers)
        heads = (mixed.shape[3] - 2) // sharers
        mixed = mixed[:, :, group : group + 1]
        queries, key_value = mixed[..., part * heads : (part + 1) * heads, :], mixed[..., -2:, :]
        return torch.cat((queries, key_value), dim=-2)


class _SplitAndRotate(torch.autograd.Function):
    """[S, B, G, R+2, D] -> rotated query [S, B, G R, D], rotated key [S, B, G, D], value [S, B, G, D].

    Rotary embedding (arXiv 2104.09864) with the two halves of a head paired. It is linear and orthogonal: the
    backward pass rotates back by the same angles, and nothing but these is saved.
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.mixed_shape = mixed.shape
        sequence, batch, groups, heads, size = mixed.shape
        query = mixed.new_empty(sequence, batch, groups, heads - 2, size)
        key = mixed.new_empty(sequence, batch, groups, 1, size)
        _rotate(mixed[..., :-2, :], cosine, sine, 1, out=query)
        _rotate(mixed[..., -2:-1, :], cosine, sine, 1, out=key)
        value = mixed[..., -1, :].contiguous()
        return query.view(sequence, batch, groups * (heads - 2), size), key.squeeze(3), value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        grad_query, grad_key, grad_value = grads
        grad_mixed = grad_value.new_empty(ctx.mixed_shape)
        sequence, batch, groups, heads, size = ctx.mixed_shape
        grad_query = grad_query.reshape(sequence, batch, groups, heads - 2, size)
        _rotate(grad_query, cosine, sine, -1, out=grad_mixed[..., :-2, :])
        _rotate(grad_key.unsqueeze(3), cosine, sine, -1, out=grad_mixed[..., -2:-1, :])
        grad_mixed[..., -1, :] = grad_value
        return grad_mixed, None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, direction: int, out: Tensor) -> None:
    """out = x rotated by the angles (direction 1) or back (-1); x and out [S, B, G, heads, D]."""
    (x_first, x_second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x_first, cosine, out=out_first).addcmul_(x_second, sine, value=-direction)
    torch.mul(x_second, cosine, out=out_second).addcmul_(x_first, sine, value=direction)
