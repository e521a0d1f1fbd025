"""The table of methods is complete, its rows are consistent, and docs/methods.md says what it says."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.config.settings import SETTINGS
from megatron_edit.sync.outer import OUTER_STEPS, OuterSettings
from megatron_edit.tables.methods import METHODS, Method, UnknownMethodError, get_method, settings_of_others

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_edit"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")

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
    assert (row.trigger == "time") == (row.sync_time is not None) == (not row.equal_steps)
    assert all(SETTINGS[setting].section == "edit" for setting in row.settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.name = "other"  # type: ignore[misc]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownMethodError, match=r"'edti'; known: baseline, post-local-sgd"):
        get_method("edti")


def test_a_setting_of_others_is_every_owned_one_that_the_row_does_not_name() -> None:
    owned = {setting for row in METHODS.values() for setting in row.settings}
    for row in METHODS.values():
        others = settings_of_others(row)
        assert others.keys() == owned - set(row.settings)
        assert all(setting in owner.settings for setting, owner in others.items())
    assert settings_of_others(METHODS["edit"])["edit_co2_momentum_clip"].name == "co2", "the first that takes it"


def test_methods_answer_for_themselves() -> None:
    """No file but the table compares with a method's name: what a method does follows from its row."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and not ast.unparse(node).startswith("setting.section"):
                constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if constants & METHODS.keys():
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


# ---- docs/methods.md -------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def row_of_the_page(row: Method) -> str:
    penalty = "off" if row.takes_penalty else "none"
    if row.anomaly_threshold or row.pseudo_grad_clip:
        penalty = f"{row.weighting}, δ {row.anomaly_threshold:g}, φ {row.pseudo_grad_clip:g}"
    place = row.placement + (", sharded" if row.shards_over_sync else "")
    rates = f"{number(row.outer_lr)} | {number(row.outer_momentum)}"
    return f"| `{row.name}` | {row.trigger} | {place} | {penalty} | {row.outer_step} | {rates} | {row.source} |"


def test_the_page_has_a_line_for_every_method_and_no_other() -> None:
    lines = [
        line for line in PAGE.splitlines() if re.match(r"\| `[a-z0-9-]+` \| (never|steps|staggered|time) \|", line)
    ]
    assert lines == [row_of_the_page(row) for row in METHODS.values()]


def test_the_page_gives_the_defaults_of_the_settings() -> None:
    found = dict(re.findall(r"^\| `--(edit-[a-z0-9-]+)` \| ([^|]+?) \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE))
    assert len(found) > 15
    for flag, shown in found.items():
        default: Any = SETTINGS[flag.replace("-", "_")].default
        if flag == "edit-sync-time":
            assert [shown] == [number(row.sync_time) for row in METHODS.values() if row.sync_time]
        elif default is None:  # derived; said in words
            assert not shown[0].isdigit()
        elif isinstance(default, bool):
            assert shown == ("on" if default else "off"), flag
        else:
            assert shown == (default if isinstance(default, str) else number(default)), flag


def test_the_page_says_whose_a_setting_is() -> None:
    users = dict(re.findall(r"^\| `--(edit-[a-z0-9-]+)` \| [^|]+ \| ([^|]+?) \| [^|]+ \|$", PAGE, re.MULTILINE))
    owned = {setting for row in METHODS.values() for setting in row.settings}
    assert {flag.replace("-", "_") for flag in users} > owned
    for setting in owned:
        used_by = users[setting.replace("_", "-")].removesuffix(" with a delay").split(", ")
        assert used_by == [row.name for row in METHODS.values() if setting in row.settings], setting


def test_the_page_names_every_setting_of_the_sync_but_those_of_every_run() -> None:
    elsewhere = {"edit_method", "edit_num_replicas", "edit_warmup_steps"}
    names = [name for name, setting in SETTINGS.items() if setting.section == "edit" and name not in elsewhere]
    assert [name for name in names if SETTINGS[name].flag not in PAGE] == []


def test_the_worked_example_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is consistent, its outer step is torch's; tests/dist/test_methods_against_reference.py runs it."""
    (example,) = re.findall(r"^```python run\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(METHODS, "heavy-ball", None)  # both are taken out again afterwards
    monkeypatch.setitem(OUTER_STEPS, "heavy-ball", None)
    exec(compile(example, "docs/methods.md", "exec"), {})
    row = METHODS["heavy-ball"]
    test_rows_are_consistent(row)
    anchor, momentum = torch.zeros(5), torch.zeros(5)
    parameter = torch.nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9)
    for seed in range(4):
        delta = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        parameter.grad = -0.5 * delta
        sgd.step()
        assert row.outer_lr is not None and row.outer_momentum is not None
        settings = OuterSettings(row.outer_lr, row.outer_momentum)
        OUTER_STEPS[row.outer_step](anchor, momentum, delta, torch.tensor(0.5), settings)
    torch.testing.assert_close(anchor, parameter.detach())
    with pytest.raises(AssertionError, match="different sizes"):  # as `test_outer.py` asks of all of them
        OUTER_STEPS[row.outer_step](anchor, momentum, torch.zeros(1), 1.0, settings)
    assert max(map(len, example.splitlines())) <= 120, "it is to be pasted into files that lint"
