"""What a step costs, as ratios of things run in turn in one script: `make bench`, or `python benchmarks/step_cost.py`.

1. one rank     a step of this package against plain PyTorch of the same shape (benchmarks/plain_llama.py)
2. two replicas a local EDiT step against a baseline step whose collectives between replicas are off
3. two replicas a baseline step against megatron-core's own data parallelism over the same two ranks

Steps of the two things take turns, so what else the machine does meets both. The ratio is that of the medians, beside
it that of the minima; the load average tells how busy the machine was (on 2 cores it should be well below 2).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from plain_llama import PlainLlamaShape, PlainTrainer

from megatron_edit.config.schema import Config
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import tiny_config

LIMITS = {"plain PyTorch": 1.2, "baseline without collectives": 1.03, "megatron-core": 1.05}
SHAPE = PlainLlamaShape()
Step = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each of the two things in a comparison")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    rows = [
        *run_ranks(against_plain, 1, arguments.steps, arguments.micro_batch_size, timeout_s=900)[0],
        *run_ranks(between_replicas, 2, arguments.steps, arguments.micro_batch_size, timeout_s=900)[0],
    ]
    print(f"{'ours':32}{'against':32}{'ms':>9}{'ms':>9}{'ratio':>8}{'minima':>8}{'limit':>7}")
    for row in rows:
        print(
            f"{row['ours']:32}{row['against']:32}{row['ours_ms']:9.1f}{row['against_ms']:9.1f}{row['ratio']:8.3f}"
            f"{row['ratio_of_minima']:8.3f}{row['limit']:7.2f}"
        )
    print(f"load average over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.output:
        arguments.output.write_text(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    return 0


def config_of(world_size: int, micro_batch_size: int, **settings: Any) -> Config:
    """The shape of the comparison; one micro-batch a step and rank."""
    return tiny_config(
        world_size,
        num_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        ffn_hidden_size=SHAPE.ffn_hidden_size,
        num_attention_heads=SHAPE.num_attention_heads,
        num_query_groups=SHAPE.num_query_groups,
        seq_length=SHAPE.seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * world_size,
        edit_num_replicas=world_size,
        edit_sync_interval=1_000_000,
        **settings,
    )


def random_batch(micro_batch_size: int) -> dict[str, torch.Tensor]:
    samples = torch.randint(SHAPE.vocab_size, (micro_batch_size, SHAPE.seq_length + 1))
    return {
        "tokens": samples[:, :-1].contiguous(),
        "labels": samples[:, 1:].contiguous(),
        "loss_mask": torch.ones(micro_batch_size, SHAPE.seq_length),
    }


def against_plain(rank: int, world_size: int, steps: int, micro_batch_size: int) -> list[dict[str, Any]]:
    """Comparison 1."""
    from megatron_edit.platform import get_platform
    from megatron_edit.train.replica import build_replica, mesh_of
    from megatron_edit.train.step import TrainStep

    batch = random_batch(micro_batch_size)
    plain = PlainTrainer(SHAPE)
    config = config_of(1, micro_batch_size, edit_method="baseline")
    step = TrainStep(build_replica(config, mesh_of(config, get_platform("cpu")), SHAPE.vocab_size))
    return [
        compare(
            ("one rank", lambda: step.run([batch], 3e-4)),
            ("plain PyTorch", lambda: plain.step(batch["tokens"], batch["labels"])),
            steps,
        )
    ]


def between_replicas(rank: int, world_size: int, steps: int, micro_batch_size: int) -> list[dict[str, Any]]:
    """Comparisons 2 and 3; each rank takes the same steps, so that collectives meet."""
    from megatron_edit.platform import get_platform
    from megatron_edit.train.replica import build_replica, mesh_of
    from megatron_edit.train.step import TrainStep

    torch.manual_seed(rank)
    batch = random_batch(micro_batch_size)
    edit = config_of(world_size, micro_batch_size)
    baseline = config_of(world_size, micro_batch_size, edit_method="baseline")
    mesh = mesh_of(edit, get_platform("cpu"))
    local = TrainStep(build_replica(edit, mesh, SHAPE.vocab_size))
    alone = TrainStep(build_replica(baseline, mesh, SHAPE.vocab_size))
    alone.replica.reducer.enabled = False
    trigger = alone.replica.engine.trigger
    trigger.warmup_steps = trigger.warmup_end = 0  # nor are token counts summed over the replicas
    together = TrainStep(build_replica(baseline, mesh, SHAPE.vocab_size))
    core = MegatronCoreStep(baseline, mesh)
    return [
        compare(
            ("local EDiT step", lambda: local.run([batch], 3e-4)),
            ("baseline without collectives", lambda: alone.run([batch], 3e-4)),
            steps,
        ),
        compare(
            ("baseline", lambda: together.run([batch], 3e-4)), ("megatron-core", lambda: core.run(batch)), steps
        ),
    ]


class MegatronCoreStep:
    """megatron-core's DDP and distributed optimizer over all ranks, as a user of it alone would set them up."""

    def __init__(self, config: Config, mesh: Any) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.process_groups_config import ProcessGroupCollection

        from megatron_edit.model.init import initialize_weights
        from megatron_edit.model.llama import build_model_chunks, transformer_config
        from megatron_edit.train.replica import build_optimizer

        groups = ProcessGroupCollection.use_mpu_process_groups()  # data parallel groups of the whole world
        groups.tp_dp_cp = groups.intra_dist_opt = dist.new_group()
        megatron_config = transformer_config(
            config.model, config.parallel, params_dtype=torch.float32, device_type="cpu"
        )
        (model,) = build_model_chunks(config.model, megatron_config, SHAPE.vocab_size, groups)
        initialize_weights([model], config.model, SHAPE.vocab_size, 1, groups.tp)
        self.chunk = DistributedDataParallel(
            megatron_config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                use_distributed_optimizer=True,
            ),
            model,
            pg_collection=groups,
        )
        self.optimizer = build_optimizer(config, [self.chunk], groups)
        self.groups = groups
        megatron_config.grad_scale_func = self.optimizer.scale_loss
        megatron_config.finalize_model_grads_func = finalize_model_grads
        megatron_config.no_sync_func = self.chunk.no_sync

    def run(self, batch: dict[str, torch.Tensor]) -> None:
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        from megatron_edit.model.loss import forward_step

        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=self.chunk,
            num_microbatches=1,
            seq_length=SHAPE.seq_length,
            micro_batch_size=batch["tokens"].shape[0],
            pg_collection=self.groups,
        )
        self.optimizer.step()


def compare(ours: tuple[str, Step], against: tuple[str, Step], steps: int, warmup: int = 5) -> dict[str, Any]:
    """Times both, a step each in turn; which one goes first alternates."""
    times: dict[str, list[float]] = {ours[0]: [], against[0]: []}
    for index in range(warmup + steps):
        for name, step in (ours, against) if index % 2 else (against, ours):
            dist.barrier()
            started = time.perf_counter()
            step()
            if index >= warmup:
                times[name].append(1000 * (time.perf_counter() - started))
    first, second = times[ours[0]], times[against[0]]
    return {
        "ours": ours[0],
        "against": against[0],
        "ours_ms": statistics.median(first),
        "against_ms": statistics.median(second),
        "ratio": statistics.median(first) / statistics.median(second),
        "ratio_of_minima": min(first) / min(second),
        "limit": LIMITS[against[0]],
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
