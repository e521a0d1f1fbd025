"""The benchmarks run to their end and print their table; what they measure is not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.full(reason="benchmarks, as short as they can be")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("step_cost.py --steps 1 --micro-batch-size 1", "local EDiT step"),
        ("memory.py", "edit"),
        ("data.py --megabytes 2 --turns 1", "tokens/s"),
        ("straggler.py --fast-steps 5 --intervals 1", "a-edit"),
    ],
)
def test_a_benchmark_runs(command: str, line: str) -> None:
    script, *flags = command.split()
    result = subprocess.run([sys.executable, BENCHMARKS / script, *flags], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert line in result.stdout
