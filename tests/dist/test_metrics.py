"""Numbers of the log over real ranks."""

import math
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.testing.ranks import run_ranks
from megatron_edit.log.lines import SyncReport, TrainReport, training_line
from megatron_edit.log.metrics import MetricsError, MetricsReducer, Reporter, Throughput

CPU = torch.device("cpu")


def reporter_of(rank: int, *, replicas: int, dp: int = 1, pp: int = 1, tp: int = 1) -> Reporter:
    """Grid (sync, dp, pp, tp), tp fastest, as in parallel/layout.py."""
    replica, rest = divmod(rank, dp * pp * tp)
    shard, rest = divmod(rest, pp * tp)
    stage, tensor = divmod(rest, tp)
    return Reporter(
        SimpleNamespace(num_replicas=replicas, replica=replica), stage, pp,  # type: ignore[arg-type]
        reports_loss=stage == pp - 1 and tensor == 0, reports_stage=tensor == shard == 0,
    )  # fmt: skip


def reducer_of(rank: int, group: dist.ProcessGroup | None = None, **grid: int) -> MetricsReducer:
    reporter = reporter_of(rank, **grid)
    return MetricsReducer(group or dist.new_group(backend="gloo"), CPU, reporter, train_iters=100)


def emit(reducer: MetricsReducer, iteration: int, *, local_steps: bool = True) -> None:
    reducer.emit(
        iteration, consumed_samples=8 * iteration, learning_rate=1e-3, global_batch_size=8, local_steps=local_steps
    )


def losses_of(iteration: int, replica: int, shard: int = 0) -> tuple[float, int]:
    """Loss sum and tokens of one microbatch share: unequal everywhere."""
    tokens = 5 + (iteration * 7 + replica * 3 + shard) % 11
    return tokens * (4.0 - 0.1 * iteration + 0.5 * replica + 0.01 * shard), tokens


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_identical_data_gives_one_number_for_any_number_of_replicas(replicas: int) -> None:
    def run(rank: int, world_size: int) -> TrainReport:
        reducer = reducer_of(rank, replicas=replicas)
        for iteration in range(3):
            loss, tokens = losses_of(iteration, replica=0)
            reducer.accumulate(torch.tensor(loss), torch.tensor(tokens), 1.25)
        emit(reducer, 3)
        (report,) = reducer.flush(20)
        assert isinstance(report, TrainReport)
        return report

    reports = run_ranks(run, replicas, timeout_s=30)
    sums = [losses_of(iteration, 0) for iteration in range(3)]
    expected = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    for report in reports:
        assert report.lm_loss == pytest.approx(expected, rel=1e-6)
        assert report.replica_losses == pytest.approx([expected] * replicas, rel=1e-6)
        assert f"| lm loss: {expected:.6E} |" in training_line(report)
        assert (report.grad_norm, report.grad_norm_max) == (1.25, 1.25)


@pytest.mark.parametrize("grid", [{"pp": 2}, {"tp": 2}, {"dp": 2}])
def test_loss_is_known_on_every_rank_and_counted_once(grid: dict[str, int]) -> None:
    """R2 x two ranks. What the ranks that report no loss hand in makes no difference."""

    def run(rank: int, world_size: int) -> Any:
        reducer = reducer_of(rank, replicas=2, **grid)
        replica, inner = divmod(rank, 2)
        for iteration in range(1, 7):
            loss, tokens = losses_of(iteration, replica, shard=inner if "dp" in grid else 0)
            if not reducer._reporter.reports_loss:
                loss, tokens = -1.0, 1000
            reducer.accumulate(torch.tensor(loss), torch.tensor(tokens), 1.0 + replica + iteration)
            if iteration % 3 == 0:
                emit(reducer, iteration)
        return reducer.flush(20)

    for reports in run_ranks(run, 4, timeout_s=30):
        for report, iterations in zip(reports, ([1, 2, 3], [4, 5, 6]), strict=True):
            shares = range(2 if "dp" in grid else 1)
            sums = torch.tensor([[losses_of(i, r, s) for i in iterations for s in shares] for r in (0, 1)]).sum(1)
            assert report.iteration == iterations[-1] and report.consumed_samples == 8 * iterations[-1]
            assert report.lm_loss == pytest.approx(float(sums[:, 0].sum() / sums[:, 1].sum()), rel=1e-6)
            assert report.replica_losses == pytest.approx((sums[:, 0] / sums[:, 1]).tolist(), rel=1e-6)
            assert report.grad_norm == 1.5 + iterations[-1]  # last iteration, mean over replicas
            assert report.grad_norm_max == 2.0 + iterations[-1]


def test_masked_and_broken_replicas_do_not_hide_the_others() -> None:
    def run(rank: int, world_size: int) -> Any:
        reducer = reducer_of(rank, replicas=3)
        for iteration in (1, 2):
            loss, tokens, norm = [(8.0, 4, 1.0), (0.0, 0, 0.0), (math.nan, 4, math.nan)][rank]
            if rank == 2 and iteration == 1:
                loss, norm = 12.0, 5.0
            reducer.accumulate(torch.tensor(loss), torch.tensor(tokens), norm, skipped=rank == 1)
        emit(reducer, 2)
        return reducer.flush(20)

    for (report,) in run_ranks(run, 3, timeout_s=30):
        assert report.lm_loss == pytest.approx((8 + 8 + 12) / 12)
        assert report.replica_losses[0] == 2.0 and report.replica_losses[2] == 3.0
        assert math.isnan(report.replica_losses[1])
        assert (report.grad_norm, report.grad_norm_max) == (0.5, 5.0)
        assert (report.skipped_iterations, report.nan_iterations) == (2, 1)


def test_synchronous_steps_show_no_largest_norm() -> None:
    def run(rank: int, world_size: int) -> Any:
        reducer = reducer_of(rank, replicas=2)
        reducer.accumulate(1.0, 1, 2.0)
        emit(reducer, 1, local_steps=False)
        reducer.accumulate(1.0, 1, None)
        emit(reducer, 2)
        return [(report.grad_norm, report.grad_norm_max) for report in reducer.flush(20)]

    assert run_ranks(run, 2, timeout_s=30) == [[(2.0, None), (None, None)]] * 2


def test_a_sleeping_replica_delays_no_step_of_another_with_a_line_each_step() -> None:
    def run(rank: int, world_size: int) -> Any:
        reducer = reducer_of(rank, replicas=2)
        dist.barrier()
        started, arrived, most_in_flight = time.monotonic(), [], 0
        for iteration in range(1, 21):
            if rank == 1 and iteration == 3:
                time.sleep(1.0)
            loss, tokens = losses_of(iteration, rank)
            reducer.accumulate(torch.tensor(loss), torch.tensor(tokens), 1.0)
            emit(reducer, iteration)
            most_in_flight = max(most_in_flight, len(reducer._in_flight))
            arrived += reducer.poll()
        seconds = time.monotonic() - started
        arrived += reducer.flush(20)
        return seconds, most_in_flight, [(report.iteration, report.lm_loss) for report in arrived]

    (fast, in_flight, lines), (slow, _, same_lines) = run_ranks(run, 2, timeout_s=30)
    assert fast < 0.5 and slow >= 1.0
    assert in_flight >= 17
    assert lines == same_lines
    for (iteration, loss), expected in zip(lines, range(1, 21), strict=True):
        (loss_0, tokens_0), (loss_1, tokens_1) = losses_of(expected, 0), losses_of(expected, 1)
        assert iteration == expected
        assert loss == pytest.approx((loss_0 + loss_1) / (tokens_0 + tokens_1), rel=1e-6)


def test_a_replica_that_never_comes_is_an_error_and_no_hang() -> None:
    def run(rank: int, world_size: int) -> str:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5))
        reducer = reducer_of(rank, group, replicas=2)
        said = "nothing"
        if rank == 0:
            reducer.accumulate(1.0, 1, 1.0)
            emit(reducer, 7)
            with pytest.raises(MetricsError, match=r"iteration 7 did not arrive within 0\.2 s: some rank"):
                reducer.flush(0.2)
            with pytest.raises(MetricsError, match="iteration 7 did not arrive: ") as error:
                reducer.flush(10)  # ends when the group's own time-out does
            said = str(error.value)
        dist.barrier()
        return said

    assert "iteration 7" in run_ranks(run, 2, timeout_s=30)[0]


def test_time_of_evaluation_is_no_time_of_the_iterations() -> None:
    def run(rank: int, world_size: int) -> float:
        reducer = reducer_of(rank, replicas=1)
        time.sleep(0.05)
        with reducer.untimed():
            time.sleep(0.5)
        reducer.accumulate(1.0, 1, 1.0)
        emit(reducer, 1)
        return reducer.flush(20)[0].iteration_ms

    (milliseconds,) = run_ranks(run, 1, timeout_s=30)
    assert 50 <= milliseconds < 400


def test_throughput_counts_the_samples_that_were_read() -> None:
    """Of a batch that grows each step has its own; nothing of an earlier line counts again."""

    def run(rank: int, world_size: int) -> list[float]:
        throughput = Throughput(seq_length=32, replica_devices=2, flops_per_token=1.0)
        group = dist.new_group(backend="gloo")
        reducer = MetricsReducer(group, CPU, reporter_of(rank, replicas=1), train_iters=9, throughput=throughput)
        for iteration, samples in enumerate((4, 4, 12, 16), start=1):
            reducer.accumulate(1.0, 1, 1.0, samples=samples)
            if iteration != 1:
                emit(reducer, iteration)
        reports = reducer.flush(20)
        return [each.tokens_per_second * each.iteration_ms / 1000 for each in reports]  # in a mean iteration

    (tokens,) = run_ranks(run, 1, timeout_s=30)
    assert tokens == pytest.approx([(4 + 4) / 2 * 16, 12 * 16, 16 * 16])


def test_sync_reports_of_the_stages_become_one_line_between_training_lines() -> None:
    def run(rank: int, world_size: int) -> Any:
        reducer = reducer_of(rank, replicas=2, pp=2)
        stage = rank % 2
        reducer.accumulate(1.0, 1, 1.0)
        emit(reducer, 4)
        reducer.emit_sync(
            SyncReport(
                sync=1, iteration=4, modules=3 - stage, weight_min=0.4 - 0.1 * stage, weight_max=0.6 + 0.1 * stage,
                left_out=stage, of=2 * (3 - stage), effective_replicas_min=2.0 - 0.1 * stage, num_replicas=2,
                beta_min=1.0 - 0.5 * stage, rolled_back=0, bytes=1000 + rank, exposed_ms=float(rank), total_ms=5.0,
            )
        )  # fmt: skip
        return reducer.flush(20)

    for training, sync in run_ranks(run, 4, timeout_s=30):
        assert training.iteration == 4 and math.isfinite(training.lm_loss)
        assert sync == SyncReport(
            sync=1, iteration=4, modules=5, weight_min=pytest.approx(0.3), weight_max=pytest.approx(0.7), left_out=1,
            of=10, effective_replicas_min=1.9, num_replicas=2, beta_min=0.5, rolled_back=0, bytes=2001,
            exposed_ms=1.0, total_ms=5.0,
        )  # fmt: skip
