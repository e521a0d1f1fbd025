"""Rotary settings of a config.json, which can spell each of them twice.

transformers 5 keeps them in `rope_parameters`, older releases in `rope_scaling` and a `rope_theta` of its own; the kind
is `rope_type` or `type`. Which spelling wins depends on the release: 5.24 takes `rope_scaling` where both are there,
4.x knows nothing else; the `rope_theta` inside wins in 5.24, the one outside in 4.x; `type` wins in some 4.x. So two
spellings may stand side by side only if they say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_edit.config.settings import SETTINGS, value_problem

SPELLINGS = ("rope_parameters", "rope_scaling")
KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ORIGINAL = "original_max_position_embeddings"


def read_rope(raw: Mapping[str, Any], default_base: float) -> tuple[dict[str, Any], list[str]]:
    """The model's rotary settings by name, and what is wrong. `raw`: config.json; `default_base`: of the class."""
    given = {name: raw[name] for name in SPELLINGS if raw.get(name) not in (None, {})}
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for name, rope in (given or {SPELLINGS[0]: {}}).items():
        if isinstance(rope, dict):
            found[name], wrong = _one_spelling(name, rope, raw, default_base)
            problems += wrong
        else:
            problems.append(f'{name} {rope!r} is not a mapping such as {{"rope_type": "linear", "factor": 8.0}}')
    if problems:
        return {}, problems
    first, second = (*found.values(), *found.values())[:2]
    if first != second:
        differ = ", ".join(
            f"{key} {first.get(key, 'absent')} and {second.get(key, 'absent')}"
            for key in sorted(first.keys() | second.keys())
            if first.get(key) != second.get(key)
        )
        return {}, [f"{' and '.join(found)} are two spellings of one setting and differ ({differ}): remove one"]
    return first, []


def _one_spelling(
    name: str, rope: Mapping[str, Any], raw: Mapping[str, Any], default_base: float
) -> tuple[dict[str, Any], list[str]]:
    """What the mapping `rope` says together with the keys of `raw` that stand for what it leaves out."""
    kind, problems = _agreed({f"{name}.rope_type": rope.get("rope_type"), f"{name}.type": rope.get("type")})
    kind = "default" if kind is None else kind
    if not problems and (not isinstance(kind, str) or kind not in KEYS):
        problems = [f"rope type {kind!r} is not built here; known are {', '.join(KEYS)}"]
    if problems:
        return {}, problems
    needed = KEYS[kind]
    values: dict[str, Any] = {key: rope.get(key) for key in ("rope_theta", *needed)}
    for key in ("rope_theta", *(key for key in needed if key == _ORIGINAL)):  # these can stand outside too
        values[key], wrong = _agreed({f"{name}.{key}": rope.get(key), key: raw.get(key)})
        problems += wrong
    if values["rope_theta"] is None:
        values["rope_theta"] = default_base
        if raw.get("rope_theta", 0) is None:
            problems.append("rope_theta is null")
    if missing := [key for key in needed if values[key] is None]:
        problems.append(f"{name}, rope type {kind}: {', '.join(missing)} missing")
    if rope.get("partial_rotary_factor", 1) != 1:
        problems.append(f"{name}.partial_rotary_factor other than 1 cannot be represented")
    others = rope.keys() - {"rope_type", "type", "partial_rotary_factor", *values}
    if extra := sorted(key for key in others if rope[key] is not None):
        problems.append(f"{name}, rope type {kind}: {', '.join(extra)} cannot be represented")
    settings = {"rotary_base" if key == "rope_theta" else f"rope_scaling_{key}": values[key] for key in values}
    for key, (setting, value) in zip(values, settings.items(), strict=True):
        if value is not None and (problem := value_problem(SETTINGS[setting], value)):
            problems.append(f"{key if key in raw else f'{name}.{key}'} {problem}")
    low, high = values.get("low_freq_factor"), values.get("high_freq_factor")
    if not problems and low is not None and high is not None and low >= high:
        problems.append(f"{name}.low_freq_factor {low} must be below high_freq_factor {high}: Llama 3 has 1 and 4")
    if problems:
        return {}, problems
    kinds = {"rotary_base": float(settings.pop("rotary_base")), "rope_scaling_type": "none" if not needed else kind}
    return {**kinds, **settings}, []


def _agreed(spelled: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The one value of those that are not None (None if there is none), or what is wrong."""
    given = {name: value for name, value in spelled.items() if value is not None}
    first = next(iter(given.values()), None)
    if len(given) < 2 or all(value == first for value in given.values()):
        return first, []
    each = " and ".join(f"{name} {value!r}" for name, value in given.items())
    return None, [f"{each} are two spellings of one setting and differ: remove one"]
