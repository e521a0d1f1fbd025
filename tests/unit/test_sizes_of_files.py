"""CONTRIBUTING.md's bounds on files and functions: what is longer does two things."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_edit"
FILES = sorted(PACKAGE.rglob("*.py"))
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60
TABLES = {"config/schema.py", "config/megatron_refused.py"}  # rows, one after the other


def too_long(source: str) -> list[str]:
    """Functions and methods above the bound, with their lines, the first and the last included."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = {f"{n.name} {lines}": lines for n in functions if (lines := (n.end_lineno or 0) - n.lineno + 1)}
    return [name for name, lines in lengths.items() if lines > LINES_OF_A_FUNCTION]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_and_its_functions_are_short(path: Path) -> None:
    source, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
    assert too_long(source) == []
    assert (len(source.splitlines()) > LINES_OF_A_FILE) == (name in TABLES), "a table that got short is not named here"


def test_a_long_function_is_found() -> None:
    def method(lines: int) -> str:
        return "class A:\n    def long(self):\n" + "        pass\n" * (lines - 1)

    assert too_long(method(LINES_OF_A_FUNCTION)) == []
    assert too_long(method(LINES_OF_A_FUNCTION + 1)) == [f"long {LINES_OF_A_FUNCTION + 1}"]
