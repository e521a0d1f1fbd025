"""A tied matrix over two pipeline stages is one matrix: one decision for both copies, and a fault in one is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.tables.parameters import module_key
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.train.replica import Replica
from tests.dist.against_reference import differences
from tests.dist.engine_runs import RankRecord, Run, run_engine
from tests.dist.test_against_reference import make_run

INTERVAL, BAD_SYNC, SYNCS = 2, 2, 4


def tied_run(**fields: Any) -> Run:
    run = make_run("R2xPP2", "tied", steps=INTERVAL * SYNCS + 1, edit_sync_interval=INTERVAL)
    return Run(run.world_size, run.settings, run.steps, run.data, **fields)


def before_the_sync(replica: Replica, change: Callable[[Any], None], *, everywhere: bool = False) -> None:
    """`change(tied module)` on the last stage of replica 1 (or of all), when sync BAD_SYNC is about to be decided."""
    engine, mesh = replica.engine, replica.mesh
    right = engine._decide

    def decide(modules: list[Any], index: int, *arguments: Any, **named: Any) -> Any:
        for module in modules:
            here = mesh.is_last_stage and (everywhere or mesh.replica == 1)
            if index == BAD_SYNC and module.key == "embedding" and here:
                change(module)
        return right(modules, index, *arguments, **named)

    engine._decide = decide  # type: ignore[method-assign]


def spoils_one_copy(replica: Replica) -> None:
    """One element of one copy changes, by less than any norm shows."""

    def change(module: Any) -> None:
        module.slices[0].master[3] += 1e-5

    before_the_sync(replica, change)


def spoils_one_moment(replica: Replica) -> None:
    """Adam's second moment of one copy is wrong after the first step: its updates part from then on."""
    step = replica.optimizer.step_with_ready_grads

    def step_with_ready_grads() -> Any:
        result = step()
        for part in replica.optimizer.chained_optimizers if not done else ():
            for module in replica.engine.modules:
                if module.key == "embedding" and replica.mesh.is_last_stage and replica.mesh.replica == 1:
                    part.optimizer.state[module.slices[0].optimizer_parameter]["exp_avg_sq"].view(-1)[:64] *= 4
                    done.append(True)
        return result

    done: list[bool] = []
    replica.optimizer.step_with_ready_grads = step_with_ready_grads  # type: ignore[method-assign]


def embedding_of_replica_1_is_nan(iteration: int, replica: int, name: str, value: Tensor, anchor: Tensor) -> None:
    """What the reference, which has one matrix, is told of a replica whose copies differ."""
    if iteration == INTERVAL * BAD_SYNC and replica == 1 and module_key(name) == "embedding":
        value.fill_(math.nan)


def copies_agree(records: list[RankRecord]) -> bool:
    """Both copies of each replica's matrix, and all of the anchor's, are the same bits."""
    holders = [record for record in records if "embedding" in record.keys]
    masters = {(record.place.sync, record.digests["embedding"]) for record in holders}
    return len(masters) == 2 and len({record.digests["anchor of the embedding"] for record in holders}) == 1


def warnings_of(records: list[RankRecord]) -> list[str]:
    """Of one replica, each line once."""
    return [line for record in records if record.place.sync == 0 for line in record.warnings]


def test_a_replica_whose_copies_differ_is_left_out_as_if_it_were_not_finite_and_set_back() -> None:
    records = run_engine(tied_run(fault=spoils_one_copy))
    expected = differences(tied_run(spoil=embedding_of_replica_1_is_nan), records)
    assert set(expected) <= {"weights before a sync"}  # the reference's are NaN then
    assert copies_agree(records)
    (line,) = warnings_of(records)
    assert line.startswith(f"warning: sync {BAD_SYNC}: replica 1: the two copies, on first and last stage, differ")


def test_a_wrong_moment_of_one_copy_heals_with_the_next_sync() -> None:
    records = run_engine(tied_run(fault=spoils_one_moment))
    assert copies_agree(records)
    views = [record.syncs[0] for record in records if "embedding" in record.keys]
    left_out = [view.decision.verdict.left_out[:, view.keys.index("embedding")].tolist() for view in views]
    assert left_out == [[False, True]] * 4
    later = [view for record in records for view in record.syncs[1:]]
    assert later and not any(bool(view.decision.verdict.left_out.any()) for view in later)


@pytest.mark.parametrize(("factor", "said"), [(1 + 1e-6, 0), (1.01, 1)])
def test_anchors_that_have_parted_are_made_one_again(factor: float, said: int) -> None:
    """By rounding (sums over more replicas in another order on each stage) without a word, else with a warning."""

    def parts(replica: Replica) -> None:
        def change(module: Any) -> None:
            replica.engine.state.anchor[module.index].mul_(factor)
            module.write_masters(torch.cat([piece.master for piece in module.slices]) * factor)

        before_the_sync(replica, change, everywhere=factor < 1.001)

    records = run_engine(tied_run(fault=parts))
    assert differences(tied_run(), records) == {}
    assert copies_agree(records)
    lines = warnings_of(records)
    assert len(lines) == said, lines
    assert not said or "the anchor's two copies of the tied embedding" in lines[0]


def measures_one_copy_too_long(replica: Replica) -> None:
    """The last stage's arithmetic gives another norm of the same numbers."""
    right = replica.engine._measure

    def measure(modules: list[Any], keep: int) -> Any:
        def square_sum(module: ModuleShard, flat: Tensor) -> Tensor:
            found = plain(module, flat)
            return 2 * found if module.key == "embedding" and replica.mesh.is_last_stage else found

        plain = ModuleShard.counted_square_sum
        ModuleShard.counted_square_sum = square_sum  # type: ignore[method-assign]
        try:
            return right(modules, keep)
        finally:
            ModuleShard.counted_square_sum = plain  # type: ignore[method-assign]

    replica.engine._measure = measure  # type: ignore[method-assign]


def test_both_stages_decide_by_one_norm() -> None:
    records = run_engine(tied_run(fault=measures_one_copy_too_long))
    assert "norms" in differences(tied_run(), records)  # the fault is one
    assert "one decision" not in differences(tied_run(), records) and copies_agree(records)


def test_healthy_copies_take_one_decision_and_nothing_is_said() -> None:
    records = run_engine(tied_run())
    assert differences(tied_run(), records) == {} and copies_agree(records) and not warnings_of(records)
