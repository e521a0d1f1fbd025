"""Preprocessing against Hugging Face tokenizers' own batch encoding, its memory, and random reads against numpy.

python benchmarks/data.py [--megabytes 64] [--turns 2]
The text is generated; both encode the same part of it in turns, each with as many threads or processes as there are
cores, so that a busy machine slows both. Bounds are those of the project's aims; the last lines say what was reached.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORES = 2
VOCABULARY = 16_384
TOKENIZER = "HuggingFaceTokenizer"


def generated_texts(megabytes: float) -> Iterator[str]:
    """Documents of 1 to 8 kB: lines of the text that every Python has, drawn at random, some words replaced by others
    that no document had before (a tokenizer's cache of words would make the rest too easy)."""
    from megatron_edit.corpora.quickstart import quickstart_documents

    draw = random.Random(1)
    lines = [line for _, text in quickstart_documents() for line in text.splitlines(keepends=True) if line.strip()]
    left = megabytes * 1e6
    while left > 0:
        size, parts = draw.randrange(1000, 8000), []
        while size > 0:
            line = draw.choice(lines)
            if draw.random() < 0.2:
                line = f"{draw.getrandbits(40):x} {line}"
            parts.append(line)
            size -= len(line)
        text = "".join(parts)
        left -= len(text.encode())
        yield text


def write_parts(folder: Path, megabytes: float, turns: int) -> list[Path]:
    """JSON lines, one file for each turn."""
    texts = generated_texts(megabytes)
    paths = []
    for turn in range(turns):
        path = folder / f"{turn}.jsonl"
        with open(path, "w", encoding="utf-8") as stream:
            size = 0
            for text in texts:
                stream.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                if size >= megabytes * 1e6 / turns:
                    break
        paths.append(path)
    return paths


def train_tokenizer(folder: Path) -> Path:
    """A byte-level BPE, as Llama 3 has one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(generated_texts(4), trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder / "tokenizer.json"


# ---- what is measured, each in a process of its own ------------------------------------------------------------------


def hugging_face(path: str, tokenizer: str) -> dict[str, float]:
    """The library's batch encoding of the texts of a file, read as fast as Python reads JSON lines."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(tokenizer)
    backend.encode_batch(["start the threads"] * 100)
    tokens, seconds = 0, time.perf_counter()
    with open(path, "rb") as stream:
        batch: list[str] = []
        for line in stream:
            batch.append(json.loads(line)["text"])
            if len(batch) == 1000:
                tokens += sum(len(e.ids) for e in backend.encode_batch(batch, add_special_tokens=False))
                batch = []
        tokens += sum(len(e.ids) for e in backend.encode_batch(batch, add_special_tokens=False))
    return {"tokens": tokens, "seconds": time.perf_counter() - seconds}


def ours(path: str, tokenizer: str) -> dict[str, float]:
    """tools/preprocess_data.py: reading, decoding, encoding, the end ids, files made durable; and its start."""
    prefix = str(Path(path).with_suffix(""))
    seconds = time.perf_counter()
    command = [
        sys.executable, "tools/preprocess_data.py", "--input", path, "--output-prefix", prefix, "--append-eod",
        "--tokenizer-type", TOKENIZER, "--tokenizer-model", tokenizer, "--workers", str(CORES),
        "--log-interval", "1000000000",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak = PeakMemory(process.pid)
    assert process.returncode == 0
    seconds = time.perf_counter() - seconds
    manifest = json.loads(Path(f"{prefix}_text_document.manifest.json").read_text())
    end_ids = manifest["documents"]
    return {"tokens": manifest["tokens"] - end_ids, "seconds": seconds, "peak": peak.stop(), "documents": end_ids}


class PeakMemory:
    """Largest sum of resident memory of a process and all below it, in bytes, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._process, self._done, self.peak = psutil.Process(pid), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        import psutil

        while not self._done.wait(0.1):
            try:
                family = [self._process, *self._process.children(recursive=True)]
                self.peak = max(self.peak, sum(process.memory_info().rss for process in family))
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak


def random_reads(prefix: str, tokenizer: str) -> dict[str, float]:
    """Samples/s of 4,096 tokens in random order: from our dataset, and by hand from a numpy memmap; samples/s of 32
    tokens from our loader against what the tiny model's step takes."""
    import numpy as np
    import torch

    from megatron_edit.config.batch_schedule import BatchSchedule
    from megatron_edit.corpora.preprocess import TokenizerSpec
    from megatron_edit.data.blend import resolve_sources
    from megatron_edit.data.datasets import build_split
    from megatron_edit.data.loader import MicrobatchLoader, RankPlace
    from megatron_edit.testing.ranks import run_ranks

    torch.set_num_threads(1)
    source = resolve_sources(train_data_path=[prefix])["train"]
    assert source is not None
    spec = TokenizerSpec(TOKENIZER, tokenizer).build()
    split = build_split(source, seq_length=4096, tokenizer=spec)
    (dataset,) = split.datasets
    order = split.training_order(1)
    count = min(len(dataset), 1500)
    picked = [order[k][1] for k in range(count)]
    memory = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")

    def by_hand(sample: int) -> None:
        piece = torch.from_numpy(memory[sample * 4096 : sample * 4096 + 4097].astype(np.int64))
        piece[:-1].contiguous(), piece[1:].contiguous()

    # Seconds of CPU from here on: the machine may be busy with something else.
    best = {"ours": float("inf"), "numpy": float("inf")}
    for _ in range(5):  # in turns
        for name, read in (("ours", dataset.__getitem__), ("numpy", by_hand)):
            seconds = time.process_time()
            for sample in picked:
                read(sample)
            best[name] = min(best[name], time.process_time() - seconds)

    short = build_split(source, seq_length=32, tokenizer=spec)
    loader = MicrobatchLoader(
        short.datasets, short.training_order(1), consumed_samples=0, place=RankPlace(1, 0, 1, 0, 2),
        batch=BatchSchedule.constant(8), num_workers=1,
    )  # fmt: skip
    loader.next_batch()
    loaded = float("inf")
    for _ in range(5):
        seconds = time.process_time()
        for _ in range(500):
            loader.next_batch()
        loaded = min(loaded, (time.process_time() - seconds) / 500 / 8)
    loader.close()
    (step_seconds,) = run_ranks(tiny_step_seconds, 1)
    return {"samples": count / best["ours"], "numpy": count / best["numpy"], "loader": 1 / loaded, "step": step_seconds}


def tiny_step_seconds(rank: int, world_size: int) -> float:
    """CPU of the fastest of 20 steps of the tests' tiny model, global batch 8, sequence 32."""
    from megatron_edit.testing.tiny import tiny_batch, tiny_config, tiny_replica
    from megatron_edit.train.step import TrainStep

    config = tiny_config(world_size)
    replica = tiny_replica(config)
    step, batch, best = TrainStep(replica), tiny_batch(config, replica.mesh, 0), float("inf")
    for _ in range(20):
        seconds = time.process_time()
        step.run(batch, 1e-3)
        best = min(best, time.process_time() - seconds)
    return best


MEASUREMENTS = {"hugging_face": hugging_face, "ours": ours, "random_reads": random_reads}


def measured(name: str, *arguments: object) -> dict[str, Any]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "true",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    command = [sys.executable, __file__, "--measure", name, *map(str, arguments)]
    folder = Path(__file__).parents[1]
    result = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--megabytes", type=float, default=64, help="of text (default 64; 1000 for the stated numbers)")
    parser.add_argument("--turns", type=int, default=2, help="parts that both encode in turns (default 2)")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, *arguments = args.measure
        print(json.dumps(MEASUREMENTS[name](*arguments) | {"cpu": cpu_seconds()}))
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = write_parts(Path(folder), args.megabytes, args.turns)
        tokenizer = train_tokenizer(Path(folder))
        theirs, mine = [], []
        for path in paths:
            theirs.append(measured("hugging_face", path, tokenizer))
            mine.append(measured("ours", path, tokenizer))
            print(f"{path.name}: {rate(theirs[-1:]):,.0f} tokens/s, ours {rate(mine[-1:]):,.0f}", flush=True)
        assert [part["tokens"] for part in theirs] == [part["tokens"] for part in mine], "other tokens"
        reads = measured("random_reads", paths[0].with_name("0_text_document"), tokenizer)
    tokens = sum(part["tokens"] for part in mine)
    peak = max(part["peak"] for part in mine)
    print(f"\n{args.megabytes:g} MB of text, {tokens:,} tokens, {CORES} processes or threads, in {args.turns} turns")
    print(f"Hugging Face tokenizers, encode_batch   {rate(theirs):>12,.0f} tokens/s  {cpu(theirs):6.0f} s of CPU")
    print(f"tools/preprocess_data.py --workers {CORES}    {rate(mine):>12,.0f} tokens/s  {cpu(mine):6.0f} s of CPU")
    print(
        f"  ratio {rate(mine) / rate(theirs):.2f} (aim: at least 0.8); all processes together hold {peak / 1e6:.0f} MB"
    )
    needed = 8 / reads["step"]
    print("on one core:")
    print(f"random samples of 4,096 tokens: {reads['samples']:,.0f}/s, numpy memmap by hand {reads['numpy']:,.0f}/s")
    print(f"loader, samples of 32 tokens: {reads['loader']:,.0f}/s; the tiny model's step takes {needed:,.0f}/s")
    print(f"  ratio {reads['loader'] / needed:.1f} ({reads['samples'] / needed:.1f} for samples of 4,096 tokens)")


def rate(parts: list[dict[str, Any]]) -> float:
    return float(sum(part["tokens"] for part in parts) / sum(part["seconds"] for part in parts))


def cpu(parts: list[dict[str, Any]]) -> float:
    return float(sum(part["cpu"] for part in parts))


def cpu_seconds() -> float:
    """Of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
