"""How often the host waits for the device: once in a local step, once more where a sync is decided."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_edit.testing.streams import count_by_place
from tests.dist.engine_runs import Run, masked_batch
from tests.dist.stream_runs import watch
from tests.dist.test_stream_races import run_of

FULL = pytest.mark.full("the rest of the layouts and settings")


@pytest.mark.parametrize(
    ("name", "world_size", "settings"),
    [
        ("in forward", 2, {"micro_batch_size": 1}),
        ("in forward, far ahead, offload, moments", 4, {}),
        ("delayed, offload", 2, {"bf16": True, "edit_sync_interval": 4}),
        ("next round", 4, {"pipeline_model_parallel_size": 2}),
        ("warm-up", 2, {}),
        pytest.param("blocking, compression", 2, {}, marks=FULL),
        pytest.param("without an anchor, moments", 2, {}, marks=FULL),
        pytest.param("in forward", 4, {"tensor_model_parallel_size": 2}, marks=FULL),
    ],
)
def test_the_host_waits_once_in_a_step_and_once_more_in_a_sync(
    name: str, world_size: int, settings: dict[str, Any]
) -> None:
    run = run_of(name, world_size, **settings)
    for seen in watch(Run(run.world_size, run.settings, run.steps, data=masked_batch)):
        assert any(seen.synced) and not all(seen.synced)
        for waits, synced in list(zip(seen.waits, seen.synced, strict=True))[1:]:  # the first moves tables to the device
            assert len(waits) <= 1 + synced, count_by_place(waits)
