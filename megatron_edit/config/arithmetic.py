"""The arithmetic of a run in words, for --dry-run and the log: mesh, batch, length, syncs, parameters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.derive import BatchPlan
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.save_size import save_line
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import is_given
from megatron_edit.config.values import parse_split
from megatron_edit.tables.methods import METHODS
from megatron_edit.tables.parameters import module_keys, parameter_count
from megatron_edit.tables.timetable import Timetable, fragments_of


def count_modules(config: Config) -> int:
    """Modules that synchronise as one: embedding, layers or their halves, head."""
    return len(module_keys(config.model.num_layers, config.edit.edit_modules))


def timetable_of(config: Config) -> Timetable | None:
    """When a run of the resolved `config` synchronises that starts at iteration 1; None without a plan by steps."""
    edit = config.edit
    method = METHODS[edit.edit_method]
    if method.trigger not in ("steps", "staggered"):
        return None
    fragments = fragments_of(method, edit.edit_num_fragments, count_modules(config), edit.edit_sync_interval)
    return Timetable(edit.edit_sync_interval, fragments, edit.edit_warmup_steps)


def planned_syncs(config: ResolvedConfig) -> int:
    """Syncs of the whole run: those of the timetable, and the last one where the run ends between two."""
    iterations, timetable = config.training.train_iters, timetable_of(config)
    if timetable is None:
        return 0
    ends_apart = not timetable.is_due_for_all(iterations)
    if config.edit.edit_mixing_alpha is not None:  # a mixture leaves the replicas apart after every sync
        ends_apart = iterations > timetable.warmup_end
    return timetable.syncs_in(0, iterations) + int(ends_apart)


def batch_lines(schedule: BatchSchedule, plan: BatchPlan, train_iters: int) -> list[str]:
    """The steps of a batch that grows, as far as a run of `train_iters` iterations comes; a long list is cut."""
    if schedule.is_constant:
        return []
    lines, first = [], 1
    for samples, size, number in schedule.stretches():
        last = train_iters if number is None else min(train_iters, first + number - 1)
        if first > train_iters:
            break
        microbatches = size * plan.num_microbatches // plan.global_batch_size
        lines.append(
            f"  from sample {samples}: global batch {size}, {microbatches} microbatches, iterations {first} to {last}"
        )
        first = last + 1
    shown = lines if len(lines) <= 8 else [*lines[:4], f"  ... {len(lines) - 7} more steps", *lines[-3:]]
    return ["  that is the batch in the end, and of evaluations; the run has", *shown]


@dataclass(frozen=True)
class Done:
    """What a run that is resumed has behind it. `beyond`: samples after its last whole iteration (a-edit)."""

    iterations: int = 0
    samples: int = 0
    beyond: int = 0


def length_line(config: ResolvedConfig, done: Done) -> str:
    """Iterations, samples and tokens of the whole run; those that are `done` may have had other batches."""
    training, schedule = config.training, config.batch_schedule
    iterations, counted = training.train_iters, done.samples - done.beyond
    if is_given(config, "train_samples"):
        iterations = done.iterations + schedule.iterations_until(training.train_samples, counted)
    samples = schedule.samples_after(max(0, iterations - done.iterations), counted)
    line = f"length: {iterations} iterations, {samples} samples, {samples * config.model.seq_length} tokens"
    if done.samples:
        line += f", of which {done.iterations} iterations and {done.samples} samples are done"
    return line


def describe(config: ResolvedConfig, vocab_size: int | None = None, done: Done | None = None) -> str:
    """Lines on a checked `config`. `vocab_size`: the tokenizer's, when known; `done`: of --load."""
    parallel, model, plan = config.parallel, config.model, config.batch_plan
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
    iters = config.training.train_iters
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
        f"batch: global {plan.global_batch_size} = {plan.num_replicas} replicas x {plan.shard_size} shards x "
        f"{plan.micro_batch_size} micro batch x {plan.num_microbatches} microbatches; replica batch "
        f"{plan.replica_batch_size}",
        *batch_lines(config.batch_schedule, plan, iters),
        length_line(config, done or Done()),
    ]
    lines.append(_sync_line(config, iters))
    if config.data.data_path:
        shares = " / ".join(f"{share:.4g}" for share in parse_split(config.data.split))
        lines.append(f"split: training / validation / test = {shares}")
    if vocab_size is not None:
        parameters = parameter_count(model, vocab_size)
        lines.append(f"parameters: {parameters:,} (vocabulary {vocab_size}, not padded)")
        if config.checkpoint.save is not None:
            lines.append(save_line(config, parameters))
    return "\n".join(lines)


def _sync_line(config: ResolvedConfig, iterations: int) -> str:
    edit, timetable, syncs = config.edit, timetable_of(config), planned_syncs(config)
    if not METHODS[edit.edit_method].is_local:
        return f"sync: {edit.edit_method}, gradients are averaged over all replicas in every step"
    if timetable is None:
        return (
            f"sync: {edit.edit_method}, {edit.edit_warmup_steps} synchronous iterations, then a sync whenever "
            f"{edit.edit_sync_time:g} seconds have passed; iterations are samples / global batch"
        )
    warmup = min(edit.edit_warmup_steps, iterations)
    fragments = f" for each of {timetable.num_fragments} fragments" if timetable.num_fragments > 1 else ""
    at_end = syncs - timetable.syncs_in(0, iterations)
    last = ", the last one at the end" if at_end and syncs > 1 else ", at the end" if at_end else ""
    return (
        f"sync: {edit.edit_method}, {warmup} synchronous iterations, then every {edit.edit_sync_interval}{fragments}: "
        f"{syncs} sync{'s' * (syncs != 1)} planned{last}"
    )
