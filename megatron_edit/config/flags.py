"""Command line and YAML file -> Config, with the source of every value. Flags win over the file, the file
over the preset of --model-size, the preset over the defaults.

Own parser instead of argparse: all problems are reported at once, nothing is abbreviated, and unknown flags
get a suggestion. A flag that is given twice holds its last value, as scripts that append "$@" expect.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_edit.config.megatron_flags import (
    MEGATRON_FLAGS,
    TRANSLATED,
    FlagGroup,
    Verdict,
    command_without,
    entry_of,
    judge,
)
from megatron_edit.config.paths import expand
from megatron_edit.config.presets import PRESETS
from megatron_edit.config.schema import CommandConfig, Config, ConfigError
from megatron_edit.config.settings import SETTINGS, Setting, completed, value_of, value_problem, with_values
from megatron_edit.config.yaml_file import read_yaml


@dataclass
class ReadResult:
    """What was understood, what was not, and the settings whose intended value is therefore unknown."""

    config: Config
    problems: list[str]
    doubtful: set[str]
    groups: list[FlagGroup] = field(default_factory=list)
    megatron: Verdict = field(default_factory=Verdict)

    def error(self, more_problems: Sequence[str] = ()) -> ConfigError | None:
        """All problems, and the command without the flags that are refused; None when there is no problem."""
        problems = list(dict.fromkeys([*self.problems, *more_problems]))
        others = len(problems) - len(self.megatron.refused)
        return ConfigError(problems, command_without(self.groups, self.megatron, others)) if problems else None


def load_config(argv: Sequence[str]) -> Config:
    """Config of the command line `argv` (without the program's name).

    Raises ConfigError with all problems of syntax, type and range. What depends on the ranks and on other
    settings is checked by `check`. With --help among the flags nothing else is looked at.
    """
    result = read_config(argv)
    if error := result.error():
        raise error
    return result.config


def read_config(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> ReadResult:
    """As `load_config`, but the problems are returned beside a Config of all that could be understood.

    `environment`: variables for `$VAR` in paths.
    """
    flags = _parse(argv, environment)
    if flags.values.get("help"):
        return ReadResult(Config(command=CommandConfig(help=True)), [], set())
    problems, doubtful = list(flags.problems), set(flags.doubtful)

    yaml_values: dict[str, Any] = {}
    yaml_path = flags.values.get("config")
    if yaml_path is not None:
        yaml_values, yaml_problems, refused = read_yaml(yaml_path, environment)
        problems += yaml_problems
        if yaml_problems and not yaml_values and not refused:  # no key could be read: the file may set anything
            refused = set(SETTINGS)
        in_doubt = {s.name for s in SETTINGS.values() if s.name in refused or s.section in refused}  # misspelt section
        doubtful |= in_doubt - flags.values.keys()

    size = flags.values.get("model_size", yaml_values.get("model_size"))
    preset = PRESETS.get(size, {}) if size is not None else {}

    config = Config(sources=dict.fromkeys(SETTINGS, "default"))
    config = with_values(config, preset, f"preset {size}")
    config = with_values(config, yaml_values, str(yaml_path))
    config = with_values(config, flags.values, "flag")
    megatron = judge(flags.groups, lambda flag: flag in _SWITCH_ON and value_of(config, _SWITCH_ON[flag].name))
    config = replace(config, ignored_flags=tuple(megatron.ignored))
    problems += megatron.problems
    if "--group-query-attention" in megatron.ignored and config.sources["num_query_groups"] == "default":
        problems.append("--group-query-attention needs --num-query-groups N, the number of key/value heads")
    return ReadResult(config, problems, doubtful, flags.groups, megatron)


@dataclass
class _Flags:
    groups: list[FlagGroup]
    environment: Mapping[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)


_SWITCH_ON = {s.flag: s for s in SETTINGS.values() if s.kind is bool}
_SWITCH_OFF = {s.negative_flag: s for s in SETTINGS.values() if s.negative_flag is not None}
_WITH_VALUE = {s.flag: s for s in SETTINGS.values() if s.kind is not bool}
ALL_FLAGS: tuple[str, ...] = (
    *_SWITCH_ON, *(flag for flag in _SWITCH_OFF if flag), *_WITH_VALUE, *TRANSLATED, *MEGATRON_FLAGS
)  # fmt: skip
_CLOSE = 0.85  # of 1, difflib's measure: a letter or two


def _parse(argv: Sequence[str], environment: Mapping[str, str]) -> _Flags:
    problems: list[str] = []
    groups = _split_into_flags(argv, problems)
    result = _Flags(groups, environment, problems=problems)
    result.problems += _corpora_twice({flag for flag, _ in groups})
    for flag, values in groups:
        flag = "--help" if flag == "-h" else flag
        if flag in _SWITCH_ON or flag in _SWITCH_OFF:
            _take_switch(flag, values, result)
        elif flag in _WITH_VALUE:
            _take_value(_WITH_VALUE[flag], values, result)
        elif flag in TRANSLATED:
            _take_translated(flag, values, result)
        elif entry_of(flag) is None:
            near = _nearest_flag(flag)
            meant = f"; did you mean {near}?" if near else ""
            result.problems.append(f"{flag} is not a flag of this program{meant}")
            result.doubtful.update(s.name for s in SETTINGS.values() if near and s.flag == near)
    return result


def _nearest_flag(flag: str) -> str | None:
    """A flag that differs in few letters, this program's own before Megatron-LM's others."""
    wanted = "--" + flag[2:].replace("_", "-").lower()
    own = [*_SWITCH_ON, *(f for f in _SWITCH_OFF if f), *_WITH_VALUE]
    for flags in (own, ALL_FLAGS):
        if near := difflib.get_close_matches(wanted, flags, n=1, cutoff=_CLOSE):
            return near[0]
    return None


def _split_into_flags(argv: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the arguments that follow it (`--flag=value` has one)."""
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            flag, equals, value = token.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            problems.append(f"{token!r} stands before any flag: arguments are --flag VALUE")
    return groups


def _take_switch(flag: str, values: list[str], result: _Flags) -> None:
    setting = _SWITCH_ON.get(flag) or _SWITCH_OFF[flag]
    if values:
        result.problems.append(
            f"{flag} is a switch and takes no value, but {values[0]!r} follows it; {setting.negative_flag} turns it off"
        )
        result.doubtful.add(setting.name)
        return
    result.values[setting.name] = flag in _SWITCH_ON


def _take_value(setting: Setting, values: list[str], result: _Flags) -> None:
    if not values:
        fault = f"needs a value: {setting.flag} {setting.placeholder}"
    elif setting.kind is not list and len(values) > 1:
        fault = f"takes one value, but {' '.join(map(repr, values))} follow it"
    else:
        value, fault = _convert(setting, values, result.environment)
        if not fault:
            result.values[setting.name] = value
            return
    result.problems.append(f"{setting.flag} {fault}")
    result.doubtful.add(setting.name)


def _convert(setting: Setting, words: list[str], environment: Mapping[str, str]) -> tuple[Any, str]:
    """(value, "") or (None, what is wrong)."""
    value: Any = words if setting.kind is list else words[0]
    if setting.kind in (int, float):
        with contextlib.suppress(ValueError):  # then it stays text, and value_problem says what it should be
            value = setting.kind(value)
    try:
        return completed(setting, value, environment), value_problem(setting, value) or ""
    except ValueError as error:
        return None, f"{' '.join(words)} {error}"


# files of corpora -> settings that they stand for
FILES_OF_CORPORA = {
    "--data-args-path": ("data_path",),
    "--per-split-data-args-path": ("train_data_path", "valid_data_path", "test_data_path"),
}


def _corpora_twice(given: set[str]) -> list[str]:
    """A corpus is named by a flag or by a file, not by both."""
    return [
        f"{file} and {SETTINGS[name].flag} are both given: give one"
        for file, names in FILES_OF_CORPORA.items()
        for name in names
        if file in given and SETTINGS[name].flag in given
    ]


def _take_translated(flag: str, values: list[str], result: _Flags) -> None:
    arguments, translate = TRANSLATED[flag]
    if len(values) != arguments:
        result.problems.append(f"{flag} takes {'one value' if arguments else 'no value'}, not {values}")
        return
    try:
        value = values[0] if values else ""
        translated = translate(expand(value, result.environment) if flag in FILES_OF_CORPORA else value)
        translated = {n: completed(SETTINGS[n], v, result.environment) for n, v in translated.items()}
    except ValueError as error:
        why = f"{values[0]} {error}" if flag in FILES_OF_CORPORA else f"must be a number, not {values[0]!r}"
        result.problems.append(f"{flag} {why}")
        result.doubtful.update(FILES_OF_CORPORA.get(flag, ()))
        return
    for name, value in translated.items():
        fault = value_problem(SETTINGS[name], value)
        if fault:
            result.problems.append(f"{flag} {values[0]}: {SETTINGS[name].flag} {fault}")
        else:
            result.values[name] = value
