"""What a save costs: `make bench-checkpoint`, or `python benchmarks/checkpoint.py`.

Two replicas train on a CPU and save in turn, in one run:
  torch.save   each rank's own tensors, already lying contiguous in memory, into one durable file: the floor
  foreground   a checkpoint: blocks of global tensors, a SHA-256 of every file, rename, pointer
  background   --async-save: blocked until the state is copied; then steps are taken until the checkpoint is complete
Medians over the rounds. Host memory is that of rank 0 after the second and after the last save; sizes are on disk, of
all ranks. The load average tells how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.checkpoint.writer import CheckpointWriter
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, tiny_batch, tiny_config, tiny_replica
from megatron_edit.train.step import TrainStep

RANKS = 2
SHAPE = {"num_layers": 6, "hidden_size": 384, "ffn_hidden_size": 1024, "num_attention_heads": 6, "num_query_groups": 6,
         "seq_length": 64}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="saves of each kind")
    parser.add_argument("--directory", help="where to write; default: a temporary folder")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found: dict[str, float] = run_ranks(measure, RANKS, Path(directory), arguments.rounds, timeout_s=1800)[0]
    for name, value in found.items():
        print(f"{name:58}{value:12.3f}")
    print(f"load average over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.output:
        arguments.output.write_text(json.dumps({"load": os.getloadavg()[0], **found}, indent=1) + "\n")
    return 0


def measure(rank: int, world_size: int, directory: Path, rounds: int) -> dict[str, float]:
    """Seconds (medians over the rounds, the slowest rank's) and sizes."""
    config = tiny_config(world_size, **SHAPE, edit_num_replicas=2, global_batch_size=4, micro_batch_size=2)
    replica = tiny_replica(config)
    state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)
    step = TrainStep(replica)
    group = replica.mesh.checkpoint_group
    writer = CheckpointWriter(directory / "run", group, keep=1, say=print)
    seconds: dict[str, list[float]] = {}
    memory: list[float] = []
    sizes: dict[str, float] = {}
    iteration = 0

    def train() -> None:
        step.run(tiny_batch(config, replica.mesh, iteration), 1e-4)

    def note(name: str, started: float) -> None:
        slowest = torch.tensor(time.monotonic() - started)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.setdefault(name, []).append(float(slowest))

    def content() -> dict[str, Any]:
        return {"scope": "full", "iteration": iteration, **state.numbers(group)}

    for _ in range(rounds + 1):  # the first round warms up
        iteration += 1
        replica.engine.drain()
        started = time.monotonic()
        train()
        note("a step", started)
        replica.engine.drain()

        blocks = [tensor.data for tensor in state.tensors_to_save("full") if tensor.data is not None]
        plain = {str(index): block.clone() for index, block in enumerate(blocks)}
        file = directory / f"plain_{rank}.pt"
        dist.barrier()
        started = time.monotonic()
        with open(file, "wb") as stream:
            torch.save(plain, stream)
            stream.flush()
            os.fsync(stream.fileno())
        note("torch.save of the same state", started)
        sizes["torch.save"] = sum((directory / f"plain_{r}.pt").stat().st_size for r in range(world_size)) / 1e6
        sizes["values"] = total(sum(tensor.nbytes for tensor in plain.values())) / 1e6
        del plain

        dist.barrier()
        started = time.monotonic()
        saved = writer.save(state.checkpoint(content()))
        note("a save in the foreground", started)
        sizes["a checkpoint"] = saved.bytes / 1e6

        iteration += 1
        dist.barrier()
        started = time.monotonic()
        writer.save_in_background(state.checkpoint(content()))
        note("blocked by a save in the background", started)
        steps_started, done = time.monotonic(), torch.zeros(1)
        while not done:
            train()
            note("a step during a save in the background", steps_started)
            steps_started = time.monotonic()
            done.fill_(float(writer.finished() is not None or writer._thread is None))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        note("a save in the background until it is complete", started)
        memory.append(resident_megabytes())
    writer.close()
    medians = {f"seconds, {name}": statistics.median(values[1:]) for name, values in seconds.items()}
    foreground = medians["seconds, a save in the foreground"]
    return {
        **medians,
        "ratio, foreground to torch.save": foreground / medians["seconds, torch.save of the same state"],
        "ratio, blocked by background to foreground": (
            medians["seconds, blocked by a save in the background"] / foreground
        ),
        "MB, values": sizes["values"],
        "MB, torch.save": sizes["torch.save"],
        "MB, a checkpoint": sizes["a checkpoint"],
        "MB of rank 0's memory after the second round": memory[1],
        "MB of rank 0's memory after the last round": memory[-1],
        "MB of rank 0's memory, peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def total(mine: float) -> float:
    """Sum over the ranks."""
    value = torch.tensor(float(mine), dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def resident_megabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
