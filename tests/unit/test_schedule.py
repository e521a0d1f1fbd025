"""Field report B60: the learning rate of every iteration is the documented formula and megatron-core's
value."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_edit.config import check, notes, resolve
from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.config.flags import load_config
from megatron_edit.config.schema import OptimizerConfig
from megatron_edit.train.schedule import LearningRateSchedule

BATCH, RUN = 8, 20
STYLES = [(style, "linear") for style in ("constant", "linear", "cosine", "inverse-square-root")] + [
    ("WSD", style) for style in ("linear", "cosine", "exponential", "minus_sqrt")
]


def megatron_rates(o: OptimizerConfig, warmup: float, decay: int, wsd: int, iterations: int) -> list[float]:
    """Rate with which each iteration steps, from megatron-core's scheduler advanced after each step."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"lr": math.nan, "weight_decay": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=o.lr_warmup_init, max_lr=o.lr, min_lr=o.min_lr,
        lr_warmup_steps=warmup, lr_decay_steps=decay, lr_decay_style=o.lr_decay_style,
        start_wd=0.0, end_wd=0.0, wd_incr_steps=decay, wd_incr_style="constant",
        wsd_decay_steps=wsd, lr_wsd_decay_style=o.lr_wsd_decay_style,
    )  # fmt: skip
    rates = []
    for _ in range(iterations):
        rates.append(group["lr"])
        scheduler.step(BATCH)
    return rates


@pytest.mark.parametrize(("style", "wsd_style"), STYLES)
@pytest.mark.parametrize("warmup", [0, 5, None])  # None: the fraction 0.25
@pytest.mark.parametrize("decay", [None, 15, 20, 40])
def test_every_iteration_equals_megatron_core(
    style: str, wsd_style: str, warmup: int | None, decay: int | None
) -> None:
    wsd = 4 if style == "WSD" else None
    base = OptimizerConfig(
        lr=1e-3, min_lr=1e-5, lr_warmup_init=1e-6, lr_decay_style=style, lr_wsd_decay_style=wsd_style
    )
    given = {"lr_warmup_fraction": 0.25} if warmup is None else {"lr_warmup_iters": warmup}
    in_iters = OptimizerConfig(**{**vars(base), **given, "lr_decay_iters": decay, "lr_wsd_decay_iters": wsd})
    if warmup is not None:
        given = {"lr_warmup_samples": warmup * BATCH}
    in_samples = OptimizerConfig(
        **{
            **vars(base),
            **given,
            "lr_decay_samples": decay and decay * BATCH,
            "lr_wsd_decay_samples": wsd and wsd * BATCH,
        }
    )
    length = (decay or RUN) * BATCH
    warmup_samples = 0.25 * length if warmup is None else warmup * BATCH
    expected = megatron_rates(base, warmup_samples, length, (wsd or 0) * BATCH, 45)
    for optimizer in (in_iters, in_samples):
        schedule = LearningRateSchedule(optimizer, RUN, BatchSchedule.constant(BATCH))
        ours = [schedule.at_iteration(k) for k in range(1, 46)]
        assert ours == pytest.approx(expected, rel=1e-12, abs=0)
        assert ours == [schedule.at_samples((k - 1) * BATCH) for k in range(1, 46)]


def test_table_by_hand() -> None:
    def rates(warmup: int, decay: int | None, iterations: tuple[int, ...]) -> list[float]:
        optimizer = OptimizerConfig(lr=1.0, lr_decay_style="linear", lr_warmup_iters=warmup, lr_decay_iters=decay)
        schedule = LearningRateSchedule(optimizer, RUN, BatchSchedule.constant(BATCH))
        return [round(schedule.at_iteration(k), 12) for k in iterations]

    # position k - 1: warm-up of 5 is over before iteration 6, the decay counts from 0 and includes it
    assert rates(5, None, (1, 2, 6, 7, 21, 22)) == [0.0, 0.2, 1.0, round(14 / 15, 12), 0.0, 0.0]
    assert rates(5, 20, (6, 21)) == [1.0, 0.0]
    assert rates(5, 15, (6, 11, 16, 20)) == [1.0, 0.5, 0.0, 0.0]
    assert rates(5, 40, (6, 20, 41)) == [1.0, round(21 / 35, 12), 0.0]
    assert rates(0, None, (1, 11, 21)) == [1.0, 0.5, 0.0]


def problems_of(flags: str) -> list[str]:
    base = f"--mock-data --train-iters {RUN} --global-batch-size {BATCH} --edit-method baseline"
    return check(load_config(f"{base} {flags}".split()), 1, 1, "cpu")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lr-warmup-iters 5 --lr-warmup-samples 40", ["--lr-warmup-iters 5", "--lr-warmup-samples 40"]),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", ["--lr-warmup-iters 5", "--lr-warmup-fraction 0.1"]),
        ("--lr-warmup-samples 0 --lr-warmup-fraction 0.1", ["-samples 0", "-fraction 0.1"]),
        ("--lr-decay-iters 20 --lr-decay-samples 160", ["--lr-decay-iters 20", "--lr-decay-samples 160"]),
        ("--lr-warmup-iters 20", ["20 iterations", "the run"]),
        ("--lr-warmup-iters 25", ["25 iterations", "20 iterations"]),
        ("--lr-warmup-iters 15 --lr-decay-iters 15", ["15 iterations", "--lr-decay-iters"]),
        ("--lr-warmup-iters 16 --lr-decay-iters 15", ["16 iterations", "15 iterations"]),
        ("--lr-warmup-samples 128 --lr-decay-samples 120", ["128 samples", "120 samples"]),
        ("--lr-decay-style WSD", ["--lr-wsd-decay-iters"]),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 16 --lr-warmup-iters 5", ["16", "15 iterations would"]),
    ],
)  # fmt: skip
def test_contradictions_are_refused(flags: str, named: list[str]) -> None:
    (problem,) = problems_of(flags)
    for part in named:
        assert part in problem, problem


def test_decay_unlike_the_run_prints_a_note() -> None:
    def found(flags: str) -> str:
        argv = f"--mock-data --train-iters {RUN} --global-batch-size {BATCH} --edit-method baseline {flags}"
        return "\n".join(notes(resolve(load_config(argv.split()), 1, 1, "cpu")))

    assert "ends at iteration 15 of 20" in found("--lr-decay-iters 15")
    assert "ends at iteration 15 of 20" in found("--lr-decay-samples 120")
    assert "is not reached" in found("--lr-decay-iters 40")
    assert "decay" not in found("--lr-decay-iters 20") and "decay" not in found("")
    assert "decay" not in found("--lr-decay-iters 15 --lr-decay-style constant")


def test_run_in_samples_has_the_same_schedule_as_in_iterations() -> None:
    def schedule(flags: str) -> LearningRateSchedule:
        config = resolve(load_config(f"--mock-data --global-batch-size {BATCH} {flags}".split()), 1, 1, "cpu")
        assert config.training.train_iters == RUN and config.training.train_samples == RUN * BATCH
        return LearningRateSchedule(config.optimizer, config.training.train_iters, BatchSchedule.constant(BATCH))

    one = schedule(f"--train-iters {RUN} --lr-warmup-iters 5")
    other = schedule(f"--train-samples {RUN * BATCH} --lr-warmup-samples {5 * BATCH}")
    assert [one.at_iteration(k) for k in range(1, 30)] == [other.at_iteration(k) for k in range(1, 30)]


def test_samples_that_the_batch_does_not_divide_are_said() -> None:
    flags = f"--mock-data --global-batch-size {BATCH} --train-samples"
    config = resolve(load_config([*flags.split(), "165"]), 1, 1, "cpu")
    assert config.training.train_iters == 20
    assert any("--train-samples 165" in note and "160 samples" in note for note in notes(config))
    (problem,) = check(load_config([*flags.split(), "7"]), 1, 1, "cpu")
    assert "--train-samples 7" in problem and "8" in problem
