"""`make quickstart` learns: the loss on held-out text falls below that of a unigram model of the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("pretrain_llama.py", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(folder: Path, *words: str, timeout_s: float) -> str:
    """Output of a command that must end well; programs are those of this interpreter's environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        words, cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    return result.stdout


def unigram_loss(output: str) -> float:
    found = re.search(r"^unigram loss ([\d.]+) nats", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def validation_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+)", output)]


def test_a_short_quickstart_learns(folder: Path) -> None:
    """The same steps on less text and with fewer iterations; it ends by saying what it did."""
    flags = "--max-bytes 300000 --train-iters 60 --eval-interval 30 --log-interval 10"
    output = run(folder, "python", "tools/quickstart.py", *flags.split(), timeout_s=600)
    first, last = validation_losses(output)
    assert last < first
    assert last < unigram_loss(output) - 0.2
    assert "\nDone." in output
    assert len(re.findall(r"^sync \d+ at iteration \d+ ", output, re.MULTILINE)) >= 2
    assert {path.name for path in folder.iterdir()} == {"pretrain_llama.py", "tools", "examples", "runs"}
    assert {path.name for path in (folder / "runs").iterdir()} == {"quickstart"}


@pytest.mark.full(reason="two trainings of minutes each: EDiT and the synchronous baseline, as in the README")
def test_readme_runs_beat_a_unigram_model(folder: Path) -> None:
    output = run(folder, "python", "tools/quickstart.py", timeout_s=1800)
    unigram = unigram_loss(output)
    flags = "--device cpu --config examples/quickstart.yaml --edit-num-replicas 2 --tensor-model-parallel-size 2"
    baseline = run(
        folder, "torchrun", "--nproc-per-node", "4", "pretrain_llama.py", *flags.split(),
        "--edit-sync-interval", "0", "--save", "runs/quickstart/baseline", timeout_s=1800,
    )  # fmt: skip
    assert validation_losses(output)[-1] < unigram - 1.0
    assert validation_losses(baseline)[-1] < unigram - 1.0
