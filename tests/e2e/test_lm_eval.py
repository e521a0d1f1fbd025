"""lm-eval on a model of this program, offline, against lm-eval's own runner of transformers: the same numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.convert.tokenizer_json import write_byte_tokenizer
from megatron_edit.inference.evaluate import main as evaluate
from tests.e2e.test_conversion import tool
from tests.reference.hf_folder import write_folder
from tests.reference.hugging_face import run_python

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("lm_eval") and importlib.util.find_spec("accelerate")),
    reason="lm-eval and accelerate are not installed (the extra `eval`)",
)

# rows as the tasks' own data sets have them: task, split, rows
QUESTIONS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    **{
        name: ("test", [
            {"id": str(i), "question": f"What is {i} + 1?", "answerKey": "A",
             "choices": {"text": [str(i + 1), "a cat", "a dog", "none of these"], "label": list("ABCD")}}
            for i in range(5)
        ])
        for name in ("arc_easy", "arc_challenge")
    },
    "hellaswag": ("validation", [
        {"ind": i, "activity_label": "Cooking", "ctx_a": "A man stands.", "ctx_b": "he", "ctx": "A man stands. he",
         "endings": ["cooks.", "[step] flies.", "swims away.", "reads."], "label": str(i % 4)} for i in range(5)
    ]),
    "piqa": ("validation", [
        {"goal": f"open jar {i}", "sol1": "twist the lid", "sol2": "eat it", "label": i % 2} for i in range(5)
    ]),
    "commonsense_qa": ("validation", [
        {"id": str(i), "question": f"Where is milk {i} kept?", "question_concept": "milk", "answerKey": "ABCDE"[i % 5],
         "choices": {"label": list("ABCDE"), "text": ["fridge", "sky", "car", "sea", "hat"]}} for i in range(5)
    ]),
    "openbookqa": ("test", [
        {"id": str(i), "question_stem": f"The sun {i} is", "answerKey": "A",
         "choices": {"text": ["a star", "a cat", "a car", "a hat"], "label": list("ABCD")}} for i in range(5)
    ]),
    "winogrande": ("validation", [
        {"sentence": f"The cat chased mouse {i} because _ was hungry.", "option1": "the cat", "option2": "the mouse",
         "answer": "1"} for i in range(5)
    ]),
    **{
        f"mmlu/{subject}": ("test", [
            {"question": f"{subject} {i}: 2 + 2?", "subject": subject, "choices": ["1", "2", "3", "4"], "answer": i % 4}
            for i in range(4)
        ])
        for subject in ("anatomy", "astronomy")
    },
}  # fmt: skip

THEIRS = """
import json, os, sys
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
from pathlib import Path
import lm_eval, torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from megatron_edit.inference.evaluate import PAPER_TASKS
from megatron_edit.inference.tasks import _numbers, _specifications
manager, scratch = TaskManager(), Path(sys.argv[3])
names = [one for name in PAPER_TASKS for one in _specifications(name, manager.task_index, Path(sys.argv[2]), scratch)]
model = HFLM(pretrained=sys.argv[1], device="cpu", dtype="float32", batch_size=1)
print(json.dumps(_numbers(lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, log_samples=False))))
"""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("offline")
def test_the_papers_eight_tasks_have_the_numbers_of_transformers(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", max_position_embeddings=512)
    write_byte_tokenizer(tmp_path / "hf")
    for task, (split, rows) in QUESTIONS.items():
        (tmp_path / "data" / task).mkdir(parents=True)
        lines = (json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / task / f"{split}.jsonl").write_text("".join(lines))
    (tmp_path / "scratch").mkdir()
    words = ("-c", THEIRS, str(tmp_path / "hf"), str(tmp_path / "data"), str(tmp_path / "scratch"))
    expected = json.loads(run_python(*words).splitlines()[-1])
    layout = ("--tensor-model-parallel-size", 2)
    for ranks, flags in ((1, ()), (2, layout)):
        printed = tool(
            evaluate, "--load", tmp_path / "hf", "--tasks", "paper", "--task-data", tmp_path / "data", "--output",
            tmp_path / "out.json", "--batch-size", 3, *flags, ranks=ranks,
        )[0]  # fmt: skip
        found = json.loads((tmp_path / "out.json").read_text())["tasks"]
        assert found.keys() == expected.keys() and {"mmlu", "arc_easy", "winogrande"} < found.keys()
        for task, numbers in expected.items():
            for metric, value in numbers.items():
                if not metric.endswith("_stderr"):
                    assert found[task][metric] == pytest.approx(value), (task, metric)
        assert "openbookqa" in printed and "acc_norm" in printed


THEIRS_OF_FOLDER = """
import json, sys
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from megatron_edit.inference.tasks import _numbers
manager = TaskManager(include_path=sys.argv[2])
model = HFLM(pretrained=sys.argv[1], device="cpu", dtype="float32", batch_size=1)
names = sys.argv[3].split(",")
print(json.dumps(_numbers(lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, log_samples=False))))
"""
BEGIN = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing", "single": [BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}},
}  # fmt: skip


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("begins", [False, True])
def test_own_tasks_have_the_numbers_of_transformers_beside_task_data(tmp_path: Path, begins: bool) -> None:
    """Generated answers, rolling likelihood over several windows, texts without context; begin and end ids differ.

    `begins`: the tokenizer's template puts the begin id before a text. The folder of --task-data has none of them.
    """
    write_folder(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    if begins:
        path = tmp_path / "hf" / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": TEMPLATE}))
    rows = [{"text": "the anchor", "answer": "x"}, {"text": "a replica and its shard, " * 6, "answer": "y"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, data = tmp_path / "tasks", tmp_path / "data"
    tasks.mkdir()
    (data / "mmlu" / "anatomy").mkdir(parents=True)
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
              "test_split": "test"}  # fmt: skip
    definitions: dict[str, dict[str, Any]] = {
        "made": {
            "output_type": "generate_until", "doc_to_text": "{{answer}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}],
        },
        "rolled": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "alone": {
            "output_type": "loglikelihood", "doc_to_text": "", "doc_to_target": "{{answer}}", "target_delimiter": "",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
    }  # fmt: skip
    for name, definition in definitions.items():
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **definition}))
    names = ",".join(definitions)
    words = ("-c", THEIRS_OF_FOLDER, str(tmp_path / "hf"), str(tasks), names)
    expected = json.loads(run_python(*words).splitlines()[-1])
    tool(
        evaluate, "--load", tmp_path / "hf", "--tasks", names, "--task-folder", tasks, "--task-data", data, "--output",
        tmp_path / "out.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert found.keys() == expected.keys() == definitions.keys()
    compared = {"made": ["exact_match"], "rolled": ["bits_per_byte"], "alone": ["perplexity", "acc"]}
    for task, metric in ((task, metric) for task, metrics in compared.items() for metric in metrics):
        assert found[task][metric] == pytest.approx(expected[task][metric], rel=1e-5), (task, metric)
