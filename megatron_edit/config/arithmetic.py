"""The arithmetic of a run in words, for --dry-run and the log: mesh, batch, length, syncs, parameters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.config.derive import BatchPlan
from megatron_edit.config.save_size import save_line
from megatron_edit.config.schema import Config, ModelConfig
from megatron_edit.config.settings import is_given
from megatron_edit.config.values import parse_split


def count_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of a resolved `model` with `vocab_size` tokens, without the padding of the vocabulary."""
    assert model.kv_channels and model.num_query_groups and model.ffn_hidden_size, "the config is not resolved"
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    attention = hidden * (query + 2 * key_value) + query * hidden
    if model.add_qkv_bias:
        attention += query + 2 * key_value
    attention += model.add_attention_output_bias * hidden + model.qk_layernorm * 2 * model.kv_channels
    mlp = 3 * hidden * model.ffn_hidden_size  # gate, up, down
    norms = 2 * hidden
    embeddings = vocab_size * hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    return model.num_layers * (attention + mlp + norms) + hidden + embeddings


def planned_syncs(config: Config) -> int:
    """Syncs up to the last iteration: after the synchronous warm-up, one every --edit-sync-interval."""
    if config.edit.edit_method in ("baseline", "a-edit") or config.training.train_iters is None:
        return 0
    return max(0, config.training.train_iters - config.edit.edit_warmup_steps) // config.edit.edit_sync_interval


@dataclass(frozen=True)
class Done:
    """What a run that is resumed has behind it. `beyond`: samples after its last whole iteration (a-edit)."""

    iterations: int = 0
    samples: int = 0
    beyond: int = 0


def length_line(config: Config, batch: int, done: Done) -> str:
    """Iterations, samples and tokens of the whole run; those that are `done` may have had another batch."""
    training = config.training
    iterations = training.train_iters or 0
    if is_given(config, "train_samples"):
        left = max(0, (training.train_samples or 0) - done.samples)
        iterations = done.iterations + (left + done.beyond) // batch
    samples = done.samples + max(0, iterations - done.iterations) * batch - done.beyond
    line = f"length: {iterations} iterations, {samples} samples, {samples * config.model.seq_length} tokens"
    if done.samples:
        line += f", of which {done.iterations} iterations and {done.samples} samples are done"
    return line


def describe(config: Config, plan: BatchPlan, vocab_size: int | None = None, done: Done | None = None) -> str:
    """Lines on a resolved and checked `config`. `vocab_size`: the tokenizer's, when known; `done`: of --load."""
    parallel, training, model = config.parallel, config.training, config.model
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    replica_ranks = plan.shard_size * pp * cp * tp
    blocks = [f"{r * replica_ranks}-{(r + 1) * replica_ranks - 1}" for r in range(plan.num_replicas)]
    if replica_ranks == 1:
        blocks = [str(r) for r in range(plan.num_replicas)]
    shown = blocks if len(blocks) <= 8 else [*blocks[:3], "...", blocks[-1]]
    world_size = plan.num_replicas * replica_ranks
    iters, batch = training.train_iters or 0, plan.global_batch_size
    stage = model.num_layers // pp
    lines = [
        f"mesh: {world_size} ranks = sync {plan.num_replicas} x dp {plan.shard_size} x pp {pp} x cp {cp} x tp {tp}",
        f"replicas: {plan.num_replicas} of {replica_ranks} ranks each: ranks {', '.join(shown)}",
        f"layers: {model.num_layers} = {pp} stages x {stage}"
        + (
            f" ({stage // parallel.num_layers_per_virtual_pipeline_stage} chunks of "
            f"{parallel.num_layers_per_virtual_pipeline_stage})"
            if parallel.num_layers_per_virtual_pipeline_stage
            else ""
        ),
        f"batch: global {batch} = {plan.num_replicas} replicas x {plan.shard_size} shards x "
        f"{plan.micro_batch_size} micro batch x {plan.num_microbatches} microbatches; replica batch "
        f"{plan.replica_batch_size}",
        length_line(config, batch, done or Done()),
    ]
    if config.edit.edit_method == "baseline":
        lines.append("sync: baseline, gradients are averaged over all replicas in every step")
    elif config.edit.edit_method == "a-edit":
        lines.append(
            f"sync: a-edit, {config.edit.edit_warmup_steps} synchronous iterations, then a sync whenever "
            f"{config.edit.edit_sync_time:g} seconds have passed; iterations are samples / global batch"
        )
    else:
        lines.append(
            f"sync: {config.edit.edit_method}, {min(config.edit.edit_warmup_steps, iters)} synchronous "
            f"iterations, then every {config.edit.edit_sync_interval}: {planned_syncs(config)} syncs "
            "planned"
        )
    if config.data.data_path:
        shares = " / ".join(f"{share:.4g}" for share in parse_split(config.data.split))
        lines.append(f"split: training / validation / test = {shares}")
    if vocab_size is not None:
        parameters = count_parameters(model, vocab_size)
        lines.append(f"parameters: {parameters:,} (vocabulary {vocab_size}, not padded)")
        if config.checkpoint.save is not None:
            lines.append(save_line(config, parameters))
    return "\n".join(lines)
