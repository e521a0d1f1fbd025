"""`run_ranks`: a function on several gloo ranks, forked from this process, in about a second.

The parent has torch and megatron-core imported and the CPU platform initialised, so a rank costs a fork and a
rendezvous. The parent never makes a process group or a store, whose threads a fork would lose.
"""

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from megatron_edit.platform import get_platform

_GRACE_S = 3.0  # what the other ranks get, after one has failed, to report their own view of it
_STACK_SIGNAL = signal.SIGXCPU  # asks a silent rank for its stacks; chosen as no test sends it


class RankFailure(RuntimeError):  # noqa: N818  it reports failures, it is not one of the ranks' errors
    """At least one rank failed; the message holds each rank's traceback, the first failing rank's first.

    Attributes:
        rank: the rank that failed first (of a hang: the lowest silent one).
        reports: rank -> traceback, or what is known of a rank that sent none.
        silent: ranks that were still running and had to be killed.
    """

    def __init__(self, reports: dict[int, str], silent: list[int], headline: str) -> None:
        self.reports, self.silent, self.rank = reports, silent, next(iter(reports))
        sections = [f"----- rank {rank} -----\n{report.rstrip()}" for rank, report in reports.items()]
        super().__init__("\n".join([headline, *sections]))


@dataclass
class _Rank:
    """A child as the parent sees it."""

    rank: int
    pid: int
    results: Connection
    stacks: IO[bytes]  # where the rank writes its stacks when asked to
    succeeded: bool | None = None  # None: no report yet
    value: Any = None  # result, or the text of the failure
    failed_at: float = 0.0  # time.monotonic of the failure; 0 when the rank died: peers' errors come from that
    exit_status: int | None = None

    def poll_exit(self) -> bool:
        """True when the process is gone; it is reaped."""
        if self.exit_status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_status = os.waitstatus_to_exitcode(status)
        return self.exit_status is not None

    def receive(self) -> None:
        """Takes the report, or notes that the rank ended without one."""
        try:
            self.succeeded, self.value, self.failed_at = pickle.loads(self.results.recv_bytes())
        except (EOFError, ConnectionError):
            deadline = time.monotonic() + 1
            while not self.poll_exit() and time.monotonic() < deadline:
                time.sleep(0.01)
            status = self.exit_status
            how = "closed its pipe" if status is None else f"exit code {status}"
            if status is not None and status < 0:
                how = f"killed by {signal.Signals(-status).name}"
            self.succeeded, self.value = False, f"ended without a result: {how}"

    def kill(self) -> None:
        """Ends the rank and whatever it started (its process group), and reaps it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self.poll_exit():  # also a rank that has not come as far as its own group
            os.kill(self.pid, signal.SIGKILL)
        while not self.poll_exit():
            time.sleep(0.005)

    def read_stacks(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on `world_size` ranks of a gloo group; returns each rank's result.

    Each rank has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, one thread, the CPU platform
    initialised and the default process group made. `fn` may be a closure; what it returns must be picklable.
    A rank ends without the parent's exit handlers, and only when all ranks have reported.

    Args:
        timeout_s: seconds for the whole run; also the time-out of the default group's collectives.
        env: environment variables of the ranks, on top of the parent's.

    Raises:
        RankFailure: a rank raised, died, or did not report in time.
    """
    assert not dist.is_initialized(), "a process with a process group cannot be forked"
    get_platform("cpu").initialize()
    # The store of rank 0 takes the listening socket over: the port is never free, nobody waits for rank 0.
    listener = socket.create_server(("127.0.0.1", 0), backlog=world_size + 8)
    released, release = os.pipe()  # ranks that have reported wait for its end, so that no peer is cut off
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            receiver, sender = Pipe(duplex=False)
            stacks = tempfile.TemporaryFile()  # noqa: SIM115  closed by _end
            pid = os.fork()
            if pid == 0:
                os.close(release)
                _child(fn, rank, world_size, args, timeout_s, env or {}, listener, sender, released, stacks)
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # the rank does it too: whichever comes first
            sender.close()
            ranks.append(_Rank(rank, pid, receiver, stacks))
        return _collect(ranks, timeout_s)
    finally:
        os.close(release)
        os.close(released)
        listener.close()
        _end(ranks)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline, waiting = time.monotonic() + timeout_s, list(ranks)
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready = wait([rank.results for rank in waiting], remaining)
        for rank in [rank for rank in waiting if rank.results in ready]:
            rank.receive()
            waiting.remove(rank)
            if not rank.succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    failed = sorted((rank for rank in ranks if rank.succeeded is False), key=lambda rank: rank.failed_at)
    if not failed and not waiting:
        return [rank.value for rank in ranks]
    reports = {rank.rank: rank.value for rank in failed}
    reports.update(_stacks(waiting))
    silent = [rank.rank for rank in waiting]
    if failed:
        headline = f"rank {failed[0].rank} of {len(ranks)} failed first"
    else:
        headline = f"no report within {timeout_s:g} s from rank(s) {silent} of {len(ranks)}"
    raise RankFailure(reports, silent, headline)


def _stacks(silent: list[_Rank]) -> dict[int, str]:
    """Asks ranks that are still running where they are."""
    for rank in silent:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, _STACK_SIGNAL)
    time.sleep(0.2 if silent else 0)
    return {rank.rank: "silent, killed; its stacks:\n" + rank.read_stacks() for rank in silent}


def _end(ranks: list[_Rank]) -> None:
    """Ranks that have reported end by themselves, now that they are released; the others are killed."""
    deadline = time.monotonic() + 1
    while any(rank.succeeded and not rank.poll_exit() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.002)
    for rank in ranks:
        rank.kill()
        rank.results.close()
        rank.stacks.close()


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    env: dict[str, str],
    listener: socket.socket,
    sender: Connection,
    released: int,
    stacks: IO[bytes],
) -> NoReturn:
    """Body of a rank; never returns into the parent's stack."""
    try:
        os.setpgid(0, 0)  # what this rank starts can be ended with it
        faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
        try:
            _init_rank(rank, world_size, timeout_s, env, listener)
            report = pickle.dumps((True, fn(rank, world_size, *args), 0.0))
        except BaseException:
            report = pickle.dumps((False, traceback.format_exc(), time.monotonic()))
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        sender.send_bytes(report)
        os.read(released, 1)
    finally:
        os._exit(0)


def _init_rank(rank: int, world_size: int, timeout_s: float, env: dict[str, str], listener: socket.socket) -> None:
    host, port = listener.getsockname()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
        **env,
    )
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
