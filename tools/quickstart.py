#!/usr/bin/env python
"""What `make quickstart` does once everything is installed: text, tokenizer, tokens, training.

Each step is a command that you could type; it is printed before it runs. All output goes to runs/quickstart.
usage: python tools/quickstart.py [--max-bytes N] [any flag of pretrain_llama.py ...]
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_edit.config import ResolvedConfig, load_config, resolve

FOLDER = Path("runs/quickstart")
CONFIG = "examples/quickstart.yaml"
VOCABULARY = 2048
RANKS = 4
TRAINING = ["--device", "cpu", "--config", CONFIG]
MESH = ["--edit-num-replicas", "2", "--tensor-model-parallel-size", "2"]
EDIT = [*MESH, "--edit-sync-interval", "8"]


def run(*words: object, program: str = "python") -> str:
    """Shows and runs one command; returns what it printed when it is a step of seconds."""
    line = [str(word) for word in words]
    print(f"\n$ {shlex.join([program, *line])}", flush=True)
    executable = [sys.executable] if program == "python" else [str(Path(sys.executable).with_name(program))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # ranks share the cores
    captured = subprocess.PIPE if program == "python" else None  # training keeps the terminal
    result = subprocess.run([*executable, *line], env=environment, stdout=captured, text=True)
    print(result.stdout or "", end="", flush=True)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return result.stdout or ""


def prepare(max_bytes: int) -> None:
    """Corpus, tokenizer, tokens."""
    text, tokenizer = FOLDER / "corpus.jsonl", FOLDER / "tokenizer"
    run("tools/build_quickstart_corpus.py", "--output", text, "--max-bytes", max_bytes)
    run("tools/train_tokenizer.py", "--input", text, "--output-prefix", tokenizer, "--vocab-size", VOCABULARY)
    run(
        "tools/preprocess_data.py", "--input", text, "--output-prefix", FOLDER / "corpus",
        "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{tokenizer}.model", "--append-eod",
    )  # fmt: skip


def unigram_loss(config: ResolvedConfig) -> float:
    """Nats per token of a unigram model, on the tokens that the evaluation predicts."""
    tokens = config.evaluation.eval_iters * config.training.global_batch_size * config.model.seq_length
    corpus, split = config.data.data_path[0], config.data.split
    printed = run("tools/unigram_loss.py", "--data-path", corpus, "--split", split, "--max-tokens", tokens)
    found = re.search(r"unigram loss ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1])


def losses(folder: str) -> tuple[float, float]:
    """(first training loss, last validation loss) in the metrics of the run, in nats per token."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    training = [r["lm_loss"] for r in records if r["kind"] == "train"]
    validation = [r["lm_loss"] for r in records if r["kind"] == "eval" and r["split"] == "validation"]
    return training[0], validation[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Other flags go to pretrain_llama.py, for example --train-iters 100.", allow_abbrev=False
    )
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="of text (default 4000000)")
    args, extra = parser.parse_known_args()
    config = resolve(load_config([*TRAINING, *EDIT, *extra]), RANKS, RANKS, "cpu")
    assert config.checkpoint.save is not None

    prepare(args.max_bytes)
    unigram = unigram_loss(config)
    started = time.monotonic()
    run("--nproc-per-node", RANKS, "pretrain_llama.py", *TRAINING, *EDIT, *extra, program="torchrun")
    minutes = (time.monotonic() - started) / 60
    first, validation = losses(config.checkpoint.save)

    print(f"""
Done. Two replicas of a small Llama, each split over two ranks by tensor parallelism, trained on this machine's CPU
for {minutes:.1f} minutes. They met every {config.edit.edit_sync_interval} steps (the lines that begin with "sync").

    first training loss         {first:.3f} nats per token
    a unigram model             {unigram:.3f}  (knows how often each token occurs, on the same validation text)
    validation loss at the end  {validation:.3f}

Try next, after `source .venv/bin/activate`:
    the same with gradients averaged in every step, the usual data parallelism:
      torchrun --nproc-per-node {RANKS} pretrain_llama.py {shlex.join([*TRAINING, *MESH])} \\
          --edit-sync-interval 0 --save {FOLDER}/baseline
    every setting with its source:
      WORLD_SIZE=4 python pretrain_llama.py {shlex.join([*TRAINING, *EDIT])} --print-config
    your own text: docs/getting-started.md.   The method: docs/method.md.   A cluster: examples/slurm.
""")
    if not validation < unigram:
        sys.exit("the validation loss is not below that of the unigram model")


if __name__ == "__main__":
    main()
