"""What this rank saw of a completed sync, as a report of its pipeline stage."""

from __future__ import annotations

import torch

from megatron_edit.log.lines import SyncReport
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.event import SyncResult
from megatron_edit.sync.modules import ModuleShard
from megatron_edit.sync.penalty import effective_replicas


def stage_sync_report(
    result: SyncResult, mesh: Mesh, modules: list[ModuleShard], iteration: int | None = None
) -> SyncReport:
    """The modules of this rank's stage. `MetricsReducer.emit_sync` joins the stages.

    `iteration`: where replicas with unequal step counts have met; default: the replica's steps.
    """
    tied_copy = mesh.is_last_stage and mesh.layout.pp > 1
    # The tied matrix is on two stages; the copy on the last one is the same module and counts once.
    decision = result.decision
    counted = torch.tensor([not (tied_copy and module.key == "embedding") for module in modules]) & decision.due  # [M]
    averaged = decision.weights[:, counted & ~decision.rolled_back]  # [R, modules that were averaged]
    used = averaged[averaged > 0]
    return SyncReport(
        sync=decision.index,
        iteration=decision.iteration if iteration is None else iteration,
        modules=int(counted.sum()),
        weight_min=float(used.min()) if used.numel() else float("nan"),
        weight_max=float(used.max()) if used.numel() else float("nan"),
        left_out=int(decision.verdict.left_out[:, counted].sum()),
        of=int(counted.sum()) * decision.num_replicas,
        effective_replicas_min=float(effective_replicas(averaged).min()) if used.numel() else float("nan"),
        num_replicas=decision.num_replicas,
        beta_min=float(result.clip_coefficients[counted].min()) if counted.any() else float("nan"),
        rolled_back=int(decision.rolled_back[counted].sum()),
        bytes=result.bytes_sent,
        exposed_ms=result.exposed_ms,
        total_ms=result.total_ms,
    )
