"""Tasks of lm-eval (extra `eval`) on a model of this program, offline: the questions come from local files.

lm-eval's own definitions say how a question is put; only where its data is read from is changed.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_edit.data.errors import DataError
from megatron_edit.inference.sampling import Sampling
from megatron_edit.inference.start import Started

# The eight of arXiv 2412.07210
PAPER_TASKS = ("mmlu", "arc_easy", "arc_challenge", "hellaswag", "piqa", "commonsense_qa", "openbookqa", "winogrande")
_SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split", "dev": "fewshot_split"}
_MAX_NEW_TOKENS = 256


def run_tasks(
    started: Started, tasks: Sequence[str], *, data_folder: Path | None, task_folder: Path | None,
    num_fewshot: int | None, limit: int | None, batch_size: int, online: bool,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Numbers of each task by metric, from `lm_eval.simple_evaluate`. Raises DataError for what is missing.

    `data_folder`: TASK/SPLIT.jsonl, for mmlu mmlu/SUBJECT/SPLIT.jsonl, rows as the task's own data set has them.
    `task_folder`: further definitions in lm-eval's YAML. `limit`: questions of each task.
    """
    if not online:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError(f"--tasks needs lm-eval ({error}): pip install -e '.[eval]'") from None
    if task_folder is not None and not task_folder.is_dir():
        raise DataError(f"--task-folder {task_folder} is not a folder")
    if data_folder is not None and not data_folder.is_dir():
        raise DataError(f"--task-data {data_folder} is not a folder")
    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    with tempfile.TemporaryDirectory() as scratch:
        specifications = [
            one
            for name in tasks
            for one in _specifications(name, manager.task_index, data_folder, Path(scratch), task_folder)
        ]
        try:
            found = lm_eval.simple_evaluate(
                model=_language_model(started, batch_size), tasks=specifications, num_fewshot=num_fewshot,
                limit=limit, task_manager=manager, bootstrap_iters=1000, log_samples=False,
            )  # fmt: skip
        except (ConnectionError, FileNotFoundError, KeyError, ValueError) as error:
            raise DataError(f"lm-eval: {type(error).__name__}: {error}") from error
    return _numbers(found or {})


def _specifications(
    name: str, index: Any, data_folder: Path | None, scratch: Path, task_folder: Path | None = None
) -> list[str]:
    """What lm-eval is given for the task: its name, or YAML files that read from `data_folder`.

    A task of `task_folder` that has no data there names its own.
    """
    if data_folder is None:
        return [name]
    parts = _parts(data_folder)
    wanted = {part: folder for part, folder in parts.items() if part == name or folder.parent == data_folder / name}
    if wanted:
        return [_local(part, folder, index, scratch) for part, folder in wanted.items()]
    entry = index.get(name)
    path = None if entry is None else entry.yaml_path
    if entry is None or (task_folder is not None and path and task_folder.resolve() in Path(path).resolve().parents):
        return [name]
    raise DataError(f"--task-data {data_folder} has no folder {name}; it has {', '.join(sorted(parts)) or 'none'}")


def _parts(data_folder: Path) -> dict[str, Path]:
    """Folders with rows by the task's name: TASK, and TASK_SUBJECT for TASK/SUBJECT."""
    found: dict[str, Path] = {}
    for folder in sorted(path for path in data_folder.iterdir() if path.is_dir()):
        subjects = sorted(path for path in folder.iterdir() if path.is_dir())
        found |= {f"{folder.name}_{path.name}": path for path in subjects} or {folder.name: folder}
    return found


def _local(name: str, folder: Path, index: Any, scratch: Path) -> str:
    files = {path.stem: str(path.absolute()) for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        raise DataError(f"--task-data: {folder} holds no SPLIT.jsonl")
    if name not in index:
        raise DataError(f"lm-eval has no task {name} (from {folder})")
    definition = {
        "include": str(index[name].yaml_path), "task": name, "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        **{key: None for split, key in _SPLITS.items() if split not in files},
    }  # fmt: skip
    path = scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump(definition))
    return str(path)


def _numbers(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    results = {}
    for task, metrics in {**found.get("results", {}), **found.get("groups", {})}.items():
        numbers = {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and not math.isnan(value)
        }
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        results[task] = {**numbers, **({"questions": samples} if samples is not None else {})}
    subjects = {
        task: numbers for task, numbers in results.items() if task.startswith("mmlu_") and "questions" in numbers
    }
    if subjects and "mmlu" not in results:  # over all questions, as lm-eval's own group
        count = sum(numbers["questions"] for numbers in subjects.values())
        mean = sum(numbers["acc"] * numbers["questions"] for numbers in subjects.values()) / count
        results["mmlu"] = {"acc": mean, "questions": count}
    return results


def _language_model(started: Started, batch_size: int) -> Any:
    """lm-eval's interface to the model, with the tokens and windows of lm-eval's own runner of transformers.

    All ranks are given the same requests in the same order.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    model, tokenizer = started.model, started.tokenizer
    longest = started.weights.model.max_position_embeddings or started.weights.model.seq_length

    class LanguageModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            if tokenizer.eod_id is None:
                raise DataError(f"{tokenizer.name} has no end id, which stands before a text without context")
            return tokenizer.eod_id

        @property
        def prefix_token_id(self) -> int:
            """What stands before a text without context: the begin id if there is one, begun with or not."""
            return tokenizer.bos_id if tokenizer.bos_id is not None else self.eot_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.tokenize(string) if add_special_tokens is False else started.encode(string)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            rows = [((*context, *answer)[-(longest + 1) :], len(answer)) for _, context, answer in requests]
            return [(sum(scores), all(greedy)) for scores, greedy in _scored(started, rows, batch_size)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                windows = get_rolling_token_windows(
                    started.encode(request.args[0]), self.prefix_token_id, max_seq_len=longest, context_len=1
                )
                pairs = map(make_disjoint_window, windows)
                rows = [((*context, *predicted), len(predicted)) for context, predicted in pairs]
                totals.append(sum(sum(scores) for scores, _ in _scored(started, rows, batch_size)))
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = []
            for number, request in enumerate(requests):
                context, options = request.args
                limit = int(options.get("max_gen_toks", _MAX_NEW_TOKENS))
                if limit >= longest:
                    raise DataError(f"a task asks for {limit} new tokens, the model has {longest} positions")
                sampling = Sampling(float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0)
                prompt = started.encode(context)[-(longest - limit) :] or [self.prefix_token_id]
                (ids,) = model.generate([prompt], limit, sampling, started.stop_ids, first_sequence=number)
                text = tokenizer.detokenize([i for i in ids if i < tokenizer.vocab_size])
                until = options.get("until") or []
                until = [until] if isinstance(until, str) else until
                ends = [text.index(end) for end in until if end and end in text]
                texts.append(text[: min(ends)] if ends else text)
            return texts

    return LanguageModel()


def _scored(
    started: Started, rows: list[tuple[tuple[int, ...], int]], batch_size: int
) -> list[tuple[list[float], list[bool]]]:
    """Of each row (ids, how many at its end count): scores of those that count and whether each is the most likely.

    Rows of similar length go together, padded on the right, which a causal model does not see.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    found: list[tuple[list[float], list[bool]]] = [([], [])] * len(rows)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        longest = max(len(rows[batch[0]][0]), 2)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, i in enumerate(batch):
            tokens[row, : len(rows[i][0])] = torch.tensor(rows[i][0])
        scores, greedy = started.model.log_probabilities(tokens)
        for row, i in enumerate(batch):
            end, count = len(rows[i][0]) - 1, rows[i][1]
            begin = max(end - count, 0)
            found[i] = scores[row, begin:end].tolist(), greedy[row, begin:end].tolist()
    return found
