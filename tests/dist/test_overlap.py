"""The sync runs inside the forward pass, in one order on all ranks, and nobody waits for it earlier than needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.model.names import unwrap
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import rank_microbatches, tiny_replica
from megatron_edit.train.replica import Replica
from megatron_edit.train.step import TrainStep
from tests.dist.engine_runs import Run, run_engine
from tests.dist.test_against_reference import make_run

FULL = pytest.mark.full("the rest of the layouts")
Event = tuple[str, int]  # ("launch" | "complete" | "computes" | "computed", index of the module)


# ---- the trace -----------------------------------------------------------------------------------------------------


def trace_of_the_step_after_a_sync(rank: int, world_size: int, run: Run) -> tuple[list[Event], list[Event]]:
    """Events from the end of the step at which a sync is due to the end of the next one; and those of one more."""
    events: list[Event] = []
    replica = tiny_replica(run.config, observer=lambda event, module: events.append((event, module.index)))
    watch_modules(replica, events)
    step, taken = TrainStep(replica), []
    interval = run.config.edit.edit_sync_interval
    for iteration in range(1, interval + 3):
        if iteration == interval + 1:
            launched = [event for event in events if event[0] in ("launch", "complete")]  # by after_step
            events[:] = launched
        elif iteration == interval + 2:
            taken, events[:] = list(events), []
        step.run(rank_microbatches(run.config, replica.mesh, run.data(run.config, iteration)), 1e-3)
    return taken, events


def watch_modules(replica: Replica, events: list[Event]) -> None:
    """Notes when a module starts to compute, after the hooks that ask for its weights, and when it ends."""
    index = {module.key: module.index for module in replica.engine.modules}

    def note(first: Any, last: Any, key: str) -> None:
        first.register_forward_pre_hook(lambda *_: events.append(("computes", index[key])))
        last.register_forward_hook(lambda *_: events.append(("computed", index[key])))

    for chunk in replica.chunks:
        model: Any = unwrap(chunk)
        if model.pre_process:
            note(model.embedding.word_embeddings, model.embedding, "embedding")
        for layer in model.decoder.layers:
            note(layer.input_layernorm, layer, f"layers.{layer.layer_number - 1}")
        if model.post_process:
            note(model.decoder.final_layernorm, model.output_layer, "head")


def in_flight_while_computing(events: list[Event]) -> list[tuple[int, set[int]]]:
    """For each forward pass of a module: the modules whose all-reduce was launched before it and completed after it."""
    found = []
    for start, (event, module) in enumerate(events):
        if event == "computes":
            end = events.index(("computed", module), start)
            before, during = events[:start], events[start:end]
            launched = {m for e, m in before if e == "launch"} - {m for e, m in before if e == "complete"}
            found.append((module, launched - {m for e, m in during if e == "complete"}))
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("layout", "gathers"), [("R2", False), ("R2xS2", True)])
def test_the_next_modules_are_in_flight_while_a_module_computes(layout: str, gathers: bool, depth: int) -> None:
    """Module j computes: the all-reduce of j + 2 is in flight, and with a depth of 2 that of j + 3.

    Without a shard group that of j + 1 too; with one it has ended, and its all-gather is in flight.
    """
    last = 5
    for events, later in run_ranks(trace_of_the_step_after_a_sync, *traced(layout, depth)):
        nearest = 2 if gathers else 1
        expected = [(j, set(range(j + nearest, min(j + 1 + depth, last) + 1))) for j in range(last + 1)]
        assert in_flight_while_computing(events)[: last + 1] == expected
        assert not [event for event in later if event[0] in ("launch", "complete")]


def traced(layout: str, depth: int = 1, **settings: Any) -> tuple[int, Run]:
    run = make_run(layout, edit_sync_interval=3, edit_prefetch_depth=depth, **settings)
    return run.world_size, run


@pytest.mark.parametrize("layout", ["R2xPP2", "R2xPP2 interleaved"])
def test_on_a_pipeline_each_stage_overlaps_its_own_modules(layout: str) -> None:
    for events, _ in run_ranks(trace_of_the_step_after_a_sync, *traced(layout)):
        for module, in_flight in in_flight_while_computing(events)[:1]:
            assert in_flight == {module + 1, module + 2} & set(range(3)), events
        assert_one_sync(events, modules=3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("layout", ["R2xS2", "R2xPP2"])
def test_recompute_and_later_microbatches_find_nothing_to_do(layout: str, recompute: str) -> None:
    settings: dict[str, Any] = {"micro_batch_size": 1, "recompute_granularity": recompute}
    if recompute == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    modules = 3 if "PP" in layout else 6
    for events, later in run_ranks(trace_of_the_step_after_a_sync, *traced(layout, **settings)):
        assert_one_sync(events, modules)
        microbatches = 2 if layout == "R2xS2" else 4
        layer = 1  # on every stage here
        assert events.count(("computes", layer)) == microbatches * (2 if recompute == "full" else 1)
        assert not [event for event in later if event[0] in ("launch", "complete")]


def assert_one_sync(events: list[Event], modules: int) -> None:
    """Every module launched once and completed once, in module order, before it first computes."""
    for event in ("launch", "complete"):
        assert [m for e, m in events if e == event] == list(range(modules))
    for module in range(modules):
        assert events.index(("complete", module)) < events.index(("computes", module))


# ---- one order -----------------------------------------------------------------------------------------------------

COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base")


def calls_of_the_sync_group(rank: int, world_size: int, run: Run) -> tuple[list[int], list[tuple[str, int]]]:
    """(ranks of the group, (collective, elements) as the backend was asked for them). Replicas run at unequal speed."""
    replica = tiny_replica(run.config)
    group, calls = replica.mesh.sync_group, []
    ranks = dist.get_process_group_ranks(group)

    def logged(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            if self.group_name == group.group_name:
                tensors = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
                calls.append((name, sum(tensor.numel() for tensor in tensors)))
            return original(self, *arguments, **options)

        return call

    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, logged(name, getattr(dist.ProcessGroup, name)))
    for chunk in replica.chunks:
        for layer in unwrap(chunk).decoder.layers:  # type: ignore[union-attr]
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.01 * replica.mesh.replica))
    step = TrainStep(replica)
    for iteration in range(1, run.steps + 1):
        step.run(rank_microbatches(run.config, replica.mesh, run.data(run.config, iteration)), 1e-3)
    replica.engine.drain()
    return ranks, calls


@pytest.mark.parametrize("layout", ["R2xS2", "R2xPP2 interleaved", "R3"])
def test_collectives_of_the_sync_group_are_issued_in_one_order(layout: str) -> None:
    """Warm-up (gradients of every bucket, then the anchor) and three syncs."""
    run = make_run(layout, steps=5, edit_warmup_steps=2, edit_sync_interval=1)
    modules = 3 if "PP" in layout else 6
    by_group: dict[tuple[int, ...], list[list[tuple[str, int]]]] = {}
    for ranks, calls in run_ranks(calls_of_the_sync_group, run.world_size, run):
        by_group.setdefault(tuple(ranks), []).append(calls)
    for ranks, logs in by_group.items():
        assert len(logs) == len(ranks) == run.config.edit.edit_num_replicas
        assert all(log == logs[0] for log in logs)
        names = [name for name, _ in logs[0]]
        token_counts = 2  # one number each
        assert names.count("allreduce") == token_counts + 2 * modules + 3 * modules
        assert names.count("broadcast") == modules
        assert len(names) == token_counts + 6 * modules


# ---- placement, and who waits for whom -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["R2xS2", pytest.param("R2xTP2", marks=FULL), "R2xPP2 interleaved"])
def test_the_sync_in_the_forward_pass_equals_the_blocking_one_bit_for_bit(layout: str) -> None:
    runs = [
        run_engine(make_run(layout, edit_sync_placement=placement, edit_prefetch_depth=depth))
        for placement, depth in (("forward", 1), ("step", 1), ("forward", 3))
    ]
    for forward, *others in zip(*runs, strict=True):
        assert all(forward.digests == other.digests for other in others)
        assert all(forward.losses == other.losses for other in others)


SLEEP_S, SLEEPY_STEP = 3.0, 2


def falls_asleep(replica: Replica) -> None:
    """Replica 1 sleeps before its second step."""
    right, calls = replica.forward_backward, []

    def forward_backward(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if replica.mesh.replica == 1 and len(calls) == SLEEPY_STEP:
            time.sleep(SLEEP_S)
        return right(*arguments, **options)

    replica.forward_backward = forward_backward  # type: ignore[method-assign]


def steps_of_replica_0_before_replica_1_has_woken(layout: str, **settings: Any) -> int:
    run = make_run(layout, steps=7, edit_sync_interval=4, **settings)
    records = run_engine(Run(run.world_size, run.settings, run.steps, run.data, fault=falls_asleep, snapshots=False))
    woken = min(r.finished[SLEEPY_STEP - 2] for r in records if r.place.sync == 1) + SLEEP_S
    ahead = {sum(end < woken for end in r.finished) for r in records if r.place.sync == 0}
    assert len(ahead) == 1, "ranks of one replica end their steps together"
    return ahead.pop()


@pytest.mark.parametrize("layout", ["R2xS2", "R2xPP2", pytest.param("R2xTP2", marks=FULL)])
def test_no_local_step_waits_for_another_replica(layout: str) -> None:
    """Replica 0 takes all its steps up to the sync while replica 1 sleeps; the sync, at the end of step 4, waits."""
    assert steps_of_replica_0_before_replica_1_has_woken(layout) == 3


def test_synchronous_steps_do_wait_for_the_other_replica() -> None:
    assert steps_of_replica_0_before_replica_1_has_woken("R2xS2", edit_method="baseline") == 1
