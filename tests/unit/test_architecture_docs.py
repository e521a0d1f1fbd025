"""The tree in docs/architecture.md lists every file, and every file, class and function that the pages name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_edit"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ARCHITECTURE, ROOT / "docs" / "way-of-a-step.md", ROOT / "docs" / "glossary.md"]
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?P<path>[\w/.-]+\.(?:py|yaml|sbatch))(?::(?P<name>\w+(?:\.\w+)?))?")
IN_A_CLASS = re.compile(r"[A-Z]\w*[a-z]\w*(?:\.[a-z_]\w*)?")  # `SyncEngine`, `SyncEngine.after_step`; not a constant


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, constants of a file, and Class.method, Class.attribute of its classes."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
            fields = [member.target for member in node.body if isinstance(member, ast.AnnAssign)]
            found |= {f"{node.name}.{target.id}" for target in fields if isinstance(target, ast.Name)}
    return frozenset(found)


def names_in_package() -> set[str]:
    return set().union(*(names_in(path) for path in PACKAGE.rglob("*.py")))


def unknown_names(text: str) -> list[str]:
    """What `text` names in backticks as a file, class or function, and is not there."""
    known, wrong = names_in_package(), []
    for word in CODE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if match := FILE.fullmatch(word):
            places = [base / match["path"] for base in (ROOT, PACKAGE) if (base / match["path"]).is_file()]
            if not places or (match["name"] and match["name"] not in names_in(places[0])):
                wrong.append(word)
        elif IN_A_CLASS.fullmatch(word) and word not in known:
            wrong.append(word)
    return wrong


def tree_of(text: str) -> list[str]:
    """Files of the tree, as paths from the root."""
    tree = re.search(r"^## The tree\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert tree is not None
    listed: list[str] = []
    folders: list[str] = []
    for line in tree[1].splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        if not name.endswith("/"):
            listed.append("".join(folders))
    return listed


def test_the_tree_lists_every_file() -> None:
    listed = tree_of(ARCHITECTURE.read_text(encoding="utf-8"))
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("megatron_edit/**/*.py", "tools/*.py", "benchmarks/*.py", "docs/*.md")
        for path in ROOT.glob(pattern)
        if path.name != "__init__.py"
    }
    assert wanted - set(listed) == set(), "add to the tree in docs/architecture.md"
    assert [name for name in listed if not (ROOT / name).exists()] == []
    assert len(listed) == len(set(listed))


def test_the_layers_are_those_of_the_import_contract() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r"^layers = \[\n(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    assert layers is not None
    rooms = [re.findall(r"\w+", line) for line in layers[1].splitlines()]
    table = ARCHITECTURE.read_text(encoding="utf-8").split("| layer, top to bottom |")[1].split("\n\n")[0]
    assert [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]] == rooms


def test_the_readme_is_short_and_its_map_has_every_room() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    map_of_folders = text.split("## The folders\n\n```\n")[1].split("```")[0].splitlines()
    assert len(map_of_folders) == 12
    names = {name for line in map_of_folders for name in re.findall(r"[\w.]+", line.split("  ")[0].replace("/", " "))}
    assert {name for name in names if not any((base / name).exists() for base in (ROOT, PACKAGE))} == set()
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_everything_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown_names(text) == []
    assert ".py" in text


WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_no_page_names_a_file_of_python_that_is_not_there(page: Path) -> None:
    unknown = unknown_names(page.read_text(encoding="utf-8"))
    assert [name for name in unknown if re.match(r"\w+/[\w/]*\.py", name)] == []


@pytest.mark.parametrize(
    ("word", "is_known"),
    [
        ("sync/engine.py", True),
        ("megatron_edit/sync/engine.py", True),
        ("sync/engine.py:SyncEngine", True),
        ("sync/engine.py:SyncEngine.after_step", True),
        ("SyncEngine.after_step", True),
        ("SyncDecision.norms", True),
        ("ranks/signal_pipe.py:STOP_SIGNALS", True),
        ("--edit-method", True),  # not a name of the code
        ("edit", True),
        ("sync/motor.py", False),
        ("sync/engine.py:begin_sync", False),
        ("sync/engine.py:SyncEngine.begin_sync", False),
        ("SyncEngine.begin_sync", False),
        ("SyncMotor", False),
    ],
)
def test_a_name_that_has_gone_is_noticed(word: str, is_known: bool) -> None:
    assert unknown_names(f"The text says `{word}`.") == ([] if is_known else [word])
