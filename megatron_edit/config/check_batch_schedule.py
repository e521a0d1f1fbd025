"""Checks of a batch that grows: --step-batch-size-schedule and --rampup-batch-size. `config` is resolved."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_edit.config.check_layout import divisors, nearest_multiples
from megatron_edit.config.derive import batch_schedule, model_ranks, read_batch_schedule
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import is_given
from megatron_edit.tables.methods import DEFAULT_METHOD, METHODS

STEPS, RAMPUP = "--step-batch-size-schedule", "--rampup-batch-size"


def check_batch_schedule(config: Config, world_size: int) -> Iterator[str]:
    """The two flags against each other, the other batch sizes, the method and the number of ranks.

    Of a run that goes on only the last batch is looked at here: which others are still to come is known when its
    checkpoint is (`undivided_batches`).
    """
    training = config.training
    if not training.step_batch_size_schedule and not training.rampup_batch_size:
        return
    flag, value = _flag(config)
    shown = f"{flag} {value}"
    method = METHODS[config.edit.edit_method]
    if not method.equal_steps:
        yield (
            f"{shown} and --edit-method {method.name} contradict: its replicas take unequal numbers of steps, for "
            f"which samples are dealt out in batches of one size; give --global-batch-size, or --edit-method "
            f"{DEFAULT_METHOD}"
        )
    if training.step_batch_size_schedule and training.rampup_batch_size:
        yield f"{STEPS} and {RAMPUP} are both given: give one"
        return
    if training.step_batch_size_schedule:
        for name in ("global_batch_size", "replica_batch_size"):
            if is_given(config, name):
                other = f"--{name.replace('_', '-')} {getattr(training, name)}"
                yield f"{shown} and {other} are both given: give one; the schedule says every batch"
                return
    elif not is_given(config, "global_batch_size"):
        yield f"{shown} needs --global-batch-size N, the batch in the end; START and INCREMENT are of all replicas too"
        return
    try:
        batch = read_batch_schedule(config)
    except ValueError as error:
        yield f"{shown} {error}"
        return
    goes_on = config.checkpoint.load is not None and not config.checkpoint.finetune
    yield from undivided_batches(config, world_size, batch.steps[-1][0] if batch and goes_on else 0)


def undivided_batches(config: Config, world_size: int, samples: int) -> list[str]:
    """What is wrong with the batches of a run that stands at `samples`: each must be dealt out evenly to the ranks."""
    batch, replicas, ranks = batch_schedule(config), config.edit.edit_num_replicas, model_ranks(config)
    if batch is None or replicas is None or world_size % ranks or (world_size // ranks) % replicas:
        return []  # reported elsewhere
    if batch.is_constant and not config.training.step_batch_size_schedule:
        return []  # `check_batch` has looked at it
    micro, data_parallel_size = config.training.micro_batch_size, world_size // ranks
    unit = micro * data_parallel_size
    of = (
        f"--micro-batch-size {micro} x data parallel size {data_parallel_size} ({replicas} replicas x "
        f"{data_parallel_size // replicas})"
    )
    if config.parallel.num_layers_per_virtual_pipeline_stage is not None:
        stages = config.parallel.pipeline_model_parallel_size
        unit *= stages
        of += f" x --pipeline-model-parallel-size {stages} (interleaved)"
    flag, value = _flag(config)
    sizes = dict.fromkeys(size for _, size, _ in batch.stretches(samples))
    if flag == RAMPUP:
        sizes.pop(batch.last_size, None)  # --global-batch-size: `check_batch` looks at it
    bad = [size for size in sizes if size % unit]
    if not bad:
        return []
    where = f" from sample {samples} on" if samples else ""
    listed = ", ".join(f"{size} is not ({nearest_multiples(size, unit)} would work)" for size in bad[:4])
    more = f", and {len(bad) - 4} more" if len(bad) > 4 else ""
    problem = f"{flag} {value}: every global batch{where} must be a multiple of {of} = {unit}, and {listed}{more}"
    if flag == RAMPUP:
        problem += f"; {_rampup_that_works(config, unit)}"
    return [problem]


def _flag(config: Config) -> tuple[str, str]:
    training = config.training
    if training.step_batch_size_schedule:
        return STEPS, " ".join(training.step_batch_size_schedule)
    return RAMPUP, " ".join(training.rampup_batch_size)


def _rampup_that_works(config: Config, unit: int) -> str:
    """START and INCREMENT nearest to those given of which all batches are multiples of `unit`."""
    start, increment, samples = config.training.rampup_batch_size
    final = (config.training.global_batch_size or 0) // unit  # in units; whether it is whole is `check_batch`'s matter
    if final < 2:
        return "leave it out: --global-batch-size is the smallest batch of these ranks"
    first = min(max(1, round(int(start) / unit)), final - 1)
    step = min(divisors(final - first), key=lambda n: abs(n * unit - int(increment)))
    return f"for example {RAMPUP} {first * unit} {step * unit} {samples}"
