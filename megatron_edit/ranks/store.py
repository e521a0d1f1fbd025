"""The rendezvous store: found before anything collective is made, with one line where nobody answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

SECONDS_FOR_A_LAUNCHER = 10.0  # torchrun's store is there before its ranks are


class StoreError(RuntimeError):
    """The store cannot be reached, or does not answer any more; the message says who holds it."""


@dataclass(frozen=True)
class Rendezvous:
    """The store that all ranks share, and who of how many this is. `holder`: the process that keeps the store."""

    store: dist.Store
    rank: int
    world_size: int
    holder: str

    @property
    def is_holder(self) -> bool:
        return self.rank == 0 and self.holder == "rank 0"


def open_store(environment: Mapping[str, str], timeout_seconds: float, job: str = "") -> Rendezvous:
    """The rendezvous of torchrun's variables; one rank without them.

    Keys are kept apart by `job`. Raises ValueError where a variable is missing or is not a number, StoreError where
    nobody answers within `timeout_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" not in environment:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        store.set_timeout(timeout)
        return Rendezvous(store, 0, 1, "rank 0")
    rank, world_size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = environment.get("MASTER_ADDR", "")
    if not host or not 0 <= rank < world_size:
        raise ValueError(f"MASTER_ADDR is {host!r}, RANK {rank} and WORLD_SIZE {world_size}")
    by_launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = "the launcher (torchrun)" if by_launcher else "rank 0"
    is_master = rank == 0 and not by_launcher
    try:
        if not is_master:
            _await_answer(host, port, holder, min(timeout_seconds, SECONDS_FOR_A_LAUNCHER if by_launcher else 1e9))
        store = dist.TCPStore(
            host, port, world_size, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )  # fmt: skip
    except (dist.DistError, OSError) as error:
        what = "cannot be opened" if is_master else f"of {holder} is not there"
        place = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        raise StoreError(f"the store at {place} {what}: {first_line(error)}") from error
    return Rendezvous(dist.PrefixStore(job, store) if job else store, rank, world_size, holder)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number, it is {text!r}" if text else f"{name} is not set")
    return int(text)


def _await_answer(host: str, port: int, holder: str, seconds: float) -> None:
    """Until somebody listens there: torch's own client writes pages of frames when nobody does."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, seconds)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                hint = "; torchrun --local-addr 127.0.0.1 where host names do not resolve" if _no_name(error) else ""
                raise StoreError(
                    f"nobody answers at {host}:{port} (MASTER_ADDR, MASTER_PORT), where {holder} should: "
                    f"{error.strerror or error}{hint}"
                ) from error
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def _no_name(error: OSError) -> bool:
    return isinstance(error, socket.gaierror)


def first_line(error: BaseException) -> str:
    """The message of `error` without the C++ frames that torch adds."""
    text = str(error).split("\nException raised from")[0].split("Exception raised from")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
