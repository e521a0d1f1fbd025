#!/usr/bin/env python
"""Conversion of a model of 1B shape (random weights), both ways: seconds and peak memory, beside what the safetensors
library needs to read and write the same bytes, in one run.

Each is a process of its own, its imports included, and makes its files durable. "ratio" is to the time of the library.
Exit code 1: a conversion took more than 3 times as long, or 2 GB of memory.

python benchmarks/conversion.py [--preset 1b] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VOCABULARY = 32000
LARGEST_RATIO, LARGEST_BYTES = 3.0, 2e9

_LIBRARY = """
import glob, os, sys
from safetensors import safe_open
from safetensors.torch import load_file, save_file
os.makedirs(sys.argv[2])
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    target = sys.argv[2] + "/" + os.path.basename(path)
    save_file(load_file(path), target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
"""


def make_model(folder: Path, preset: str) -> int:
    """Random bfloat16 weights in shards; returns their bytes."""
    import torch

    from megatron_edit.config.presets import PRESETS
    from megatron_edit.config.resolved import ResolvedModel
    from megatron_edit.convert.architectures import ARCHITECTURES
    from megatron_edit.convert.hf_config import write_config
    from megatron_edit.convert.safetensors_file import Writer
    from megatron_edit.tables.parameters import full_parameter_shapes

    settings = PRESETS[preset]
    model = ResolvedModel(
        **settings, kv_channels=settings["hidden_size"] // settings["num_attention_heads"],
        max_position_embeddings=settings["seq_length"],
    )  # fmt: skip
    llama = ARCHITECTURES["llama"]
    folder.mkdir(parents=True)
    config = write_config(llama, model, VOCABULARY, "bfloat16", {})
    (folder / "config.json").write_text(json.dumps(config))
    shapes = full_parameter_shapes(model, VOCABULARY)
    parts = {
        name: shape
        for row in llama.rows_of(model, VOCABULARY)
        for name, shape in zip(row.theirs, row.transform.shapes(shapes[row.ours], model), strict=True)
    }
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in parts.items():
        if sum(math.prod(one) for one in shards[-1].values()) > 4e8:
            shards.append({})
        shards[-1][name] = shape
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer = Writer(folder / file, {name: (shape, torch.bfloat16) for name, shape in shard.items()})
        for name, shape in shard.items():
            writer.write(name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02))
            places[name] = file
        writer.close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return 2 * sum(math.prod(shape) for shape in parts.values())


def measure(words: list[str]) -> tuple[float, float]:
    """Seconds, and bytes of the largest resident set, of the command."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return time.monotonic() - started, usage.ru_maxrss * 1024.0


def main() -> int:
    """Prints one line for each; returns 1 when a conversion needs more than it may."""
    parser = argparse.ArgumentParser(description="Measures the conversion of a large model.")
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--folder", type=Path, help="where to write some 8 GB; default: the temporary folder")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        size = make_model(work / "hf", arguments.preset)
        tool = str(ROOT / "tools" / "convert_checkpoint.py")
        commands = {
            "safetensors read and write": ["-c", _LIBRARY, str(work / "hf"), str(work / "copy")],
            "hf-to-megatron": [tool, "hf-to-megatron", *_between(work / "hf", work / "megatron")],
            "megatron-to-hf": [tool, "megatron-to-hf", *_between(work / "megatron", work / "back")],
        }
        print(f"{arguments.preset}: {size / 1e9:.2f} GB of bfloat16, vocabulary {VOCABULARY}")
        failed, library = False, 0.0
        for name, words in commands.items():
            seconds, peak = measure(words)
            line = f"{name:<28} {seconds:6.1f} s   peak {peak / 1e9:5.2f} GB"
            if library:
                line += f"   ratio {seconds / library:.2f}"
                failed |= peak > LARGEST_BYTES or seconds / library > LARGEST_RATIO
            else:
                library = seconds
            print(line, flush=True)
        measure(["-c", _COMPARE, str(work / "hf"), str(work / "back")])
        print("the round trip is bit-equal")
        print(f"load average over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        return int(failed)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _between(source: Path, target: Path) -> list[str]:
    return ["--input", str(source), "--output", str(target), "--quiet"]


_COMPARE = """
import sys
from pathlib import Path
from megatron_edit.convert.hugging_face import HuggingFaceWeights
import torch
one, other = (HuggingFaceWeights(Path(folder)) for folder in sys.argv[1:])
for name in one.shapes:
    assert torch.equal(one.read(name).view(torch.int16), other.read(name).view(torch.int16)), name
"""

if __name__ == "__main__":
    sys.exit(main())
