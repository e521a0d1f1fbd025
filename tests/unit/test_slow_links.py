"""benchmarks/slow_links.py: its arithmetic, and that it says why it is skipped. Measuring needs root and minutes."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_links.py"


@pytest.fixture(scope="module")
def slow_links() -> ModuleType:
    specification = importlib.util.spec_from_file_location("slow_links", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["slow_links"] = module  # dataclasses look it up there
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("rate", "bits"), [("100m", 1e8), ("2g", 2e9), ("1.5Gbit", 1.5e9)])
def test_rates(slow_links: ModuleType, rate: str, bits: float) -> None:
    assert slow_links.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "0g", "100", "-1g", "1g2"])
def test_bad_rates_are_named(slow_links: ModuleType, rate: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as"):
        slow_links.bits_per_second(rate)


@pytest.mark.parametrize("rate", ["2g", "1g", "500m", "200m", "100m"])
def test_the_model_takes_about_as_long_as_asked(slow_links: ModuleType, rate: str) -> None:
    hidden_size = slow_links.hidden_size_of(rate, 0.25)
    seconds = 16 * 12 * hidden_size**2 * 32 / slow_links.bits_per_second(rate)
    assert 0.8 < seconds / 0.25 < 1.25


def turn(slow_links: ModuleType, seconds: float, inside: float) -> object:
    return slow_links.Turn(seconds, Counter({"apply": inside / 2, "exchange": inside / 2}))


def test_a_rank_that_waits_for_the_other_is_not_stalled(slow_links: ModuleType) -> None:
    """Rank 1 is 3 s late; rank 0 spends them in the engine. Both spend 0.25 s there, and 0.5 s more beside it."""
    turns = [[turn(slow_links, 2 + 0.5 + 3.25, 3.25)], [turn(slow_links, 5 + 0.5 + 0.25, 0.25)]]
    assert slow_links.stalls(turns, [2.0, 5.0]) == [(pytest.approx(0.75), pytest.approx(0.25))]


def test_own_time_of_nested_parts(slow_links: ModuleType) -> None:
    parts = slow_links.Parts()
    inner = parts.wrap(lambda: time.sleep(0.05), "inner")

    def both() -> None:
        inner()
        time.sleep(0.02)

    parts.wrap(both, "outer")()
    assert set(parts.seconds) == {"inner", "outer"}
    assert parts.seconds["inner"] >= 0.05 and parts.seconds["outer"] >= 0.02
    inner()
    assert parts.seconds["inner"] >= 0.1


def test_without_root_one_line_says_that_it_is_skipped(
    slow_links: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_links.py"])
    monkeypatch.setattr(slow_links.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(slow_links.os, "geteuid", lambda: 1000)
    assert slow_links.main() == 0
    assert capsys.readouterr().out == "slow links: skipped, root is needed\n"


def test_without_iproute2_one_line_says_that_it_is_skipped(
    slow_links: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slow_links.py"])
    monkeypatch.setattr(slow_links.shutil, "which", lambda name: None if name == "tc" else f"/usr/sbin/{name}")
    monkeypatch.setattr(slow_links.os, "geteuid", lambda: 0)
    assert slow_links.main() == 0
    assert capsys.readouterr().out == "slow links: skipped, no tc\n"
