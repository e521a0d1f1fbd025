"""The Llama on megatron-core: its TransformerConfig, and the chunks of this rank's pipeline stage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.config.schema import ParallelConfig
from megatron_edit.model.spec import block_spec  # first, for its look at Transformer Engine

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_edit.model.loss import valid_columns, vocabulary_parallel_cross_entropy
from megatron_edit.model.names import canonical_name
from megatron_edit.model.rope import rotary_inverse_frequencies
from megatron_edit.tables.parameters import is_gated, padded_vocabulary_size, partition_dim


def transformer_config(
    model: ResolvedModel,
    parallel: ParallelConfig,
    *,
    params_dtype: torch.dtype,
    device_type: str,
    deterministic_mode: bool = False,
) -> TransformerConfig:
    """megatron-core's config of the Llama; weights are left empty, see `init.initialize_weights`.

    Args:
        params_dtype: float32, bfloat16 or float16; also the dtype of activations between pipeline stages.
        device_type: "cpu" or "cuda". On a CPU nothing is compiled (that would want a compiler).
    """
    on_cuda = device_type == "cuda"
    stages, tensor_ranks = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    virtual_stages = virtual_stages_of(model, parallel)
    interleaved = virtual_stages is not None
    transformer_engine = model.transformer_impl == "transformer_engine"
    return TransformerConfig(
        **_architecture(model),
        # layout
        tensor_model_parallel_size=tensor_ranks,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual_stages,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Batched send/receive is silently wrong on gloo with two interleaved stages; on NCCL the
        # interleaved schedule overlaps unbatched ones with compute.
        batch_p2p_comm=on_cuda and not interleaved,
        overlap_p2p_comm=on_cuda and interleaved,
        deallocate_pipeline_outputs=True,
        # precision
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        fp16=params_dtype == torch.float16,
        calculate_per_token_loss=True,
        deterministic_mode=deterministic_mode,
        # memory
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        # weights
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        # kernels; the flag about TE means that the spec's activation is taken, here swiglu.SwiGLU
        use_te_activation_func=not on_cuda,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=transformer_engine,
        gradient_accumulation_fusion=on_cuda and find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


def _architecture(model: ResolvedModel) -> dict[str, Any]:
    """What makes it a Llama, and its sizes."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
    }


def virtual_stages_of(model: ResolvedModel, parallel: ParallelConfig) -> int | None:
    """Chunks per pipeline stage, None without interleaving."""
    stages, layers = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    assert model.num_layers % stages == 0, f"{model.num_layers} layers do not divide over {stages} stages"
    if layers is None:
        return None
    assert stages > 1, "an interleaved pipeline needs more than one stage"
    per_stage = model.num_layers // stages
    assert per_stage % layers == 0, f"{per_stage} layers of a stage do not divide into chunks of {layers}"
    return per_stage // layers if per_stage > layers else None


def build_model_chunks(
    model: ResolvedModel,
    config: TransformerConfig,
    vocab_size: int,
    pg_collection: ProcessGroupCollection,
    z_loss_coeff: float = 0.0,
) -> list[Llama]:
    """The chunks of this rank's pipeline stage in order: one, or several with the interleaved schedule.

    Parameters have config.params_dtype and are not initialised. With tied embeddings on several stages this
    is a collective of the embedding group (megatron-core's constructor makes it one).

    Args:
        vocab_size: ids of the tokenizer, without padding.
        pg_collection: groups of this rank; tp, cp, pp and embd are used.
        z_loss_coeff: of the z-loss beside the token losses while training, see `vocabulary_parallel_cross_entropy`.
    """
    virtual_stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for virtual_stage in range(virtual_stages) if virtual_stages else [None]:
        chunk = Llama(model, config, vocab_size, pg_collection, virtual_stage, z_loss_coeff)
        _mark_tensor_parallel(chunk)
        chunks.append(chunk)
    return chunks


class Llama(GPTModel):
    """One chunk. Beyond megatron-core's GPTModel: padded vocabulary ids have probability 0, and the rotary
    frequencies are the config's."""

    def __init__(
        self,
        model: ResolvedModel,
        config: TransformerConfig,
        vocab_size: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
        z_loss_coeff: float = 0.0,
    ) -> None:
        pp_group, virtual_stages = pg_collection.pp, config.virtual_pipeline_model_parallel_size
        num_layers = get_num_layers_to_build(config, vp_stage, pp_group.rank())
        super().__init__(
            config,
            block_spec(model, num_layers),
            vocab_size=padded_vocabulary_size(
                vocab_size, model.make_vocab_size_divisible_by, config.tensor_model_parallel_size
            ),
            max_sequence_length=model.max_position_embeddings or model.seq_length,
            pre_process=is_pp_first_stage(pp_group) and is_vp_first_stage(vp_stage, virtual_stages),
            post_process=is_pp_last_stage(pp_group) and is_vp_last_stage(vp_stage, virtual_stages),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.unpadded_vocab_size = vocab_size
        self.z_loss_coeff = z_loss_coeff
        rotary = self.rotary_pos_emb
        rotary.inv_freq = rotary_inverse_frequencies(model).to(rotary.inv_freq.device)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor | None, **kwargs: Any) -> tuple[Any, ...]:
        """megatron-core's: inputs of the first layer and rotary angles [S, 1, 1, D]; with `position_ids` (int64
        [B, S], below S) angles of each token's own position [S, B, 1, D]. megatron-core ignores them with rotary
        embeddings."""
        prepared = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if position_ids is None:
            return prepared
        hidden, angles, *others = prepared
        return hidden, angles[position_ids.t(), 0], *others  # [S, B, 1, D]

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As GPTModel's: hidden states; on the last stage token losses (see `compute_language_model_loss`), or without
        labels logits [B, S, V / TP], those of padded ids -inf."""
        output = super().forward(*args, labels=labels, **kwargs)
        if self.post_process and labels is None:
            columns = output.shape[-1]
            rank = 0 if columns == self.vocab_size else self.tp_group.rank()  # 0 too when gathered
            valid = valid_columns(columns, self.unpadded_vocab_size, rank)
            output = output.masked_fill(torch.arange(columns, device=output.device) >= valid, float("-inf"))
        return output

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [B, S], logits [S, B, V / TP] -> losses in nats, fp32 [B, S]; [2, B, S] with z-losses behind them, in
        training and with a coefficient."""
        losses, z_losses = vocabulary_parallel_cross_entropy(
            logits, labels.t(), self.unpadded_vocab_size, self.tp_group, self.z_loss_coeff if self.training else 0.0
        )
        if z_losses is None:
            return losses.t().contiguous()
        return torch.stack((losses.t(), z_losses.t()))


def _mark_tensor_parallel(chunk: nn.Module) -> None:
    """Tells megatron-core which parameters are cut, and how.

    Its constructors say so only when they initialise the weights themselves. A parameter without the mark
    counts as a copy: the gradient norm would leave out all but the first rank's part of it.
    """
    for local_name, parameter in chunk.named_parameters():
        name = canonical_name(chunk, local_name)
        dim = partition_dim(name)
        parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
        parameter.partition_dim = -1 if dim is None else dim  # type: ignore[attr-defined]
        parameter.partition_stride = 2 if is_gated(name) else 1  # type: ignore[attr-defined]
