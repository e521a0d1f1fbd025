"""Field report B34: the shares of --split and the blend of --data-path are parsed whole or refused by
field."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_edit.config import check
from megatron_edit.config.flags import load_config
from megatron_edit.config.schema import ConfigError
from megatron_edit.config.values import Blend, parse_blend, parse_named_sets, parse_split, words_of_named_sets
from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.errors import DataError


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("1", (1, 0, 0)),
        ("100,0,0", (1, 0, 0)),
        ("99.5,0.5", (0.995, 0.005, 0)),
        (" 90, 5 ,5", (0.9, 0.05, 0.05)),
        ("2e1,.5,79.5", (0.2, 0.005, 0.795)),
    ],
)
def test_split_is_normalised(text: str, shares: tuple[float, ...]) -> None:
    assert parse_split(text) == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "blend"),
    [
        ("A", Blend(("A",))),
        ("A B C", Blend(("A", "B", "C"))),
        ("0.3 A 0.7 B", Blend(("A", "B"), (Fraction(3, 10), Fraction(7, 10)))),
        ("30 A 70 B", Blend(("A", "B"), (Fraction(30), Fraction(70)))),
        ("1e-1 A", Blend(("A",), (Fraction(1, 10),))),
        ("1 ./1", Blend(("./1",), (Fraction(1),))),
    ],
)
def test_blend_forms(fields: str, blend: Blend) -> None:
    assert parse_blend(fields.split()) == blend


ODD_SPLITS = [
    ("-1,1,0", "has the field '-1'"),
    ("+5,1", "has the field '+5'"),
    ("1_0,1", "has the field '1_0'"),
    ("90,abc5,5", "has the field 'abc5'"),
    ("90,5abc,5", "has the field '5abc'"),
    ("0,0,0", "has shares that sum to 0"),
    ("1,2,3,4", "has 4 fields"),
    ("nan", "has the field 'nan'"),
    ("1,inf", "has the field 'inf'"),
    ("1e999,1", "has the field '1e999'"),
    ("1e308,1e308", "has shares that sum to inf"),
    ("90,,10", "has the field ''"),
    ("90,", "has the field ''"),
    ("   ", "has the field ''"),
    ("90;5;5", "has the field '90;5;5'"),
    ("90 5 5", "has the field '90 5 5'"),
    ("\u0669,1", "has the field '\u0669'"),  # a digit, but not one of the ten
]
ODD_BLENDS = [
    (["1"], "has 1 fields, and the first, 1, is a number"),
    (["0.5", "a", "0.5"], "has 3 fields"),
    (["a", "a"], "has a more than once"),
    (["0.3", "a", "0.7", "a"], "has a more than once"),
    (["-1", "a", "1", "b"], "has the weight '-1'"),
    (["+1", "a"], "has the weight '+1'"),
    (["1_0", "a"], "has the weight '1_0'"),
    (["nan", "a", "1", "b"], "has the weight 'nan'"),
    (["inf", "a"], "has the weight 'inf'"),
    (["1e999", "a"], "has the weight '1e999'"),
    (["1e-999", "a"], "has the weight '1e-999'"),
    (["0", "a"], "has the weight '0'"),
    (["0.3", "a", "b", "0.7"], "has '0.7' where a prefix"),
    (["0.5", "a", "b", "c"], "has the weight 'b'"),
    (["0.5", "a", "x7", "b"], "has the weight 'x7'"),
    (["a", "0.5", "b", "0.5"], "has '0.5' where a prefix"),
    (["0.5", "0.5", "a", "b"], "has '0.5' where a prefix"),
    (["0.5", "a", "0.5", "1_0"], "has '1_0' where a prefix"),
]


@pytest.mark.parametrize(
    ("data_path", "split", "reason"),
    [(["A"], *odd) for odd in ODD_SPLITS] + [(path, "9,1", reason) for path, reason in ODD_BLENDS],
)
def test_odd_shares_and_blends_are_refused_alike_by_the_checks_and_by_the_data(
    data_path: list[str], split: str, reason: str
) -> None:
    """B34: the same words at both doors."""
    flags = ["--train-iters", "9", "--global-batch-size", "8", "--tokenizer-type", "ByteTokenizer"]
    (problem,) = check(load_config([*flags, "--data-path", *data_path, f"--split={split}"]), 1, 1, "cpu")
    shown = f"--split {split} " if data_path == ["A"] else f"--data-path {' '.join(data_path)} "
    assert problem.startswith(shown + reason)
    with pytest.raises(DataError) as error:
        resolve_sources(data_path=data_path, split=split)
    assert str(error.value) == problem


def test_a_blend_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="is empty"):
        parse_blend([])


def test_split_problem_names_the_flag() -> None:
    flags = "--train-iters 9 --global-batch-size 8 --tokenizer-type ByteTokenizer --data-path a --split"
    (problem,) = check(load_config([*flags.split(), "90,abc5,5"]), 1, 1, "cpu")
    assert "--split 90,abc5,5" in problem and "'abc5'" in problem
    (problem,) = check(load_config([*flags.split(), "0,1"]), 1, 1, "cpu")
    assert "nothing for training" in problem


def test_blend_problem_names_the_flag() -> None:
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
