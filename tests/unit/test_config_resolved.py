"""A resolved config: what its types promise is there, and nothing else of the settings changes."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace

import pytest

from megatron_edit.config import Config, ConfigError, ResolvedConfig, derive, load_config, resolve
from megatron_edit.config.resolved import (
    ResolvedEdit,
    ResolvedModel,
    ResolvedTraining,
    UnresolvedError,
    resolved_model,
)
from megatron_edit.config.schema import ModelConfig
from megatron_edit.config.settings import SETTINGS, value_of, with_values
from megatron_edit.tables.methods import METHODS

BASE = "--mock-data --train-samples 64 --global-batch-size 8 --edit-num-replicas 2"
SECTIONS = (ResolvedModel, ResolvedEdit, ResolvedTraining)
REQUIRED = [name for section in SECTIONS for name in inspect.get_annotations(section)]


def config_of(flags: str) -> ResolvedConfig:
    return resolve(load_config(f"{BASE} {flags}".split()), 2, 2, "cpu")


@pytest.mark.parametrize("method", METHODS)
def test_every_required_field_has_a_value_with_every_method(method: str) -> None:
    config = config_of(f"--edit-method {method}")
    assert all(value_of(config, name) is not None for name in REQUIRED)
    assert (config.edit.sync_seconds is not None) == (METHODS[method].trigger == "time")
    assert (config.edit.outer_lr_and_momentum != (0.0, 0.0)) == METHODS[method].has_anchor


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_is_an_optional_one_of_the_schema(name: str) -> None:
    """A field that is required anyhow has no place here: its type would stand twice."""
    assert SETTINGS[name].optional


def test_settings_and_their_order_are_those_of_the_schema() -> None:
    """A checkpoint saves them by name."""
    flags = load_config(BASE.split())
    config, derived = resolve(flags, 2, 2, "cpu"), derive(flags, 2, 2, "cpu")
    for section in ("model", "edit", "training", "optimizer"):
        ours, theirs = asdict(getattr(config, section)), asdict(getattr(derived, section))
        assert list(ours.items()) == list(theirs.items())
    assert config.sources == derived.sources


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_cannot_be_taken_away(name: str) -> None:
    section = getattr(config_of("--edit-method a-edit"), SETTINGS[name].section)
    with pytest.raises(UnresolvedError, match=SETTINGS[name].flag):
        replace(section, **{name: None})


@pytest.mark.parametrize(
    ("method", "name"), [("a-edit", "edit_sync_time"), ("edit", "edit_outer_lr"), ("co2", "edit_outer_momentum")]
)
def test_what_the_method_needs_cannot_be_taken_away(method: str, name: str) -> None:
    with pytest.raises(UnresolvedError, match=SETTINGS[name].flag):
        replace(config_of(f"--edit-method {method}").edit, **{name: None})
    replace(config_of("--edit-method baseline").edit, **{name: None})


def test_what_does_not_resolve_is_said_as_the_checks_say_it() -> None:
    flags = "--mock-data --global-batch-size 7 --edit-num-replicas 2"
    with pytest.raises(ConfigError) as error:
        resolve(load_config(flags.split()), 2, 2, "cpu")
    assert len(error.value.problems) == 2
    assert "neither --train-iters nor --train-samples is given" in str(error.value)
    assert "--global-batch-size 7 is not a multiple" in str(error.value)


def test_a_resolved_config_with_another_value_is_to_be_resolved_again() -> None:
    config = with_values(config_of(""), {"seed": 5})
    assert type(config) is Config and type(config.edit) is not ResolvedEdit
    again = resolve(config, 2, 2, "cpu")
    assert again.training.seed == 5 and again.edit == config_of("").edit


def test_a_model_alone() -> None:
    model = resolved_model(ModelConfig(num_attention_heads=4, hidden_size=100))
    assert (model.ffn_hidden_size, model.num_query_groups, model.kv_channels) == (320, 4, 25)
    assert model.max_position_embeddings == model.seq_length
    assert resolved_model(model) == model
    with pytest.raises(UnresolvedError, match="--kv-channels"):
        resolved_model(ModelConfig(num_attention_heads=3, hidden_size=100))
