"""Field report B34: the shares of --split and the blend of --data-path are parsed whole or refused by
field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_edit.config import check
from megatron_edit.config.flags import load_config
from megatron_edit.config.schema import ConfigError
from megatron_edit.config.values import parse_blend, parse_named_sets, parse_split, words_of_named_sets


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("1", (1, 0, 0)),
        ("100,0,0", (1, 0, 0)),
        ("99.5,0.5", (0.995, 0.005, 0)),
        (" 90, 5 ,5", (0.9, 0.05, 0.05)),
        ("1e2,0,0", (1, 0, 0)),
    ],
)
def test_b34_split_valid(text: str, shares: tuple[float, ...]) -> None:
    assert parse_split(text) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("-1,1,0", "'-1'"),
        ("90,abc5,5", "'abc5'"),
        ("0,0,0", "only zeros"),
        ("1,2,3,4", "4 fields"),
        ("nan", "'nan'"),
        ("1,inf", "'inf'"),
        ("90,,10", "''"),
        ("", "''"),
        ("90;5;5", "'90;5;5'"),
    ],
)
def test_b34_split_invalid(text: str, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_split(text)


def test_b34_split_problem_names_the_flag() -> None:
    flags = "--train-iters 9 --global-batch-size 8 --tokenizer-type ByteTokenizer --data-path a --split"
    (problem,) = check(load_config([*flags.split(), "90,abc5,5"]), 1, 1, "cpu")
    assert "--split 90,abc5,5" in problem and "'abc5'" in problem
    (problem,) = check(load_config([*flags.split(), "0,1"]), 1, 1, "cpu")
    assert "nothing for training" in problem


def test_blend_valid() -> None:
    assert parse_blend(["a"]) == [(1.0, "a")]
    assert parse_blend(["1"]) == [(1.0, "1")]
    assert parse_blend(["a", "b"]) == [(0.5, "a"), (0.5, "b")]
    assert parse_blend(["3", "a", "1", "b"]) == [(0.75, "a"), (0.25, "b")]


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        (["-1", "a", "1", "b"], "'-1'"),
        (["nan", "a", "1", "b"], "'nan'"),
        (["0", "a"], "'0'"),
        (["0.5", "a", "0.5"], "3 fields"),
        (["a", "0.5", "b", "0.5"], "'a'"),
        (["0.5", "0.5", "a", "b"], "'0.5' where the prefix"),
        (["0.5", "a", "b", "c"], "'b'"),
    ],
)
def test_b34_blend_invalid(entries: list[str], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_blend(entries)


def test_b34_blend_problem_names_the_flag() -> None:
    flags = "--train-iters 9 --global-batch-size 8 --tokenizer-type ByteTokenizer --data-path 0.5 a nan b"
    (problem,) = check(load_config(flags.split()), 1, 1, "cpu")
    assert "--data-path 0.5 a nan b" in problem and "'nan'" in problem


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        ("A", {"": ["A"]}),
        ("0.3 A 0.7 B", {"": ["0.3", "A", "0.7", "B"]}),
        ("./a=b data/lr=0.1/c /x=y", {"": ["./a=b", "data/lr=0.1/c", "/x=y"]}),
        ("wiki=A code=B", {"wiki": ["A"], "code": ["B"]}),
        ("wiki=0.3 A 0.7 B code-2.x=dir/a=b C", {"wiki": ["0.3", "A", "0.7", "B"], "code-2.x": ["dir/a=b", "C"]}),
    ],
)
def test_named_sets(words: str, sets: dict[str, list[str]]) -> None:
    assert parse_named_sets(words.split()) == sets
    if "" not in sets:
        assert parse_named_sets(words_of_named_sets(sets)) == sets


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["wiki=A", "wiki=B"], "has the name wiki twice; one set of several corpora is wiki=PREFIX PREFIX"),
        (["A", "wiki=B"], "has 'A' before the first NAME=: give every set a name, or none"),
        (["wiki="], "has nothing behind wiki=: write wiki=PREFIX"),
        (["wi ki=A"], "has the name 'wi ki': names are letters, digits"),
        (["=A"], "has the name ''"),
        (["0.3=A"], "a prefix with '=' is written ./0.3=A"),
        (["w\u00e4ki=A"], "has the name"),
    ],
)
def test_named_sets_that_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_named_sets(words)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ({"a/b": "A"}, "has the name 'a/b'"),
        ({2024: "A"}, "has the name 2024"),
        ({}, "is an empty mapping"),
        ({"wiki": []}, "has under wiki no list"),
        ({"wiki": None}, "has under wiki no list"),
        ({"wiki": [True]}, "has under wiki no list"),
    ],
)
def test_named_sets_of_a_file_that_are_refused(sets: dict[object, object], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        words_of_named_sets(sets)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--valid-data-path", "wiki=A", "wiki=B"], "--valid-data-path wiki=A wiki=B has the name wiki twice"),
        (["--valid-data-path", "wiki=A", "code=0.3", "B", "0.7"], "has 3 fields"),
        (["--train-data-path", "wiki=A"], None),  # a prefix, as ever
    ],
)
def test_the_checks_name_the_flag_of_a_bad_set(words: list[str], reason: str | None) -> None:
    argv = ["--train-data-path", "T", *words] if words[0] != "--train-data-path" else words
    config = load_config([*argv, "--train-iters", "10", "--tokenizer-type", "ByteTokenizer"])
    problems = [problem for problem in check(config, 1, 1, "cpu") if "data-path" in problem]
    assert problems == [] if reason is None else any(reason in problem for problem in problems), problems


def test_named_sets_in_yaml_and_json(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  valid_data_path:\n    wiki: A\n    code: [0.3, B, 0.7, C]\n")
    (tmp_path / "splits.json").write_text('{"train": "T", "valid": {"wiki": "A", "code": [0.3, "B", 0.7, "C"]}}')
    for flag, file in (("--config", "run.yaml"), ("--per-split-data-args-path", "splits.json")):
        argv = [flag, str(tmp_path / file)]
        assert load_config(argv).data.valid_data_path == ["wiki=A", "code=0.3", "B", "0.7", "C"]
    (tmp_path / "run.yaml").write_text("valid_data_path: {a/b: A}\n")
    with pytest.raises(ConfigError, match=r"run.yaml: key valid_data_path .* has the name 'a/b'"):
        load_config(["--config", str(tmp_path / "run.yaml")])
