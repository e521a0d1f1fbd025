"""One timetable of the syncs: what is due when, how many syncs there are, and who else counts by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.config.arithmetic import count_modules, describe, planned_syncs
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.configure import resolve
from megatron_edit.config.flags import load_config
from megatron_edit.config.notes import notes
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import ConfigError
from megatron_edit.sync.inner_rate import check_inner_rates
from megatron_edit.sync.trigger import StepTrigger
from megatron_edit.tables.methods import METHODS
from megatron_edit.tables.parameters import module_keys
from megatron_edit.tables.timetable import Timetable, fragments_of
from megatron_edit.train.checkpointing import Position, Start
from megatron_edit.train.schedule import LearningRateSchedule

TABLES = st.builds(Timetable, st.integers(1, 9), st.integers(1, 12), st.integers(0, 7))


def config_of(flags: str) -> ResolvedConfig:
    base = "--mock-data --global-batch-size 8 --edit-num-replicas 2"
    return resolve(load_config(f"{base} {flags}".split()), 2, 2, "cpu")


@given(TABLES, st.integers(0, 30), st.integers(0, 30))
def test_syncs_in_a_stretch_are_the_steps_after_which_something_is_due(table: Timetable, after: int, more: int) -> None:
    due = [step for step in range(after + 1, after + more + 1) if table.due_after(step)]
    assert table.syncs_in(after, after + more) == len(due)
    assert all(step > table.warmup_end for step in due)


@given(TABLES, st.integers(0, 40))
def test_counts_of_the_fragments(table: Timetable, step: int) -> None:
    for fragment in range(table.num_fragments):
        times = sum(fragment in table.due_after(s) for s in range(1, step + 1))
        assert table.count_of(fragment, step) == times
    in_one_interval = [f for s in range(1, table.interval + 1) for f in table.due_after(table.warmup_end + s)]
    assert sorted(in_one_interval) == list(range(table.num_fragments)), "each once an interval"


@given(TABLES, st.integers(0, 40))
def test_the_trigger_follows_the_timetable(table: Timetable, steps: int) -> None:
    trigger = StepTrigger(table.interval, table.warmup_end, table.num_fragments)
    assert trigger.timetable == table, "also while the warm-up lasts"
    assert [trigger.advance().due for _ in range(steps)] == [table.due_after(s) for s in range(1, steps + 1)]
    assert trigger.syncs == table.syncs_in(0, steps)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0; try 128"):
        Timetable(0)
    with pytest.raises(ValueError, match="got 0; try 1"):
        Timetable(4, num_fragments=0)


# ---- --dry-run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "planned", "line"),
    [
        ("--train-iters 24 --edit-sync-interval 4 --edit-warmup-steps 4", 5, "every 4: 5 syncs planned"),
        ("--train-iters 12 --edit-sync-interval 5", 3, "every 5: 3 syncs planned, the last one at the end"),
        ("--train-iters 3 --edit-sync-interval 5", 1, "every 5: 1 sync planned, at the end"),
        ("--train-iters 12 --edit-sync-interval 5 --edit-warmup-steps 12", 0, "every 5: 0 syncs planned"),
        ("--train-iters 0", 0, "0 syncs planned"),
        # an interval of 8 and 4 fragments: something is due every 2 steps; after the last one not all of them are
        ("--edit-method streaming --train-iters 256 --edit-sync-interval 8 --edit-num-fragments 4", 129,
         "every 8 for each of 4 fragments: 129 syncs planned, the last one at the end"),
        ("--edit-method streaming --train-iters 8 --edit-sync-interval 4 --edit-num-fragments 1", 2, "2 syncs"),
        # every module is a fragment: 4 layers, embedding and head
        ("--edit-method streaming --train-iters 24 --edit-sync-interval 12", 13, "each of 6 fragments: 13 syncs"),
        ("--edit-method streaming --train-iters 8 --edit-sync-interval 4 --edit-num-fragments 1 --edit-sync-delay 1 "
         "--edit-mixing-alpha 0.5", 3, "3 syncs planned, the last one at the end"),
        ("--edit-method co2 --train-iters 9 --edit-sync-interval 4", 3, "3 syncs planned, the last one at the end"),
    ],
)  # fmt: skip
def test_a_dry_run_plans_the_syncs_that_the_run_makes(flags: str, planned: int, line: str) -> None:
    config = config_of(flags)
    assert planned_syncs(config) == planned
    assert line in describe(config)


def test_without_a_plan_by_steps() -> None:
    assert planned_syncs(config_of("--edit-method baseline --train-iters 100")) == 0
    assert planned_syncs(config_of("--edit-method a-edit --train-samples 800")) == 0


def test_the_note_on_no_sync_before_the_end_counts_fragments() -> None:
    short = "--train-iters 5 --edit-sync-interval 8"
    assert any("no sync would happen before the end" in note for note in notes(config_of(short)))
    streaming = notes(config_of(f"{short} --edit-method streaming --edit-num-fragments 4"))
    assert not any("no sync would happen" in note for note in streaming)


@pytest.mark.parametrize("modules", ["layer", "sublayer"])
def test_the_modules_are_counted_as_the_engine_counts_them(modules: str) -> None:
    config = config_of(f"--num-layers 5 --edit-modules {modules} --train-iters 9")
    assert count_modules(config) == len(module_keys(5, modules))
    streaming = METHODS["streaming"]
    assert fragments_of(streaming, None, 7, 4) == 4 and fragments_of(streaming, None, 7, 100) == 7
    assert fragments_of(streaming, 3, 7, 100) == 3 and fragments_of(METHODS["edit"], 3, 7, 100) == 1


# ---- buffers, slowmo -------------------------------------------------------------------------------------------------


def slowmo_check(trigger: StepTrigger, iteration: int, train_iters: int, rate_is_0_at: int) -> None:
    """The check of a run at `iteration` whose learning rate is 0 in one iteration."""
    rates = [float(step != rate_is_0_at) for step in range(iteration + 1, train_iters + 1)]
    for method in METHODS.values():
        if method.name != "slowmo" and method.equal_steps:
            check_inner_rates(method, trigger, iteration, rates, peak=1e-3)  # the others do not divide by it
    check_inner_rates(METHODS["slowmo"], trigger, iteration, rates, peak=1e-3)


@pytest.mark.parametrize("batch", [BatchSchedule.constant(8), BatchSchedule(((0, 8), (16, 16)))], ids=["", "grows"])
def test_the_rates_that_are_looked_at_are_those_of_the_steps(batch: BatchSchedule) -> None:
    config = config_of("--lr 1 --lr-warmup-iters 4 --train-iters 9")
    schedule = LearningRateSchedule(config.optimizer, 9, batch, 8)
    start = Start(Position(2, 16, schedule_samples=8), 9, schedule, batch, resumed=True)
    assert list(start.rates()) == [schedule.at_iteration(k) for k in range(2, 9)]


def test_slowmo_counts_from_the_saved_end_of_the_warm_up() -> None:
    """A run of `baseline`, saved after 10 steps, goes on: its syncs are at 14, 18 and at the end, 20."""
    trigger = StepTrigger(4)
    trigger.load_state_dict({"steps": 10, "syncs": 0, "warmup_end": None, "last_sync_step": 0})
    for iteration in range(11, 21):
        if iteration in (14, 18, 20):
            with pytest.raises(ConfigError, match=f"0 at iteration {iteration}, before a sync"):
                slowmo_check(trigger, 10, 20, iteration)
        else:
            slowmo_check(trigger, 10, 20, iteration)


def test_slowmo_in_a_warm_up_that_is_still_to_end() -> None:
    trigger = StepTrigger(4, warmup_steps=6)
    for iteration, refused in ((4, False), (6, False), (8, False), (10, True), (12, True)):  # the end is at 12
        if refused:
            with pytest.raises(ConfigError, match=f"0 at iteration {iteration},"):
                slowmo_check(trigger, 0, 12, iteration)
        else:
            slowmo_check(trigger, 0, 12, iteration)
    slowmo_check(StepTrigger(4, warmup_steps=20), 0, 12, 12)
