"""Two network namespaces joined by a veth pair whose ends send no faster than a given rate (for slow_links.py).

Needs root and iproute2. The namespaces are called after the process, so that those of a run that died are known.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

NAMESPACES, DEVICE = "slow-links-", "slow0"


def bits_per_second(rate: str) -> float:
    """Of "500m", "1g" or "1.5gbit". Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])(?:bit)?", rate.lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{rate!r} is not a rate such as 500m or 2g (bits per second)")
    return float(found[1]) * {"m": 1e6, "g": 1e9}[found[2]]


class LinkError(RuntimeError):
    """`ip` or `tc` refused."""


@contextlib.contextmanager
def linked_namespaces() -> Iterator[list[str]]:
    """Two namespaces joined by a veth pair, 10.77.0.1 and 10.77.0.2; removed again, those of dead runs too."""
    names = [f"{NAMESPACES}{os.getpid()}-{rank}" for rank in range(2)]
    remove_leftovers()
    try:
        for name in names:
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        first, second = names
        command("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for rank, name in enumerate(names):
            command("ip", "-n", name, "address", "add", f"10.77.0.{rank + 1}/30", "dev", DEVICE)
            command("ip", "-n", name, "link", "set", DEVICE, "up")
            limit_rate("1g", "-n", name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def remove_leftovers() -> None:
    """Deletes the namespaces of earlier runs that have died without doing it."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({NAMESPACES}(\d+)-[01])", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def limit_rate(rate: str, *options: str) -> None:
    """This end of the link sends no faster than `rate`; a burst of 1 ms, so that small messages are limited too.

    `options`: of tc, for the end of another namespace.
    """
    bits = bits_per_second(rate)
    burst = max(16_000, int(bits / 8 * 1e-3))
    limit = ["rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "50ms"]
    command("tc", *options, "qdisc", "replace", "dev", DEVICE, "root", "tbf", *limit)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(words)}: {done.stderr.strip()}")
