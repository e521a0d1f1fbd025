"""Where an lm-eval task reads its questions from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_edit.data.errors import DataError
from megatron_edit.inference.tasks import _specifications


def test_questions_come_from_task_data_or_from_the_tasks_own_file(tmp_path: Path) -> None:
    data, own, scratch = tmp_path / "data", tmp_path / "own", tmp_path / "scratch"
    for name in ("piqa", "mmlu/anatomy", "mmlu/astronomy"):
        (data / name).mkdir(parents=True)
        (data / name / "test.jsonl").write_text("{}\n")
    own.mkdir()
    scratch.mkdir()
    paths = {name: Path("/lm_eval/tasks") / name for name in ("piqa", "mmlu_anatomy", "mmlu_astronomy", "hellaswag")}
    index = {name: SimpleNamespace(yaml_path=path) for name, path in {**paths, "mine": own / "mine.yaml"}.items()}
    index["a_tag"] = SimpleNamespace(yaml_path=None)

    def given(name: str, data_folder: Path | None = data, task_folder: Path | None = own) -> list[str]:
        return _specifications(name, index, data_folder, scratch, task_folder)

    assert given("hellaswag", data_folder=None) == ["hellaswag"]
    assert given("piqa") == [str(scratch / "piqa.yaml")]
    assert given("mmlu") == [str(scratch / f"mmlu_{subject}.yaml") for subject in ("anatomy", "astronomy")]
    assert given("mmlu_anatomy") == [str(scratch / "mmlu_anatomy.yaml")]
    written = yaml.safe_load((scratch / "mmlu_anatomy.yaml").read_text())
    assert written["dataset_kwargs"]["data_files"] == {"test": str(data / "mmlu" / "anatomy" / "test.jsonl")}
    assert given("mine") == ["mine"]  # it names its own data
    for name, folder in (("mine", None), ("hellaswag", own), ("a_tag", own)):
        with pytest.raises(DataError, match=f"no folder {name}; it has mmlu_anatomy, mmlu_astronomy, piqa"):
            given(name, task_folder=folder)
    (data / "mine").mkdir()
    (data / "mine" / "test.jsonl").write_text("{}\n")
    assert given("mine") == [str(scratch / "mine.yaml")]
