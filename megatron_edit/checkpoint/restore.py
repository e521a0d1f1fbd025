"""Taking up a checkpoint on this run's layout: plan (`plan.py`), read, reconcile, resume.

Any tensor, pipeline and virtual pipeline parallel size, shard size and vocabulary padding, at any iteration: what fits
is loaded in place, what differs is named (`fit.py`). Another number of replicas takes effect at a sync: in the middle
of an interval it is made here (`resize.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.fit import check_fit, weights_key
from megatron_edit.checkpoint.folders import Candidate
from megatron_edit.checkpoint.in_flight import SavedInFlight
from megatron_edit.checkpoint.plan import RestorePlan, ThisRun, plan_restore
from megatron_edit.checkpoint.resize import sync_of_saved_replicas
from megatron_edit.checkpoint.torch_dist import ShardedTensor, read_tensors
from megatron_edit.checkpoint.training_state import (
    ERROR,
    MOMENTS,
    TrainingState,
    local_key,
    own_key,
    set_random_states,
    shared_key,
)
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.outer_state import OuterState
from megatron_edit.sync.trigger import WarmupError


def layout_description(state: TrainingState) -> dict[str, int]:
    """The grid as it stands in the manifest, with the model chunks of each rank."""
    return {**asdict(state.mesh.layout), "chunks": len(state.sync.chunks)}


@dataclass
class _Loaded:
    """What was read beside the masters and moments, which are read in place.

    outer      anchor and outer momentum, whole; None: of none
    decider    of the saved replicas, with their detectors
    in_flight  averages under way, and the masters when they set out
    """

    outer: OuterState | None
    decider: Decider
    in_flight: SavedInFlight


@torch.no_grad()
def restore(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, random_states: bool, seed: int
) -> list[str]:
    """Everything of the checkpoint; returns what the user should know. Collective over `group`, all ranks.

    `random_states`: restore every generator; possible where the replica's grid is the same, elsewhere, and on new
    replicas, they are seeded from `seed` and the iteration. Raises CheckpointError, the same on all ranks.
    """
    plan = plan_restore(candidate.manifest.content, candidate.folder, _this_run(state))
    remarks = check_fit(state, candidate, group)
    loaded = _read(state, candidate, plan, group)
    trigger = _reconcile(state, candidate, plan, loaded, group)
    _resume(state, candidate, plan, loaded, trigger)
    if random_states:
        _restore_random_states(state, candidate, plan, group, seed)
    return [*remarks, *plan.remarks, *(plan.generator_remarks if random_states else ())]


def _this_run(state: TrainingState) -> ThisRun:
    sync = state.sync
    return ThisRun(
        method=sync.method,
        edit_modules=sync.config.edit_modules,
        schedule_of_syncs=sync.schedule_of_syncs,
        layout=layout_description(state),
        num_replicas=sync.fleet.num_replicas,
        replica=sync.fleet.replica,
    )


# ---- read ------------------------------------------------------------------------------------------------------------


def _read(state: TrainingState, candidate: Candidate, plan: RestorePlan, group: dist.ProcessGroup) -> _Loaded:
    """Masters and moments in place, and what else there is to read."""
    saved, sync = candidate.manifest.content, state.sync
    num_saved = saved["layout"]["sync"]
    loaded = _Loaded(
        outer=sync.outer_to_load() if plan.reads_anchor else None,
        decider=sync.decider_of(num_saved),
        in_flight=SavedInFlight(state, saved),
    )
    columns = state.detector_to_load(num_saved) if plan.reads_detectors else {}
    tensors = [*_local(state, MOMENTS, plan.source), *columns.values(), *loaded.in_flight.averages()]
    if loaded.outer is not None:
        tensors += _whole(state, partial(shared_key, "anchor"), loaded.outer.anchors)
        tensors += _whole(state, partial(shared_key, "outer_momentum"), loaded.outer.momenta)
    if plan.masters is not None:
        tensors += _local(state, ("param",), plan.masters)
    if plan.at_launch is not None:
        tensors += loaded.in_flight.at_launch(plan.at_launch)
    errors = [] if plan.resized else sync.errors_to_load()
    if plan.reads_errors:
        tensors += _whole(state, partial(own_key, plan.source, ERROR), errors)
    read_tensors(candidate.folder, tensors, group)
    if columns:
        loaded.decider.detector.load_state_dict(state.detector_state(columns))
    return loaded


def _local(state: TrainingState, names: tuple[str, ...], replica: int) -> Iterator[ShardedTensor]:
    for module in state.sync.modules:
        for piece in module.slices:
            for name, flat in state.local_state(piece).items():
                if name in names:
                    yield from state.to_read(local_key(replica, name, piece.name), piece, flat)


def _whole(state: TrainingState, key_of: Callable[[str], str], flats: list[torch.Tensor]) -> Iterator[ShardedTensor]:
    """`flats` [numel] of each module (or []: of none), to be read into."""
    for module, flat in zip(state.sync.modules, flats, strict=bool(flats)):
        yield from state.whole_module(module, flat, key_of)


# ---- reconcile -------------------------------------------------------------------------------------------------------


def _reconcile(
    state: TrainingState, candidate: Candidate, plan: RestorePlan, loaded: _Loaded, group: dist.ProcessGroup
) -> dict[str, Any]:
    """What was read becomes what this run goes on from: anchor, momentum, detectors, masters. Returns the trigger."""
    saved, sync, outer = candidate.manifest.content, state.sync, loaded.outer
    state.set_numbers(saved["replicas"][plan.source])
    if outer is not None and plan.new_momentum:
        for momentum in outer.momenta:
            momentum.zero_()
    trigger = dict(saved["trigger"])
    if plan.sync_first:
        verdict = sync_of_saved_replicas(
            state, candidate.folder, group, saved["replicas"], loaded.decider, loaded.in_flight, outer
        )
        trigger["syncs"] += 1
        trigger["last_sync_step"] = trigger["steps"]
        for module in sync.modules:
            if verdict.non_finite[plan.source, module.index]:
                _zero_moments(state, module)
    if plan.resized:
        loaded.decider.detector.follow(plan.kept)
    if outer is not None:
        sync.outer.take(outer)
        if plan.masters is None:
            for module in sync.modules:
                module.write_masters(outer.anchor(module))
                outer.release(module)
    _write_models(state)
    return trigger


def _zero_moments(state: TrainingState, module: ModuleShard) -> None:
    for piece in module.slices:
        moments = state.local_state(piece)
        for name in MOMENTS:
            moments[name].zero_()


def _write_models(state: TrainingState) -> None:
    """This rank's shard of the model's own weights := the masters."""
    for module in state.sync.modules:
        for piece in module.slices:
            piece.model.copy_(piece.master)


# ---- resume ----------------------------------------------------------------------------------------------------------


def _resume(
    state: TrainingState, candidate: Candidate, plan: RestorePlan, loaded: _Loaded, trigger: dict[str, Any]
) -> None:
    """The sync goes on from it."""
    replica = candidate.manifest.content["replicas"][plan.source]
    try:
        state.sync.load(
            trigger,
            detectors=loaded.decider.detector.state_dict(),
            updates_since_sync=replica["updates_since_sync"] if plan.keeps_interval else (),
            steps_since_average=replica["steps_since_average"] if plan.keeps_interval else 0,
            inner_lr=replica["inner_lr"],
        )
    except WarmupError as error:
        raise CheckpointError(f"{candidate.folder}, --edit-warmup-steps: {error}") from error
    state.sync.resume(
        has_anchor=plan.reads_anchor,
        under_way=loaded.in_flight.under_way() if plan.keeps_interval else (),
        apply_now=plan.apply_now,
    )


def _restore_random_states(
    state: TrainingState, candidate: Candidate, plan: RestorePlan, group: dist.ProcessGroup, seed: int
) -> None:
    """Of ranks whose replica was there with the same grid; the others are seeded anew."""
    tensors = state.random_states_to_load() if plan.own_generators else {}
    read_tensors(candidate.folder, tensors.values(), group)
    if plan.own_generators:
        set_random_states({name: _data(tensor) for name, tensor in tensors.items()})
    else:
        state.mesh.seed_dropout(seed + candidate.manifest.iteration)


def _data(tensor: ShardedTensor) -> torch.Tensor:
    assert tensor.data is not None
    return tensor.data


# ---- weights alone ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def restore_weights(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, iteration: int
) -> list[str]:
    """The weights alone: the anchor where there is one. Masters and a new anchor start from them, all else anew.

    `iteration`: where the run goes on; 0 for a new one. Collective; raises CheckpointError, the same on all ranks.
    """
    remarks = check_fit(state, candidate, group, weights_only=True)
    tensors = [
        tensor
        for module in state.sync.modules
        for piece in module.slices
        for tensor in state.to_read(weights_key(candidate, piece.name), piece, piece.master)
    ]
    read_tensors(candidate.folder, tensors, group)
    _write_models(state)
    state.sync.load({"steps": iteration, "syncs": 0, "warmup_end": None})
    state.sync.resume()
    return remarks


def describe_candidate(folder: Path, content: dict[str, Any]) -> str:
    """One line: what is loaded."""
    layout = content.get("layout", {})
    grid = ", ".join(f"{axis} {size}" for axis, size in layout.items())
    return f"{folder}: iteration {content['iteration']}, {content['scope']}, saved on {grid}"
