"""What all tests share: one thread a process, no deadlines, the tests marked `full` left out unless --full is given."""

from __future__ import annotations

import os

import hypothesis
import pytest

# torch, which is not imported yet, reads it once. Several ranks share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine is not a fault of the code. In CI the examples are the same in every run.
hypothesis.settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("here")

_LEFT_OUT = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too (make test-full)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is marked `full`, and remembers why."""
    config.stash[_LEFT_OUT] = {}
    if config.getoption("--full"):
        return
    full = [(item, marker) for item in items if (marker := item.get_closest_marker("full"))]
    for item, marker in full:
        reason = marker.kwargs.get("reason") or next(iter(marker.args), "too long for every run")
        config.stash[_LEFT_OUT][item.nodeid] = reason
    config.hook.pytest_deselected(items=[item for item, _ in full])
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lists what was left out, one line a test function, with its reason."""
    left_out = config.stash.get(_LEFT_OUT, {})
    if not left_out:
        return
    lines: dict[tuple[str, str], int] = {}
    for nodeid, reason in left_out.items():
        key = (nodeid.split("[")[0], reason)
        lines[key] = lines.get(key, 0) + 1
    terminalreporter.section(f"{len(left_out)} tests left to `make test-full`")
    for (test, reason), count in lines.items():
        terminalreporter.line(f"{test} ({count}): {reason}")
