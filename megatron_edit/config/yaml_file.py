"""Reads a settings file: keys are the settings' names, flat or grouped by section. Collects all problems."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from megatron_edit.config.schema import SECTIONS
from megatron_edit.config.settings import LARGEST_INTEGER, SETTINGS, Setting, value_problem
from megatron_edit.config.values import words_of_named_sets


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key that stands twice in one mapping (YAML's default keeps the last)."""


def _mapping_of_unique_keys(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = str(loader.construct_object(key_node))
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key} stands twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_of_unique_keys)


def read_yaml(path: str) -> tuple[dict[str, Any], list[str], set[str]]:
    """Values by setting name, problems (each names file and key), and the settings whose value is refused."""
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
            value = _as_kind(setting, value)
            fault = value_problem(setting, value) if value is not None else None
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
        tree = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2024-13-45 looks like a date and is none
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


def _as_kind(setting: Setting, value: Any) -> Any:
    """YAML's reading brought to the setting's kind where nothing is lost; else as it is, for the check."""
    if setting.kind is float:
        if isinstance(value, str):  # YAML 1.1 reads 3e-4, which has no dot, as text
            try:
                return float(value)
            except ValueError:
                return value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_INTEGER:
            return float(value)
    if setting.kind is list:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in items):
            return [str(v) for v in items]
    return value


def _nearest_key(key: str) -> list[str]:
    keys = [*SECTIONS, *SETTINGS]
    return difflib.get_close_matches(key.replace("-", "_").lower(), keys, n=1)
