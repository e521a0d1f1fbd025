"""Field report B59: the memory of the preprocessing tool stays below the bound that docs/corpora.md states."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_corpus_tools import REPOSITORY

MEGABYTE = 1_000_000
# What the docs say of the process that reads; with one worker it is the only one.
FIXED, PER_DOCUMENT, PER_BYTE_OF_THE_LONGEST = 150 * MEGABYTE, 20, 5

CODE = """
import re, sys
from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess
if __name__ == "__main__":
    (report,) = preprocess([sys.argv[1]], sys.argv[2], TokenizerSpec("ByteTokenizer"), append_eod=True)
    # Of this program alone; getrusage also counts what the process held before it became this program.
    kilobytes = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
    print("peak", int(kilobytes) * 1024, "documents", report.documents)
"""


def peak_memory(path: Path) -> tuple[int, int]:
    """(bytes, documents) of a run in a process of its own."""
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(path.with_name("out"))],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = re.search(r"peak (\d+) documents (\d+)", result.stdout)
    assert found is not None
    return int(found[1]), int(found[2])


def test_many_short_documents(tmp_path: Path) -> None:
    """400,000 documents of one word."""
    path = tmp_path / "in.jsonl"
    with open(path, "w") as stream:
        stream.writelines(f'{{"text": "w{i % 1000}"}}\n' for i in range(400_000))
    peak, documents = peak_memory(path)
    assert documents == 400_000
    print(f"peak {peak}")
    assert peak < FIXED + PER_DOCUMENT * documents


@pytest.mark.parametrize("form", ["jsonl", "txt"])
@pytest.mark.parametrize("megabytes", [25, pytest.param(200, marks=pytest.mark.full(reason="tokenizes 200 MB"))])
def test_one_long_document(tmp_path: Path, megabytes: int, form: str) -> None:
    path = tmp_path / f"in.{form}"
    text = "a long document of words " * (megabytes * MEGABYTE // 25)
    path.write_text(json.dumps({"text": text}) if form == "jsonl" else text)
    peak, documents = peak_memory(path)
    assert documents == 1
    print(f"peak {peak}")
    assert peak < FIXED + PER_BYTE_OF_THE_LONGEST * len(text)
