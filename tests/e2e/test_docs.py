"""The commands of README.md and docs/*.md work as they are written.

Every fenced block of shell or Python says what the tests do with it: "```bash run" is run, the blocks of one file in
order and in one folder; "```bash not run: REASON" is not, and its reason is shown. Of both, the flags of each call of
pretrain_llama.py are parsed, so that no page names a flag that does not exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_edit.config import check, load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "shell", "console")
PYTHON = ("python", "py")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")  # (file, heading)
NOT_RUN = "not run:"


def code_blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, info after it, code) of each block of shell or Python."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [(language, info.strip(), body) for language, info, body in found if language in SHELL + PYTHON]


def as_shell(language: str, body: str) -> str:
    return body if language in SHELL else f"python - <<'END OF BLOCK'\n{body}END OF BLOCK\n"


def commands(body: str) -> list[list[str]]:
    """Words of each command line, with continued lines joined and comments dropped."""
    lines = body.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def calls_of_trainer() -> list[tuple[str, list[str]]]:
    """(page, words) of each command that starts pretrain_llama.py."""
    return [
        (page.name, words)
        for page in PAGES
        for language, _, body in code_blocks(page)
        if language in SHELL
        for words in commands(body)
        if "pretrain_llama.py" in words and words[0] != "!"  # meant to fail
    ]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder that looks like the repository, in which commands may write."""
    for name in ("pretrain_llama.py", "megatron_edit", "tools", "examples", "docs", "benchmarks", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_marked(page: Path) -> None:
    unmarked = [
        body
        for _, info, body in code_blocks(page)
        if info != "run" and not (info.startswith(NOT_RUN) and info.removeprefix(NOT_RUN).strip())
    ]
    assert unmarked == [], "write ```LANGUAGE run, or ```LANGUAGE not run: REASON"


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=lambda page: page.name)
def test_commands_run(page: Path, workspace: Path) -> None:
    blocks = code_blocks(page)
    runnable = [as_shell(language, body) for language, info, body in blocks if info == "run"]
    not_run = sorted({info for _, info, _ in blocks if info != "run"})
    print(f"{page.name}: {len(blocks)} blocks", *not_run, sep="\n  ")
    if not runnable:
        pytest.skip(f"{page.name}: {'; '.join(not_run)}")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(runnable)],
        cwd=workspace, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, f"{page.name}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{page}-{i}") for i, (page, words) in enumerate(calls_of_trainer())]
)
def test_flags_of_every_call_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the page does not show, such as a corpus, is not the flags' fault."""
    monkeypatch.chdir(ROOT)
    arguments = [word for word in words[words.index("pretrain_llama.py") + 1 :] if word != "..."]
    load_config(arguments)


def test_quickstart_settings_pass_all_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the flags of the README's run, on its four ranks; only the tokenizer is made by an earlier step."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    flags = "--edit-num-replicas 2 --tensor-model-parallel-size 2 --edit-sync-interval 8"
    config = load_config(
        ["--device", "cpu", "--config", "examples/quickstart.yaml", *flags.split()]
    )
    assert config.data.tokenizer_model is not None
    tokenizer = tmp_path / config.data.tokenizer_model
    tokenizer.parent.mkdir(parents=True)
    tokenizer.touch()
    assert check(config, world_size=4, local_world_size=4, device="cpu") == []


def anchors(page: Path) -> set[str]:
    """What a link may have behind `#`: the page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, heading) for file, heading in links if "://" not in file]
    missing = [(str(target), heading) for target, heading in targets if not target.exists()]
    missing += [(target.name, heading) for target, heading in targets if heading and heading not in anchors(target)]
    assert missing == []
