"""What a GPU must show, in under five minutes on one GPU; the result is committed beside this file.

    python benchmarks/gpu_check.py                  prints the checks, exits 1 when one fails
    python benchmarks/gpu_check.py --output FILE    also writes them as JSON

1. Two replicas on one GPU, gloo between them: EDiT in fp32 equals the same run on two CPU ranks.
2. The same in bf16: the replicas are bit-equal after a sync, and the model is the cast of its masters.
3. One rank trains a tiny Llama in bf16 over NCCL: the loss falls; milliseconds of a step, and the part of a sync that
   the compute stream waited for.

Without a GPU it says so and exits 0. Every check runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, SYNC_INTERVAL = 8, 4
TOLERANCE = 2e-4  # of weights after 8 steps and 2 syncs in fp32: kernels round differently, Adam magnifies it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return 0
    if not torch.cuda.is_available():
        print("gpu_check: no GPU here, nothing was checked")
        return 0
    started = time.perf_counter()
    checks = [check_fp32_against_cpu(), check_bf16_replicas(), check_bf16_training()]
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "checks": checks,
    }
    for check in checks:
        print(f"{'passed' if check['passed'] else 'FAILED'}: {check['name']}: {check['numbers']}")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(check["passed"] for check in checks) else 1


def check_fp32_against_cpu() -> dict[str, Any]:
    """Weights of two replicas on one GPU against two CPU ranks."""
    on_gpu = run_workers("cuda", 2, "fp32")
    on_cpu = run_workers("cpu", 2, "fp32")
    worst = max(
        float((gpu - cpu).abs().max())
        for name, cpu in on_cpu[0]["masters"].items()
        for gpu in (on_gpu[0]["masters"][name],)
    )
    equal = same(on_gpu[0]["masters"], on_gpu[1]["masters"])
    numbers = {"largest difference": worst, "tolerance": TOLERANCE, "replicas bit-equal": equal}
    return {"name": "fp32 equals the CPU", "passed": worst < TOLERANCE and equal, "numbers": numbers}


def check_bf16_replicas() -> dict[str, Any]:
    """bf16: replicas bit-equal after a sync, model = cast(master)."""
    first, second = run_workers("cuda", 2, "bf16")
    numbers = {
        "masters bit-equal": same(first["masters"], second["masters"]),
        "anchors bit-equal": same(first["anchor"], second["anchor"]),
        "model is cast(master)": all(
            torch.equal(first["model"][name], master.bfloat16()) for name, master in first["masters"].items()
        ),
        "replicas read different data": first["losses"] != second["losses"],
    }
    return {"name": "bf16 replicas after a sync", "passed": all(numbers.values()), "numbers": numbers}


def check_bf16_training() -> dict[str, Any]:
    """One rank over NCCL."""
    (result,) = run_workers("nccl", 1, "bf16")
    losses = result["losses"]
    numbers = {
        "first loss": losses[0], "last loss": losses[-1], "ms per step": result["step_ms"],
        "exposed ms of a sync": result["exposed_ms"],
    }  # fmt: skip
    return {"name": "bf16 training over NCCL", "passed": losses[-1] < losses[0], "numbers": numbers}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def run_workers(device: str, world_size: int, precision: str) -> list[dict[str, Any]]:
    """What each of `world_size` processes found."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", device, str(rank), str(world_size), str(port), precision, folder]
            )
            for rank in range(world_size)
        ]
        try:
            codes = [process.wait(timeout=150) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"gpu_check: workers on {device} in {precision} ended with {codes}")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def worker(device: str, rank: str, world_size: str, port: str, precision: str, folder: str) -> None:
    """Trains on one rank and writes what it holds."""
    from megatron_edit.platform import CpuPlatform, CudaPlatform, Platform
    from megatron_edit.platform.base import ordered_gloo_backend

    class SharedGpu(CudaPlatform):
        """Several ranks on one GPU, which NCCL refuses: gloo between them, by way of the host."""

        backend = "gloo"

        def sync_backend(self) -> str:
            return ordered_gloo_backend()

    platforms: dict[str, type[Platform]] = {"cuda": SharedGpu, "nccl": CudaPlatform}
    platform = CpuPlatform() if device == "cpu" else platforms[device](0)  # type: ignore[call-arg]
    platform.initialize()
    store = dist.TCPStore("127.0.0.1", int(port), int(world_size), is_master=rank == "0")
    dist.init_process_group(
        platform.backend, store=store, rank=int(rank), world_size=int(world_size), timeout=timedelta(seconds=60)
    )
    torch.save(train(platform, int(world_size), precision), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def train(platform: Any, world_size: int, precision: str) -> dict[str, Any]:
    """STEPS steps with a sync every SYNC_INTERVAL; ends with the last sync completed."""
    from megatron_edit.testing.tiny import VOCABULARY, tiny_batch, tiny_config
    from megatron_edit.train.replica import build_replica, mesh_of
    from megatron_edit.train.step import TrainStep

    config = tiny_config(
        world_size, edit_num_replicas=world_size, edit_sync_interval=SYNC_INTERVAL, bf16=precision == "bf16",
        edit_pseudo_grad_clip=0.1, train_iters=STEPS,
    )  # fmt: skip
    mesh = mesh_of(config, platform)
    replica = build_replica(config, mesh, VOCABULARY)
    step = TrainStep(replica)
    losses, milliseconds, exposed = [], [], float("nan")
    for _ in range(STEPS):
        started = time.perf_counter()
        outcome = step.run(tiny_batch(config, mesh, 0), 1e-3)
        losses.append(float(outcome.loss_sum / outcome.tokens))
        milliseconds.append(1000 * (time.perf_counter() - started))
        for result in replica.engine.take_results():
            exposed = result.exposed_ms
    replica.engine.drain()
    assert replica.engine.last_decision is not None
    pieces = [(f"{m.key} {p.name}", p) for m in replica.engine.modules for p in m.slices]
    return {
        "losses": losses,
        "step_ms": sorted(milliseconds)[len(milliseconds) // 2],
        "exposed_ms": exposed,
        "norms": replica.engine.last_decision.norms.flatten().tolist(),
        "masters": {name: piece.master.cpu().clone() for name, piece in pieces},
        "model": {name: piece.model.detach().cpu().clone() for name, piece in pieces},
        "anchor": {str(index): anchor.cpu() for index, anchor in enumerate(replica.engine.state.anchor)},
    }


if __name__ == "__main__":
    sys.exit(main())
