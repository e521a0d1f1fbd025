"""When syncs happen, what is logged at each iteration, and which weights end a run. B46, B48, B55, B58, B60."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import losses, masters, syncs, train, training_lines, weights_of

# ---- syncs (B46) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["forward", "step"])
def test_exactly_the_planned_syncs(placement: str, tmp_path: Path) -> None:
    """Interval 4 after a warm-up of 4, four microbatches, groups with and without weight decay."""
    settings = {"train_iters": 24, "edit_warmup_steps": 4, "global_batch_size": 16, "edit_sync_placement": placement,
                "weight_decay": 0.1}  # fmt: skip
    planned = {1: 8, 2: 12, 3: 16, 4: 20, 5: 24}
    straight = train(2, **settings)
    assert syncs(straight.stdout) == planned
    assert "5 syncs planned" in straight.stdout
    folder = str(tmp_path)
    first = train(2, **settings, save=folder, load=folder, exit_interval=16)
    second = train(2, **settings, save=folder, load=folder)
    assert (syncs(first.stdout), syncs(second.stdout)) == ({1: 8, 2: 12, 3: 16}, {4: 20, 5: 24})


def test_a_last_sync_ends_a_run_that_ends_between_two() -> None:
    assert syncs(train(2, train_iters=6).stdout) == {1: 4, 2: 6}
    assert syncs(train(2, train_iters=3).stdout) == {1: 3}


@pytest.mark.parametrize("settings", [
    {"edit_num_fragments": 2, "train_iters": 9},
    {"edit_sync_delay": 2, "train_iters": 6},
    {"edit_num_fragments": 1, "edit_sync_delay": 1, "edit_mixing_alpha": 0.5, "train_iters": 4},
    {"edit_method": "co2", "train_iters": 5},
], ids=["streaming", "delayed", "mixed", "co2"])  # fmt: skip
def test_as_many_syncs_as_the_arithmetic_says(settings: dict[str, Any]) -> None:
    """The timetable's, of which a method with fragments has several an interval, and the one that ends the run."""
    log = train(2, **{"edit_method": "streaming", **settings}).stdout
    (planned,) = re.findall(r"(\d+) syncs planned, the last one at the end", log)
    assert len(syncs(log)) == int(planned) > settings["train_iters"] // 4, log


def test_runs_without_a_sync() -> None:
    """The baseline by both names, a warm-up as long as the run, and no iteration at all."""
    choices: list[dict[str, Any]] = [{"edit_method": "baseline"}, {"edit_sync_interval": 0}, {"edit_warmup_steps": 12},
                                     {"train_iters": 0}]  # fmt: skip
    for settings in choices:
        assert syncs(train(2, **settings).stdout) == {}, settings


# ---- the weights at the end (B48) ------------------------------------------------------------------------------------


def weights_of_each_rank(folder: Path) -> Callable[[int], None]:
    """Beside final/, every rank writes the weights that it would have written there."""

    def in_rank(rank: int) -> None:
        from megatron_edit.model.names import canonical_name
        from megatron_edit.sync.anchor_weights import anchor_weights
        from megatron_edit.train.checkpointing import RunCheckpoints

        original = RunCheckpoints.save_final

        def save_final(self: RunCheckpoints, iteration: int) -> None:
            with anchor_weights(self._engine):
                weights = {
                    canonical_name(chunk, name): parameter.detach().clone()
                    for chunk in self._engine.chunks
                    for name, parameter in chunk.named_parameters()
                }
            torch.save(weights, folder / f"rank{rank}.pt")
            original(self, iteration)

        RunCheckpoints.save_final = save_final  # type: ignore[method-assign]

    return in_rank


def test_the_final_weights_are_the_synchronised_ones_of_all_replicas(tmp_path: Path) -> None:
    """Interval 5, 12 iterations. With an outer step that is the plain mean, final/ is the mean of both replicas."""
    save = tmp_path / "run"
    result = train(2, train_iters=12, edit_sync_interval=5, save=str(save), in_rank=weights_of_each_rank(tmp_path),
                   edit_outer_lr=1, edit_outer_momentum=0, edit_weighting="mean", edit_pseudo_grad_clip=0)  # fmt: skip
    assert syncs(result.stdout) == {1: 5, 2: 10, 3: 12}
    final = weights_of(save / "final", "model.")
    by_rank = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    local = [masters(save / "iter_0000012", rank) for rank in range(2)]
    for name, weight in final.items():
        rows = len(weight)  # without the padding of the vocabulary
        assert all(torch.equal(weight, each[name][:rows]) for each in by_rank), f"{name} depends on the rank"
        one, other = (each[name] for each in local)
        assert not torch.equal(one, other), f"{name}: the replicas do not differ, so this shows nothing"
        torch.testing.assert_close(weight, (one + other) / 2, rtol=1e-6, atol=1e-7)


def test_a_stop_between_syncs_makes_no_sync_and_no_final_weights(tmp_path: Path) -> None:
    result = train(2, train_iters=12, edit_sync_interval=5, exit_interval=8, save=str(tmp_path))
    assert syncs(result.stdout) == {1: 5}
    assert (tmp_path / "iter_0000008").is_dir() and not (tmp_path / "final").exists()
    assert "--exit-interval 8" in result.stdout
    local = [masters(tmp_path / "iter_0000008", rank) for rank in range(2)]
    assert not any(torch.equal(local[0][name], local[1][name]) for name in local[0])  # the work of both is kept


# ---- the logged loss (B55) -------------------------------------------------------------------------------------------


def same_sample_everywhere(rank: int) -> None:
    from megatron_edit.data.datasets import MockDataset

    original = MockDataset.__getitem__
    MockDataset.__getitem__ = lambda self, index: original(self, 3)  # type: ignore[method-assign]


def test_one_loss_for_any_number_of_replicas_on_identical_data() -> None:
    """Every sample is the same one, so all replicas do the same, over three syncs."""
    found = {}
    for replicas in (1, 2, 3):
        result = train(replicas, edit_num_replicas=replicas, global_batch_size=12, in_rank=same_sample_everywhere)
        lines = training_lines(result.stdout)
        found[replicas] = [float(fields["lm loss"]) for fields in lines.values()]
        for fields in lines.values():
            own = [fields[f"lm loss replica {r}"] for r in range(replicas)] if replicas > 1 else []
            assert all(loss == fields["lm loss"] for loss in own)
        assert len(syncs(result.stdout)) == 3
    assert found[1][-1] < found[1][0] - 0.3
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    assert found[3] == pytest.approx(found[1], rel=1e-5)


def test_one_loss_for_any_number_of_replicas_on_one_global_batch() -> None:
    """The replicas' shares differ; without learning the mean over all of them is one number."""
    found = [losses(train(n, edit_num_replicas=n, global_batch_size=12, lr=0, train_iters=5).stdout) for n in (1, 2, 3)]
    for iteration, loss in found[0].items():
        assert [float(each[iteration]) for each in found] == pytest.approx([float(loss)] * 3, rel=2e-6)


def masked_on_replica_1(rank: int) -> None:
    from megatron_edit.data.datasets import MockDataset

    if rank == 1:
        original = MockDataset.__getitem__

        def masked(self: Any, index: int) -> Any:
            sample = original(self, index)
            return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}

        MockDataset.__getitem__ = masked  # type: ignore[method-assign]


def test_a_replica_without_a_token_that_counts() -> None:
    """It adds nothing to the mean, makes no step, is out of each sync, and says so."""
    result = train(2, in_rank=masked_on_replica_1, train_iters=8)
    lines = training_lines(result.stdout)
    assert len(lines) == 8
    for fields in lines.values():
        assert fields["lm loss"] == fields["lm loss replica 0"] and fields["lm loss replica 1"].lower() == "nan"
        assert fields["number of skipped iterations"] == "1"
    assert float(lines[8]["lm loss"]) < float(lines[1]["lm loss"])
    assert result.stdout.count("| left out 6 of 12 |") == 2  # six modules, two syncs


def test_a_line_over_three_iterations_and_a_sync_is_their_mean() -> None:
    each = {k: float(v) for k, v in losses(train(2, train_iters=12).stdout).items()}
    thirds = losses(train(2, train_iters=12, log_interval=3).stdout)
    assert sorted(thirds) == [3, 6, 9, 12]
    for last, loss in thirds.items():
        assert float(loss) == pytest.approx(sum(each[k] for k in (last - 2, last - 1, last)) / 3, abs=2e-6)


def test_the_last_line_holds_the_rest(tmp_path: Path) -> None:
    each = {k: float(v) for k, v in losses(train(2, train_iters=8).stdout).items()}
    result = losses(train(2, train_iters=8, log_interval=5).stdout)
    assert sorted(result) == [5, 8]
    assert float(result[8]) == pytest.approx((each[6] + each[7] + each[8]) / 3, abs=2e-6)


# ---- pipelines (B58) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"edit_num_replicas": 1}, {"num_layers_per_virtual_pipeline_stage": 1,
                                    "edit_num_replicas": 1}], ids=["1F1B", "interleaved"])  # fmt: skip
def test_the_true_loss_is_printed_with_a_pipeline(layout: dict[str, Any]) -> None:
    expected = train(1, train_iters=6, edit_num_replicas=1)
    found = train(2, train_iters=6, pipeline_model_parallel_size=2, **layout)
    for iteration, fields in training_lines(expected.stdout).items():
        other = training_lines(found.stdout)[iteration]
        assert float(other["lm loss"]) == pytest.approx(float(fields["lm loss"]), abs=2e-5)
        assert float(other["grad norm"]) == pytest.approx(float(fields["grad norm"]), abs=2e-3)
    assert len(training_lines(found.stdout)) == 6
    assert all("iteration" not in rank.stdout for rank in found.ranks[1:])


# ---- the learning rate (B60) -----------------------------------------------------------------------------------------


def cosine(iteration: int, warmup: int, decay: int, peak: float = 1e-3, floor: float = 1e-5) -> float:
    """The documented formula: a step is at the place of what was consumed before it; the decay includes the warm-up."""
    done = iteration - 1
    if warmup and done <= warmup:
        return peak * done / warmup
    if done > decay:
        return floor
    return floor + (peak - floor) * (1 + math.cos(math.pi * (done - warmup) / (decay - warmup))) / 2


SCHEDULES: dict[str, tuple[dict[str, Any], int, int]] = {
    "decay not given": ({"lr_warmup_iters": 5}, 5, 20),
    "decay 15": ({"lr_warmup_iters": 5, "lr_decay_iters": 15}, 5, 15),
    "decay 20": ({"lr_warmup_iters": 5, "lr_decay_iters": 20}, 5, 20),
    "decay 40": ({"lr_warmup_iters": 5, "lr_decay_iters": 40}, 5, 40),
    "in samples": ({"lr_warmup_samples": 40, "lr_decay_samples": 120}, 5, 15),
    "run in samples": ({"lr_warmup_samples": 40, "train_iters": None, "train_samples": 160}, 5, 20),
    "no warm-up": ({}, 0, 20),
    "fraction": ({"lr_warmup_fraction": 0.25}, 5, 20),
}
SMALL = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_rate_of_each_logged_iteration_is_the_formula(case: str) -> None:
    settings, warmup, decay = SCHEDULES[case]
    result = train(1, edit_num_replicas=1, lr_decay_style="cosine", min_lr=1e-5, **SMALL,
                   **{"train_iters": 20, **settings})  # fmt: skip
    found = {k: float(fields["learning rate"]) for k, fields in training_lines(result.stdout).items()}
    assert found == pytest.approx({k: cosine(k, warmup, decay) for k in range(1, 21)}, rel=1e-6, abs=1e-12)
    shorter = "the learning rate decay ends at iteration 15 of 20" in result.stdout
    assert shorter == (decay < 20)


def test_the_rate_does_not_depend_on_the_number_of_replicas() -> None:
    settings = {"lr_decay_style": "cosine", "lr_warmup_iters": 3, "global_batch_size": 12}
    logs = [train(n, edit_num_replicas=n, **settings).stdout for n in (1, 2, 3)]
    found = [{k: fields["learning rate"] for k, fields in training_lines(log).items()} for log in logs]
    assert found[0] == found[1] == found[2] and len(found[0]) == 12


# ---- nobody waits ----------------------------------------------------------------------------------------------------

ASLEEP_S = 3.0


def clocked(folder: Path, sleeper: int, at_iteration: int) -> Callable[[int], None]:
    """Rank `sleeper` sleeps inside the step of one iteration; every rank writes when each of its steps ended."""

    def in_rank(rank: int) -> None:
        import time

        from megatron_edit.ranks.signals import StopCoordinator
        from megatron_edit.train.trainer import Trainer

        original = Trainer._train_step
        ends: list[float] = []

        def train_step(self: Trainer, stop: StopCoordinator) -> bool:
            step = self._step.run

            def slow(*arguments: Any) -> Any:
                if rank == sleeper and self.iteration + 1 == at_iteration:
                    time.sleep(ASLEEP_S)
                return step(*arguments)

            self._step.run = slow  # type: ignore[method-assign]
            at_boundary = original(self, stop)
            self._step.run = step  # type: ignore[method-assign]
            ends.append(time.monotonic())
            (folder / f"{rank}.json").write_text(json.dumps(ends))
            return at_boundary

        Trainer._train_step = train_step  # type: ignore[method-assign]

    return in_rank


def step_ends(folder: Path, result: CommandResult) -> list[list[float]]:
    """When each iteration ended on each rank, in seconds since the first end of any."""
    ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(result.ranks))]
    first = min(each[0] for each in ends)
    return [[end - first for end in each] for each in ends]


def test_no_local_step_waits_for_a_replica_that_sleeps(tmp_path: Path) -> None:
    """Replica 1 sleeps inside iteration 6, with logging at every iteration: replica 0 waits only at the sync, which
    is completed inside iteration 9."""
    result = train(2, train_iters=12, edit_sync_interval=4, in_rank=clocked(tmp_path, sleeper=1, at_iteration=6),
                   log_interval=1, log_throughput=True, metrics_file=str(tmp_path / "metrics.jsonl"))  # fmt: skip
    awake, asleep = step_ends(tmp_path, result)
    durations = [after - before for before, after in itertools.pairwise(awake)]  # of iteration 2, 3, ...
    longest = max(range(len(durations)), key=lambda k: durations[k]) + 2
    assert longest in (8, 9), durations  # the exchange of norms after step 8, or its result in the forward pass of 9
    assert durations[longest - 2] > ASLEEP_S / 2, durations
    assert awake[6] < asleep[5] - ASLEEP_S / 2, "replica 0 had not done iteration 7 when replica 1 slept in its sixth"
    assert len(training_lines(result.stdout)) == 12
