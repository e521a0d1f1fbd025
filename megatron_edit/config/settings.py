"""The schema as one flat table: name -> section, type, bounds, flag. Reads and copies a Config."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from megatron_edit.config.paths import PATH_METAVARS, expand
from megatron_edit.config.schema import SECTIONS, Config

TYPE_NAMES: dict[type, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
LARGEST_INTEGER = 2**63  # what a count can be in torch and numpy; far below what float() can take


@dataclass(frozen=True)
class Setting:
    """One field of the schema. `kind`: int, float, str, bool or list (of text); `optional`: may be None."""

    name: str
    section: str
    kind: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    above: float | None
    below: float | None
    metavar: str | None
    source: str | None

    @property
    def flag(self) -> str:
        """`micro_batch_size` -> `--micro-batch-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """`--no-NAME` for a switch, else None."""
        return "--no-" + self.name.replace("_", "-") if self.kind is bool else None

    @property
    def is_path(self) -> bool:
        """Whether the value names files or folders, so that `~` and `$VAR` expand in it."""
        return self.metavar in PATH_METAVARS or self.name.endswith("data_path")

    @property
    def placeholder(self) -> str:
        """What stands for the value in the help; empty for a switch."""
        if self.kind is bool:
            return ""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        word = self.metavar or {int: "N", float: "X", str: "TEXT"}.get(self.kind, "X")
        if self.kind is not list or " " in word:  # with blanks it names a fixed number of values
            return word
        return f"{word} [{word} ...]"


def _settings() -> dict[str, Setting]:
    table: dict[str, Setting] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            assert f.name not in table, f"setting {f.name} stands in two sections"
            hint, optional = hints[f.name], False
            if isinstance(hint, types.UnionType):
                hint, none = typing.get_args(hint)
                assert none is types.NoneType
                optional = True
            default = f.default if f.default_factory is MISSING else f.default_factory()
            meta = f.metadata
            table[f.name] = Setting(
                name=f.name,
                section=section,
                kind=typing.get_origin(hint) or hint,
                optional=optional,
                default=default,
                help=meta["help"],
                choices=None if meta["choices"] is None else tuple(meta["choices"]),
                minimum=meta["minimum"],
                above=meta["above"],
                below=meta["below"],
                metavar=meta["metavar"],
                source=meta["source"],
            )
    return table


SETTINGS: dict[str, Setting] = _settings()


def value_problem(setting: Setting, value: Any) -> str | None:
    """What is wrong with `value` by itself (type, choices, bounds), or None."""
    if value is None:
        return None if setting.optional else "needs a value"
    if setting.kind is list:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            return f"must be a list of text, not {value!r}"
        return None
    accepted = (int, float) if setting.kind is float else (setting.kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and setting.kind is not bool):
        return f"must be {TYPE_NAMES[setting.kind]}, not {value!r}"
    if setting.choices and value not in setting.choices:
        return f"must be one of {', '.join(setting.choices)}, not {value!r}"
    if setting.kind is str and value == "":
        return "must not be empty"
    return _number_problem(setting, value) if isinstance(value, (int, float)) else None


def _number_problem(setting: Setting, value: float) -> str | None:
    if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        return f"must be below 2^63, not a number of {value.bit_length()} bits"
    if not math.isfinite(value):
        return f"must be a finite number, not {value}"
    if setting.minimum is not None and value < setting.minimum:
        return f"must be at least {setting.minimum:.10g}, not {value}"
    if setting.above is not None and value <= setting.above:
        return f"must be above {setting.above:.10g}, not {value}"
    if setting.below is not None and value >= setting.below:
        return f"must be below {setting.below:.10g}, not {value}"
    return None


def completed(setting: Setting, value: Any, environment: Mapping[str, str]) -> Any:
    """`value` of a flag or a YAML key as it is meant: paths expanded, --split without quotes and brackets around it
    (as in Megatron-LM). Raises ValueError that says what is wrong with a path."""
    if setting.name == "split" and isinstance(value, str):
        return value.strip(" '\"[]()") or value
    if not setting.is_path:
        return value
    if isinstance(value, list):
        return [expand(word, environment) for word in value]
    return expand(value, environment)


def as_written(name: str, value: Any) -> Any:
    """`value` of the setting `name` as it must stand in a file to be read back: the reverse of `completed`."""
    if not SETTINGS[name].is_path or value is None:
        return value
    return [word.replace("$", "$$") for word in value] if isinstance(value, list) else value.replace("$", "$$")


def flag_of(name: str) -> str:
    """Flag of the setting `name`."""
    return SETTINGS[name].flag


def value_of(config: Config, name: str) -> Any:
    """The setting `name`, whatever its section."""
    return getattr(getattr(config, SETTINGS[name].section), name)


def is_given(config: Config, name: str) -> bool:
    """Whether the user (flag, YAML or preset) set `name`, in contrast to a default and a derived value."""
    source = config.sources.get(name)
    if source is not None:
        return source not in ("default", "derived")
    return bool(value_of(config, name) != SETTINGS[name].default)


def with_values(config: Config, values: Mapping[str, Any], source: str | None = None) -> Config:
    """A copy of `config` with `values` (of any section) set; `source` is noted for each when given.

    What was resolved is not any more, as other values may follow from the new ones.
    """
    settings = {section: dict(vars(getattr(config, section))) for section in SECTIONS}
    for name, value in values.items():
        settings[SETTINGS[name].section][name] = value
    sections = {section: SECTIONS[section](**settings[section]) for section in SECTIONS}
    sources = {**config.sources, **dict.fromkeys(values, source)} if source is not None else config.sources
    return Config(**sections, sources=sources, ignored_flags=config.ignored_flags)
