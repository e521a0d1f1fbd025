"""The batch that grows: Megatron-LM's two flags, iterations and samples both ways, what is refused, what follows."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.config import ResolvedConfig, check, notes, resolve
from megatron_edit.config.arithmetic import describe
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.check_batch_schedule import undivided_batches
from megatron_edit.config.derive import schedule_lengths
from megatron_edit.config.flags import load_config
from megatron_edit.config.schema import OptimizerConfig
from megatron_edit.train.pace import Pace
from megatron_edit.train.schedule import LearningRateSchedule

MIXED = BatchSchedule(((0, 4), (10, 6), (11, 100), (12, 8), (50, 2), (60, 16)))  # 100 is jumped over; 2 goes down


def batches(schedule: BatchSchedule, iterations: int, samples: int = 0) -> list[tuple[int, int]]:
    """(samples before, batch) of each iteration, one by one."""
    found = []
    for _ in range(iterations):
        size = [size for start, size in schedule.steps if start <= samples][-1]
        found.append((samples, size))
        samples += size
    return found


# ---- iterations and samples ------------------------------------------------------------------------------------------

SCHEDULES = st.builds(
    lambda first, later: BatchSchedule(tuple(sorted({**later, 0: first}.items()))),
    st.integers(1, 12), st.dictionaries(st.integers(1, 200), st.integers(1, 60), max_size=6),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(schedule=SCHEDULES, start=st.integers(0, 250), iterations=st.integers(0, 40), part=st.integers(0, 59))
def test_iterations_and_samples_are_those_of_a_count(
    schedule: BatchSchedule, start: int, iterations: int, part: int
) -> None:
    counted = batches(schedule, iterations + 1, start)
    samples, size = counted[iterations]
    assert schedule.samples_after(iterations, start) == samples and schedule.size_at(samples) == size
    assert schedule.iterations_until(samples + part % size, start) == iterations
    stretches = schedule.stretches(start)
    taken = [size for _, size, number in stretches for _ in range(41 if number is None else number)]
    assert taken[: iterations + 1] == [size for _, size in counted]
    if start == 0:
        assert schedule.iteration_at(samples + part % size) == pytest.approx(iterations + part % size / size)


def test_a_table_by_hand() -> None:
    assert batches(MIXED, 9) == [(0, 4), (4, 4), (8, 4), (12, 8), (20, 8), (28, 8), (36, 8), (44, 8), (52, 2)]
    assert [size for _, size, _ in MIXED.stretches()] == [4, 8, 2, 16]
    assert (MIXED.samples_after(9), MIXED.iterations_until(53), MIXED.iterations_until(54)) == (54, 8, 9)
    assert (MIXED.samples_after(2, 8), MIXED.iterations_until(20, 8), MIXED.iterations_until(3, 8)) == (20, 2, 0)
    assert BatchSchedule.constant(8).samples_after(10**15) == 8 * 10**15


# ---- what the flags mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 4, 16])
@pytest.mark.parametrize("increment", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 21])  # 21 and 98 samples: 70 / (98 / 21) comes out below 15
@pytest.mark.parametrize("samples", [1, 3, 64, 98, 997])
def test_a_ramp_is_megatron_cores(start: int, increment: int, count: int, samples: int) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    if not hasattr(calculator, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this megatron-core has no --rampup-batch-size any more; 0.16 is the last that does")
    logging.getLogger(calculator.__name__).setLevel(logging.WARNING)
    final = start + count * increment
    theirs = calculator.RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, start, increment, samples)
    ours = BatchSchedule.from_rampup([str(start), str(increment), str(samples)], final)
    for consumed in range(samples + 3):
        theirs.update(consumed, True)
        assert ours.size_at(consumed) == theirs.current_global_batch_size, consumed


def test_steps_are_megatron_lms() -> None:
    """Thresholds in tokens, cut to whole samples; blanks or commas; any order; K, M, B and T behind either number."""
    one = BatchSchedule.from_steps(["0:768 250B:1536 500B:3072 750B:6144"], 4096)
    assert one.steps == ((0, 768), (61035156, 1536), (122070312, 3072), (183105468, 6144))
    same = ["750B:6144,500b:3.072K", "0.25T:1536", "1:768"]  # token 1 is in sample 0
    assert BatchSchedule.from_steps(same, 4096) == one
    assert BatchSchedule.from_steps(["0:8", "1.5K:16", "1e4:32"], 1).steps == ((0, 8), (1500, 16), (10000, 32))


def test_steps_are_those_of_megatron_cores_calculator() -> None:
    from megatron.core import num_microbatches_calculator as calculator

    if not hasattr(calculator, "StepBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this megatron-core has no --step-batch-size-schedule yet; 0.18 is the first that does")
    words = "0:4 1K:6,704:8 2.5K:2 6.4K:16"
    theirs = calculator.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, words, 64)
    ours = BatchSchedule.from_steps([words], 64)
    for consumed in range(120):
        theirs.update(consumed, True)
        assert ours.size_at(consumed) == theirs.get_current_global_batch_size(), consumed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("768", "'768': entries are TOKENS:BATCH"), ("0:8 100", "'100'"), ("0:0", "'0:0'"), ("0:-8", "'0:-8'"),
        ("0:8 1.0001K:16", "'1.0001K:16'"), ("0:8 x:16", "'x:16'"), ("0:8 1e999999999:16", "'1e999999999:16'"),
        ("0:8 nan:16", "'nan:16'"), ("0:8 infB:16", "'infB:16'"), ("0:8:9", "'0:8:9'"), ("0:8 K:16", "'K:16'"),
        (" , ", "is empty"), ("1K:8", "first entry must be at 0, like 0:8"),
        ("0:8 640:16 650:32", "two batches from sample 10 on, 640:16 and 650:32: samples have --seq-length 64"),
    ],
)  # fmt: skip
def test_steps_that_mean_nothing_name_the_entry(words: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has|does) ") as caught:
        BatchSchedule.from_steps(words.split(" "), 64)
    assert named in str(caught.value)


# ---- flags of a run --------------------------------------------------------------------------------------------------

BASE = "--mock-data --seq-length 32 --micro-batch-size 2"
STEPS, RAMPUP = "--step-batch-size-schedule", "--rampup-batch-size"


def config_of(flags: str, ranks: int = 4) -> ResolvedConfig:
    return resolve(load_config(f"{BASE} --edit-num-replicas 2 {flags}".split()), ranks, ranks, "cpu")


def problems_of(flags: str, ranks: int = 4) -> list[str]:
    return check(load_config(f"{BASE} --edit-num-replicas 2 {flags}".split()), ranks, ranks, "cpu")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"{STEPS} 0:8 --global-batch-size 8", [f"{STEPS} 0:8 and --global-batch-size 8 are both given"]),
        (f"{STEPS} 0:8 --replica-batch-size 4", [f"{STEPS} 0:8 and --replica-batch-size 4 are both given"]),
        (f"{STEPS} 0:8 --global-batch-size 16 {RAMPUP} 8 8 9", [f"{STEPS} and {RAMPUP} are both given"]),
        (f"{RAMPUP} 4 4 64 --replica-batch-size 8", [f"{RAMPUP} 4 4 64 needs --global-batch-size N"]),
        (f"{STEPS} 0:8 640:12 1280:18", ["= 8, and 12 is not (8 or 16 would work), 18 is not (16 or 24 would work)",
                                         "--micro-batch-size 2 x data parallel size 4 (2 replicas x 2)"]),
        (f"{RAMPUP} 4 4 64 --global-batch-size 32", ["4 is not (8 would work)", f"example {RAMPUP} 8 8 64"]),
        (f"{RAMPUP} 8 6 64 --global-batch-size 32", ["14 is not (8 or 16 would work)", f"example {RAMPUP} 8 8 64"]),
        (f"{RAMPUP} 4 4 64 --global-batch-size 8", ["leave it out"]),
        (f"{RAMPUP} 32 8 64 --global-batch-size 32", ["starts at 32, which is not below --global-batch-size 32"]),
        (f"{RAMPUP} 8 10 64 --global-batch-size 32", ["32 - 8 = 24 is not a multiple of the increment 10; 8 or 12"]),
        (f"{RAMPUP} 8 8 --global-batch-size 32", ["three whole numbers from 1 on: START INCREMENT SAMPLES"]),
        (f"{RAMPUP} 8 8 0 --global-batch-size 32", ["three whole numbers from 1 on"]),
        (f"{STEPS} 8", [f"{STEPS} 8 has the entry '8'"]),
    ],
)  # fmt: skip
def test_each_problem_alone(flags: str, named: list[str]) -> None:
    (problem,) = problems_of(f"--train-samples 1000 {flags}")
    for part in named:
        assert part in problem, problem


def test_values_that_are_named_work() -> None:
    assert problems_of(f"--train-samples 1000 {RAMPUP} 8 8 64 --global-batch-size 32") == []
    assert problems_of(f"--train-samples 1000 {STEPS} 0:8 640:16 1280:24") == []
    assert problems_of(f"--train-iters 10 {STEPS} 0:8,640:16") == []


def test_interleaved_stages_want_microbatches_of_every_step() -> None:
    flags = (
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--train-samples 1000 --edit-num-replicas 1"
    )
    (problem,) = problems_of(f"{flags} {STEPS} 0:2 640:4", ranks=2)
    assert "2 is not (4 would work)" in problem and "--pipeline-model-parallel-size 2" in problem
    assert problems_of(f"{flags} {STEPS} 0:4 640:8", ranks=2) == []


def test_a_edit_is_refused() -> None:
    found = problems_of(f"--edit-method a-edit --train-samples 1000 {STEPS} 0:8")
    assert any(f"{STEPS} 0:8 and --edit-method a-edit contradict" in problem for problem in found)


def test_a_run_that_goes_on_is_checked_for_the_batches_to_come(tmp_path: object) -> None:
    """A step that more ranks could not divide does not matter when it is over."""
    flags = f"--train-samples 1000 {STEPS} 0:4 640:12 1280:16"
    assert len(problems_of(flags, ranks=4)) == 1
    assert problems_of(f"{flags} --load {tmp_path}", ranks=4) == []
    config = config_of(flags, ranks=4)
    (problem,) = undivided_batches(config, 4, 20)
    assert "every global batch from sample 20 on" in problem and "12 is not" in problem and "4 is not" not in problem
    assert undivided_batches(config, 4, 40) == []
    assert len(problems_of(f"{flags} --load {tmp_path} --finetune", ranks=4)) == 1


def test_lengths_follow_the_batch() -> None:
    config = config_of(f"{STEPS} 0:8 640:16 1280:32 --train-samples 990")  # 3 of 8, 1 of 16, then 32
    assert config.training.global_batch_size == 32 and config.training.replica_batch_size == 16
    count = [before + size for before, size in batches(config.batch_schedule, 60)]
    assert config.training.train_iters == sum(end <= 990 for end in count)
    said = f"{config.training.train_iters} iterations, {max(end for end in count if end <= 990)} samples"
    assert any(said in note for note in notes(config))
    other = config_of(f"{STEPS} 0:8 640:16 1280:32 --train-iters 20")
    assert other.training.train_samples == count[19]
    ramp = config_of(f"{RAMPUP} 8 8 64 --global-batch-size 32 --train-iters 20")
    assert ramp.training.train_samples == BatchSchedule(((0, 8), (22, 16), (43, 24), (64, 32))).samples_after(20)
    (problem,) = problems_of(f"{STEPS} 0:8 640:16 --train-samples 7")
    assert "less than one global batch of 8" in problem


def test_dry_run_shows_every_step_of_the_run() -> None:
    config = config_of(f"{STEPS} 0:8 640:16 64000:32 --train-iters 10")
    lines = describe(config).splitlines()
    assert "  from sample 0: global batch 8, 1 microbatches, iterations 1 to 3" in lines
    assert "  from sample 24: global batch 16, 2 microbatches, iterations 4 to 10" in lines
    assert not any("batch 32, " in line for line in lines), "the run does not come to it"
    assert any(line.startswith("length: 10 iterations, 136 samples, 4352 tokens") for line in lines)


# ---- the learning rate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_learning_rate_of_every_iteration_is_megatron_cores(style: str) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay, warmup, wsd = MIXED.samples_after(25), MIXED.samples_after(5), 70
    optimizer = OptimizerConfig(
        lr=1e-3, min_lr=1e-5, lr_warmup_init=1e-6, lr_decay_style=style, lr_warmup_samples=warmup,
        lr_wsd_decay_samples=wsd if style == "WSD" else None,
    )  # fmt: skip
    group = {"lr": math.nan, "weight_decay": 0.0}
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=1e-6, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=warmup,
        lr_decay_steps=decay, lr_decay_style=style, start_wd=0.0, end_wd=0.0, wd_incr_steps=decay,
        wd_incr_style="constant", wsd_decay_steps=wsd, lr_wsd_decay_style="linear",
    )  # fmt: skip
    ours = LearningRateSchedule(optimizer, 25, MIXED)
    in_iterations = LearningRateSchedule(
        OptimizerConfig(**{**vars(optimizer), "lr_warmup_iters": 5, "lr_warmup_samples": None}), 25, MIXED
    )
    for iteration, (_, size) in enumerate(batches(MIXED, 30), start=1):
        assert ours.at_iteration(iteration) == pytest.approx(group["lr"], rel=1e-12, abs=0)
        assert in_iterations.at_iteration(iteration) == ours.at_iteration(iteration)
        theirs.step(size)


def test_lengths_in_iterations_are_samples_of_those_iterations() -> None:
    optimizer = OptimizerConfig(lr_warmup_iters=2, lr_decay_iters=9, lr_wsd_decay_iters=3)
    for first in (0, 8, 33):
        before = [start for start, _ in batches(MIXED, 10, first)]
        lengths = schedule_lengths(optimizer, 100, MIXED, first)
        assert lengths.warmup == before[2] - first and lengths.decay == before[9] - first
        assert lengths.wsd_decay == before[9] - before[6]
    too_long = OptimizerConfig(lr_decay_samples=83, lr_wsd_decay_iters=12)
    found = schedule_lengths(too_long, 100, BatchSchedule.constant(8)).wsd_decay
    assert found == 96, "more than there is: the check refuses it by its whole length"


def test_counts_of_a_growing_batch() -> None:
    pace = Pace(iteration=0, consumed_samples=0, fleet=SimpleNamespace(num_replicas=2, replica=1), batch=MIXED)
    for iteration, (before, size) in enumerate(batches(MIXED, 15), start=1):
        assert (pace.schedule_samples, pace.global_batch_size, pace.replica_batch_size) == (before, size, size // 2)
        pace.step()
        pace.meet_after_one_step()
        assert (pace.iteration, pace.consumed_samples, pace.is_uneven) == (iteration, before + size, False)
