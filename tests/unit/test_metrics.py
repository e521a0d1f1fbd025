"""The arithmetic of the log's numbers, without processes."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.config.schema import ModelConfig
from megatron_edit.log.lines import SyncReport, TrainReport
from megatron_edit.log.metrics import (
    _SYNC_COLUMNS,
    MetricsReducer,
    Reporter,
    Throughput,
    _Column,
    sync_report,
    train_report,
)
from megatron_edit.tables.parameters import training_flops_per_token

KNOWN = TrainReport(
    iteration=10, train_iters=100, consumed_samples=80, iteration_ms=math.nan, learning_rate=1e-3,
    global_batch_size=8, lm_loss=math.nan, replica_losses=(), grad_norm=math.nan, grad_norm_max=math.nan,
    skipped_iterations=0, nan_iterations=0,
)  # fmt: skip


def slot(**columns: float) -> list[float]:
    """One replica's sums over 2 iterations in 0.5 s, unless said otherwise."""
    values = {
        "LOSS_SUM": 20.0,
        "TOKENS": 10.0,
        "GRAD_NORM": 1.5,
        "GRAD_NORM_IS_FINITE": 1.0,
        "GRAD_NORM_MAX": 3.0,
        "ITERATIONS": 2.0,
        "SECONDS": 0.5,
        "SAMPLES": 8.0,
    }
    values |= columns
    return [values.get(column.name, 0.0) for column in _Column]


def report_of(*slots: list[float], throughput: Throughput | None = None) -> TrainReport:
    return train_report(torch.tensor(slots, dtype=torch.float64), KNOWN, throughput)


def test_loss_is_weighted_by_tokens() -> None:
    report = report_of(slot(), slot(LOSS_SUM=100.0, TOKENS=90.0))
    assert report.lm_loss == pytest.approx(120 / 100)
    assert report.replica_losses == pytest.approx((2.0, 100 / 90))


def test_z_loss_is_the_mean_over_the_same_tokens_where_there_is_one() -> None:
    slots = torch.tensor([slot(Z_LOSS_SUM=3.0), slot(TOKENS=90.0, Z_LOSS_SUM=1.0)], dtype=torch.float64)
    assert train_report(slots, KNOWN, None).z_loss is None
    report = train_report(slots, replace(KNOWN, z_loss=math.nan), None)
    assert report.z_loss == pytest.approx(4 / 100) and report.lm_loss == pytest.approx(40 / 100)


def test_replica_without_a_token_has_no_loss_and_weighs_nothing() -> None:
    report = report_of(slot(), slot(LOSS_SUM=0.0, TOKENS=0.0))
    assert report.lm_loss == 2.0
    assert report.replica_losses[0] == 2.0 and math.isnan(report.replica_losses[1])
    assert math.isnan(report_of(slot(LOSS_SUM=0.0, TOKENS=0.0)).lm_loss)


def test_gradient_norms_of_broken_replicas_are_left_out() -> None:
    broken = slot(GRAD_NORM=0.0, GRAD_NORM_IS_FINITE=0.0, GRAD_NORM_MAX=-math.inf, NAN_ITERATIONS=2.0)
    report = report_of(slot(), broken, slot(GRAD_NORM=2.5))
    assert (report.grad_norm, report.grad_norm_max, report.nan_iterations) == (2.0, 3.0, 2)
    lost = report_of(broken, broken)
    assert lost.grad_norm is not None and math.isnan(lost.grad_norm)
    assert lost.grad_norm_max is not None and math.isnan(lost.grad_norm_max)


def test_counts_of_iterations_are_the_worst_replicas() -> None:
    report = report_of(slot(SKIPPED_ITERATIONS=1.0), slot(SKIPPED_ITERATIONS=1.0), slot(SKIPPED_ITERATIONS=2.0))
    assert report.skipped_iterations == 2


def test_time_and_throughput_are_means_over_replicas_of_their_own_speed() -> None:
    throughput = Throughput(seq_length=250, replica_devices=4, flops_per_token=2e9)
    report = report_of(slot(SECONDS=0.5), slot(SECONDS=1.0), throughput=throughput)
    assert report.iteration_ms == pytest.approx(375)
    assert report.tokens_per_second == pytest.approx((4000 + 2000) / 2 / 4)
    assert report.tflops == pytest.approx(1.5)  # 750 tokens/s x 2e9
    assert math.isnan(report_of(slot(ITERATIONS=0.0)).iteration_ms)


def test_flops_per_token_of_llama_7b() -> None:
    model = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
        kv_channels=128, seq_length=4096, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    flops = training_flops_per_token(model, 32000)
    weights = 6_738_415_616 - 32000 * 4096 - 65 * 4096  # all parameters less the embedding and the norms
    assert flops == 6 * weights + 12 * 32 * 4096 * 4096  # arXiv 2204.02311, appendix B: 6N + 12 L H Q T
    tied = ModelConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=2, kv_channels=8,
        seq_length=32, add_qkv_bias=True, add_attention_output_bias=True, qk_layernorm=True,
    )  # fmt: skip
    with_groups = training_flops_per_token(tied, 259)
    weights = 64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 128 + 64 * 259
    assert with_groups == 6 * weights + 12 * 32 * 64


class NoReading(TorchDispatchMode):
    """Fails when a tensor's value is asked for on the host: on a GPU that would wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_accumulating_reads_no_tensor() -> None:
    reporter = Reporter(SimpleNamespace(num_replicas=1, replica=0), 0, 1, reports_loss=True, reports_stage=True)
    reducer = MetricsReducer(None, torch.device("cpu"), reporter, train_iters=1)  # type: ignore[arg-type]
    with NoReading(), pytest.raises(AssertionError):
        float(torch.tensor(1.0))
    with NoReading():
        reducer.accumulate(torch.tensor(2.0), torch.tensor(3), torch.tensor(1.0))
        reducer.accumulate(torch.tensor(math.nan), torch.tensor(3), 1.0)
        reducer.accumulate(torch.tensor(1.0), torch.tensor(2), 1.0, z_loss_sum=torch.tensor(0.5))
    assert reducer._losses.tolist() == [3.0, 5.0, 0.5]


SYNC = SyncReport(
    sync=2, iteration=16, modules=3, weight_min=0.4, weight_max=0.6, left_out=1, of=6, effective_replicas_min=1.9,
    num_replicas=2, beta_min=0.5, rolled_back=0, bytes=100, exposed_ms=3.0, total_ms=10.0,
)  # fmt: skip


def sync_slots(*replicas: list[dict[str, float]]) -> Tensor:
    rows = [[[stage.get(n, getattr(SYNC, n)) for n in _SYNC_COLUMNS] for stage in stages] for stages in replicas]
    return torch.tensor(rows, dtype=torch.float64)


def test_sync_report_joins_the_stages_of_a_replica() -> None:
    first, second = {"weight_min": 0.3, "beta_min": 1.0}, {"modules": 4, "weight_max": 0.8, "bytes": 50, "of": 8}
    slow = {"exposed_ms": 900.0, "total_ms": 1000.0}  # late, as replica 1 came late
    report = sync_report(sync_slots([first, second | {"exposed_ms": 5.0}], [first | slow, second | slow]), SYNC)
    assert report == SyncReport(
        sync=2, iteration=16, modules=7, weight_min=0.3, weight_max=0.8, left_out=2, of=14,
        effective_replicas_min=1.9, num_replicas=2, beta_min=0.5, rolled_back=0, bytes=150, exposed_ms=5.0,
        total_ms=10.0,
    )  # fmt: skip


def test_stage_that_was_rolled_back_has_no_weights() -> None:
    gone = {"weight_min": math.nan, "weight_max": math.nan, "effective_replicas_min": math.nan, "rolled_back": 3}
    report = sync_report(sync_slots([gone, {}], [gone, {}]), SYNC)
    assert (report.weight_min, report.weight_max, report.effective_replicas_min) == (0.4, 0.6, 1.9)
    assert report.rolled_back == 3
    report = sync_report(sync_slots([gone, gone], [gone, gone]), SYNC)
    assert math.isnan(report.weight_min) and math.isnan(report.weight_max)
