"""What import-linter cannot say: the pure files of sync use no process group."""

import ast
from pathlib import Path

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
