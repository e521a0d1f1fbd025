"""--log-sample-ids: which samples each replica has used, for audits."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_edit.log.writers import LineFile, drop_lines
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.sync.fleet import Fleet

_LINE = re.compile(rb'\{"iteration": (\d+), "replica": (\d+), ')


class SampleIdFile:
    """One JSON line per step and replica, appended by the first rank of each replica. Collective over all ranks.

    `steps`: of each replica where this start begins. Later lines of an earlier start, which the checkpoint does not
    know of, move to `FILE.dropped`. Replicas write when they come to a step; the end of a run, and the next start, put
    the lines in the order of iteration and replica, so that two runs can be compared.
    """

    def __init__(self, path: str | None, mesh: Mesh, fleet: Fleet, steps: list[int]) -> None:
        self._fleet = fleet
        self._file: LineFile | None = None
        self._path, self._mesh = path, mesh
        if path is None:
            return
        if mesh.rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drop_lines(Path(path), lambda entry: entry["iteration"] > _known(steps, entry["replica"]))
            sort_lines(Path(path))
        dist.barrier(mesh.world_control_group)
        if mesh.is_replica_leader:
            self._file = LineFile(Path(path), partial(print, flush=True))  # lines of replicas do not mix

    def write(self, step: int, sample_ids: list[int]) -> None:
        """The samples of the step `step` of this replica, counted from 1 over the whole run."""
        if self._file is not None:
            entry = {"iteration": step, "replica": self._fleet.replica, "samples": sample_ids}
            self._file.write(json.dumps(entry))


    def close(self) -> None:
        """Sorts the file. Collective over all ranks: call it when the run ends well."""
        if self._path is None:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        dist.barrier(self._mesh.world_control_group)
        if self._mesh.rank == 0:
            sort_lines(Path(self._path))


def sort_lines(path: Path) -> None:
    """Puts the lines in the order of iteration and replica. What fails is said: the run has ended well all the same."""
    if not path.is_file():  # there is none, or it is a device
        return
    places, offset = list[tuple[int, int, int, int]](), 0
    ordered = path.with_name(path.name + ".new")
    try:
        with open(path, "rb") as stream:
            for line in stream:
                match = _LINE.match(line)
                if match is None:
                    raise OSError(0, f"the line after {offset} bytes is not of --log-sample-ids")
                places.append((int(match[1]), int(match[2]), offset, len(line)))
                offset += len(line)
            if places == sorted(places):
                return
            with open(ordered, "wb") as sorted_stream:
                for _, _, start, size in sorted(places):
                    stream.seek(start)
                    sorted_stream.write(stream.read(size))
        os.replace(ordered, path)
    except OSError as error:
        ordered.unlink(missing_ok=True)
        print(f"warning: {path} is not in the order of iterations: {error.strerror}", file=sys.stderr, flush=True)


def _known(steps: list[int], replica: int) -> int:
    """Step up to which lines of `replica` count; one that this start does not have took its last one before."""
    return steps[replica] if replica < len(steps) else max(steps)
