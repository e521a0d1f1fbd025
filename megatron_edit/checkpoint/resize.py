"""The sync that a change of the number of replicas makes necessary in the middle of an interval.

Every new replica reads the local states of all old ones, shard by shard, and computes what they would have agreed on
(arXiv 2412.07210; `sync.engine` does the same with collectives). A sync that was under way is applied first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.in_flight import SavedInFlight
from megatron_edit.checkpoint.torch_dist import ShardedTensor, read_tensors
from megatron_edit.checkpoint.training_state import TrainingState, local_key
from megatron_edit.sync.decide import Decider
from megatron_edit.sync.detector import DetectorVerdict
from megatron_edit.sync.modules import ModuleShard


@torch.no_grad()
def sync_of_saved_replicas(
    state: TrainingState,
    folder: Path,
    group: dist.ProcessGroup,
    replicas: list[dict[str, Any]],
    detector_state: dict[str, torch.Tensor] | None,
    in_flight: SavedInFlight,
    anchors: list[torch.Tensor],
    momenta: list[torch.Tensor],
) -> tuple[DetectorVerdict, dict[str, torch.Tensor]]:
    """Moves the loaded `anchors` and `momenta` ([numel] of each module) by one sync of the saved replicas.

    Of a method without an anchor both are [], and the masters become the mean. Reads each old replica twice, and holds
    one of them and the average beside the state. Returns the verdict on the old replicas and their detectors' new
    state. Collective over `group`.
    """
    engine = state.engine
    device = state.mesh.platform.device
    deltas = [torch.empty(module.numel, dtype=torch.float32, device=device) for module in engine.modules]

    def read_deltas(replica: int) -> None:
        """deltas := masters of the saved replica - anchor, or - its masters when a sync under way set out."""
        tensors: list[ShardedTensor] = list(in_flight.at_launch(replica))
        for module, flat in zip(engine.modules, deltas, strict=True):
            flat.zero_()  # the padding of the vocabulary
            for piece, view in zip(module.slices, module.views(flat), strict=True):
                tensors += state.pieces(local_key(replica, "param", piece.name), piece, view)
        read_tensors(folder, tensors, group)
        for module, flat in zip(engine.modules, deltas, strict=True):
            base = in_flight.base(module.index, replica)
            if base is None and anchors:
                base = anchors[module.index].to(device)
            if base is not None:
                flat.sub_(base)

    squares = torch.zeros(len(replicas), len(engine.modules), dtype=torch.float64, device=device)  # [R, M]
    for replica in range(len(replicas)):
        read_deltas(replica)
        for module, delta in zip(engine.modules, deltas, strict=True):
            squares[replica, module.index] = module.counted_square_sum(delta)
    if state.mesh.norm_group.size() > 1:
        dist.all_reduce(squares, group=state.mesh.norm_group)
    decider = Decider(engine.config, engine.method, range(len(replicas)), len(engine.modules))
    if detector_state is not None:
        decider.detector.load_state_dict(detector_state)

    def updates_of(replica: int, module: ModuleShard) -> int:
        since: list[int] = replicas[replica]["updates_since_sync"]  # of each fragment
        known = since[module.fragment] if len(since) == engine.trigger.num_fragments else max(since)
        return 0 if in_flight.drops_progress(module.index, replica) else known

    updates = torch.tensor([[updates_of(i, module) for module in engine.modules] for i in range(len(replicas))])
    decision = decider.decide(
        0, 0, range(len(engine.modules)), squares.sqrt().cpu(), updates, range(len(replicas))
    )

    averaged = [torch.zeros_like(delta) for delta in deltas]
    for replica in range(len(replicas)):
        read_deltas(replica)
        for module, delta in zip(engine.modules, deltas, strict=True):
            weight = float(decision.weights[replica, module.index])
            if weight > 0:  # never 0 x its values: they may be NaN
                averaged[module.index].add_(delta.mul_(weight))
    for module in engine.modules:
        m = module.index
        if not anchors:
            if not decision.rolled_back[m]:
                engine.fleet.transport.broadcast(averaged[m])
                module.write_masters(averaged[m])
            continue
        anchor, momentum = anchors[m].to(device), momenta[m].to(device)
        inner_lr = in_flight.inner_lr(m)
        if (average := in_flight.average(m)) is not None:
            beta = engine.averages.clip_coefficient_of(module, average)
            engine.averages.outer_step(anchor, momentum, average, beta, inner_lr)
        if not decision.rolled_back[m]:
            beta = engine.averages.clip_coefficient_of(module, averaged[m])
            engine.averages.outer_step(anchor, momentum, averaged[m], beta, float(replicas[0]["inner_lr"]))
        for whole, moved in ((anchors[m], anchor), (momenta[m], momentum)):
            engine.fleet.transport.broadcast(moved)  # bit-equal in all replicas even where kernels round differently
            whole.copy_(moved)
    return decision.verdict, decider.detector.state_dict()
