"""Small checkpoints of every method, written by earlier versions: what a newer one must still load.

    python -m tests.dist.saved_checkpoints    writes those of `CASES` that tests/fixtures/checkpoints has not yet

They are kept as they are: a change of the code that needs other ones is a change of the format. Each archive also holds
what the run that wrote it saw when it went on. Which release of megatron-core wrote one makes no difference to what loads it.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.dist.checkpoint_runs import ITERATIONS, Part, run_part

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
SMALL = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": False,
    "edit_num_replicas": 2,
    "edit_sync_interval": 4,
}
# name -> ranks, settings, iteration after which it was saved: in the middle of an interval, averages under way
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "baseline": (2, {"edit_method": "baseline"}, 6),
    "post-local-sgd": (2, {"edit_method": "post-local-sgd"}, 6),
    "slowmo": (2, {"edit_method": "slowmo"}, 6),
    "diloco": (2, {"edit_method": "diloco"}, 6),
    "co2": (2, {"edit_method": "co2"}, 6),
    "co2-sharded": (2, {"edit_method": "co2-sharded"}, 6),
    "edit": (2, {"edit_method": "edit"}, 6),
    "edit-megatron-core-0.19": (2, {"edit_method": "edit"}, 6),  # written under 0.19.2, the others under 0.16.1
    "edit-int8-offload": (2, {"edit_method": "edit", "edit_comm_dtype": "int8", "edit_cpu_offload": True}, 6),
    "a-edit": (2, {"edit_method": "a-edit", "edit_sync_time": 1e-9}, 6),
    "streaming": (2, {"edit_method": "streaming", "edit_num_fragments": 2}, 7),
    "streaming-delayed": (2, {"edit_method": "streaming", "edit_num_fragments": 2, "edit_sync_delay": 2}, 7),
    "streaming-delayed-pp2": (
        4,
        {"edit_method": "streaming", "edit_sync_delay": 1, "pipeline_model_parallel_size": 2},
        6,
    ),
}


def settings_of(name: str) -> Mapping[str, Any]:
    """Settings of the run that wrote the checkpoint `name`."""
    return {**SMALL, **CASES[name][1]}


def extract(name: str, folder: Path) -> Path:
    """The checkpoint folder `name`, unpacked below `folder`; `after.json` in it says how its run went on."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def write(name: str) -> None:
    """Trains, saves, goes on from the checkpoint, and keeps it with the losses that followed."""
    world_size, _, iteration = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch, name)
        run_part(Part(world_size, settings_of(name), 0, iteration, save=saved))
        (saved / ".lock").unlink()
        after = run_part(Part(world_size, settings_of(name), iteration, ITERATIONS, load=saved))
        (saved / "after.json").write_text(json.dumps({"losses": after.losses, "grad_norms": after.grad_norms}))
        with tarfile.open(FOLDER / f"{name}.tar.xz", "x:xz") as archive:
            archive.add(saved, name)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not (FOLDER / f"{case}.tar.xz").exists():
            write(case)
            print(f"wrote {FOLDER / case}.tar.xz")
