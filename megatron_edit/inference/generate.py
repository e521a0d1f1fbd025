"""The command line of tools/generate.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.config.paths import PathParser
from megatron_edit.config.schema import ConfigError
from megatron_edit.inference.sampling import Sampling
from megatron_edit.inference.start import Started, add_flags, run


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = PathParser(description="Text from a checkpoint or a Hugging Face folder.", allow_abbrev=False)
    add_flags(parser, parse_special_tokens=True)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the most likely")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens; 0 = all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that reach P together"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts of each prompt")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at a time")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="also write prompt, text and ids there")
    arguments = parser.parse_args(argv)
    return run(arguments, lambda started: _generate(arguments, started))


def _generate(arguments: argparse.Namespace, started: Started) -> None:
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    texts = [*arguments.prompt, *_lines(arguments.prompt_file)]
    prompts = [started.encode(text) for text in texts for _ in range(arguments.num_samples)]
    longest = started.weights.model.max_position_embeddings
    problems = [*sampling.problems(), *_count_problems(arguments)]
    if not texts:
        problems.append("no --prompt and no --prompt-file")
    for prompt, text in zip(prompts[:: arguments.num_samples or 1], texts, strict=False):
        if not prompt:
            problems.append(f"--prompt {text!r} has no tokens; --add-bos would begin it with the begin id")
        elif max(prompt) >= started.model.vocab_size:
            problems.append(f"--prompt {text!r} has id {max(prompt)}, the model has {started.model.vocab_size} ids")
        elif longest is not None and len(prompt) + arguments.max_new_tokens > longest:
            problems.append(
                f"{len(prompt)} tokens of the prompt and --max-new-tokens {arguments.max_new_tokens} are more than the "
                f"{longest} positions of the model: {max(longest - len(prompt), 0)} new ones would work"
            )
    if problems:
        raise ConfigError(problems)
    records = []
    for first in range(0, len(prompts), arguments.batch_size):
        batch = prompts[first : first + arguments.batch_size]
        new = started.model.generate(batch, arguments.max_new_tokens, sampling, started.stop_ids, first_sequence=first)
        for number, (prompt, ids) in enumerate(zip(batch, new, strict=True), first):
            text = texts[number // arguments.num_samples]
            continuation = _continuation(started, prompt, ids)
            records.append({"prompt": text, "text": continuation, "prompt_ids": prompt, "ids": ids})
            started.say(f"{text}{continuation}")
    if arguments.output is not None and started.is_first_rank:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        arguments.output.write_text("".join(lines), encoding="utf-8")


def _continuation(started: Started, prompt: list[int], ids: list[int]) -> str:
    """What the new ids add to the prompt's text; decoded alone they would lose a blank at their beginning."""
    tokenizer = started.tokenizer
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *_known(started, ids)])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(_known(started, ids))


def _known(started: Started, ids: list[int]) -> list[int]:
    """Without ids of rows that no token uses."""
    return [i for i in ids if i < started.tokenizer.vocab_size]


def _count_problems(arguments: argparse.Namespace) -> list[str]:
    counts = {"--max-new-tokens": arguments.max_new_tokens, "--num-samples": arguments.num_samples,
              "--batch-size": arguments.batch_size}  # fmt: skip
    return [f"{flag} {value} is below 1" for flag, value in counts.items() if value < 1]


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--prompt-file {path} cannot be read: {error}"]) from None
