"""Bytes that a rank keeps, per method: what `pretrain_llama.py` prints at the start, for all methods side by side.

    python benchmarks/memory.py [--hidden-size 256] [--num-layers 8]

Counted from the tensors of 4 ranks, 2 replicas of 2 shards each, before and after two syncs; the buffers of the sync
must not grow in between. On the CPU in fp32; in bf16 the weights halve and fp32 masters are added to the optimizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_edit.checkpoint.training_state import TrainingState
from megatron_edit.log.lines import format_bytes
from megatron_edit.tables.methods import METHODS
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import VOCABULARY, tiny_batch, tiny_config, tiny_replica
from megatron_edit.train.memory import KINDS, memory_table
from megatron_edit.train.step import TrainStep

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"edit_method": name} for name, row in METHODS.items() if row.equal_steps},
    "streaming, delay 2": {"edit_method": "streaming", "edit_sync_delay": 2},
    "edit, offload": {"edit_cpu_offload": True},
    "edit, int8": {"edit_comm_dtype": "int8"},
    "edit, sublayer": {"edit_modules": "sublayer"},
    "edit, all prefetched": {"edit_prefetch_depth": 1000},
}


def measure(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[dict[str, int], int]:
    """(bytes by kind at the start, bytes of the sync's buffers after two syncs) of this rank."""
    config = tiny_config(world_size, edit_num_replicas=2, edit_sync_interval=4, **settings)
    replica = tiny_replica(config)
    state = TrainingState(replica.engine.state, replica.optimizer, config.model, VOCABULARY)
    table = memory_table(replica, state).bytes
    step = TrainStep(replica)
    for iteration in range(10):
        step.run(tiny_batch(config, replica.mesh, iteration), 1e-3)
    return table, replica.engine.buffers.allocated_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=8)
    arguments = parser.parse_args()
    size = {"hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers, "ffn_hidden_size": None}
    print("| method | " + " | ".join(KINDS) + " |")
    print("|---|" + "---|" * len(KINDS))
    for name, settings in VARIANTS.items():
        table, after = run_ranks(measure, 4, {**size, **settings})[0]
        print(f"| `{name}` | " + " | ".join(format_bytes(table[kind]) for kind in KINDS) + " |", flush=True)
        assert after == table["sync buffers"], f"{name}: the buffers have grown to {after} bytes"


if __name__ == "__main__":
    main()
