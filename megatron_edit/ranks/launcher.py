"""Which rank of how many this process is, where torchrun did not start it: `srun python ...`, `mpirun python ...`.

torchrun tells its processes in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Slurm, Open
MPI and the process managers of MPICH and Intel MPI tell the same under other names. Pure: strings in, strings out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_edit.config.schema import ConfigError

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FIRST_PORT, PORTS = 20_000, 10_000  # below the range that systems give to outgoing connections


@dataclass(frozen=True)
class _Launcher:
    """Names of variables; `job`: one that is the same on all ranks of a job and another in another job."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None
    job: tuple[str, ...]


_SLURM = _Launcher(
    "srun (Slurm)", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, ("SLURM_JOB_ID", "SLURM_STEP_ID")
)
_LAUNCHERS = (  # Slurm first: it also sets PMI's variables. In a batch script itself there is no SLURM_STEP_NUM_TASKS.
    _SLURM,
    _Launcher(
        "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        "mpirun (PMI: MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",)
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """torchrun's variables, of which those that were not set must be added; what is said of it, and the job's name."""

    environment: dict[str, str]
    note: str
    job: str


def launched(environment: Mapping[str, str]) -> Launched | None:
    """What `environment` says when a launcher other than torchrun has started several processes; else None.

    MASTER_ADDR and MASTER_PORT are taken where they are set. Raises ConfigError, with a command that would work, when
    there are several processes and it does not follow which one this is, or where rank 0 can be reached.
    """
    if "RANK" in environment:
        return None
    found = next((each for each in _LAUNCHERS if environment.get(each.world_size, "1") != "1"), None)
    if found is None:
        return None
    rank, world_size = (_number(environment, name, found) for name in (found.rank, found.world_size))
    local_rank = _number(environment, found.local_rank, found)
    if found is _SLURM:
        first, local_world_size = _slurm_node(environment, rank, local_rank)
    else:
        assert found.local_world_size is not None
        local_world_size = _number(environment, found.local_world_size, found)
        first = rank - local_rank
    if not (0 <= rank < world_size and local_rank < local_world_size and first == rank - local_rank):
        raise _refusal(
            found,
            f"rank {rank} of {world_size} is number {local_rank} of {local_world_size} on its node, where ranks must "
            "follow one another",
        )
    job = "-".join(environment[name] for name in found.job if name in environment)
    address = environment.get("MASTER_ADDR") or _address(environment, found, local_world_size == world_size)
    port = environment.get("MASTER_PORT") or str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)
    numbers = (rank, local_rank, world_size, local_world_size)
    values = {**dict(zip(TORCHRUN, map(str, numbers), strict=False)), "MASTER_ADDR": address, "MASTER_PORT": port}
    note = f"started by {found.name}: {world_size} ranks, {local_world_size} on this node, rank 0 at {address}:{port}"
    return Launched(values, note, job)


def _number(environment: Mapping[str, str], name: str, launcher: _Launcher) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise _refusal(launcher, f"{name} is {text!r}" if name in environment else f"{name} is not set")
    return int(text)


def _refusal(launcher: _Launcher, reason: str) -> ConfigError:
    size = launcher.world_size
    command = (
        "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node N --rdzv-backend c10d "
        "--rdzv-endpoint HEAD_NODE:29500 pretrain_llama.py ... (examples/slurm/pretrain.sbatch), or srun "
        "--distribution block"
        if launcher is _SLURM
        else "torchrun --nproc-per-node N pretrain_llama.py ... on each node, or mpirun -x MASTER_ADDR=HEAD_NODE "
        "-x MASTER_PORT=29500 (Intel MPI, MPICH: -genv NAME VALUE)"
    )
    return ConfigError([
        f"{launcher.name} has started several processes ({size}), but {reason}; without that each would be a run of "
        f"its own. Start with {command}"
    ])  # fmt: skip


def _address(environment: Mapping[str, str], launcher: _Launcher, one_node: bool) -> str:
    if one_node:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if launcher is _SLURM and nodes:
        return first_node(nodes)
    raise _refusal(launcher, "MASTER_ADDR, where rank 0 can be reached, is not set")


def _slurm_node(environment: Mapping[str, str], rank: int, local_rank: int) -> tuple[int, int]:
    """First rank of this node, and how many it has."""
    node = _number(environment, "SLURM_NODEID", _SLURM)
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = tasks_per_node(text)
    if node >= len(tasks):
        raise _refusal(_SLURM, f"SLURM_STEP_TASKS_PER_NODE is {text!r}")
    return sum(tasks[:node]), tasks[node]


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "4(x2),3" is [4, 4, 3]; anything else is []."""
    tasks: list[int] = []
    for field in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", field)
        if match is None:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_node(nodes: str) -> str:
    """Slurm's "gpu[007-010,012]-a,login1" begins with gpu007-a."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")
