"""Stop and go on in the same layout, byte for byte: checkpoints, printed losses, syncs. B01, B03, B07, signals."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.torch_dist import stored_tensors
from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import differences, evaluations, files_below, losses, start, syncs, train, training_lines

DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "R2": (2, {}),
    "R2xTP2": (4, {**TENSOR}),
    "PP2": (2, {**PIPELINE, "edit_num_replicas": 1}),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "R2xS2": (4, {}),
    "R2xPP2": (4, {**PIPELINE}),
    "TP2xPP2": (4, {**TENSOR, **PIPELINE, "edit_num_replicas": 1}),
    "saved in the background": (2, {"async_save": True, "save_interval": 4}),
    "R2xTP2 with sequence parallel": (4, {**TENSOR, "sequence_parallel": True}),
    "interleaved": (2, {**PIPELINE, "edit_num_replicas": 1, "num_layers_per_virtual_pipeline_stage": 1}),
    "tied PP2": (2, {**PIPELINE, "edit_num_replicas": 1, "untie_embeddings_and_output_weights": False}),
    "R3": (3, {"edit_num_replicas": 3, "global_batch_size": 12}),
    "bf16": (2, {"bf16": True}),
    "baseline": (2, {"edit_method": "baseline"}),
    "sync after the step": (2, {"edit_sync_placement": "step"}),
    "no loader threads, then three": (2, {"num_workers": 0}),
}
DELAYED = {"edit_method": "streaming", "edit_sync_delay": 2}
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "post-local-sgd": (2, {"edit_method": "post-local-sgd"}),
    "slowmo": (2, {"edit_method": "slowmo"}),
    "diloco": (2, {"edit_method": "diloco"}),
    "co2": (2, {"edit_method": "co2"}),
    "co2-sharded": (2, {"edit_method": "co2-sharded"}),
    "streaming": (2, {"edit_method": "streaming"}),
    "streaming with a delay": (2, DELAYED),
    "int8 with error feedback": (2, {"edit_comm_dtype": "int8"}),
    "everything random": (2, {"edit_sparsity": 0.5, "edit_sparsity_method": "random", "edit_consensus": "sum"}),
    "offload, moments averaged": (2, {"edit_cpu_offload": True, "edit_inner_moments": "average",
                                      "edit_inner_moments_interval": 2}),
}  # fmt: skip
MORE_METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "streaming with a delay, R2xPP2": (4, {**DELAYED, **PIPELINE}),
    "streaming mixed, int4, R2xTP2": (4, {**DELAYED, **TENSOR, "edit_mixing_alpha": 0.5, "edit_comm_dtype": "int4"}),
    "streaming, sublayers, R3": (3, {**DELAYED, "edit_num_replicas": 3, "global_batch_size": 12,
                                     "edit_modules": "sublayer"}),
    "co2 R2xS2": (4, {"edit_method": "co2"}),
    "co2-sharded R2xTP2": (4, {"edit_method": "co2-sharded", **TENSOR}),
    "co2 in bf16": (2, {"edit_method": "co2", "bf16": True}),
    "bf16 messages": (2, {"edit_comm_dtype": "bf16"}),
    "sublayers": (2, {"edit_modules": "sublayer"}),
    "delay of a whole interval": (2, {"edit_method": "streaming", "edit_sync_delay": 5}),
}  # fmt: skip
# interval 5: one iteration before, on and after a sync
STOPS = [9, 10, 11]


Straight = Callable[..., Path]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Folder of a run at once, with its log in `log`, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("straight"), {}

    def run(world_size: int, **settings: Any) -> Path:
        key = repr((world_size, sorted(settings.items())))
        if key not in made:
            made[key] = folder / str(len(made))
            log = train(world_size, **settings, save=str(made[key])).stdout
            (made[key] / "log").write_text(log)
        return made[key]

    return run


def check_resume(
    straight: Straight, world_size: int, stop: int, folder: Path, then: dict[str, Any] | None = None, **settings: Any
) -> None:
    """20 iterations at once, and up to `stop` and on from there: equal in every byte."""
    settings = {"train_iters": 20, "edit_sync_interval": 5, "lr_decay_style": "cosine", **DROPOUT, **settings}
    two = str(folder)
    first = train(world_size, **settings, save=two, load=two, exit_interval=stop)
    second = train(world_size, **{**settings, **(then or {})}, save=two, load=two)
    end = settings["train_iters"]
    check_equal(straight(world_size, **settings), folder, first, second, stop, end)


def check_equal(
    at_once: Path, in_two: Path, first: CommandResult, second: CommandResult, stop: int, end: int = 20
) -> None:
    log, one, other = (at_once / "log").read_text(), losses(first.stdout), losses(second.stdout)
    assert (list(one), list(other)) == (list(range(1, stop + 1)), list(range(stop + 1, end + 1)))
    assert {**one, **other} == losses(log)
    assert {**syncs(first.stdout), **syncs(second.stdout)} == syncs(log)
    assert f"resumed iteration {stop} of {end}" in second.stdout
    for folder in (f"iter_{end:07d}", "final"):
        assert differences(at_once / folder, in_two / folder) == []


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_halves_are_one_run(layout: str, stop: int, straight: Straight, tmp_path: Path) -> None:
    world_size, settings = LAYOUTS[layout]
    check_resume(straight, world_size, stop, tmp_path, **settings)


@pytest.mark.full(reason="more layouts of the same")
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_two_halves_are_one_run_in_more_layouts(layout: str, stop: int, straight: Straight, tmp_path: Path) -> None:
    world_size, settings = MORE_LAYOUTS[layout]
    then = {"num_workers": 3} if layout.startswith("no loader") else None
    check_resume(straight, world_size, stop, tmp_path, then, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_two_halves_are_one_run_with_every_method(method: str, straight: Straight, tmp_path: Path) -> None:
    """In the middle of an interval: with what is under way, owed by compression, dealt out, in host memory."""
    world_size, settings = METHODS[method]
    check_resume(straight, world_size, 7, tmp_path, **settings, train_iters=12)


@pytest.mark.full(reason="more stops of the same, and more layouts and combinations")
@pytest.mark.parametrize("stop", [9, 10, 11])
@pytest.mark.parametrize("method", {**METHODS, **MORE_METHODS})
def test_two_halves_are_one_run_with_every_method_and_stop(
    method: str, stop: int, straight: Straight, tmp_path: Path
) -> None:
    world_size, settings = {**METHODS, **MORE_METHODS}[method]
    check_resume(straight, world_size, stop, tmp_path, **settings)


@pytest.mark.parametrize("stop", [6, 7, 8])
def test_stops_around_the_end_of_the_warm_up(stop: int, straight: Straight, tmp_path: Path) -> None:
    check_resume(straight, 2, stop, tmp_path, edit_warmup_steps=7)


def test_every_tensor_is_looked_at(tmp_path: Path) -> None:
    """The comparison sees one step more: nothing in a checkpoint may stay what it was."""
    for end in (10, 11):
        train(2, train_iters=end, lr_decay_style="constant", **DROPOUT, save=str(tmp_path / str(end)))
    (tmp_path / "10" / "iter_0000010").rename(tmp_path / "x")
    (tmp_path / "11" / "iter_0000011").rename(tmp_path / "y")
    found = differences(tmp_path / "x", tmp_path / "y")
    stored = stored_tensors(tmp_path / "x")
    assert set(found) >= {name for name in stored if not name.startswith(("edit", "rng"))}
    assert {"trigger", "replicas", "consumed_samples"} <= set(found)
    assert any(name.startswith("rng.") and "tracker" in name for name in found)


def test_another_batch_size_goes_on_in_the_order_of_samples(tmp_path: Path) -> None:
    """The position is a count of samples, so no sample is left out or used twice; the learning rate goes by it too."""
    ids, save = tmp_path / "ids.jsonl", str(tmp_path / "run")
    settings = {"save": save, "load": save, "log_sample_ids": str(ids), "lr_decay_style": "linear",
                "lr_decay_samples": 400}  # fmt: skip
    first = train(2, **settings, train_iters=5)
    second = train(2, **settings, train_iters=10, global_batch_size=4)
    train(2, train_iters=8, log_sample_ids=str(tmp_path / "straight.jsonl"))
    lines = {**training_lines(first.stdout), **training_lines(second.stdout)}
    assert [int(line["consumed samples"]) for line in lines.values()] == [8, 16, 24, 32, 40, 44, 48, 52, 56, 60]
    rates = [float(line["learning rate"]) for line in lines.values()]
    assert rates[4:7] == pytest.approx([1e-3 * (1 - done / 400) for done in (32, 40, 44)], rel=1e-6)
    assert samples_of(ids) == samples_of(tmp_path / "straight.jsonl")[:60]


def samples_of(file: Path) -> list[int]:
    """Ids in the order of use: by iteration, then replica."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    entries.sort(key=lambda entry: (entry["iteration"], entry["replica"]))
    return [sample for entry in entries for sample in entry["samples"]]


def test_a_crash_leaves_no_sample_logged_twice(tmp_path: Path) -> None:
    """Killed after iteration 7, taken up at 4: the ids of 5 to 7 are no longer this run's."""
    ids, save = tmp_path / "ids.jsonl", str(tmp_path / "run")
    settings = {"train_iters": 10, "save": save, "load": save, "log_sample_ids": str(ids)}
    crashed = start(2, **settings, save_interval=4, in_rank=killed_after(7))
    assert crashed.exit_codes != [0, 0] and len(samples_of(ids)) >= 7 * 8 - 4
    train(2, **settings)
    train(2, train_iters=10, log_sample_ids=str(tmp_path / "straight.jsonl"))
    assert samples_of(ids) == samples_of(tmp_path / "straight.jsonl")
    assert (tmp_path / "ids.jsonl.dropped").exists()


def killed_after(iteration: int) -> Callable[[int], None]:
    def in_rank(rank: int) -> None:
        from megatron_edit.ranks.signals import StopCoordinator
        from megatron_edit.train.trainer import Trainer

        original = Trainer._train_step

        def train_step(self: Trainer, stop: StopCoordinator) -> bool:
            at_boundary = original(self, stop)
            if self.iteration == iteration:
                os.kill(os.getpid(), signal.SIGKILL)
            return at_boundary

        Trainer._train_step = train_step  # type: ignore[method-assign]

    return in_rank


def test_iterations_before_a_stop_are_logged(tmp_path: Path) -> None:
    each = {k: float(v) for k, v in losses(train(2, train_iters=8).stdout).items()}
    found = losses(train(2, train_iters=8, log_interval=5, exit_interval=7, save=str(tmp_path)).stdout)
    assert list(found) == [5, 7]
    assert float(found[7]) == pytest.approx((each[6] + each[7]) / 2, abs=2e-6)


# ---- nothing left to do (B07) ----------------------------------------------------------------------------------------


def test_nothing_left_to_do_touches_nothing(tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    train(2, train_iters=6, save=save)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    result = train(2, train_iters=6, save=save, load=save)
    assert "nothing left to do: resumed at iteration 6 of 6" in result.stdout
    assert losses(result.stdout) == {}
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    assert {path: value for path, value in after.items() if "iter_" in str(path) or path.suffix == ".txt"} == {
        path: value for path, value in before.items() if "iter_" in str(path) or path.suffix == ".txt"
    }
    more = train(2, train_iters=7, save=save, load=save, save_interval=1)
    assert list(losses(more.stdout)) == [7]
    assert {"iter_0000006", "iter_0000007"} <= files_below(tmp_path / "run")


def test_a_first_start_says_so(tmp_path: Path) -> None:
    for made in (False, True):
        folder = tmp_path / str(made)
        if made:
            folder.mkdir()
        result = train(2, train_iters=1, save=str(folder), load=str(folder))
        assert "first start" in result.stdout


def test_load_and_save_at_once_gives_the_same_bytes(tmp_path: Path) -> None:
    """Asked to stop before the first step after a resume: saved to another folder; not written anew in the same."""
    run = tmp_path / "run"
    settings = {"train_iters": 12, "load": str(run), **DROPOUT}
    train(2, **settings, exit_interval=6, save=str(run))
    at_once = asked_to_stop(rank=0, at=7, wait=True)
    result = train(2, **settings, save=str(tmp_path / "other"), in_rank=at_once)
    assert losses(result.stdout) == {}
    assert differences(run / "iter_0000006", tmp_path / "other" / "iter_0000006") == []
    before = (run / "iter_0000006").stat()
    result = train(2, **settings, save=str(run), in_rank=at_once)
    assert losses(result.stdout) == {} and "SIGTERM on rank 0" in result.stdout
    assert (run / "iter_0000006").stat() == before


def test_every_iteration_is_saved_once(tmp_path: Path) -> None:
    result = train(2, save=str(tmp_path), save_interval=4, exit_interval=8)
    assert re.findall(r"^saved iteration (\d+)", result.stdout, re.MULTILINE) == ["4", "8"]
    result = train(2, save=str(tmp_path), load=str(tmp_path), save_interval=4)
    assert re.findall(r"^saved iteration (\d+)", result.stdout, re.MULTILINE) == ["12"]


def test_an_exit_interval_at_the_end_is_the_end(tmp_path: Path) -> None:
    """A chain of jobs whose last one ends the training on its own exit interval has final weights."""
    settings = {"save": str(tmp_path), "load": str(tmp_path), "exit_interval": 4}
    for iteration in (4, 8, 12):
        train(2, **settings)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
        assert (tmp_path / "final").exists() == (iteration == 12)


def test_final_weights_that_a_kill_prevented_are_made_up_for(tmp_path: Path) -> None:
    save = str(tmp_path)
    train(2, train_iters=6, save=save, **DROPOUT)
    (tmp_path / "final").rename(tmp_path / "as_it_was")
    before = (tmp_path / "iter_0000006").stat()
    result = train(2, train_iters=6, save=save, load=save, eval_iters=1, **DROPOUT)
    assert losses(result.stdout) == {} and evaluations(result.stdout).keys() == {6}
    assert differences(tmp_path / "as_it_was", tmp_path / "final") == []
    assert (tmp_path / "iter_0000006").stat() == before


# ---- signals ---------------------------------------------------------------------------------------------------------


def asked_to_stop(rank: int, at: int, number: int = signal.SIGTERM, wait: bool = False) -> Callable[[int], None]:
    """`rank` is sent a signal as it comes to iteration `at`; `wait`: until it has proposed where to stop."""
    victim = rank

    def in_rank(rank: int) -> None:
        import time

        from megatron_edit.ranks.signals import StopCoordinator

        original = StopCoordinator.should_stop

        def should_stop(self: StopCoordinator, iteration: int) -> Any:
            if iteration == at - 1:
                if rank == victim:
                    os.kill(os.getpid(), number)
                while wait and self._proposal is None:
                    time.sleep(0.01)
            return original(self, iteration)

        StopCoordinator.should_stop = should_stop  # type: ignore[method-assign]

    return in_rank


@pytest.mark.parametrize(
    ("world_size", "victim", "settings"),
    [(2, 1, {}), pytest.param(4, 2, TENSOR, marks=pytest.mark.full(reason="one layout more"))],
    ids=["R2", "R2xTP2"],
)
def test_a_signal_to_one_rank_saves_once_and_can_be_resumed(
    world_size: int, victim: int, settings: dict[str, Any], straight: Straight, tmp_path: Path
) -> None:
    settings = {"train_iters": 48, "edit_sync_interval": 5, **DROPOUT, **settings}
    two = str(tmp_path)
    first = train(world_size, **settings, save=two, load=two, in_rank=asked_to_stop(victim, at=8))
    (stop,) = map(int, re.findall(r"saved iteration (\d+) to ", first.stdout))
    assert f"SIGTERM on rank {victim}: all ranks stop after iteration {stop}" in first.stdout
    assert 7 <= stop < 48 and not (tmp_path / "final").exists()
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_{stop:07d}"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(stop)
    second = train(world_size, **settings, save=two, load=two)
    check_equal(straight(world_size, **settings), tmp_path, first, second, stop, end=48)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_the_other_signals(number: int, tmp_path: Path) -> None:
    result = train(2, train_iters=100, save=str(tmp_path), in_rank=asked_to_stop(rank=0, at=3, number=number))
    assert f"{signal.Signals(number).name} on rank 0" in result.stdout
    assert result.stdout.count("saved iteration") == 1


def test_a_duration_stops_the_run(tmp_path: Path) -> None:
    result = train(2, train_iters=10_000, save=str(tmp_path), exit_duration_in_mins=0.02, log_interval=1000)
    assert "exit duration of 0.02 minutes" in result.stdout
    assert result.stdout.count("saved iteration") == 1
