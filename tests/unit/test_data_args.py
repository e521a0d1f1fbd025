"""--data-args-path and --per-split-data-args-path: files in the place of --data-path and its relatives."""

import json
from pathlib import Path

import pytest

from megatron_edit.config.flags import read_config


def problems_of(*argv: str) -> list[str]:
    return read_config(argv).problems


def test_a_file_stands_for_data_path(tmp_path: Path) -> None:
    path = tmp_path / "blend.txt"
    path.write_text("0.3 A  # web\n\n# books\n0.7\tB\n")
    config = read_config(["--data-args-path", str(path)]).config
    assert config.data.data_path == ["0.3", "A", "0.7", "B"] and config.sources["data_path"] == "flag"


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    """What Windows editors put before UTF-8: it would become a part of the first weight or prefix."""
    path = tmp_path / "blend.txt"
    path.write_text("0.3 A\n0.7 B\n", encoding="utf-8-sig")
    assert read_config(["--data-args-path", str(path)]).config.data.data_path == ["0.3", "A", "0.7", "B"]
    path.write_text('{"train": ["A"]}', encoding="utf-8-sig")
    assert read_config(["--per-split-data-args-path", str(path)]).config.data.train_data_path == ["A"]
    path.write_text("train_iters: 7\n", encoding="utf-8-sig")
    assert read_config(["--config", str(path)]).config.training.train_iters == 7


@pytest.mark.parametrize("as_text", [False, True])
def test_a_file_stands_for_a_path_of_each_split(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "splits.json"
    entries = {"train": [0.5, "A", "5e-1", "B"], "valid": ["C"], "test": None}
    if as_text:
        entries = {"train": "0.5 A 5e-1 B", "valid": "C", "test": ""}
    path.write_text(json.dumps(entries))
    data = read_config([f"--per-split-data-args-path={path}"]).config.data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (["0.5", "A", "5e-1", "B"], ["C"], [])


@pytest.mark.parametrize(
    ("flag", "content", "reason"),
    [
        ("--data-args-path", None, "cannot be read: No such file"),
        ("--data-args-path", b"# nothing\n", "holds no corpus"),
        ("--data-args-path", b"\xff\xfe", "is not text in UTF-8"),
        ("--per-split-data-args-path", None, "cannot be read: No such file"),
        ("--per-split-data-args-path", b"{", "is not JSON"),
        ("--per-split-data-args-path", b"[]", "is not a JSON object with"),
        ("--per-split-data-args-path", b'{"valid": ["A"]}', 'with "train" corpora'),
        ("--per-split-data-args-path", b'{"train": ["A"], "dev": ["B"]}', "has the key 'dev'"),
        ("--per-split-data-args-path", b'{"train": {"A": 1}}', "has under 'train' no list"),
        ("--per-split-data-args-path", b'{"train": [["A"]]}', "has under 'train' no list"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, flag: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems_of(flag, str(path))
    assert problem.startswith(f"{flag} {path} ") and reason in problem


def test_a_flag_and_a_file_for_the_same_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "blend"
    path.write_text("A")
    file = ["--data-args-path", str(path)]
    for argv in (["--data-path", "B", *file], [*file, "--data-path", "B"]):
        assert problems_of(*argv) == ["--data-args-path and --data-path are both given: give one"]
    splits = tmp_path / "splits"
    splits.write_text('{"train": ["A"]}')
    (problem,) = problems_of("--per-split-data-args-path", str(splits), "--valid-data-path", "B")
    assert problem == "--per-split-data-args-path and --valid-data-path are both given: give one"
    assert "takes one value" in problems_of("--data-args-path", str(path), "B")[0]
