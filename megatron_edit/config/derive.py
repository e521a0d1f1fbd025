"""Fills in what follows from other settings and from the number of ranks. Pure: integers in, a new Config
out.

A derived value never replaces a given one. Where the given ones do not fit (a size that does not divide), the
value is left as it is and `check` says why; nothing here raises for a user's mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.schema import Config, ModelConfig, OptimizerConfig
from megatron_edit.config.settings import SETTINGS, value_of, with_values
from megatron_edit.tables.methods import DEFAULT_METHOD, METHODS, SYNCHRONOUS_METHOD


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic: global = replicas x shard x micro x microbatches, all in samples of one iteration.

    `shard_size`: data parallel ranks inside one replica. `num_microbatches`: forward passes of each rank.
    """

    num_replicas: int
    shard_size: int
    micro_batch_size: int
    num_microbatches: int

    @property
    def replica_batch_size(self) -> int:
        """Samples of one iteration of one replica."""
        return self.shard_size * self.micro_batch_size * self.num_microbatches

    @property
    def global_batch_size(self) -> int:
        """Samples of one iteration over all replicas."""
        return self.num_replicas * self.replica_batch_size


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of the learning rate schedule in samples; `decay` counts from 0, so it includes the warm-up."""

    warmup: float
    decay: int
    wsd_decay: int


def model_ranks(config: Config) -> int:
    """Ranks that hold one copy of the model: TP x PP x CP."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def ffn_hidden_size(model: ModelConfig) -> int:
    """As given, else 8/3 of the hidden size, up to a multiple of 64."""
    return -(-8 * model.hidden_size // (3 * 64)) * 64 if model.ffn_hidden_size is None else model.ffn_hidden_size


def num_query_groups(model: ModelConfig) -> int:
    """As given, else one for each query head."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups


def default_num_replicas(config: Config, world_size: int, local_world_size: int) -> int | None:
    """Nodes / nodes that one replica needs (as in the paper); None when nodes cannot be dealt out so."""
    if world_size % local_world_size:
        return None
    nodes = world_size // local_world_size
    nodes_per_replica = -(-model_ranks(config) // local_world_size)
    return None if nodes % nodes_per_replica else nodes // nodes_per_replica


def batch_plan(config: Config, world_size: int) -> BatchPlan | None:
    """The plan of a resolved config; None when sizes do not divide, which `check` reports. Of a batch that grows it is
    the plan of the last step.
    """
    replicas, ranks = config.edit.edit_num_replicas, model_ranks(config)
    if replicas is None or world_size % ranks or (world_size // ranks) % replicas:
        return None
    shard_size = world_size // ranks // replicas
    micro_batch_size = config.training.micro_batch_size
    given = config.training.global_batch_size
    if config.training.step_batch_size_schedule:
        schedule = batch_schedule(config)
        given = None if schedule is None else schedule.last_size
    elif given is None and config.training.replica_batch_size is not None:
        given = config.training.replica_batch_size * replicas
    unit = micro_batch_size * shard_size * replicas
    if given is None or given < unit or given % unit:
        return None
    return BatchPlan(replicas, shard_size, micro_batch_size, given // unit)


def batch_schedule(config: Config) -> BatchSchedule | None:
    """The global batch of every iteration; None when it is not known or does not fit, which `check` reports."""
    try:
        return read_batch_schedule(config)
    except ValueError:
        return None


def read_batch_schedule(config: Config) -> BatchSchedule | None:
    """As `batch_schedule`, but raises ValueError that says what is wrong with the words of a batch that grows."""
    training = config.training
    if training.step_batch_size_schedule:
        return BatchSchedule.from_steps(training.step_batch_size_schedule, config.model.seq_length)
    if training.global_batch_size is None:
        return None
    if training.rampup_batch_size:
        return BatchSchedule.from_rampup(training.rampup_batch_size, training.global_batch_size)
    return BatchSchedule.constant(training.global_batch_size)


def schedule_lengths(
    optimizer: OptimizerConfig, train_iters: int, batch: BatchSchedule, first_sample: int = 0
) -> ScheduleLengths:
    """Lengths in samples from whichever form was given; an unset decay is the run's length.

    Both forms agree: n iterations are the samples of the n iterations after `first_sample`, where the schedule of the
    learning rate begins; of the final decay those of the n iterations before its end. The fraction is of the decay
    length.
    """

    def samples(iters: int | None, in_samples: int | None) -> int | None:
        return batch.samples_after(iters, first_sample) - first_sample if iters is not None else in_samples

    decay = samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples)
    if decay is None:
        decay = batch.samples_after(train_iters, first_sample) - first_sample
    warmup: float | None = samples(optimizer.lr_warmup_iters, optimizer.lr_warmup_samples)
    if warmup is None:
        warmup = (optimizer.lr_warmup_fraction or 0.0) * decay
    wsd_decay = optimizer.lr_wsd_decay_samples or 0
    if optimizer.lr_wsd_decay_iters is not None:
        last = batch.iterations_until(first_sample + decay, first_sample)
        first = max(0, last - optimizer.lr_wsd_decay_iters)
        wsd_decay = batch.samples_after(last, first_sample) - batch.samples_after(first, first_sample)
        too_many = max(0, optimizer.lr_wsd_decay_iters - last)  # `check` refuses it by this length
        wsd_decay += too_many * batch.size_at(first_sample)
    return ScheduleLengths(warmup=warmup, decay=decay, wsd_decay=wsd_decay)


def derive(config: Config, world_size: int, local_world_size: int, device: str) -> Config:
    """`config` with every value filled in that follows from others, noted as "derived" in `sources`.

    `device`: "cpu" or "cuda", what this machine has; it is taken when --device is auto. `local_world_size`:
    ranks of one node. Deriving twice gives the same; for another number of ranks it is done anew.
    """
    config = _without_derived(config)
    derived: dict[str, Any] = {
        **derived_model(config.model),
        **_derived_method(config),
        **_derived_replicas(config, world_size, local_world_size),
    }
    if config.training.device == "auto":
        derived["device"] = device
    if config.data.tokenizer_type is None and config.data.mock_data:
        derived["tokenizer_type"] = "ByteTokenizer"
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        derived["sequence_parallel"] = False
    config = with_values(config, derived, "derived")
    config = with_values(config, _derived_batch(config, world_size), "derived")
    config = with_values(config, _derived_length(config), "derived")
    return with_values(config, _derived_schedule(config), "derived")


def _without_derived(config: Config) -> Config:
    names = [name for name, source in config.sources.items() if source == "derived"]
    reset = with_values(config, {name: SETTINGS[name].default for name in names})
    return replace(reset, sources={**config.sources, **dict.fromkeys(names, "default")})


def derived_model(model: ModelConfig) -> dict[str, Any]:
    """Sizes that were not given and follow from those that were."""
    values: dict[str, Any] = {}
    if model.ffn_hidden_size is None:
        values["ffn_hidden_size"] = ffn_hidden_size(model)
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads == 0:
        values["kv_channels"] = model.hidden_size // model.num_attention_heads
    if model.num_query_groups is None:
        values["num_query_groups"] = num_query_groups(model)
    if model.max_position_embeddings is None:
        values["max_position_embeddings"] = model.seq_length
    return values


def _derived_method(config: Config) -> dict[str, Any]:
    """The method, and the defaults of its row for what was not given."""
    edit, values = config.edit, {}
    name = edit.edit_method
    if edit.edit_sync_interval == 0 and name == DEFAULT_METHOD:
        values["edit_method"] = name = SYNCHRONOUS_METHOD
    method = METHODS[name]
    defaults: dict[str, Any] = {
        "edit_weighting": method.weighting,
        "edit_anomaly_threshold": method.anomaly_threshold,
        "edit_pseudo_grad_clip": method.pseudo_grad_clip,
        "edit_outer_lr": method.outer_lr,
        "edit_outer_momentum": method.outer_momentum,
        "edit_sync_placement": method.placement if method.placement in ("forward", "step") else None,
        "edit_sync_time": method.sync_time,
    }
    for setting, default in defaults.items():
        if value_of(config, setting) is None and default is not None:
            values[setting] = default
    return values


def _derived_replicas(config: Config, world_size: int, local_world_size: int) -> dict[str, Any]:
    if config.edit.edit_num_replicas is not None:
        return {}
    return {"edit_num_replicas": default_num_replicas(config, world_size, local_world_size)}


def _derived_batch(config: Config, world_size: int) -> dict[str, Any]:
    plan = batch_plan(config, world_size)
    if plan is None:
        return {}
    values = {}
    if config.training.global_batch_size is None:
        values["global_batch_size"] = plan.global_batch_size
    if config.training.replica_batch_size is None:
        values["replica_batch_size"] = plan.replica_batch_size
    return values


def _derived_length(config: Config) -> dict[str, Any]:
    training, batch = config.training, batch_schedule(config)
    if batch is None:
        return {}
    if training.train_iters is None and training.train_samples is not None:
        return {"train_iters": batch.iterations_until(training.train_samples)}
    if training.train_samples is None and training.train_iters is not None:
        return {"train_samples": batch.samples_after(training.train_iters)}
    return {}


def _derived_schedule(config: Config) -> dict[str, Any]:
    optimizer, values = config.optimizer, {}
    if optimizer.lr_decay_iters is None and optimizer.lr_decay_samples is None:
        values["lr_decay_iters"] = config.training.train_iters
    warmups = (optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, optimizer.lr_warmup_fraction)
    if all(warmup is None for warmup in warmups):
        values["lr_warmup_iters"] = 0
    return values
