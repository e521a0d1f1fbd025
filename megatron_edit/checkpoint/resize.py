"""The sync that a change of the number of replicas makes necessary in the middle of an interval.

Every new replica reads the local states of all old ones, shard by shard, and computes what they would have agreed on
(arXiv 2412.07210; `sync.engine` does the same with collectives).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_edit.checkpoint.torch_dist import read_tensors
from megatron_edit.checkpoint.training_state import TrainingState, local_key
from megatron_edit.sync.detector import AnomalyDetector, DetectorVerdict
from megatron_edit.sync.outer import nesterov_step_
from megatron_edit.sync.penalty import replica_weights


@torch.no_grad()
def sync_of_saved_replicas(
    state: TrainingState,
    folder: Path,
    group: dist.ProcessGroup,
    replicas: list[dict[str, Any]],
    detector_state: dict[str, torch.Tensor],
) -> tuple[DetectorVerdict, dict[str, torch.Tensor]]:
    """Moves the loaded anchor and outer momentum by one sync of the saved replicas.

    Reads each old replica twice, and holds one of them and the average beside the state. Returns the verdict on the
    old replicas and their detectors' new state. The masters are left to the caller. Collective over `group`.
    """
    engine, config = state.engine, state.engine.config
    device = state.mesh.platform.device
    deltas = [torch.empty(module.numel, dtype=torch.float32, device=device) for module in engine.modules]

    def read_deltas(replica: int) -> None:
        """deltas := masters of the saved replica - anchor."""
        tensors: list[ShardedTensor] = []
        for module, flat in zip(engine.modules, deltas, strict=True):
            flat.zero_()  # the padding of the vocabulary
            for piece, view in zip(module.slices, module.views(flat), strict=True):
                tensors += state.pieces(local_key(replica, "param", piece.name), piece, view)
        read_tensors(folder, tensors, group)
        for module, flat in zip(engine.modules, deltas, strict=True):
            flat.sub_(engine.anchor[module.index])

    squares = torch.zeros(len(replicas), len(engine.modules), dtype=torch.float64, device=device)  # [R, M]
    for replica in range(len(replicas)):
        read_deltas(replica)
        for module, delta in zip(engine.modules, deltas, strict=True):
            squares[replica, module.index] = module.counted_square_sum(delta)
    if state.mesh.norm_group.size() > 1:
        dist.all_reduce(squares, group=state.mesh.norm_group)
    norms = squares.sqrt().cpu()
    stepped = torch.tensor([replica["steps_since_sync"] > 0 for replica in replicas])
    detector = AnomalyDetector(
        len(replicas),
        len(engine.modules),
        threshold=config.edit_anomaly_threshold,
        alpha=config.edit_anomaly_alpha,
        warmup=config.edit_anomaly_warmup_syncs,
    )
    detector.load_state_dict(detector_state)
    verdict = detector.observe(norms, stepped)
    weights = replica_weights(norms, verdict.left_out, config.edit_weighting, config.edit_softmax_temperature)

    averaged = [torch.zeros_like(delta) for delta in deltas]
    for replica in range(len(replicas)):
        read_deltas(replica)
        for module, delta in zip(engine.modules, deltas, strict=True):
            weight = float(weights[replica, module.index])
            if weight > 0:  # never 0 x its values: they may be NaN
                averaged[module.index].add_(delta.mul_(weight))
    rolled_back = verdict.left_out.all(dim=0)  # [M]
    for module in engine.modules:
        if rolled_back[module.index]:
            continue
        anchor, momentum = engine.anchor[module.index], engine.outer_momentum[module.index]
        beta = engine.clip_coefficient_of(module, averaged[module.index])
        nesterov_step_(
            anchor, momentum, averaged[module.index], beta, config.edit_outer_lr, config.edit_outer_momentum
        )
    for tensor in (*engine.anchor, *engine.outer_momentum):
        engine.transport.broadcast(tensor)  # bit-equal in all replicas even where kernels round differently
    return verdict, detector.state_dict()
