"""The command line of tools/evaluate.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_edit.config.paths import PathParser
from megatron_edit.config.schema import ConfigError
from megatron_edit.data.indexed import Manifest
from megatron_edit.inference.perplexity import corpus_tokens, perplexity, text_tokens
from megatron_edit.inference.start import Started, add_flags, run
from megatron_edit.inference.tasks import PAPER_TASKS, run_tasks

_MAIN_METRICS = ("acc", "acc_norm", "exact_match", "word_perplexity", "bits_per_byte")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = PathParser(description="Perplexity and lm-eval tasks of a checkpoint.", allow_abbrev=False)
    add_flags(parser)
    corpus = parser.add_argument_group("perplexity")
    corpus.add_argument("--data-path", metavar="PREFIX", help="a corpus; see --split")
    corpus.add_argument("--split", default="969,30,1", help="shares of training, validation and test, as in training")
    corpus.add_argument("--split-name", choices=("train", "valid", "test"), default="valid")
    corpus.add_argument("--text-file", type=Path, metavar="FILE", help="a text, as one document")
    corpus.add_argument("--seq-length", type=int, help="tokens of a window; default: the model's training length")
    corpus.add_argument("--max-tokens", type=int, metavar="N", help="predict only the first N")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", help=f"names with commas; 'paper' stands for {','.join(PAPER_TASKS)}")
    tasks.add_argument("--task-data", type=Path, metavar="DIR", help="TASK/SPLIT.jsonl, mmlu/SUBJECT/SPLIT.jsonl")
    tasks.add_argument("--task-folder", type=Path, metavar="DIR", help="further task definitions, lm-eval's YAML")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples before a question")
    tasks.add_argument("--limit", type=int, metavar="N", help="questions of each task")
    tasks.add_argument("--online", action="store_true", help="let lm-eval download data")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args(argv)
    return run(arguments, lambda started: _evaluate(arguments, started))


def _evaluate(arguments: argparse.Namespace, started: Started) -> None:
    if not (arguments.data_path or arguments.text_file or arguments.tasks):
        raise ConfigError(["nothing to evaluate: give --data-path, --text-file or --tasks"])
    seq_length = arguments.seq_length or started.weights.model.seq_length
    longest = started.weights.model.max_position_embeddings
    if longest is not None and seq_length > longest:
        raise ConfigError([f"--seq-length {seq_length} is above the {longest} positions of the model"])
    results: dict[str, Any] = {
        "load": str(arguments.load),
        "folder": str(started.weights.folder),
        "weights": started.weights.origin.get("weights", "weights"),
        "iteration": started.weights.origin.get("iteration"),
        "perplexity": [],
        "tasks": {},
    }
    options = {"seq_length": seq_length, "batch_size": arguments.batch_size, "max_tokens": arguments.max_tokens}
    if arguments.data_path:
        tokens = corpus_tokens(arguments.data_path, arguments.split, arguments.split_name)
        source = f"{arguments.data_path} {arguments.split_name}"
        manifest = Manifest.read(arguments.data_path)
        if manifest is not None and manifest.tokenizer_fingerprint != started.tokenizer.fingerprint:
            started.say(
                f"*** {arguments.data_path} was made with {manifest.tokenizer} (vocabulary {manifest.vocab_size}), the "
                f"model's tokenizer is {started.tokenizer.name} ({started.tokenizer.vocab_size}): the loss means "
                "something only if their ids are the same, as after a conversion ***"
            )
        results["perplexity"].append(perplexity(started, tokens, source=source, **options).record)
    if arguments.text_file:
        tokens, size = text_tokens(started, arguments.text_file)
        found = perplexity(started, tokens, source=str(arguments.text_file), text_bytes=size, **options)
        results["perplexity"].append(found.record)
    if arguments.tasks:
        names = [name for word in arguments.tasks.split(",") for name in (PAPER_TASKS if word == "paper" else (word,))]
        results["tasks"] = run_tasks(
            started, names, data_folder=arguments.task_data, task_folder=arguments.task_folder,
            num_fewshot=arguments.num_fewshot, limit=arguments.limit, batch_size=arguments.batch_size,
            online=arguments.online,
        )  # fmt: skip
    for line in table(results):
        started.say(line)
    if arguments.output is not None and started.is_first_rank:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> list[str]:
    """The results for reading: one line each."""
    lines = [f"{results['folder']} ({results['weights']})"]
    for one in results["perplexity"]:
        bits = f", {one['bits_per_byte']:.4f} bits a byte" if one["bits_per_byte"] is not None else ""
        lines.append(
            f"loss {one['loss']:.6f} nats a token, perplexity {one['perplexity']:.4f}{bits}, "
            f"{one['tokens']} tokens in windows of {one['seq_length']} (--seq-length) | {one['source']}"
        )
    if results["tasks"]:
        lines.append(f"{'task':<32} {'metric':<16} {'value':>8} {'stderr':>8} {'questions':>9}")
    for task, numbers in sorted(results["tasks"].items()):
        for metric in (name for name in _MAIN_METRICS if name in numbers):
            error = numbers.get(f"{metric}_stderr")
            spread = f"{error:>8.4f}" if error is not None else " " * 8
            lines.append(f"{task:<32} {metric:<16} {numbers[metric]:>8.4f} {spread} {numbers.get('questions', ''):>9}")
    return lines
