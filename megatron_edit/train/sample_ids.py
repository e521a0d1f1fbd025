"""--log-sample-ids: which samples each replica has used, for audits."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_edit.parallel.mesh import Mesh
from megatron_edit.train.writers import LineFile, drop_lines


class SampleIdFile:
    """One JSON line per step and replica, appended by the first rank of each replica. Collective over all ranks.

    `steps`: of each replica where this start begins. Later lines of an earlier start, which the checkpoint does not
    know of, move to `FILE.dropped`.
    """

    def __init__(self, path: str | None, mesh: Mesh, steps: list[int]) -> None:
        self._replica = mesh.replica
        self._file: LineFile | None = None
        if path is None:
            return
        if mesh.rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drop_lines(Path(path), lambda entry: entry["iteration"] > _known(steps, entry["replica"]))
        dist.barrier(mesh.world_control_group)
        if mesh.is_replica_leader:
            self._file = LineFile(Path(path), partial(print, flush=True))  # lines of replicas do not mix

    def write(self, step: int, sample_ids: list[int]) -> None:
        """The samples of the step `step` of this replica, counted from 1 over the whole run."""
        if self._file is not None:
            entry = {"iteration": step, "replica": self._replica, "samples": sample_ids}
            self._file.write(json.dumps(entry))


def _known(steps: list[int], replica: int) -> int:
    """Step up to which lines of `replica` count; one that this start does not have took its last one before."""
    return steps[replica] if replica < len(steps) else max(steps)
