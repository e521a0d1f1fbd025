"""What import-linter cannot say: pure files of sync use no process group, and circles through an `__init__.py`."""

import ast
from pathlib import Path

import grimp
import pytest

import megatron_edit.sync

PURE = ("trigger", "detector", "penalty", "outer", "compression", "reducers")


@pytest.mark.parametrize("name", PURE)
def test_pure_files_of_sync_do_not_import_torch_distributed(name: str) -> None:
    source = Path(megatron_edit.sync.__file__).with_name(f"{name}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert "torch" in imported or name == "trigger"
    assert not any(module.startswith("torch.distributed") for module in imported)


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
