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


@pytest.mark.usefixtures("offline")
def test_own_task_files_with_generated_answers_and_rolling_likelihood(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "the anchor", "answer": "x"}\n{"text": "a replica and its shard", "answer": "y"}\n')
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    (tasks / "made.yaml").write_text(
        f"task: made\n{common}output_type: generate_until\ndoc_to_text: '{{{{text}}}}'\n"
        "doc_to_target: '{{answer}}'\ngeneration_kwargs:\n  until: ['.']\n  max_gen_toks: 5\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    (tasks / "rolled.yaml").write_text(
        f"task: rolled\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{text}}}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n"
    )
    tool(
        evaluate, "--load", tmp_path / "hf", "--tasks", "made,rolled", "--task-folder", tasks, "--output",
        tmp_path / "out.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert found["made"]["exact_match"] == 0.0
    assert 5 < found["rolled"]["bits_per_byte"] < 20  # an untrained model of 259 ids: about 8
