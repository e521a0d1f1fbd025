"""The table of methods is complete and its rows are consistent."""

import dataclasses

import pytest

from megatron_edit.sync.methods import METHODS, Method, UnknownMethodError, get_method

# design tables of the papers: trigger, place, outer step, its learning rate and momentum, penalty by default
EXPECTED = {
    "baseline": ("never", "gradient", "none", None, None, False),
    "post-local-sgd": ("steps", "step", "none", None, None, False),
    "slowmo": ("steps", "step", "slowmo", 1.0, 0.5, False),
    "diloco": ("steps", "step", "nesterov", 0.7, 0.9, False),
    "co2": ("steps", "round", "co2", 1.0, 0.5, False),
    "co2-sharded": ("steps", "round", "co2", 1.0, 0.5, False),
    "edit": ("steps", "forward", "nesterov", 0.7, 0.8, True),
    "a-edit": ("time", "forward", "nesterov", 0.7, 0.8, True),
    "streaming": ("staggered", "forward", "nesterov", 0.7, 0.9, False),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_method_has_the_documented_parts_and_defaults(name: str) -> None:
    row = get_method(name)
    penalty = (row.weighting, row.anomaly_threshold, row.pseudo_grad_clip)
    assert (row.trigger, row.placement, row.outer_step, row.outer_lr, row.outer_momentum) == EXPECTED[name][:5]
    assert penalty == (("softmax", 3.0, 10.0) if EXPECTED[name][5] else ("mean", 0.0, 0.0))


def test_there_are_no_other_methods() -> None:
    assert METHODS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("row", METHODS.values(), ids=METHODS)
def test_rows_are_consistent(row: Method) -> None:
    assert METHODS[row.name] is row and row.source
    assert row.has_anchor == (row.outer_lr is not None) == (row.outer_momentum is not None)
    assert row.takes_penalty or (row.weighting, row.anomaly_threshold, row.pseudo_grad_clip) == ("mean", 0.0, 0.0)
    assert row.has_anchor or not (row.takes_penalty or row.shards_over_sync)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.name = "other"  # type: ignore[misc]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownMethodError, match=r"'edti'; known: baseline, post-local-sgd"):
        get_method("edti")
