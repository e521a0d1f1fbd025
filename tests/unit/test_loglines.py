"""The log lines, read as parsers of Megatron-LM's logs read them."""

import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megatron_edit.log.lines import (
    EvaluationReport,
    SyncReport,
    TrainReport,
    evaluation_line,
    format_bytes,
    sync_line,
    training_line,
)

NOW = datetime(2026, 1, 31, 12, 0, 0)
REPORT = TrainReport(
    iteration=10, train_iters=100, consumed_samples=80, iteration_ms=12.34, learning_rate=1e-3,
    global_batch_size=8, lm_loss=5.1, replica_losses=(5.1,), grad_norm=1.2, grad_norm_max=None,
    skipped_iterations=0, nan_iterations=0,
)  # fmt: skip
SYNC = SyncReport(
    sync=3, iteration=384, modules=34, weight_min=0.24, weight_max=0.26, left_out=1, of=136,
    effective_replicas_min=1.9, num_replicas=2, beta_min=0.91, rolled_back=0, bytes=1_200_000_000,
    exposed_ms=3.1, total_ms=88.0,
)  # fmt: skip

# Written for this test after the ways in which public scripts read Megatron-LM's logs: searching from key to
# key, with one or more blanks, and over the whole line.
MEGATRON_LINE = re.compile(
    r"\[\s*(\d{4}-\d\d-\d\d [\d:]+)\] iteration\s+(?P<iteration>\d+)/\s+(?P<train_iters>\d+) \|"
    r"\s+consumed samples:\s+(?P<samples>\d+)\s+\|"
    r"\s+elapsed time per iteration \(ms\):\s+(?P<ms>[\d.]+)\s+\|"
    r".*?\s+learning rate:\s+(?P<lr>[\d.E+-]+)\s+\|"
    r"\s+global batch size:\s+(?P<batch>\d+)\s+\|"
    r"\s+lm loss:\s+(?P<loss>[\d.E+-]+)\s+\|"
    r".*?\s+grad norm:\s+(?P<norm>[\d.]+)\s+\|"
    r".*?\s+number of skipped iterations:\s+(?P<skipped>\d+)\s+\|"
    r"\s+number of nan iterations:\s+(?P<nan>\d+)\s+\|$"
)
MEGATRON_SEARCHES = {
    r"iteration +(\d+)/": 10,
    r"elapsed time per iteration \(ms\): ([\d.]+)": 12.3,
    r"throughput per GPU \(TFLOP/s/GPU\):\s+([0-9.]+)(?:\s|$|\|)": 98.8,
    r"learning rate: ([\d.E+\-]+)": 1e-3,
    r"lm loss: ([\d.E+\-]+)": 5.1,
    r"grad norm: +([\d.]+)": 1.2,
}
FULL = replace(
    REPORT, replica_losses=(5.0, 5.2), grad_norm_max=3.4, loss_scale=65536.0,
    tokens_per_second=1234.56, tflops=98.76, z_loss=2.5e-3,
)  # fmt: skip


def fields(line: str) -> dict[str, str]:
    """The line split at `|`, as existing parsers do."""
    return {k.strip(): v.strip() for k, v in (part.rsplit(":", 1) for part in line.split("|")[1:-1])}


def test_the_plain_line() -> None:
    assert training_line(REPORT, NOW) == (
        " [2026-01-31 12:00:00] iteration 10/ 100 | consumed samples: 80 "
        "| elapsed time per iteration (ms): 12.3 | learning rate: 1.000000E-03 | global batch size: 8 "
        "| lm loss: 5.100000E+00 | grad norm: 1.200 | number of skipped iterations: 0 | number of nan iterations: 0 |"
    )


def test_the_z_loss_stands_beside_the_lm_loss() -> None:
    assert fields(training_line(FULL, NOW))["z loss"] == "2.500000E-03" and "z loss" not in training_line(REPORT, NOW)


@pytest.mark.parametrize("report", [REPORT, FULL])
def test_parsers_of_megatron_logs_read_it(report: TrainReport) -> None:
    line = training_line(report, NOW)
    match = MEGATRON_LINE.search(line)
    assert match is not None, line
    assert (int(match["iteration"]), int(match["train_iters"]), int(match["samples"])) == (10, 100, 80)
    assert (float(match["loss"]), float(match["norm"]), float(match["lr"])) == (5.1, 1.2, 1e-3)
    for pattern, expected in MEGATRON_SEARCHES.items():
        found = re.findall(pattern, line)
        if "throughput" in pattern and report.tflops is None:
            assert not found
        else:
            assert [float(value) for value in found] == [expected], pattern


def test_own_fields_have_names_of_their_own() -> None:
    found = fields(training_line(FULL, NOW))
    assert found["lm loss replica 0"] == "5.000000E+00"
    assert found["lm loss replica 1"] == "5.200000E+00"
    assert found["grad norm max"] == "3.400"
    assert found["loss scale"] == "65536.0"
    assert found["tokens per second per GPU"] == "1234.6"
    assert list(found)[:4] == [
        "consumed samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "tokens per second per GPU",
    ]


def test_nothing_is_said_that_is_not_known() -> None:
    line = training_line(replace(REPORT, grad_norm=None), NOW)
    assert "grad norm" not in line and "replica" not in line and "throughput" not in line


def test_loss_without_a_token_reads_as_nan() -> None:
    line = training_line(replace(REPORT, lm_loss=math.nan, replica_losses=(math.nan, 5.0)), NOW)
    found = fields(line)
    assert math.isnan(float(found["lm loss"])) and math.isnan(float(found["lm loss replica 0"]))
    assert float(found["lm loss replica 1"]) == 5.0


def test_time_stamp_is_now_by_default() -> None:
    stamp = re.match(r" \[(.*?)\]", training_line(REPORT))
    assert stamp is not None
    assert abs((datetime.now() - datetime.fromisoformat(stamp[1])).total_seconds()) < 5


def test_sync_line() -> None:
    assert sync_line(SYNC) == (
        "sync 3 at iteration 384 | modules 34 | weights min 0.24 max 0.26 | left out 1 of 136 | "
        "N_eff min 1.9 of 2 | beta min 0.91 | rolled back 0 | bytes 1.2 GB | exposed 3.1 ms of 88.0 ms |"
    )


def test_evaluation_line() -> None:
    line = evaluation_line(EvaluationReport(iteration=20, split="validation", lm_loss=2.0, tokens=5))
    match = re.search(r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) ", line)
    assert match is not None
    assert (int(match[1]), float(match[2])) == (20, 2.0)
    assert float(match[3]) == pytest.approx(math.exp(2), rel=1e-5)
    assert perplexity_of(1e9) == pytest.approx(math.exp(20), rel=1e-5)
    assert math.isnan(perplexity_of(math.nan))


def test_evaluation_line_of_a_named_set() -> None:
    report = EvaluationReport(iteration=20, split="validation", lm_loss=2.0, tokens=5, set="wiki")
    assert evaluation_line(report).startswith(" validation loss at iteration 20 on wiki | lm loss value: 2.000000E+00 ")


def perplexity_of(lm_loss: float) -> float:
    return float(evaluation_line(EvaluationReport(1, "test", lm_loss, 1)).split(":")[-1].strip(" |"))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"),
     (1_234_567_890, "1.2 GB"), (5e12, "5.0 TB"), (5e15, "5000.0 TB")],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text
