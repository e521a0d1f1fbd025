"""Checks of sizes against each other: ranks, replicas, the batch, the model. Each message names flags,
numbers and values that would work. `config` is resolved; each check yields nothing when all is well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_edit.config.derive import batch_plan, ffn_hidden_size, model_ranks, num_query_groups
from megatron_edit.config.schema import Config, ModelConfig
from megatron_edit.config.settings import is_given

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
GLOBAL, REPLICA = "--global-batch-size", "--replica-batch-size"


def divisors(n: int) -> list[int]:
    """All divisors of n >= 1, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_multiples(n: int, unit: int) -> str:
    """The multiples of `unit` around n, smallest first, as text: "8 or 16"."""
    lower = n // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def nearest_divisors(n: int, wanted: int) -> str:
    """The divisors of n around `wanted`, as text: "2 or 4"."""
    below = [d for d in divisors(n) if d < wanted][-1:]
    above = [d for d in divisors(n) if d > wanted][:1]
    return " or ".join(map(str, below + above))


def check_mesh(config: Config, world_size: int, local_world_size: int) -> Iterator[str]:
    """Ranks into copies of the model, copies into replicas."""
    parallel, ranks = config.parallel, model_ranks(config)
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if world_size % ranks:
        factors = f"{TP} {tp} x {PP} {pp}" + (f" x {CP} {cp}" if cp > 1 else "")
        yield (
            f"{world_size} rank{'s' * (world_size != 1)} cannot be divided into copies of the model of "
            f"{ranks} ranks ({factors}): start {nearest_multiples(world_size, ranks)} ranks"
        )
        return
    data_parallel_size = world_size // ranks
    replicas = config.edit.edit_num_replicas
    possible = ", ".join(map(str, divisors(data_parallel_size)))
    if replicas is None:
        yield (
            f"--edit-num-replicas is not given and cannot be derived: {world_size} ranks with "
            f"{local_world_size} a node do not make replicas of whole nodes for {ranks} ranks a copy; "
            f"these would work: {possible}"
        )
    elif data_parallel_size % replicas:
        derived = config.sources.get("edit_num_replicas") == "derived"
        how = f" (derived: {local_world_size} ranks a node)" if derived else ""
        span = f", so a context-parallel group ({CP} {cp}) would span replicas" if cp > 1 else ""
        yield (
            f"--edit-num-replicas {replicas}{how} does not divide the data parallel size "
            f"{data_parallel_size} ({world_size} ranks / {ranks} a copy of the model){span}: these would "
            f"work: {possible}; or start {nearest_multiples(world_size, ranks * replicas)} ranks"
        )


def check_batch(config: Config, world_size: int) -> Iterator[str]:
    """Global or replica batch into replicas, shards, micro-batches."""
    training, ranks, replicas = config.training, model_ranks(config), config.edit.edit_num_replicas
    if training.step_batch_size_schedule:
        return  # check_batch_schedule
    given = _given_batches(config)
    if len(given) > 1:
        yield " and ".join(f"{flag} {value}" for flag, value in given.items()) + " are both given: give one"
        return
    if not given:
        yield f"neither {GLOBAL} nor {REPLICA} is given: give one"
        return
    if replicas is None or world_size % ranks or (world_size // ranks) % replicas:
        return  # check_mesh has said why
    micro, shard_size = training.micro_batch_size, world_size // ranks // replicas
    ((flag, value),) = given.items()
    if flag == GLOBAL:
        parts = shard_size * replicas
        of = f"data parallel size {parts} ({replicas} replicas x {shard_size})"
    else:
        parts = shard_size
        of = f"shard group {parts} (data parallel ranks of one replica)"
    unit = micro * parts
    if value % unit:
        smaller = ""
        if value % parts == 0:
            smaller = f"; or --micro-batch-size {nearest_divisors(value // parts, micro)}"
        yield (
            f"{flag} {value} is not a multiple of --micro-batch-size {micro} x {of} = {unit}: "
            f"{nearest_multiples(value, unit)} would work{smaller}"
        )


def _given_batches(config: Config) -> dict[str, int]:
    """Flag -> value of the batch sizes that were given."""
    training = config.training
    sizes = {GLOBAL: training.global_batch_size, REPLICA: training.replica_batch_size}
    given = {GLOBAL: is_given(config, "global_batch_size"), REPLICA: is_given(config, "replica_batch_size")}
    return {flag: size for flag, size in sizes.items() if size is not None and given[flag]}


def sizes_are_fixed(config: Config) -> bool:
    """Whether the model's sizes are those of weights that are loaded, or of a named model."""
    return config.checkpoint.load is not None or config.model.model_size is not None


def check_pipeline(config: Config, world_size: int, *, fixed: bool | None = None) -> Iterator[str]:
    """Layers into stages and chunks; the interleaved schedule. `fixed`: see `check_model`."""
    layers, pp = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    chunk = config.parallel.num_layers_per_virtual_pipeline_stage
    if layers % pp:
        fixed = sizes_are_fixed(config) if fixed is None else fixed
        other_model = "" if fixed else f"{nearest_multiples(layers, pp)} layers, or "
        yield (
            f"--num-layers {layers} is not divisible by {PP} {pp}, and every stage holds the same number of layers: "
            f"{other_model}a pipeline size of {nearest_divisors(layers, pp)}{'' if fixed else ','} would work"
        )
        return
    if chunk is None:
        return
    flag = f"--num-layers-per-virtual-pipeline-stage {chunk}"
    if pp == 1:
        yield f"{flag} needs a pipeline: {PP} is 1; leave it off, or give {PP} 2 or more"
        return
    stage = layers // pp
    usable = [d for d in divisors(stage) if d < stage]
    if not usable or chunk not in usable:
        works = f"these would work: {', '.join(map(str, usable))}" if usable else "leave it off"
        yield (
            f"{flag} does not cut the {stage} layers of a stage (--num-layers {layers} / {PP} {pp}) into "
            f"two or more equal chunks: {works}"
        )
    plan = batch_plan(config, world_size)
    if plan is not None and plan.num_microbatches % pp and not config.training.step_batch_size_schedule:
        parts, batch_flag, value = plan.shard_size, REPLICA, plan.replica_batch_size
        if GLOBAL in _given_batches(config):
            parts, batch_flag, value = parts * plan.num_replicas, GLOBAL, plan.global_batch_size
        works = nearest_multiples(value, plan.micro_batch_size * parts * pp)
        yield (
            f"{flag} needs a number of micro-batches that {PP} {pp} divides, but {batch_flag} {value} makes "
            f"{plan.num_microbatches}: {works} would work"
        )


def check_model(config: Config, *, fixed: bool | None = None) -> Iterator[str]:
    """Heads, groups, widths and the sequence against each other and tensor / context parallel sizes.

    `fixed`: the model's sizes cannot be changed, so none are offered; None: as `sizes_are_fixed` says.
    """
    model, tp, cp = (
        config.model,
        config.parallel.tensor_model_parallel_size,
        config.parallel.context_parallel_size,
    )
    heads, groups = model.num_attention_heads, num_query_groups(model)
    if model.kv_channels is None:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}: "
            f"{nearest_multiples(model.hidden_size, heads)} would work, or give --kv-channels"
        )
    elif model.kv_channels % 2:
        yield f"--kv-channels {model.kv_channels} (size of a head) is odd, but rotary embeddings turn pairs"
    if heads % groups:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: "
            f"{nearest_divisors(heads, groups)} groups would work"
        )
    yield from _check_tensor_parallel(model, tp, sizes_are_fixed(config) if fixed is None else fixed)
    if config.parallel.sequence_parallel and model.seq_length % tp:
        yield (
            f"--sequence-parallel needs a --seq-length that {TP} {tp} divides, not {model.seq_length}: "
            f"{nearest_multiples(model.seq_length, tp)} would work"
        )
    slices = math.lcm(2 * cp, cp * tp if config.parallel.sequence_parallel else 1)  # two slices a rank
    if cp > 1 and model.seq_length % slices:
        yield (
            f"{CP} {cp} needs a --seq-length that {slices} divides, not {model.seq_length}: "
            f"{nearest_multiples(model.seq_length, slices)} would work"
        )
    if model.max_position_embeddings is not None and model.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {model.seq_length} is above --max-position-embeddings "
            f"{model.max_position_embeddings}: raise the latter or shorten the samples"
        )
    if model.add_attention_output_bias and model.transformer_impl == "transformer_engine":
        yield "--add-attention-output-bias is built for --transformer-impl local only"
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.rope_scaling_type == "llama3" and low >= high:
        yield (
            f"--rope-scaling-low-freq-factor {low:g} must be below --rope-scaling-high-freq-factor "
            f"{high:g}: Llama 3 uses 1 and 4"
        )


def _check_tensor_parallel(model: ModelConfig, tp: int, fixed: bool) -> Iterator[str]:
    """Heads, groups and MLP over the tensor parallel ranks. The sizes that are offered suit all three."""
    heads, ffn = model.num_attention_heads, ffn_hidden_size(model)
    fitting = [d for d in divisors(heads) if _why_heads_do_not_fit(model, d) is None and ffn % d == 0]
    sizes = f"these tensor parallel sizes would work: {', '.join(map(str, fitting))}"
    why = _why_heads_do_not_fit(model, tp)
    if why is not None:
        yield f"{why}; {sizes}"
    if ffn % tp:
        also = "" if why else f"; {sizes}"  # once is enough
        other_model = "" if fixed else f"; --ffn-hidden-size {nearest_multiples(ffn, tp)} would work too"
        yield f"--ffn-hidden-size {ffn} is not divisible by {TP} {tp}{also}{other_model}"


def _why_heads_do_not_fit(model: ModelConfig, tp: int) -> str | None:
    """Every rank holds whole query heads, and whole groups or, with more ranks than groups, equal parts of one."""
    heads, groups, channels = model.num_attention_heads, num_query_groups(model), model.kv_channels or 0
    if heads % tp:
        return f"--num-attention-heads {heads} is not divisible by {TP} {tp}"
    if groups % tp == 0:
        return None
    if tp % groups:
        return f"--num-query-groups {groups} cannot be split over {TP} {tp} (neither number divides the other)"
    ranks, rows = tp // groups, 2 * channels  # ranks of a group share its rows of the fused projection
    if rows % ranks:
        return (
            f"--num-query-groups {groups} cannot be split over {TP} {tp}: {ranks} ranks would share the {rows} rows of "
            f"keys and values of a group (--kv-channels {channels}), and {ranks} does not divide {rows}"
        )
    return None
