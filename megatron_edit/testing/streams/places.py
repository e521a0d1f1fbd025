"""Lines of the program that an operation came from."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Place = tuple[Any, int]  # code and line


@functools.cache
def _shown(code: Any) -> str | None:
    """A file of the program; None: not to be shown."""
    file = code.co_filename
    for package in ("/megatron_edit/", "/megatron/core/"):
        _, found, path = file.rpartition(package)
        if found and not path.startswith("testing/"):
            return f"{package.strip('/').replace('/', '.')} {path}" if "core" in package else path
    return None


def places_now() -> tuple[Place, ...]:
    """The four innermost."""
    found: list[Place] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 4:
        if _shown(frame.f_code) is not None:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def show(places: tuple[Place, ...], operation: str = "") -> str:
    """The operation and its lines, the innermost first."""
    lines = [f"{_shown(code)}:{line}" for code, line in places] or ["no file of the program"]
    return f"{operation} at {' < '.join(lines)}" if operation else " < ".join(lines)


@dataclass(frozen=True)
class HostWait:
    """The host waited for the device. `why`: the operation; `where`: lines of the program, the innermost first."""

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} at {self.where}"


def count_by_place(waits: Iterable[HostWait]) -> str:
    """A table of waits, the most frequent first."""
    return "\n".join(f"{count} x {wait}" for wait, count in Counter(map(str, waits)).most_common())
