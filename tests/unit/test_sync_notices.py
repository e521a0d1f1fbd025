"""What is said of a sync beside its line: who was left out, of which modules, why, and once; and when a run ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from megatron_edit.config.schema import Config
from megatron_edit.config.settings import with_values
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.event import SyncDecision
from megatron_edit.sync.notices import IDLE_SYNCS, ROUNDING, IdleWatch, NothingStepsError, SyncWarnings
from megatron_edit.tables.methods import get_method

KEYS = ["embedding", "layers.0", "layers.1", "head"]
WARMUP = 3


class Syncs:
    """One sync after the other of R replicas, and the lines on each."""

    def __init__(self, replicas: int = 3, told_elsewhere: Sequence[bool] | None = None) -> None:
        config = with_values(
            Config(), {"edit_anomaly_threshold": 3.0, "edit_weighting": "softmax", "edit_anomaly_warmup_syncs": WARMUP},
            "flag",
        ).edit  # fmt: skip
        self.replicas, self.index = replicas, 0
        self.decider = Decider(config, get_method("edit"), replicas, len(KEYS))
        self.warnings = SyncWarnings(KEYS, replicas, told_elsewhere)

    def decide(
        self, norms: dict[tuple[int, str], float] | None = None, idle: Sequence[int] = (), due: Sequence[str] = KEYS
    ) -> SyncDecision:
        """Norms of 1 (a little different each time) but for those given; replicas `idle` made no step."""
        self.index += 1
        table = torch.full((self.replicas, len(KEYS)), 1 + 0.01 * math.sin(self.index), dtype=torch.float64)
        for (replica, key), norm in (norms or {}).items():
            table[replica, KEYS.index(key)] = norm
        steps = torch.ones(self.replicas, len(KEYS), dtype=torch.int64)
        steps[list(idle)] = 0
        table[list(idle)] = 0
        columns = [KEYS.index(key) for key in due]
        return self.decider.decide(self.index, 10 * self.index, columns, table[:, columns], steps[:, columns])

    def lines(self, *arguments: object, **named: object) -> list[str]:
        return self.warnings.after_sync(self.decide(*arguments, **named))  # type: ignore[arg-type]

    def healthy(self, count: int) -> None:
        for _ in range(count):
            assert self.lines() == []


def test_a_flagged_replica_is_named_at_once_with_its_modules_and_once_in_a_row_of_flags() -> None:
    syncs = Syncs()
    syncs.healthy(5)
    far = {(1, "layers.0"): 31.0, (1, "head"): 8.0}
    assert syncs.lines(far) == [
        "warning: sync 6: replica 1 is far above its own past in layers.0, head (norm 31 in layers.0, others 1): "
        "left out there, set back to the anchor"
    ]
    assert all(syncs.lines(far) == [] for _ in range(8))
    assert syncs.lines(far) == ["warning: sync 15: replica 1 left out of layers.0, head for 10 syncs in a row"]
    syncs.healthy(1)
    assert "sync 17: replica 1 is far above" in syncs.lines(far)[0]  # another row


def test_the_norms_beside_a_flagged_one_are_those_of_healthy_replicas() -> None:
    syncs = Syncs()
    syncs.healthy(5)
    lines = syncs.lines({(1, "head"): 8.0, (0, "head"): math.nan})
    assert "(norm 8 in head, others 1)" in lines[0] and "replica 0 is not finite in head" in lines[1]
    alone = Syncs(replicas=1)
    alone.healthy(5)
    assert "(norm 8 in head)" in alone.lines({(0, "head"): 8.0})[0]


def test_another_module_in_the_middle_of_a_row_is_named() -> None:
    syncs = Syncs()
    syncs.healthy(5)
    assert len(syncs.lines({(1, "layers.0"): 31.0})) == 1
    (line,) = syncs.lines({(1, "layers.0"): 31.0, (1, "layers.1"): 31.0})
    assert "past in layers.1 (" in line


@pytest.mark.parametrize(
    ("norms", "idle", "reason"),
    [
        ({}, (0, 1, 2), "none made a step since the sync before"),
        ({(r, "layers.1"): math.nan for r in range(3)}, (), "all not finite"),
        ({(r, "layers.1"): 50.0 for r in range(3)}, (), "all far above its own past"),
        (
            {(0, "layers.1"): math.inf, (1, "layers.1"): 50.0},
            (2,),
            "replica 0 not finite; replica 1 far above its own past; replica 2 made no step",
        ),
    ],
)
def test_a_rollback_says_why(norms: dict[tuple[int, str], float], idle: Sequence[int], reason: str) -> None:
    syncs = Syncs()
    syncs.healthy(5)
    (line,) = [line for line in syncs.lines(norms, idle=idle) if "every replica left out" in line]
    modules = "all 4 modules of this stage (embedding to head)" if len(idle) == 3 else "layers.1"
    assert line == f"warning: sync 6: every replica left out ({reason}), rolled back to the anchor: {modules}"


def test_copies_of_a_tied_matrix_that_differ_are_said_to_and_on_one_stage_alone() -> None:
    differ = {(1, "embedding"): -math.inf}
    (line,) = Syncs().lines(differ)
    assert line.startswith("warning: sync 1: replica 1: the two copies, on first and last stage, differ of the tied")
    assert Syncs(told_elsewhere=[True, False, False, False]).lines(differ) == []
    apart = Syncs().warnings.anchors_apart(7, [0.0, ROUNDING, 0.5])
    assert len(apart) == 1 and "sync 7: replica 2" in apart[0] and "5.0e-01" in apart[0]
    assert len(Syncs().warnings.anchors_apart(7, [math.nan])) == 1


class TestIdleWatch:
    def test_a_run_in_which_nothing_steps_ends(self) -> None:
        syncs, watch = Syncs(), IdleWatch()
        watch.after_sync(syncs.decide())
        for _ in range(9):
            watch.after_sync(syncs.decide(idle=(0, 1, 2)))
        with pytest.raises(NothingStepsError, match=r"last 10 syncs, 100 iterations: no replica has made a step"):
            watch.after_sync(syncs.decide(idle=(0, 1, 2)))

    def test_also_when_everything_is_rolled_back_all_the_time(self) -> None:
        syncs, watch = Syncs(), IdleWatch()
        broken = {(r, key): math.nan for r in range(3) for key in KEYS}
        with pytest.raises(NothingStepsError, match="left out of every module"):
            for _ in range(12):
                watch.after_sync(syncs.decide(broken))

    def test_one_module_of_one_replica_is_enough_to_go_on(self) -> None:
        syncs, watch = Syncs(), IdleWatch()
        nearly = {(r, key): math.nan for r in range(3) for key in KEYS if (r, key) != (2, "head")}
        for _ in range(30):
            watch.after_sync(syncs.decide(nearly))

    def test_few_syncs_do_not_end_it_however_long_they_are(self) -> None:
        syncs, watch = Syncs(), IdleWatch()
        watch.after_sync(syncs.decide())
        syncs.index = 1000
        for _ in range(IDLE_SYNCS - 1):
            watch.after_sync(syncs.decide(idle=(0, 1, 2)))
        with pytest.raises(NothingStepsError):
            watch.after_sync(syncs.decide(idle=(0, 1, 2)))

    def test_synchronous_steps_that_are_all_skipped(self) -> None:
        watch = IdleWatch()
        for _ in range(99):
            watch.after_synchronous_step(False)
        watch.after_synchronous_step(True)
        for _ in range(99):
            watch.after_synchronous_step(False)
        with pytest.raises(NothingStepsError, match="last 100 iterations, which were all skipped"):
            watch.after_synchronous_step(False)
