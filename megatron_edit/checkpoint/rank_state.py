"""What a checkpoint holds of one rank: masters, inner moments, the sync's state, every generator."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_edit.sync.engine import SyncEngine
from megatron_edit.sync.modules import ShardSlice

MOMENTS = ("exp_avg", "exp_avg_sq")


def rank_state_dict(engine: SyncEngine, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """This rank's state, on the CPU. A due sync is completed first."""
    engine.drain()
    return {
        "slices": {
            f"{module.index}.{piece.name}": _slice_state(piece, optimizer)
            for module in engine.modules
            for piece in module.slices
        },
        "sync": engine.state_dict(),
        "grad_scaler": _grad_scaler_state(optimizer),
        "rng": {
            "cpu": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tensor_parallel": get_cuda_rng_tracker().get_states(),
        },
    }


@torch.no_grad()
def load_rank_state_dict(state: dict[str, Any], engine: SyncEngine, optimizer: MegatronOptimizer) -> None:
    """Takes up a state saved by the same rank of the same layout. Raises KeyError or RuntimeError on a mismatch."""
    for module in engine.modules:
        for piece in module.slices:
            saved = state["slices"][f"{module.index}.{piece.name}"]
            piece.master.copy_(saved["master"])
            piece.model.copy_(piece.master)
            _set_moments(piece, optimizer, saved)
    engine.load_state_dict(state["sync"])
    for part, saved in zip(optimizer.chained_optimizers, state["grad_scaler"], strict=True):
        if part.grad_scaler is not None:
            part.grad_scaler.load_state_dict(saved)
    for chunk in engine.chunks:
        chunk.start_param_sync(force_sync=True)
    torch.set_rng_state(state["rng"]["cpu"])
    torch.cuda.set_rng_state(state["rng"]["device"])
    get_cuda_rng_tracker().set_states(state["rng"]["tensor_parallel"])


def _slice_state(piece: ShardSlice, optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    moments = _inner_state(piece, optimizer)
    state = {name: moments[name] for name in (*MOMENTS, "step") if name in moments}
    return {name: value.detach().to("cpu", copy=True) for name, value in {"master": piece.master, **state}.items()}


def _set_moments(piece: ShardSlice, optimizer: MegatronOptimizer, saved: dict[str, torch.Tensor]) -> None:
    if "exp_avg" not in saved:
        return  # saved before the first step
    device = piece.master.device
    inner = _owner(piece, optimizer).optimizer.state[piece.optimizer_parameter]
    for name in MOMENTS:
        inner[name] = saved[name].to(device).view_as(piece.optimizer_parameter).clone()
    inner["step"] = saved["step"].clone().to(device)  # one tensor each: Adam advances it in place per parameter


def _inner_state(piece: ShardSlice, optimizer: MegatronOptimizer) -> dict[str, Any]:
    return dict(_owner(piece, optimizer).optimizer.state.get(piece.optimizer_parameter, {}))


def _owner(piece: ShardSlice, optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """The part of a chained optimizer that holds the piece (there is one, without mixture of experts)."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            if any(parameter is piece.optimizer_parameter for parameter in group["params"]):
                return part
    raise AssertionError(f"no optimizer holds {piece.name}")


def _grad_scaler_state(optimizer: MegatronOptimizer) -> list[dict[str, Any] | None]:
    return [
        part.grad_scaler.state_dict() if part.grad_scaler is not None else None
        for part in optimizer.chained_optimizers
    ]
