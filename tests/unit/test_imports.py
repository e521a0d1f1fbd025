"""What import-linter cannot say: pure files of sync use no process group, and circles through an `__init__.py`.

The list of the pure files is the import contract's.
"""

import ast
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]


def pure_files() -> list[Path]:
    """Of the contract in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["name"].startswith("the pure files of sync"))
    return [ROOT / f"{module.replace('.', '/')}.py" for module in contract["source_modules"]]


def imported_by(path: Path) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imported


def uses_process_groups(path: Path) -> bool:
    return any(module.startswith("torch.distributed") for module in imported_by(path))


@pytest.mark.parametrize("path", pure_files(), ids=lambda path: path.stem)
def test_pure_files_of_sync_do_not_import_torch_distributed(path: Path) -> None:
    assert not uses_process_groups(path)


def test_a_file_that_uses_process_groups_is_noticed() -> None:
    assert uses_process_groups(ROOT / "megatron_edit/sync/transport.py")
    assert uses_process_groups(ROOT / "megatron_edit/parallel/mesh.py")


def test_no_file_imports_what_imports_it() -> None:
    """Imports in functions and under TYPE_CHECKING count, and so does what a package itself imports."""
    graph = grimp.build_graph("megatron_edit", cache_dir=None)
    circles = [
        f"{importer} -> {imported}"
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if graph.chain_exists(importer=imported, imported=importer)
    ]
    assert circles == []
