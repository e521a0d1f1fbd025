"""The folder of a conversion: whole or not at all, and of one conversion at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.convert.errors import ConversionError
from megatron_edit.convert.folder import new_folder


def test_two_conversions_into_one_output(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with new_folder(output, False) as first:
        (first / "weights").write_text("first")
        for overwrite in (False, True):
            with pytest.raises(ConversionError, match="another conversion is writing there now"):
                new_folder(output, overwrite).__enter__()
    assert (output / "weights").read_text() == "first"
    with pytest.raises(ConversionError, match="--overwrite"):  # it ended while the second one read its input
        new_folder(output, False).__enter__()
    with new_folder(output, True) as second:
        (second / "weights").write_text("second")
    assert (output / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_conversion_left_is_not_in_the_next_ones_output(tmp_path: Path) -> None:
    left = tmp_path / "out.partial" / "tokenizer"
    left.mkdir(parents=True)
    (left / "x").write_text("x")
    (left.parent / "weights").write_text("half")
    with new_folder(tmp_path / "out", False) as folder:
        (folder / "new").write_text("x")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/new"]


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "out", True) as folder:
        (folder / "new").write_text("x")
        raise RuntimeError
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/old"]
