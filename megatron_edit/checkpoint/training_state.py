"""All that the next step depends on, as named tensors and a few numbers, and back, on whatever layout.

    replica{i}.optimizer.state.{param,exp_avg,exp_avg_sq}.<name>   fp32 masters and Adam's moments of replica i
    replica{i}.edit.at_launch.<name>                               masters when a delayed sync under way set out
    replica{i}.edit.error.<name>                                   what compression has not sent yet
    edit.{anchor,outer_momentum}.<name>                            once; dealt over the replicas when written
    edit.in_flight.<name>                                          likewise: averages that are not yet applied
    edit.detector.<module>.<field>                                 [R], `majority_streak` [1]
    rng.<sync>.<dp>.<pp>.<cp>.<tp>.<generator>                     bytes of each generator of the rank at that place

Names are canonical (`model.names`), tensors whole and without vocabulary padding. The model's own weights are the
masters, cast. Numbers (trigger, Adam's step, loss scale) are in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_edit.checkpoint.blocks import blocks_of
from megatron_edit.checkpoint.torch_dist import ShardedTensor, block_of, whole_tensor
from megatron_edit.checkpoint.writer import Checkpoint
from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.sync.event import Pending
from megatron_edit.sync.modules import ModuleShard, ShardSlice
from megatron_edit.sync.state import SyncState
from megatron_edit.tables.parameters import EMBEDDING, full_parameter_shapes, is_vocabulary, module_key

MOMENTS = ("exp_avg", "exp_avg_sq")
LOCAL = ("param", *MOMENTS)
SHARED = ("anchor", "outer_momentum")
IN_FLIGHT = "in_flight"  # shared
AT_LAUNCH, ERROR = "at_launch", "error"  # of each replica
MODEL = "model."  # weights only, in the model's dtype
PER_MODULE = "majority_streak"  # the detector's one field without a replica axis


def local_key(replica: int, state: str, name: str) -> str:
    """Key of one replica's `state` (of LOCAL) of the parameter `name`."""
    return f"replica{replica}.optimizer.state.{state}.{name}"


def shared_key(state: str, name: str) -> str:
    """Key of the `state` (of SHARED) of the parameter `name`."""
    return f"edit.{state}.{name}"


def own_key(replica: int, state: str, name: str) -> str:
    """Key of one replica's `state` (AT_LAUNCH or ERROR) of the parameter `name`."""
    return f"replica{replica}.edit.{state}.{name}"


def expected_tensors(content: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model's size that a checkpoint with `content` (of its manifest) holds, by key.

    `shapes`: of the whole model's tensors, by canonical name.
    """
    if content["scope"] == "weights":
        prefixes = [MODEL]
    else:
        keeps_masters = content["scope"] == "full" or not content["has_anchor"]
        states = LOCAL if keeps_masters else MOMENTS
        prefixes = [local_key(i, state, "") for i in range(len(content["replicas"])) for state in states]
        prefixes += [shared_key(state, "") for state in SHARED if content["has_anchor"]]
        if content["has_errors"]:
            prefixes += [own_key(i, ERROR, "") for i in range(len(content["replicas"]))]
    expected = {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}
    if content["scope"] == "full":
        for name, shape in shapes.items():
            expected |= dict.fromkeys(_in_flight_keys(content, name), shape)
    return expected


def _in_flight_keys(content: dict[str, Any], name: str) -> list[str]:
    """Keys of what is under way of the parameter `name`."""
    module = content["in_flight"]["modules"].get(module_key(name, content["edit_modules"]))
    if module is None or module["rolled_back"]:
        return []
    keys = [shared_key(IN_FLIGHT, name)]
    if module["delayed"]:
        keys += [own_key(i, AT_LAUNCH, name) for i, out in enumerate(module["left_out"]) if not out]
    return keys


class TrainingState:
    """This rank's share of the state: views for saving and for loading in place."""

    def __init__(
        self, sync: SyncState, optimizer: MegatronOptimizer, model: ResolvedModel, vocab_size: int
    ) -> None:
        self.sync = sync
        self.optimizer = optimizer
        self.mesh = sync.mesh
        self.model = model
        self.vocab_size = vocab_size
        self.shapes = full_parameter_shapes(model, vocab_size)  # of the whole model
        owners = {
            id(parameter): part
            for part in optimizer.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }
        self._inner = {  # the torch optimizer that steps each piece
            id(piece.optimizer_parameter): owners[id(piece.optimizer_parameter)].optimizer
            for module in sync.modules
            for piece in module.slices
        }

    def checkpoint(self, content: dict[str, Any]) -> Checkpoint:
        """What this rank has to write for a manifest with `content`. A due sync must have been completed."""
        return Checkpoint(content, self.tensors_to_save(content["scope"]), expected_tensors(content, self.shapes))

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def tensors_to_save(self, scope: str) -> Iterator[ShardedTensor]:
        """What this rank writes, views of the state where there are such.

        `scope`: "full"; "compact": replica 0's moments for all, and no masters where there is an anchor, as at a
        sync they are equal; "weights": masters of replica 0 as `model.<name>` in the model's dtype.
        """
        mesh, sync, fleet = self.mesh, self.sync, self.sync.fleet
        shared = [] if scope == "weights" else [sync.anchor, sync.outer_momentum]
        under_way = self._pending()
        for module in sync.modules:
            for piece in module.slices:
                if not self._is_written(piece):
                    continue
                if scope == "weights":
                    if fleet.replica == 0:
                        yield from self.pieces(MODEL + piece.name, piece, piece.model)
                    continue
                if scope == "full" or fleet.replica == 0:
                    for state, flat in self.local_state(piece).items():
                        if not (state == "param" and scope == "compact" and sync.has_anchor):
                            yield from self.pieces(local_key(fleet.replica, state, piece.name), piece, flat)
            if scope == "weights":
                continue
            writes_shared = module.index % fleet.num_replicas == fleet.replica
            if sync.has_anchor and writes_shared:
                for state, whole in zip(SHARED, shared, strict=True):
                    yield from self._written(module, whole[module.index], partial(shared_key, state))
            yield from self._in_flight_to_save(module, under_way.get(module.index), writes_shared)
            owed = sync.errors.of(module)
            if owed is not None and (scope == "full" or fleet.replica == 0):
                yield from self._written(module, owed, partial(own_key, fleet.replica, ERROR))
        if scope == "weights":
            return
        if fleet.replica == mesh.place.dp == mesh.place.cp == mesh.place.tp == 0:
            yield from self._detector_to_save()
        if scope == "full" or fleet.replica == 0:
            for name, generator in random_states().items():
                yield whole_tensor(f"{self._rng_prefix(fleet.replica)}{name}", generator)

    def _written(
        self, module: ModuleShard, flat: torch.Tensor, key_of: Callable[[str], str]
    ) -> Iterator[ShardedTensor]:
        """`flat` [numel of the module] under each parameter's key."""
        for piece, view in zip(module.slices, module.views(flat), strict=True):
            if self._is_written(piece):
                yield from self.pieces(key_of(piece.name), piece, view)

    def whole_module(
        self, module: ModuleShard, flat: torch.Tensor, key_of: Callable[[str], str]
    ) -> Iterator[ShardedTensor]:
        """`flat` [numel of the module], to be read into: under each parameter's key.

        Its padding of the vocabulary, which is not in a checkpoint, becomes zeros.
        """
        for piece, view in zip(module.slices, module.views(flat), strict=True):
            yield from self.to_read(key_of(piece.name), piece, view)

    def to_read(self, key: str, piece: ShardSlice, flat: torch.Tensor) -> Iterator[ShardedTensor]:
        """As `pieces`, to be read into; zeros where the padding of the vocabulary may lie."""
        return self.pieces(key, piece, flat.zero_() if is_vocabulary(piece.name) else flat)

    def _pending(self) -> dict[int, Pending]:
        """Modules whose sync is under way, by index."""
        return {pending.module: pending for _, modules in self.sync.under_way for pending in modules}

    def _in_flight_to_save(
        self, module: ModuleShard, pending: Pending | None, writes_shared: bool
    ) -> Iterator[ShardedTensor]:
        """A sync under way: its average, which must have arrived, and the masters when it set out."""
        if pending is None or pending.rolled_back:
            return
        assert pending.buffer is not None
        arrived = pending.arrived()
        assert arrived, "a save with a lost message under way"
        if writes_shared:
            yield from self._written(module, pending.buffer, partial(shared_key, IN_FLIGHT))
        if pending.at_launch is not None:
            yield from self._written(module, pending.at_launch, partial(own_key, self.sync.fleet.replica, AT_LAUNCH))

    def pieces(self, key: str, piece: ShardSlice, flat: torch.Tensor) -> Iterator[ShardedTensor]:
        """`flat` [numel of the piece] as blocks of the whole tensor `key`; views of `flat`."""
        whole = self.shapes[piece.name]
        flat = flat.view(-1)
        shard = tuple(piece.parameter.shape)
        for block in blocks_of(
            piece.name, whole, shard, self.mesh.place.tp, piece.parameter_start, flat.numel()
        ):
            count = int(torch.Size(block.shape).numel())
            yield block_of(key, flat[block.start : block.start + count].view(block.shape), whole, block.offset)

    def local_state(self, piece: ShardSlice) -> dict[str, torch.Tensor]:
        """Master and moments of a piece, flat fp32; the moments are made, as zeros, before the first step."""
        inner = self._inner[id(piece.optimizer_parameter)].state[piece.optimizer_parameter]
        for name in MOMENTS:
            if name not in inner:
                inner[name] = torch.zeros_like(piece.optimizer_parameter)
        if "step" not in inner and _counts_per_parameter(self._inner[id(piece.optimizer_parameter)]):
            inner["step"] = torch.zeros((), dtype=torch.float32, device=piece.master.device)
        return {"param": piece.master, **{name: inner[name].view(-1) for name in MOMENTS}}

    def _is_written(self, piece: ShardSlice) -> bool:
        """False for copies: of tensor parallel ranks, and of a tied matrix on the last stage."""
        return piece.counted and (piece.name != EMBEDDING or self.mesh.is_first_stage)

    # ---- detectors -------------------------------------------------------------------------------------------------

    def _detector_to_save(self) -> Iterator[ShardedTensor]:
        for module in self.sync.modules:
            if module.key == "embedding" and not self.mesh.is_first_stage:
                continue
            for field, value in self.sync.detectors.items():
                column = value[module.index : module.index + 1] if field == PER_MODULE else value[:, module.index]
                yield whole_tensor(f"edit.detector.{module.key}.{field}", column.clone())

    def detector_to_load(self, num_replicas: int) -> dict[str, ShardedTensor]:
        """Empty columns for a detector of `num_replicas` replicas, by `<module>.<field>`."""
        return {
            f"{module.key}.{field}": whole_tensor(
                f"edit.detector.{module.key}.{field}",
                torch.zeros(1 if field == PER_MODULE else num_replicas, dtype=value.dtype),
            )
            for module in self.sync.modules
            for field, value in self.sync.detectors.items()
        }

    def detector_state(self, columns: dict[str, ShardedTensor]) -> dict[str, torch.Tensor]:
        """`AnomalyDetector.state_dict()` from loaded columns: [R, M] each, [M] of majority_streak."""
        state = {}
        for field in self.sync.detectors:
            parts = [columns[f"{module.key}.{field}"].data for module in self.sync.modules]
            assert all(part is not None for part in parts)
            state[field] = torch.cat(parts) if field == PER_MODULE else torch.stack(parts, dim=1)
        return state

    # ---- generators ------------------------------------------------------------------------------------------------

    def _rng_prefix(self, replica: int) -> str:
        place = self.mesh.place
        return f"rng.{replica}.{place.dp}.{place.pp}.{place.cp}.{place.tp}."

    def random_states_to_load(self) -> dict[str, ShardedTensor]:
        """Empty tensors for the generators of this place, by generator."""
        return {
            name: whole_tensor(self._rng_prefix(self.sync.fleet.replica) + name, torch.zeros_like(state))
            for name, state in random_states().items()
        }

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def numbers(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """Counters as JSON, the same on all ranks. Collective over `group`, all ranks."""
        mine = {
            "adam_step": self._adam_step(),
            **self.sync.replica_numbers(),
            "grad_scalers": [
                None
                if part.grad_scaler is None
                else {
                    name: float(value) if isinstance(value, torch.Tensor) else value
                    for name, value in part.grad_scaler.state_dict().items()
                }
                for part in self.optimizer.chained_optimizers
            ],
        }
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (mine, self._modules_in_flight()), group=group)
        leaders = [ranks[0] for ranks in self.mesh.layout.replicas()]
        return {
            **self.sync.numbers(),
            "in_flight": {
                "events": [
                    {
                        "index": event.decision.index,
                        "iteration": event.decision.iteration,
                        "apply_after": event.apply_after,
                        "inner_lr": event.inner_lr,
                    }
                    for event, _ in self.sync.under_way
                ],
                "schedule": self.sync.schedule_of_syncs,
                "modules": {key: entry for _, modules in gathered for key, entry in modules.items()},
            },
            "replicas": [gathered[rank][0] for rank in leaders],
        }

    def _modules_in_flight(self) -> dict[str, Any]:
        """What was decided on this stage's modules whose sync is under way; the same in all replicas."""
        modules = {}
        for pending in self._pending().values():
            decision, m = pending.event.decision, pending.module
            modules[self.sync.modules[m].key] = {
                "event": decision.index,
                "rolled_back": pending.rolled_back,
                "delayed": pending.event.apply_after is not None,
                "left_out": decision.verdict.left_out[:, m].tolist(),
                "norms": decision.norms[:, m].tolist(),
                "steps": decision.steps[:, m].tolist(),
                "weights": decision.weights[:, m].tolist(),
            }
        return modules

    def set_numbers(self, replica: dict[str, Any]) -> None:
        """Adam's step and loss scale of this rank from an entry of `numbers()["replicas"]`."""
        for module in self.sync.modules:
            for piece in module.slices:
                inner = self._inner[id(piece.optimizer_parameter)]
                if _counts_per_parameter(inner):  # a tensor each: Adam advances it in place per parameter
                    inner.state[piece.optimizer_parameter]["step"] = torch.tensor(
                        float(replica["adam_step"]), dtype=torch.float32, device=piece.master.device
                    )
        for part, saved in zip(self.optimizer.chained_optimizers, replica["grad_scalers"], strict=True):
            for group in part.optimizer.param_groups:
                if not _counts_per_parameter(part.optimizer):
                    group["step"] = replica["adam_step"]
            if part.grad_scaler is not None and saved is not None:
                scale = torch.tensor([saved["scale"]], dtype=torch.float32)
                part.grad_scaler.load_state_dict({**saved, "scale": scale})

    def _adam_step(self) -> int:
        steps = set()
        for part in self.optimizer.chained_optimizers:
            steps |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
            steps |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
        assert len(steps) <= 1, f"parameters of one replica have taken different numbers of steps: {sorted(steps)}"
        return steps.pop() if steps else 0


def _counts_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """torch's Adam keeps a step per parameter; Transformer Engine's and apex's keep one per parameter group."""
    return isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam)


def random_states() -> dict[str, torch.Tensor]:
    """Every generator that training draws from, as bytes on the CPU: uint8 [n] each."""
    states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[f"tracker.{name}"] = state
    return {name: state.detach().to("cpu", torch.uint8, copy=True) for name, state in states.items()}


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Takes up what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["device"])
    prefix = "tracker."
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    )
