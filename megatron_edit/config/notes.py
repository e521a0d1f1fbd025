"""What a user should know about a set of flags that works: one line each, logged at the start on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_edit.config.arithmetic import timetable_of
from megatron_edit.config.check_run import NEED_MODEL_FILE
from megatron_edit.config.derive import schedule_lengths
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import SETTINGS, flag_of, is_given, value_of
from megatron_edit.tables.methods import METHODS, SYNCHRONOUS_METHOD


def notes(config: ResolvedConfig) -> list[str]:
    """Notes on a `config` that `check` has passed."""
    return [*_megatron_notes(config), *_method_notes(config), *_schedule_notes(config), *_other_notes(config)]


def _megatron_notes(config: Config) -> Iterator[str]:
    if config.ignored_flags:
        yield "Megatron-LM flags that make no difference here: " + " ".join(config.ignored_flags)


def _method_notes(config: ResolvedConfig) -> Iterator[str]:
    edit, train_iters = config.edit, config.training.train_iters
    method = METHODS[edit.edit_method]
    if not method.is_local:
        kept = {"edit_method", "edit_num_replicas"}
        if edit.edit_sync_interval == 0:
            kept.add("edit_sync_interval")  # it is what chose the baseline
        names = [name for name, setting in SETTINGS.items() if setting.section == "edit" and name not in kept]
        without_effect = [flag_of(name) for name in names if _was_changed(config, name)]
        if without_effect:
            yield f"with --edit-method {method.name} these have no effect: {' '.join(without_effect)}"
        return
    if edit.edit_num_replicas == 1:
        yield (
            f"*** --edit-method {method.name} with ONE replica: there is nobody to synchronise with; "
            "the sync only applies the outer optimizer. Give --edit-num-replicas R, or --edit-method "
            f"{SYNCHRONOUS_METHOD} ***"
        )
    if not method.equal_steps:
        timeout, sync_time = config.parallel.distributed_timeout_seconds, edit.sync_seconds
        if sync_time is not None and timeout <= sync_time:
            yield (
                f"--distributed-timeout-seconds {timeout} is not above --edit-sync-time {sync_time:g}: a replica that "
                "has used up its reserve of samples enters the sync early, and may wait that long for the others; "
                f"{round(2 * sync_time)} would be safe"
            )
        return
    local_steps = train_iters - edit.edit_warmup_steps
    if local_steps <= 0 and train_iters > 0:
        yield (
            f"--edit-warmup-steps {edit.edit_warmup_steps} covers all {train_iters} iterations: the whole "
            "run is synchronous"
        )
    elif local_steps > 0 and (timetable := timetable_of(config)) and timetable.syncs_in(0, train_iters) == 0:
        yield (
            f"--edit-sync-interval {edit.edit_sync_interval} is longer than the {local_steps} iterations "
            "after the synchronous warm-up: no sync would happen before the end"
        )


def _schedule_notes(config: ResolvedConfig) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    iters, batch = training.train_iters, config.batch_schedule
    if not iters:
        return
    samples = batch.samples_after(iters)
    if training.train_samples != samples:
        what = f"a multiple of the global batch of {batch.last_size}" if batch.is_constant else "at a batch's end"
        yield (
            f"--train-samples {training.train_samples} is not {what}: the run has {iters} iterations, {samples} samples"
        )
    lengths = schedule_lengths(optimizer, iters, batch)
    is_local = METHODS[config.edit.edit_method].is_local
    if is_local and lengths.warmup > batch.samples_after(config.edit.edit_warmup_steps):
        yield (
            f"the learning rate warm-up ends at iteration {batch.iteration_at(lengths.warmup):g}, after the "
            f"synchronous warm-up (--edit-warmup-steps {config.edit.edit_warmup_steps}): replicas start to "
            "differ while the rate still rises"
        )
    if optimizer.lr_decay_style == "constant":
        return
    if lengths.decay < samples:
        yield (
            f"the learning rate decay ends at iteration {batch.iteration_at(lengths.decay):g} of {iters}: the rest of "
            f"the run has --min-lr {optimizer.min_lr:g}"
        )
    elif lengths.decay > samples:
        yield (
            f"the learning rate decay is {batch.iteration_at(lengths.decay):g} iterations long, the run {iters}: "
            f"--min-lr {optimizer.min_lr:g} is not reached"
        )
    if optimizer.lr_decay_style != "WSD" and (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield f"--lr-wsd-decay-... has no effect with --lr-decay-style {optimizer.lr_decay_style}"


def _other_notes(config: Config) -> Iterator[str]:
    training, data = config.training, config.data
    if config.sources.get("sequence_parallel") == "derived":
        yield "--sequence-parallel is turned off: --tensor-model-parallel-size is 1"
    if (training.bf16 or training.fp16) and not training.accumulate_allreduce_grads_in_fp32:
        yield (
            "--no-accumulate-allreduce-grads-in-fp32: gradients of micro-batches are added up in "
            f"{'bf16' if training.bf16 else 'fp16'}, small ones are lost"
        )
    if training.bf16 and training.device == "cpu":
        yield "--bf16 on a CPU is far slower than fp32"
    if config.evaluation.eval_interval is not None and config.evaluation.eval_iters == 0:
        yield f"--eval-interval {config.evaluation.eval_interval} with --eval-iters 0: nothing is evaluated"
    if data.tokenizer_model is not None and data.tokenizer_type not in NEED_MODEL_FILE:
        yield f"--tokenizer-model has no effect with --tokenizer-type {data.tokenizer_type}"
    if data.vocab_size is not None and data.tokenizer_type != "NullTokenizer":
        yield f"--vocab-size has no effect with --tokenizer-type {data.tokenizer_type}: it has its own"
    if _was_changed(config, "split") and not data.data_path and not data.mock_data:
        yield "--split has no effect without --data-path"


def _was_changed(config: Config, name: str) -> bool:
    """Given, and to something else than the default (a file written by --print-config gives every default)."""
    return is_given(config, name) and value_of(config, name) != SETTINGS[name].default
