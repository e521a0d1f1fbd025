"""Reads a settings file: keys are the settings' names, flat or grouped by section. Collects all problems.

A value without quotes means what the same text means after a flag. YAML 1.1 would read `0123` as 83, `1:30` as
90, `007` as 7, `no` as false and 2024-01-31 as a date: here numbers are plain decimal numbers, anything else where a
number belongs is refused, and text stays the text that is written.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_edit.config.schema import SECTIONS
from megatron_edit.config.settings import LARGEST_INTEGER, SETTINGS, Setting, completed, value_problem
from megatron_edit.config.values import words_of_named_sets


class _Plain(str):
    """A scalar without quotes, as it stands in the file."""


class _Loader(yaml.SafeLoader):
    """A safe loader that leaves plain scalars as they are written, null apart, and refuses a key that stands twice in
    one mapping (YAML's default keeps the last)."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as in yaml.SafeLoader
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    return text if node.style else _Plain(text)


def _mapping_of_unique_keys(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = str(loader.construct_object(key_node))
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key} stands twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_of_unique_keys)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _scalar)


def read_yaml(path: str, environment: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], list[str], set[str]]:
    """Values by setting name, problems (each names file and key), and the settings whose value is refused.

    `environment`: variables for `$VAR` in paths.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    refused: set[str] = set()
    for key, value, section in _entries(path, problems):
        where = f"--config {path}: key {key}"
        setting = SETTINGS.get(key)
        if setting is None:
            near = _nearest_key(key)
            refused.update(near)
            problems.append(f"{where} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        refused.add(key)  # unless all is well with it
        if setting.section == "command":
            problems.append(f"{where} can only be given as the flag {setting.flag}")
        elif section is not None and section != setting.section:
            problems.append(f"{where} stands under {section}, but belongs to {setting.section}")
        elif key in values:
            problems.append(f"{where} stands twice")
        else:
            if key == "valid_data_path" and isinstance(value, dict):
                try:
                    value = words_of_named_sets(value)
                except ValueError as error:
                    problems.append(f"{where} ({setting.flag}) {error}")
                    continue
            value, fault = _meant(setting, value, environment)
            if fault:
                problems.append(f"{where} ({setting.flag}) {fault}")
                continue
            refused.discard(key)
            if value is not None:  # null: not given
                values[key] = value
    return values, problems, refused


def _entries(path: str, problems: list[str]) -> list[tuple[str, Any, str | None]]:
    """(key, value, section or None) of each setting in the file; what cannot be read goes to `problems`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problems.append(f"--config {path} cannot be read: {reason}")
        return []
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"--config {path} is not valid YAML: " + " ".join(str(error).split()))
        return []
    if tree is None:
        return []
    if not isinstance(tree, dict):
        problems.append(f"--config {path} must hold `key: value` lines, not {type(tree).__name__}")
        return []
    entries: list[tuple[str, Any, str | None]] = []
    for key, value in tree.items():
        if key in SECTIONS and value is None:
            continue
        if key in SECTIONS and isinstance(value, dict):
            entries.extend((str(inner), inner_value, key) for inner, inner_value in value.items())
        elif key in SECTIONS:
            problems.append(f"--config {path}: section {key} must hold `key: value` lines, not {value!r}")
        else:
            entries.append((str(key), value, None))
    return entries


def _meant(setting: Setting, value: Any, environment: Mapping[str, str]) -> tuple[Any, str]:
    """(value of the setting's kind, "") or (None, what is wrong). None for null: not given."""
    if value is None:
        return None, ""
    value = _as_kind(setting, value)
    if fault := value_problem(setting, value):
        return None, fault + _hint(setting, value)
    try:
        return completed(setting, value, environment), ""
    except ValueError as error:
        return None, f"{value} {error}"


_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _as_kind(setting: Setting, value: Any) -> Any:
    """A plain scalar brought to the setting's kind where it can be; else as it is, for the check."""
    if setting.kind is list:
        items = value if isinstance(value, list) else [value]
        return [str(v) for v in items] if all(isinstance(v, str | int | float) for v in items) else value
    if not isinstance(value, _Plain):
        return value
    if setting.kind is str:
        return str(value)
    if setting.kind is bool:
        return _SWITCHES.get(value.lower(), value)
    if setting.kind is float and value in (".inf", "-.inf", ".nan"):
        return float(value.replace(".", ""))
    if _INTEGER.fullmatch(value) and len(value) < 4000:  # Python reads no longer ones
        number = int(value)
        return number if setting.kind is int or abs(number) >= LARGEST_INTEGER else float(number)
    return float(value) if setting.kind is float and _NUMBER.fullmatch(value) else value


def _hint(setting: Setting, value: Any) -> str:
    """How to write a number that YAML 1.1 reads in its own way, or that begins with 0; else nothing."""
    if setting.kind not in (int, float) or not isinstance(value, _Plain):
        return ""
    try:
        other = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        other = None
    if isinstance(other, float) and setting.kind is int:  # 8.0 is a way to write 8; 8.5 and .inf are not
        other = int(other) if other.is_integer() else None
    read = isinstance(other, int | float) and not isinstance(other, bool) and math.isfinite(other)
    meant = [f"{other}"] if read else []
    if value.isdecimal() and str(int(value)) not in meant:
        meant.append(str(int(value)))
    reading = f" (YAML 1.1 reads {other})" if read else ""
    return f"{reading}: write {' or '.join(meant)}" if meant else ""


def _nearest_key(key: str) -> list[str]:
    keys = [*SECTIONS, *SETTINGS]
    return difflib.get_close_matches(key.replace("-", "_").lower(), keys, n=1, cutoff=0.8)
