"""The table of methods is complete and its rows are consistent."""

import dataclasses

import pytest

from megatron_edit.sync.methods import METHODS, Method, UnknownMethodError, get_method


def test_edit_has_the_documented_outer_step() -> None:
    edit = get_method("edit")
    assert (edit.outer_optimizer, edit.outer_lr, edit.outer_momentum) == ("nesterov", 0.7, 0.8)
    assert (edit.trigger, edit.placement, edit.averaging) == ("steps", "forward", "penalty")
    assert edit.has_anchor
    assert "2412.07210" in edit.source and "ours" in edit.source


def test_baseline_has_no_sync_of_parameters() -> None:
    baseline = get_method("baseline")
    assert (baseline.trigger, baseline.placement) == ("never", "gradient")
    assert baseline.averaging == "gradient-mean"
    assert not baseline.has_anchor and baseline.outer_optimizer == "none"


@pytest.mark.parametrize("row", METHODS.values(), ids=METHODS)
def test_rows_are_consistent(row: Method) -> None:
    assert METHODS[row.name] is row and row.source
    has_outer = row.outer_optimizer != "none"
    assert has_outer == (row.outer_lr is not None) == (row.outer_momentum is not None)
    assert row.has_anchor or not has_outer, "an outer optimizer moves an anchor"
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.name = "other"  # type: ignore[misc]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownMethodError, match=r"'edti'; known: baseline, edit"):
        get_method("edti")
