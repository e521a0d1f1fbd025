"""`~` and `$VAR` in paths, for the settings of flags and YAML and for the tools: the one place where they expand.

A shell does this itself in `--save ~/ck`, and does not in `--save=~/ck`, in quotes and in files.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH_METAVARS = ("DIR", "FILE", "PATH", "PREFIX", "OTHER", "FILE.yaml", "FILE.json", "FILE.jsonl")
_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})")


def expand(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with the home folder for a leading `~` or `~NAME`, and variables for `$VAR` and `${VAR}`.

    `$$` stands for one `$`; a `$` before anything else stays. In NAME=PREFIX the prefix is the path. Raises
    ValueError that says which variable is not set, or which user is unknown.
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        if not environment.get(name):
            state = "empty" if name in environment else "not set"
            raise ValueError(f"holds ${name}, but the environment variable {name} is {state}; $$ stands for one $")
        return environment[name]

    name, equals, path = text.partition("=")
    if equals and path.startswith("~") and "/" not in name:
        return f"{name}={expand(path, environment)}"
    if text.startswith("~"):  # before the variables: what they hold is taken as it is
        home = os.path.expanduser(text.partition("/")[0])
        if home.startswith("~"):
            raise ValueError(f"begins with {home}, but there is no such user; ./{home} is a file of that name")
        text = home.replace("$", "$$") + text[len(text.partition("/")[0]) :]
    return _VARIABLE.sub(value, text)


class PathParser(argparse.ArgumentParser):
    """An argument parser of a tool, whose arguments that are paths (by type or metavar) expand."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does; a path that cannot be expanded ends the program with code 2."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            if action.type is not Path and action.metavar not in PATH_METAVARS:
                continue
            try:
                setattr(found, action.dest, _expanded(getattr(found, action.dest, None)))
            except ValueError as error:
                given = getattr(found, action.dest)
                shown = " ".join(map(str, given)) if isinstance(given, list) else given
                self.error(f"{'/'.join(action.option_strings) or action.dest} {shown} {error}")
        return found, rest


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    if isinstance(value, Path):
        return Path(expand(str(value)))
    return expand(value) if isinstance(value, str) else value
