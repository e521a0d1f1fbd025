"""The format is megatron-core's; every rank gets its own generators back; damage is found by all. B03, B21."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_edit.checkpoint.errors import CheckpointError, SaveError
from megatron_edit.checkpoint.finder import find_checkpoint
from megatron_edit.checkpoint.inspect import compare, replica_state
from megatron_edit.checkpoint.folders import CheckpointFolder
from megatron_edit.checkpoint.restore import restore
from megatron_edit.checkpoint.torch_dist import read_whole_tensors, stored_tensors
from megatron_edit.checkpoint.training_state import TrainingState, random_states
from megatron_edit.checkpoint.writer import CheckpointWriter
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, tiny_config, tiny_mesh, tiny_replica
from tests.dist.checkpoint_runs import Part, run_part, save

TOOL = Path(__file__).parents[2] / "tools" / "inspect_checkpoint.py"
TP2 = {"tensor_model_parallel_size": 2, "edit_num_replicas": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 2 and 4 of two replicas."""
    folder = tmp_path_factory.mktemp("saved")
    settings = {"edit_num_replicas": 2, "num_layers": 2}
    run_part(Part(2, settings, 0, 2, save=folder))
    run_part(Part(2, settings, 2, 4, load=folder, save=folder))
    return folder


def test_megatron_cores_own_loader_reads_it(saved: Path) -> None:
    path = saved / "iter_0000004"

    def read(rank: int, world_size: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = dist_checkpointing.load_plain_tensors(str(path))
        return found

    (found,) = run_ranks(read, 1)
    ours = read_whole_tensors(path, list(stored_tensors(path)))
    assert found.keys() == ours.keys() and len(found) > 100
    assert all(torch.equal(found[name], ours[name]) for name in found)


def test_a_tensor_that_is_not_written_as_a_whole_is_no_checkpoint(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> str:
        replica = tiny_replica(tiny_config(world_size, edit_num_replicas=1))
        state = TrainingState(replica.engine.state, replica.optimizer, replica.config.model, VOCABULARY)
        group = replica.mesh.checkpoint_group
        writer = CheckpointWriter(tmp_path, group, say=print)
        content = {"iteration": 1, "scope": "full", **state.numbers(group)}
        messages = []
        for key in ("exp_avg.output_layer.weight", "anchor.embedding.word_embeddings.weight"):  # cut over the ranks
            checkpoint = state.checkpoint(content)
            kept = [tensor for tensor in checkpoint.tensors if rank == 0 or not tensor.key.endswith(key)]
            with pytest.raises(SaveError) as caught:
                writer.save(replace(checkpoint, tensors=kept))
            assert key in str(caught.value)
            with pytest.raises(SaveError) as caught:
                checkpoint = state.checkpoint(content)
                writer.save(replace(checkpoint, tensors=[t for t in checkpoint.tensors if not t.key.endswith(key)]))
            assert f"{key} [259, 64] was not written" in str(caught.value)
            messages.append(str(caught.value))
        return " ".join(messages)

    assert all("iter_0000001 was not saved" in message for message in run_ranks(run, 2))
    assert CheckpointFolder(tmp_path).complete_iterations() == [] and not list(tmp_path.glob("iter_*"))


# ---- generators (B03) ------------------------------------------------------------------------------------------------


def test_every_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        config = tiny_config(world_size, **TP2)
        replica = tiny_replica(config)
        state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)

        def draw() -> None:
            torch.rand(rank + 1)
            with get_cuda_rng_tracker().fork():
                torch.rand(2 * rank + 3)

        draw()
        before = random_states()
        save(replica, state, tmp_path, 1)
        draw()
        candidate = find_checkpoint(tmp_path, replica.mesh.checkpoint_group, say=print)
        assert candidate is not None
        assert restore(state, candidate, replica.mesh.checkpoint_group, random_states=True, seed=1) == []
        return before, random_states()

    results = run_ranks(run, 4)
    for before, after in results:
        assert before.keys() == after.keys() and any(name.startswith("tracker.") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)
    blobs = [before["tracker.model-parallel-rng"].numpy().tobytes() for before, _ in results]
    assert len(set(blobs)) == 4


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    """fp16 needs a GPU; its loss scaler does not."""

    def run(rank: int, world_size: int) -> list[dict[str, Any]]:
        config = tiny_config(world_size, edit_num_replicas=2)
        replica = tiny_replica(config)
        (part,) = replica.optimizer.chained_optimizers
        part.grad_scaler = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 4, 2)
        state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)
        for _ in range(2 + rank):
            part.grad_scaler.update(rank == 1)
        before = part.grad_scaler.state_dict()
        save(replica, state, tmp_path, 1)
        part.grad_scaler = DynamicGradScaler(2.0**3, 1.0, 2.0, 0.5, 4, 2)
        candidate = find_checkpoint(tmp_path, replica.mesh.checkpoint_group, say=print)
        assert candidate is not None
        restore(state, candidate, replica.mesh.checkpoint_group, random_states=True, seed=1)
        return [{**each, "scale": float(each["scale"])} for each in (before, part.grad_scaler.state_dict())]

    one, other = run_ranks(run, 2)
    assert one[0] == one[1] and other[0] == other[1] and one[0]["scale"] != other[0]["scale"]


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first shard": lambda path: flip(path / "__0_0.distcp"),
    "second shard": lambda path: flip(path / "__1_0.distcp"),
    "index": lambda path: flip(path / ".metadata"),
    "manifest": lambda path: flip(path / "manifest.json"),
    "megatron-core's": lambda path: flip(path / "common.pt"),
}


def test_any_flipped_bit_is_found_by_all_ranks_and_the_one_before_is_taken(saved: Path, tmp_path: Path) -> None:
    for name, spoil in DAMAGES.items():
        shutil.copytree(saved, tmp_path / name)
        spoil(tmp_path / name / "iter_0000004")

    def run(rank: int, world_size: int) -> dict[str, tuple[str, int, list[str]]]:
        group = tiny_mesh(tiny_config(world_size, edit_num_replicas=1)).checkpoint_group
        found = {}
        for name in DAMAGES:
            lines: list[str] = []
            with pytest.raises(CheckpointError) as caught:
                find_checkpoint(tmp_path / name, group, say=lines.append)
            assert not lines
            candidate = find_checkpoint(tmp_path / name, group, fallback=True, say=lines.append)
            assert candidate is not None
            found[name] = (str(caught.value), candidate.manifest.iteration, lines)
        return found

    one, other = run_ranks(run, 2)
    assert one == other
    for name, (message, iteration, lines) in one.items():
        assert "damaged" in message and "iter_0000004" in message, name
        assert iteration == 2 and "falling back to" in lines[0], name


# ---- the tool --------------------------------------------------------------------------------------------------------


def tool(*arguments: object) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + (done.stderr if done.returncode == 2 else "")


def test_the_tool_lists_verifies_and_dumps(saved: Path, tmp_path: Path) -> None:
    code, text = tool(saved, "--verify", "--dump-replica", 1, tmp_path / "replica.pt")
    assert code == 0, text
    for part in ("iter_0000002: iteration 2, full", "iter_0000004: iteration 4, full", "<- latest", "scope: full",
                 "layout: sync 2, dp 1, pp 1", "tensors edit.anchor: 15", "replica 1: adam_step 4", "verified: "):  # fmt: skip
        assert part in text, (part, text)
    dumped = torch.load(tmp_path / "replica.pt", weights_only=True)
    expected = replica_state(CheckpointFolder(saved).candidate(4), 1)
    numbers = {"adam_step": 4, "updates_since_sync": [1], "steps_since_average": 1,
               "inner_lr": 0.00094, "grad_scalers": [None]}  # fmt: skip
    assert dumped["numbers"] == expected["numbers"] == numbers
    assert dumped["param"].keys() == expected["param"].keys() and len(dumped["param"]) == 15
    assert all(torch.equal(dumped["param"][name], value) for name, value in expected["param"].items())


def test_a_replica_that_cannot_be_dumped_is_one_line(saved: Path, tmp_path: Path) -> None:
    """A number that there is not, a word, a folder that there is not: code 2, and what would work."""
    for index, file, expected in (
        (2, tmp_path / "a.pt", "iter_0000004 holds the state of replicas 0 to 1: there is no replica 2"),
        ("one", tmp_path / "a.pt", "--dump-replica one: a number from 0 on is wanted"),
        (1, tmp_path / "none" / "a.pt", f"--dump-replica 1 {tmp_path}/none/a.pt: there is no folder {tmp_path}/none"),
    ):
        code, text = tool(saved, "--dump-replica", index, file)
        assert code == 2 and text.rstrip().endswith(expected), text
    assert not list(tmp_path.iterdir())


def test_the_tool_verifies_the_final_weights_too(saved: Path, tmp_path: Path) -> None:
    """One bit of them, and a file that is cut; with --ckpt-step only that checkpoint is meant."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    shutil.copytree(saved / "iter_0000004", folder / "final")
    code, text = tool(folder, "--verify")
    assert code == 0 and text.count("verified: ") == 2, text
    shard = sorted((folder / "final").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), bytes(content[:100])):
        shard.write_bytes(damaged)
        code, text = tool(folder, "--verify")
        assert code == 1 and str(shard) in text.splitlines()[-1], text
        assert tool(folder, "--verify", "--ckpt-step", 4)[0] == 0


def test_the_tool_says_what_is_damaged_or_different(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    other = tmp_path / "copy" / "iter_0000004"
    assert list(compare(saved / "iter_0000004", other)) == []
    different = {difference.name: difference for difference in compare(saved / "iter_0000002", other)}
    assert "iteration" in different and different["edit.anchor.output_layer.weight"].largest > 0
    flip(other / "__1_0.distcp")
    code, text = tool(other, "--verify")
    assert code == 1 and "__1_0.distcp is damaged: SHA-256" in text
    code, text = tool(tmp_path)
    assert code == 2 and "holds no checkpoint" in text


def test_a_group_of_all_ranks_is_the_checkpoints_own() -> None:
    """Saving in the background must not share a group with anything that training waits for."""

    def run(rank: int, world_size: int) -> bool:
        mesh = tiny_mesh(tiny_config(world_size, edit_num_replicas=2))
        groups = [mesh.world_control_group, mesh.sync_group, mesh.sync_control_group, dist.group.WORLD]
        return dist.get_process_group_ranks(mesh.checkpoint_group) == [0, 1] and all(
            mesh.checkpoint_group is not group for group in groups
        )

    assert run_ranks(run, 2) == [True, True]


@pytest.mark.full(reason="ten rounds of saving a few hundred megabytes")
def test_memory_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    """After the last of ten rounds within 5 % of after the second; and a save in the background blocks less."""
    numbers = tmp_path / "numbers.json"
    script = TOOL.parents[1] / "benchmarks" / "checkpoint.py"
    subprocess.run([sys.executable, str(script), "--rounds", "9", "--output", str(numbers)], check=True)
    found = json.loads(numbers.read_text())
    second = found["MB of rank 0's memory after the second round"]
    assert found["MB of rank 0's memory after the last round"] < 1.05 * second, found
    assert found["ratio, blocked by background to foreground"] < 0.5, found
    assert found["MB, a checkpoint"] < 1.02 * found["MB, torch.save"], found
