"""What differs between releases of megatron-core, and what is said of one that is not known."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_edit.platform.base import quiet_megatron_warnings
from megatron_edit.platform.megatron_core import (
    NEWEST,
    OLDEST,
    gradients_for_norm,
    installed_release,
    mlp_parts,
    release_notes,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.16.1", "0.16.2", None])
def test_nothing_is_said_of_a_tested_release(version: str | None) -> None:
    assert release_notes(version) == []


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2", "0.19.0", "0.19.2", "0.19.2rc1"])
def test_one_line_is_said_of_a_release_that_is_tested_in_part(version: str) -> None:
    (line,) = release_notes(version)
    assert f"megatron-core {version}: only a part of the tests" in line and OLDEST in line and "\n" not in line


@pytest.mark.parametrize("version", ["0.16.0", "0.15.3", "0.20.0", "0.20.0rc0", "1.0"])
def test_one_line_is_said_of_an_unknown_release(version: str) -> None:
    (line,) = release_notes(version)
    assert f"megatron-core {version}: it is not known" in line and f"up to {NEWEST}" in line and "\n" not in line


def test_the_installed_release_is_a_known_one() -> None:
    installed = installed_release()
    assert installed is not None and "not known" not in "".join(release_notes(installed))


def test_requirement_and_constraints_hold_what_is_tested() -> None:
    (required,) = re.findall(r'"megatron-core(>=[^"]*)"', (REPOSITORY / "setup.py").read_text())
    newest_minor = int(NEWEST.split(".")[1])
    assert required == f">={OLDEST},<0.{newest_minor + 1}"
    for name, series in (("constraints.txt", OLDEST), (f"constraints-mcore-{NEWEST}.txt", NEWEST)):
        assert f"\nmegatron-core=={series}" in (REPOSITORY / name).read_text()


def test_the_parts_of_an_mlp_are_found_in_a_spec_and_in_a_builder() -> None:
    parts = object()
    for mlp in (SimpleNamespace(submodules=parts), partial(print, submodules=parts)):
        assert mlp_parts(SimpleNamespace(submodules=SimpleNamespace(mlp=mlp))) is parts


def test_the_gradients_of_the_norm_are_found_under_both_names() -> None:
    old = SimpleNamespace(get_main_grads_for_grad_norm=lambda: [1])
    new = SimpleNamespace(get_grads_for_grad_norm=lambda: [1])
    assert gradients_for_norm(old) == gradients_for_norm(new) == [1]


def test_the_recommendation_of_another_model_class_is_dropped_and_nothing_else() -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")

    def passes(message: str) -> bool:
        return bool(logger.filter(logging.LogRecord(logger.name, logging.WARNING, __file__, 1, message, None, None)))

    quiet_megatron_warnings()
    assert not passes("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    assert passes("another warning")
