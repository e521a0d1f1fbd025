"""What of a checkpoint is taken up, and from where: decided from its manifest and this run's settings alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.tables.methods import Method, get_method


@dataclass(frozen=True)
class ThisRun:
    """What of this run decides it; the last three are of this rank's replica.

    layout  the grid as it stands in a manifest, see `restore.layout_description`
    """

    method: Method
    edit_modules: str
    schedule_of_syncs: list[Any]
    layout: Mapping[str, int]
    num_replicas: int
    replica: int


@dataclass(frozen=True)
class RestorePlan:
    """The decisions. `source` etc. are indices of saved replicas.

    source              moments, Adam's step, loss scale and compression's errors are those of this one
    masters             masters are those of this one; None: of the anchor
    kept                [R] detectors of each replica of this run: columns of these; None: empty ones
    reads_anchor        anchor and outer momentum are read
    reads_detectors     else they start anew
    reads_errors        what compression still owes is read, where this run compresses
    at_launch           masters at the launch of what is under way are read of this one
    new_momentum        the outer momentum starts anew
    resized             another number of replicas
    sync_first          the saved replicas differ and their number changes: their sync is made at once
    keeps_interval      what was counted since the last sync goes on, averages under way included
    apply_now           the averages under way are applied at once
    own_generators      generators are read; else they are seeded anew
    remarks             what the user should know; `generator_remarks` where generators are wanted
    """

    source: int
    masters: int | None
    kept: tuple[int | None, ...]
    reads_anchor: bool
    reads_detectors: bool
    reads_errors: bool
    at_launch: int | None
    new_momentum: bool
    resized: bool
    sync_first: bool
    keeps_interval: bool
    apply_now: bool
    own_generators: bool
    remarks: tuple[str, ...]
    generator_remarks: tuple[str, ...]


def plan_restore(saved: Mapping[str, Any], folder: object, run: ThisRun) -> RestorePlan:
    """`saved`: the manifest's content. Raises CheckpointError where this run cannot go on from it, the same on all."""
    if saved["scope"] == "weights":
        raise CheckpointError(
            f"{folder} holds weights only and cannot be resumed; --finetune starts a new run from them"
        )
    method, under_way = run.method, saved["in_flight"]["events"]
    old, new = saved["layout"]["sync"], run.num_replicas
    resized = old != new
    differ = saved["trigger"]["warmup_end"] is not None and (  # the replicas, from each other
        any(max(replica["updates_since_sync"]) for replica in saved["replicas"]) or bool(under_way)
    )
    if differ and method.has_anchor and not saved["has_anchor"]:
        raise CheckpointError(
            f"{folder}: the replicas of --edit-method {saved['method']} differ here and there is no anchor, which "
            f"--edit-method {method.name} needs: resume with {saved['method']}, or from a checkpoint at a sync"
        )
    if under_way:
        _refuse_under_way(saved, run)
    reads_anchor = saved["has_anchor"] and method.has_anchor
    from_anchor = reads_anchor and (saved["scope"] == "compact" or resized)
    source = run.replica % len(saved["replicas"])  # 1 of a compact checkpoint
    keeps_interval = not resized and not from_anchor
    other_schedule = saved["in_flight"].get("schedule") != run.schedule_of_syncs and method.placement != "round"
    new_momentum = reads_anchor and get_method(saved.get("method", method.name)).outer_step != method.outer_step
    own_generators, generator_remarks = _generators(saved, run)
    plan = RestorePlan(
        source=source,
        # at a sync, and in the warm-up, all replicas are equal
        masters=None if from_anchor else 0 if resized else source,
        kept=tuple(index if index < old else None for index in range(new)),
        reads_anchor=reads_anchor,
        reads_detectors=saved["edit_modules"] == run.edit_modules,
        reads_errors=not resized and saved["has_errors"],
        at_launch=None if resized else source,
        new_momentum=new_momentum,
        resized=resized,
        sync_first=resized and differ,
        keeps_interval=keeps_interval,
        apply_now=keeps_interval and bool(under_way) and other_schedule,
        own_generators=own_generators,
        remarks=(),
        generator_remarks=generator_remarks,
    )
    return replace(plan, remarks=tuple(_remarks(plan, saved, run)))


def _refuse_under_way(saved: Mapping[str, Any], run: ThisRun) -> None:
    """Averages under way that this run would never apply."""
    method = run.method
    if saved["edit_modules"] != run.edit_modules:
        raise CheckpointError(
            f"the checkpoint has averages of --edit-modules {saved['edit_modules']} under way, which "
            f"--edit-modules {run.edit_modules} cannot apply: resume with the former"
        )
    if not method.has_anchor:
        raise CheckpointError(
            f"the checkpoint has averages of --edit-method {saved['method']} under way for its anchor, and "
            f"--edit-method {method.name} keeps none: resume with {saved['method']}, or give --finetune"
        )
    if method.placement != "round" and any(event["apply_after"] is None for event in saved["in_flight"]["events"]):
        raise CheckpointError(
            f"the checkpoint has an average of --edit-method {saved['method']} under way, which "
            f"--edit-method {method.name} cannot apply: resume with {saved['method']}, or give --finetune"
        )


def _remarks(plan: RestorePlan, saved: Mapping[str, Any], run: ThisRun) -> Iterator[str]:
    old, new = saved["layout"]["sync"], run.num_replicas
    if plan.new_momentum:  # SlowMo's is in units of the inner learning rate, the others' in those of Delta
        yield f"--edit-method was {saved['method']}: the outer momentum starts anew"
    if not plan.reads_detectors:
        yield f"--edit-modules was {saved['edit_modules']}, is {run.edit_modules}: the detectors start anew"
    if plan.sync_first:
        yield f"{old} replicas become {new} between two syncs: the sync of the saved replicas was made now"
    elif plan.resized:
        yield f"{old} replicas become {new}; all start from the same weights"
    if plan.apply_now:
        yield "the schedule of the syncs is another one: the averages under way were applied now"


def _generators(saved: Mapping[str, Any], run: ThisRun) -> tuple[bool, tuple[str, ...]]:
    """Whether this replica's generators are read: it was there, with the same grid; and what is said of the others."""
    own, theirs = dict(run.layout), dict(saved["layout"])
    replicas, local_states = own.pop("sync"), len(saved["replicas"])
    theirs.pop("sync")
    if own != theirs:
        return False, ("the replica's grid is another one: generators (dropout) are seeded anew",)
    remarks = (f"generators (dropout) of replicas from {local_states} on are seeded anew",)
    return run.replica < local_states, remarks if replicas > local_states else ()
