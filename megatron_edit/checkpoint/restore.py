"""Taking up a checkpoint on this run's layout: what fits is loaded in place, what differs is named.

Any tensor, pipeline and virtual pipeline parallel size, shard size and vocabulary padding, at any iteration. Another
number of replicas takes effect at a sync: in the middle of an interval it is made here (`resize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.collective import on_first_rank
from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import Candidate
from megatron_edit.checkpoint.in_flight import SavedInFlight
from megatron_edit.checkpoint.resize import sync_of_saved_replicas
from megatron_edit.checkpoint.torch_dist import ShardedTensor, read_tensors, stored_tensors
from megatron_edit.checkpoint.training_state import (
    ERROR,
    MODEL,
    MOMENTS,
    PER_MODULE,
    TrainingState,
    expected_tensors,
    local_key,
    own_key,
    set_random_states,
    shared_key,
)
from megatron_edit.config.settings import SETTINGS
from megatron_edit.sync.trigger import WarmupError
from megatron_edit.tables.methods import get_method
from megatron_edit.tables.parameters import is_vocabulary

_SHOWN = 12  # differences that are listed
_GEOMETRY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "untie_embeddings_and_output_weights", "add_qkv_bias", "add_attention_output_bias", "qk_layernorm",
)  # fmt: skip
_MAY_CHANGE = ("make_vocab_size_divisible_by", "transformer_impl", "model_size", "init_method_std")


def layout_description(state: TrainingState) -> dict[str, int]:
    """The grid as it stands in the manifest, with the model chunks of each rank."""
    return {**asdict(state.mesh.layout), "chunks": len(state.engine.chunks)}


@torch.no_grad()
def restore(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, random_states: bool, seed: int
) -> list[str]:
    """Everything of the checkpoint; returns what the user should know. Collective over `group`, all ranks.

    `random_states`: restore every generator; possible where the replica's grid is the same, elsewhere, and on new
    replicas, they are seeded from `seed` and the iteration. Raises CheckpointError, the same on all ranks.
    """
    saved, folder, engine = candidate.manifest.content, candidate.folder, state.engine
    if candidate.manifest.scope == "weights":
        raise CheckpointError(
            f"{folder} holds weights only and cannot be resumed; --finetune starts a new run from them"
        )
    local_states = len(saved["replicas"])  # 1 of a compact checkpoint
    old, new, mine = saved["layout"]["sync"], state.mesh.num_replicas, state.mesh.replica
    source = mine % local_states
    resized = old != new
    has_anchor = saved["has_anchor"] and engine.method.has_anchor
    updates = [max(replica["updates_since_sync"]) for replica in saved["replicas"]]
    between_syncs = saved["trigger"]["warmup_end"] is not None and (any(updates) or bool(saved["in_flight"]["events"]))
    if between_syncs and engine.method.has_anchor and not saved["has_anchor"]:
        raise CheckpointError(
            f"{folder}: the replicas of --edit-method {saved['method']} differ here and there is no anchor, which "
            f"--edit-method {engine.method.name} needs: resume with {saved['method']}, or from a checkpoint at a sync"
        )
    remarks = _check(state, candidate, group)
    in_flight = SavedInFlight(state, saved)

    from_anchor = has_anchor and (candidate.manifest.scope == "compact" or resized)
    columns = state.detector_to_load(old) if saved["edit_modules"] == engine.config.edit_modules else {}
    tensors = [*_local(state, MOMENTS, source), *columns.values(), *in_flight.averages()]
    anchors: list[torch.Tensor] = []
    momenta: list[torch.Tensor] = []
    if has_anchor:
        engine.state.allocate()
        anchors, momenta = engine.state.anchor, engine.state.outer_momentum
        tensors += [*_whole(state, "anchor", anchors), *_whole(state, "outer_momentum", momenta)]
    if not from_anchor:
        # at a sync, and in the warm-up, all replicas are equal
        tensors += _local(state, ("param",), 0 if resized else source)
    if not resized:
        tensors += in_flight.at_launch(source)
        tensors += _errors(state, saved, source)
    read_tensors(folder, tensors, group)
    if has_anchor and get_method(saved.get("method", engine.method.name)).outer_step != engine.method.outer_step:
        for momentum in momenta:  # SlowMo's is in units of the inner learning rate, the others' in those of Delta
            momentum.zero_()
        remarks.append(f"--edit-method was {saved['method']}: the outer momentum starts anew")
    state.set_numbers(saved["replicas"][source])
    detector, trigger = state.detector_state(columns) if columns else None, dict(saved["trigger"])
    if detector is None:
        remarks.append(
            f"--edit-modules was {saved['edit_modules']}, is {engine.config.edit_modules}: the detectors start anew"
        )
    if resized and between_syncs:
        verdict, detector = sync_of_saved_replicas(
            state, folder, group, saved["replicas"], detector, in_flight, anchors, momenta
        )
        trigger["syncs"] += 1
        trigger["last_sync_step"] = trigger["steps"]
        for module in engine.modules:
            if verdict.non_finite[source, module.index]:
                for piece in module.slices:
                    for name in MOMENTS:
                        state.local_state(piece)[name].zero_()
        remarks.append(f"{old} replicas become {new} between two syncs: the sync of the saved replicas was made now")
    elif resized:
        remarks.append(f"{old} replicas become {new}; all start from the same weights")
    if resized and detector is not None:
        detector = _resized_detector(detector, new)
    if has_anchor:
        engine.state.outer.set_whole(anchors, momenta)
    for module in engine.modules:
        if from_anchor:
            module.write_masters(anchors[module.index].to(state.mesh.platform.device))
        for piece in module.slices:
            piece.model.copy_(piece.master)
    keeps_interval = not resized and not from_anchor
    try:
        engine.state.load(
            trigger,
            detector=detector,
            updates_since_sync=saved["replicas"][source]["updates_since_sync"] if keeps_interval else (),
            steps_since_average=saved["replicas"][source]["steps_since_average"] if keeps_interval else 0,
        )
    except WarmupError as error:
        raise CheckpointError(f"{folder}, --edit-warmup-steps: {error}") from error
    engine.resume(has_anchor=has_anchor)
    if keeps_interval and in_flight.events:
        in_flight.hand_over()
        if saved["in_flight"]["schedule"] != engine.state.schedule_of_syncs and engine.method.placement != "round":
            engine.state.apply_under_way()
            remarks.append("the schedule of the syncs is another one: the averages under way were applied now")
    _gather_model(state)
    if random_states:
        remarks += _restore_random_states(state, candidate, group, seed)
    return remarks


@torch.no_grad()
def restore_weights(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, iteration: int
) -> list[str]:
    """The weights alone: the anchor where there is one. Masters and a new anchor start from them, all else anew.

    `iteration`: where the run goes on; 0 for a new one. Collective; raises CheckpointError, the same on all ranks.
    """
    remarks = _check(state, candidate, group, weights_only=True)
    tensors = [
        tensor
        for module in state.engine.modules
        for piece in module.slices
        for tensor in state.pieces(_weights_key(candidate, piece.name), piece, _emptied(piece.name, piece.master))
    ]
    read_tensors(candidate.folder, tensors, group)
    for module in state.engine.modules:
        for piece in module.slices:
            piece.model.copy_(piece.master)
    state.engine.state.load({"steps": iteration, "syncs": 0, "warmup_end": None})
    state.engine.resume()
    _gather_model(state)
    return remarks


def _weights_key(candidate: Candidate, name: str) -> str:
    if candidate.manifest.scope == "weights":
        return MODEL + name
    return shared_key("anchor", name) if candidate.manifest.content["has_anchor"] else local_key(0, "param", name)


def _local(state: TrainingState, names: tuple[str, ...], replica: int) -> Iterator[ShardedTensor]:
    for module in state.engine.modules:
        for piece in module.slices:
            for name, flat in state.local_state(piece).items():
                if name in names:
                    yield from state.pieces(local_key(replica, name, piece.name), piece, _emptied(piece.name, flat))


def _whole(state: TrainingState, name: str, flats: list[torch.Tensor]) -> Iterator[ShardedTensor]:
    """`flats` [numel] of each module, to be read as the shared state `name`."""
    for module, flat in zip(state.engine.modules, flats, strict=True):
        for piece, view in zip(module.slices, module.views(flat), strict=True):
            yield from state.pieces(shared_key(name, piece.name), piece, _emptied(piece.name, view))


def _errors(state: TrainingState, saved: dict[str, Any], replica: int) -> Iterator[ShardedTensor]:
    """What compression still owes, where both runs compress; a new run owes nothing."""
    errors = state.engine.state.errors
    errors.allocate()
    if saved["has_errors"]:
        for module, flat in zip(state.engine.modules, errors.tensors, strict=False):
            for piece, view in zip(module.slices, module.views(flat), strict=True):
                yield from state.pieces(own_key(replica, ERROR, piece.name), piece, _emptied(piece.name, view))


def _emptied(name: str, flat: torch.Tensor) -> torch.Tensor:
    """`flat`; with zeros where the padding of the vocabulary may lie, which is not in the checkpoint."""
    return flat.zero_() if is_vocabulary(name) else flat


def _gather_model(state: TrainingState) -> None:
    for chunk in state.engine.chunks:
        chunk.start_param_sync(force_sync=True)


def _resized_detector(detector: dict[str, torch.Tensor], num_replicas: int) -> dict[str, torch.Tensor]:
    """Columns of replicas that stay; those of new replicas are empty."""
    resized = {}
    for field, value in detector.items():
        if field == PER_MODULE:
            resized[field] = torch.zeros_like(value)  # counted among other replicas
        else:
            resized[field] = value.new_zeros(num_replicas, value.shape[1])
            kept = min(num_replicas, value.shape[0])
            resized[field][:kept] = value[:kept]
    return resized


def _restore_random_states(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, seed: int
) -> list[str]:
    """Of ranks whose replica was there with the same grid; the others are seeded anew."""
    saved = candidate.manifest.content
    own, theirs = layout_description(state), dict(saved["layout"])
    own_replicas = own.pop("sync")
    theirs.pop("sync")
    same_grid = own == theirs
    known = same_grid and state.mesh.replica < len(saved["replicas"])
    tensors = state.random_states_to_load() if known else {}
    read_tensors(candidate.folder, tensors.values(), group)
    if known:
        set_random_states({name: _data(tensor) for name, tensor in tensors.items()})
    else:
        state.mesh.seed_dropout(seed + candidate.manifest.iteration)
    if not same_grid:
        return ["the replica's grid is another one: generators (dropout) are seeded anew"]
    if own_replicas > len(saved["replicas"]):
        return [f"generators (dropout) of replicas from {len(saved['replicas'])} on are seeded anew"]
    return []


def _data(tensor: ShardedTensor) -> torch.Tensor:
    assert tensor.data is not None
    return tensor.data


# ---- does it fit? ----------------------------------------------------------------------------------------------


def _check(
    state: TrainingState, candidate: Candidate, group: dist.ProcessGroup, *, weights_only: bool = False
) -> list[str]:
    """Remarks on settings that differ; CheckpointError with every tensor that does."""
    differences, remarks = on_first_rank(lambda: _differences(state, candidate, weights_only), group)
    if differences:
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"{candidate.folder} does not fit this run's model:\n  " + "\n  ".join(differences[:_SHOWN]) + more
        )
    return remarks


def _differences(state: TrainingState, candidate: Candidate, weights_only: bool) -> tuple[list[str], list[str]]:
    saved, stored = candidate.manifest.content, stored_tensors(candidate.folder)
    own = asdict(state.model)
    differences = [
        f"{name}: expected {own[name]}, found {found}"
        for name in _GEOMETRY
        if own[name] != (found := saved["model"].get(name, SETTINGS[name].default))  # of before the setting was there
    ]
    if saved["vocab_size"] != state.vocab_size:
        differences.append(f"vocabulary: expected {state.vocab_size}, found {saved['vocab_size']}")
    if weights_only:
        expected = {_weights_key(candidate, name): shape for name, shape in state.shapes.items()}
    else:
        expected = expected_tensors(saved, state.shapes)
    for name, shape in expected.items():
        if name not in stored:
            differences.append(f"{name}: expected {list(shape)}, not found")
        elif stored[name].shape != shape:
            differences.append(f"{name}: expected {list(shape)}, found {list(stored[name].shape)}")
        elif not stored[name].complete:
            differences.append(f"{name}: expected {list(shape)}, found {stored[name].elements_written} of its elements")
    # of another model's parameters one state is enough to name them
    prefix = _weights_key(candidate, "")
    differences += [
        f"{name}: not expected, found {list(stored[name].shape)}"
        for name in sorted(stored)
        if name.startswith(prefix) and name.removeprefix(prefix) not in state.shapes
    ]
    # a converted model had no samples: its seq_length is a proposal
    may_change = (*_MAY_CHANGE, *(("seq_length",) if "converted_from" in saved else ()))
    remarks = [
        f"{name} was {saved['model'][name]} when it was saved, and is {own[name]} now"
        for name in own
        if name not in (*_GEOMETRY, *may_change) and own[name] != saved["model"].get(name, own[name])
    ]
    return differences, remarks


def describe_candidate(folder: Path, content: dict[str, Any]) -> str:
    """One line: what is loaded."""
    layout = content.get("layout", {})
    grid = ", ".join(f"{axis} {size}" for axis, size in layout.items())
    return f"{folder}: iteration {content['iteration']}, {content['scope']}, saved on {grid}"
