"""Ranks that srun or mpirun has started without torchrun: who this is, or a refusal with a command that works."""

import pytest

from megatron_edit.config.schema import ConfigError
from megatron_edit.ranks.launcher import first_node, launched, tasks_per_node

SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[007,012]", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-1@1",
}  # fmt: skip
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "expected", "name"),
    [
        (SLURM, ("5", "1", "7", "3", "gpu007"), "srun"),
        (OPEN_MPI, ("1", "1", "2", "2", "127.0.0.1"), "Open MPI"),
        (PMI, ("2", "0", "4", "2", "10.0.0.1"), "MPICH, Intel MPI"),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, ("5", "1", "7", "3", "gpu007"), "srun"),
    ],
)
def test_complete_variables(environment: dict[str, str], expected: tuple[str, ...], name: str) -> None:
    found = launched(environment)
    assert found is not None and name in found.note and f"{expected[2]} ranks" in found.note
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert tuple(found.environment[name] for name in names) == expected
    assert 1024 < int(found.environment["MASTER_PORT"]) < 32768


def test_ports_and_names_are_those_of_the_job() -> None:
    one, same = launched(SLURM), launched({**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"})
    other = launched({**SLURM, "SLURM_JOB_ID": "78"})
    assert one is not None and same is not None and other is not None
    assert one.environment["MASTER_PORT"] == same.environment["MASTER_PORT"] and one.job == same.job
    assert one.environment["MASTER_PORT"] != other.environment["MASTER_PORT"] and one.job != other.job
    given = launched({**SLURM, "MASTER_PORT": "29511"})
    assert given is not None and given.environment["MASTER_PORT"] == "29511"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SLURM, "RANK": "0"},  # torchrun under srun
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},  # a batch script itself, not a step of it
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_and_torchrun_are_as_they_were(environment: dict[str, str]) -> None:
    assert launched(environment) is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_PROCID": "1"}, "number 1 of 3 on its node"),  # --distribution cyclic
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE is '4x2'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"),  # of two nodes: which is rank 0's?
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK is 'one'"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "MPI_LOCALRANKID is not set"),
    ],
)
def test_incomplete_variables_are_refused_with_a_command(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        launched(environment)
    message = str(raised.value)
    assert named in message and "each would be a run of its own" in message
    assert "torchrun --nnodes" in message or "torchrun --nproc-per-node" in message


def test_slurms_short_forms() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3] and tasks_per_node("2") == [2] and tasks_per_node("x") == []
    names = {"n1": "n1", "a1,b2": "a1", "gpu[007-010,012]": "gpu007", "r1-[3,5]-x,login": "r1-3-x", "a[1-2],b": "a1"}
    assert {given: first_node(given) for given in names} == names
