"""Field report B34: the shares of --split and the blend of --data-path are parsed whole or refused by
field."""

from __future__ import annotations

import pytest

from megatron_edit.config import check
from megatron_edit.config.flags import load_config
from megatron_edit.config.values import parse_blend, parse_split


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
