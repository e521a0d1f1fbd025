"""The sync on CUDA's streams, on a CPU: no use of memory races with another, and the watch sees it when one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.checkpoint.writer import CheckpointWriter
from megatron_edit.sync.event import Pending
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import HostOuterState
from megatron_edit.testing.tiny import VOCABULARY, tiny_batch
from megatron_edit.train.evaluate import evaluate
from megatron_edit.train.replica import Replica
from tests.dist.checkpoint_runs import checkpoint_of
from tests.dist.engine_runs import Run
from tests.dist.stream_runs import AfterStep, Seen, watch

SHARDED = {"num_layers": 2, "edit_num_replicas": 2, "edit_sync_interval": 2}
OFFLOAD = {"edit_cpu_offload": True}
# Together they have every placement, every place of the outer state, and all that changes a message.
RUNS: dict[str, dict[str, Any]] = {
    "in forward": {"edit_pseudo_grad_clip": 1e-3},
    "in forward, far ahead, offload, moments": {"edit_prefetch_depth": 2, "edit_inner_moments": "average", **OFFLOAD},
    "blocking, offload, bf16": {"edit_sync_placement": "step", "bf16": True, **OFFLOAD},
    "blocking, compression": {"edit_sync_placement": "step", "edit_comm_dtype": "int8"},
    "delayed, offload": {"edit_method": "streaming", "edit_num_fragments": 2, "edit_sync_delay": 1, **OFFLOAD},
    "next round": {"edit_method": "co2", "bf16": True},
    "next round, dealt out over the replicas": {"edit_method": "co2-sharded"},
    "without an anchor, moments": {"edit_method": "post-local-sgd", "edit_inner_moments": "average"},
    "sparse, consensus": {"edit_sparsity": 0.5, "edit_consensus": "sum"},
    "warm-up": {"edit_warmup_steps": 2, "micro_batch_size": 1},
}

INTERRUPTED = ["in forward", "delayed, offload", "in forward, far ahead, offload, moments"]  # in tests of their own


def run_of(name: str, world_size: int = 2, **settings: Any) -> Run:
    return Run(world_size, {**SHARDED, **RUNS[name], **settings}, steps=5)


def races(run: Run, after_step: AfterStep | None = None) -> list[str]:
    """Those of all ranks."""
    return [race for seen in watch(run, after_step) for race in seen.races]


def clean(seen: list[Seen]) -> bool:
    assert not [race for rank in seen for race in rank.races], "\n".join(race for rank in seen for race in rank.races)
    assert not [operation for rank in seen for operation in rank.mixed]
    return True


@pytest.mark.parametrize("name", [name for name in RUNS if name not in INTERRUPTED])
def test_nothing_races(name: str) -> None:
    assert clean(watch(run_of(name)))


@pytest.mark.parametrize("name", ["in forward, far ahead, offload, moments", "warm-up"])
def test_nothing_races_where_replicas_are_sharded(name: str) -> None:
    assert clean(watch(run_of(name, world_size=4)))


@pytest.mark.parametrize("name", INTERRUPTED[:2])
def test_an_evaluation_in_between_races_with_nothing(name: str) -> None:
    def after_step(replica: Replica, iteration: int) -> None:
        if iteration > 1:
            evaluate(replica, [tiny_batch(replica.config, replica.mesh, 1)])

    assert clean(watch(run_of(name), after_step))


@pytest.mark.parametrize("name", INTERRUPTED[1:])
def test_a_save_in_the_background_races_with_nothing(name: str, tmp_path: Path) -> None:
    assert clean(watch(run_of(name), SavesInBackground(tmp_path)))


class SavesInBackground:
    """After each of the last steps; training goes on while it is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: CheckpointWriter | None = None

    def __call__(self, replica: Replica, iteration: int) -> None:
        self._writer = self._writer or CheckpointWriter(self._folder, replica.mesh.checkpoint_group, say=print)
        self._writer.finished(wait=True)
        if 3 <= iteration < 5:
            replica.engine.drain()
            state = TrainingState(replica.engine.state, replica.optimizer, replica.config.model, VOCABULARY)
            self._writer.save_in_background(checkpoint_of(replica, state, iteration))


# ---- faults --------------------------------------------------------------------------------------------------------


def without_waits_of_the_sync_stream(replica: Replica) -> None:
    """The sync stream does not wait for the stream that computes: what it sends or updates may not be there yet."""
    platform = replica.mesh.platform
    wait_event = platform.wait_event

    def wait(event: Any, stream: Any = None) -> None:
        if stream is not platform.sync_stream():
            wait_event(event, stream)

    platform.wait_event = wait  # type: ignore[method-assign]


def does_not_wait_for_the_sum(replica: Replica) -> None:
    """The update is made with what is in the buffer when the all-reduce may still be writing there."""
    Pending.arrived = lambda pending: True  # type: ignore[method-assign]


def writes_on_another_stream(replica: Replica) -> None:
    """The masters are written on the copy stream, which the forward pass does not wait for."""
    platform, write = replica.mesh.platform, ModuleShard.write_masters

    def write_elsewhere(module: ModuleShard, flat: torch.Tensor) -> None:
        platform.wait_event(platform.record_event(), platform.copy_stream())
        with platform.stream(platform.copy_stream()):
            write(module, flat)

    ModuleShard.write_masters = write_elsewhere  # type: ignore[method-assign]


def updates_before_the_anchor_is_there(replica: Replica) -> None:
    """The copy of anchor and momentum to the device may still be under way."""

    def take(state: HostOuterState, name: str, module: ModuleShard) -> torch.Tensor:
        state.prefetch(module, momentum=name == "momentum")
        return state._on_device[name, module.index]

    HostOuterState._take = take  # type: ignore[method-assign]


def goes_on_before_the_update(replica: Replica) -> None:
    """The forward pass does not wait for the sync stream."""
    platform = replica.mesh.platform
    wait_event = platform.wait_event

    def wait(event: Any, stream: Any = None) -> None:
        if stream is not None:
            wait_event(event, stream)

    platform.wait_event = wait  # type: ignore[method-assign]


def gives_the_copy_back_too_early(replica: Replica) -> None:
    """Memory of the copy stream is used on the sync stream, and the allocator does not know."""
    platform = replica.mesh.platform
    platform.used_on_current_stream = lambda tensor: None  # type: ignore[method-assign]


def does_not_wait_for_the_device(replica: Replica) -> None:
    """The thread that writes a checkpoint begins while the state is still being copied to the host."""
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "fault", "seen"),
    [
        ("warm-up", without_waits_of_the_sync_stream, ["gradients by allreduce", "sync/modules.py", "default stream"]),
        ("delayed, offload", without_waits_of_the_sync_stream, ["sync/averages.py", "megatron.core optimizer", "sync stream"]),
        ("in forward", does_not_wait_for_the_sum, ["allreduce", "sync/transport.py", "the sync stream"]),
        ("in forward", writes_on_another_stream, ["sync/averages.py", "the copy stream", "the default stream"]),
        ("delayed, offload", updates_before_the_anchor_is_there, ["_to_copy", "the copy stream", "the sync stream"]),
        ("in forward", goes_on_before_the_update, ["sync/averages.py", "the sync stream", "the default stream"]),
        ("delayed, offload", gives_the_copy_back_too_early, ["memory of the copy stream is given back"]),
    ],
)
def test_a_fault_in_the_order_is_seen(name: str, fault: Callable[[Replica], None], seen: list[str]) -> None:
    run = run_of(name)
    found = races(Run(run.world_size, run.settings, run.steps, fault=fault))
    assert any(all(part in race for part in seen) for race in found), "\n".join(found) or "no race"


def test_a_save_that_begins_before_its_copies_are_there_is_seen(tmp_path: Path) -> None:
    run = run_of("in forward")
    broken = Run(run.world_size, run.settings, run.steps, fault=does_not_wait_for_the_device)
    found = races(broken, SavesInBackground(tmp_path))
    assert any("copy_ at checkpoint/writer.py" in race and "the thread 'save 3'" in race for race in found), found
