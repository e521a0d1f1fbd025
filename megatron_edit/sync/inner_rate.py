"""What an outer step asks of the inner learning rate: one that divides by it cannot sync after a step with 0."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_edit.config.schema import ConfigError
from megatron_edit.sync.outer import DIVIDE_BY_INNER_LR
from megatron_edit.sync.trigger import StepTrigger, Trigger
from megatron_edit.tables.methods import Method


def check_inner_rates(
    method: Method, trigger: Trigger, iteration: int, rates: Iterable[float], peak: float
) -> None:
    """Of a run that stands at `iteration`, where `trigger` is, and whose steps still to come have these `rates`.

    `peak`: the highest rate, of which the message makes one that works. Raises ConfigError.
    """
    if method.outer_step not in DIVIDE_BY_INNER_LR:
        return
    assert isinstance(trigger, StepTrigger), "replicas with unequal steps have no rate in common"
    rates = list(rates)
    last_step = trigger.steps + len(rates)
    for ahead, rate in enumerate(rates, 1):
        if rate == 0 and trigger.timetable.begins_sync(trigger.steps + ahead, last_step):
            raise ConfigError([
                f"--edit-method {method.name} divides by the learning rate, which is 0 at iteration "
                f"{iteration + ahead}, before a sync: give --min-lr (or in its warm-up --lr-warmup-init) above 0, for "
                f"example {peak / 10:g}"
            ])  # fmt: skip
