"""Which classes the layers are made of."""

from __future__ import annotations

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.model.transformer_engine import check_transformer_engine

check_transformer_engine("local")  # before megatron-core: a bare transformer-engine package breaks its import

from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from megatron_edit.model.attention import RotarySelfAttention, SDPACoreAttention  # noqa: E402
from megatron_edit.model.norm import RMSNorm  # noqa: E402
from megatron_edit.model.swiglu import SwiGLU  # noqa: E402
from megatron_edit.platform.megatron_core import mlp_parts  # noqa: E402


def block_spec(model: ResolvedModel, num_layers: int) -> TransformerBlockSubmodules:
    """Spec of a chunk's `num_layers` layers and of the final norm (which only the last chunk builds).

    Raises TransformerEngineError when `--transformer-impl transformer_engine` cannot work here.
    """
    if model.transformer_impl == "transformer_engine":
        check_transformer_engine(model.transformer_impl)
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_layernorm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=[_local_layer(model)] * num_layers, layer_norm=RMSNorm)


def _local_layer(model: ResolvedModel) -> ModuleSpec:
    """megatron-core's local layer with our norm, attention and activation; its linear layers stay."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.module = RotarySelfAttention
    parts.self_attention.params["add_output_bias"] = model.add_attention_output_bias
    if model.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = SDPACoreAttention
    mlp_parts(layer).activation_func = SwiGLU  # taken when config.use_te_activation_func says so
    return layer
