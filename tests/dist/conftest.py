"""Which of these tests CI runs: all of them take some ten minutes on 2 cores, and CI has 20 for everything."""

from __future__ import annotations

from pathlib import Path

import pytest

IN_CI = (
    "fleet",
    "host_waits",
    "lost_messages",
    "mesh_groups",
    "model",
    "parameter_table",
    "saved_checkpoints",
    "seeded_faults",
    "shared_folders",
    "stream_races",
    "tied_copies",
)
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the other files `full`, unless files of this folder are asked for by name."""
    if any("dist" in str(argument) for argument in config.invocation_params.args):
        return
    for item in items:
        if HERE in item.path.parents and item.path.stem.removeprefix("test_") not in IN_CI:
            item.add_marker(pytest.mark.full("ranks on gloo, beyond CI's 20 minutes"))
