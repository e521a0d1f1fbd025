"""What --help and --print-config print; both are generated from the schema."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from megatron_edit.config.schema import SECTIONS, Config
from megatron_edit.config.settings import SETTINGS, Setting, as_written, value_of

USAGE = """\
usage: torchrun --nproc-per-node N pretrain_llama.py [--config FILE.yaml] [--FLAG VALUE ...]

Trains a Llama with EDiT. Flags win over the YAML file, the file over the preset of --model-size, the
preset over the defaults. Every flag is also a YAML key with _ for -; --no-NAME turns a switch off."""


def help_text() -> str:
    """All flags, grouped by section."""
    lines = [USAGE]
    for section, cls in SECTIONS.items():
        lines += ["", f"{section}: {(cls.__doc__ or '').splitlines()[0]}"]
        for setting in SETTINGS.values():
            if setting.section == section:
                lines += _help_lines(setting)
    return "\n".join(lines)


def _help_lines(setting: Setting) -> list[str]:
    head = f"  {setting.flag} {setting.placeholder}".rstrip()
    text = setting.help + ("" if default_text(setting) is None else f" (default: {default_text(setting)})")
    return [head, *textwrap.wrap(text, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def default_text(setting: Setting) -> str | None:
    """The default as a user would write it; None when the help says what holds if it is not given."""
    if setting.default is None or setting.default == []:
        return None
    if setting.kind is bool:
        return "on" if setting.default else "off"
    if setting.kind is float:
        return f"{setting.default:g}"
    return str(setting.default)


def print_config(config: Config) -> str:
    """Every setting with its source, as a YAML file that --config reads back to the same settings.

    Derived values stand in comments: given beside what they were derived from they would contradict it
    after a change of the number of ranks.
    """
    lines = ["# setting: value  # source"]
    for section in SECTIONS:
        if section == "command":
            continue
        lines.append(f"{section}:")
        rows = [
            (
                config.sources.get(s.name, "python"),
                f"{s.name}: {_as_yaml(as_written(s.name, value_of(config, s.name)))}",
            )
            for s in SETTINGS.values()
            if s.section == section
        ]
        lines += [f"  {'# ' if source == 'derived' else ''}{row}  # {source}" for source, row in rows]
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()
