"""docs/flags.md is generated; the file in the repository is the one that the schema gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_edit.config.flags import ALL_FLAGS
from megatron_edit.config.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "document_flags.py"


def run(tool: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=60)


def test_flags_page_is_up_to_date() -> None:
    result = run(TOOL)
    assert result.returncode == 0, result.stderr


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "megatron_edit").symlink_to(ROOT / "megatron_edit")
    tool = tmp_path / "tools" / "document_flags.py"
    tool.write_text(TOOL.read_text())
    page = tmp_path / "docs" / "flags.md"
    page.write_text((ROOT / "docs" / "flags.md").read_text())
    assert run(tool).returncode == 0
    page.write_text(page.read_text().replace("`128`", "`64`"))
    result = run(tool)
    assert result.returncode == 1 and "stale" in result.stderr
    page.unlink()
    assert run(tool).returncode == 1


def test_page_holds_every_flag() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    negative = {setting.negative_flag for setting in SETTINGS.values()}
    for flag in ALL_FLAGS:
        assert flag in negative or f"`{flag}`" in page, flag
