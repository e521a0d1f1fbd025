"""`run_command`: the entry script's `main` on several ranks that are forked from this process, as torchrun starts them.

A start of torchrun costs seconds of imports per rank; a fork of a process that has imported everything costs
milliseconds. What is the same as under torchrun: a process of its own for each rank, the environment variables, a
store that outlives the ranks, SIGTERM to the others once a rank has failed, and exit codes. What differs: the
interpreter does not shut down, the rank ends with `os._exit`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_edit.platform import get_platform

_STACK_SIGNAL = signal.SIGXCPU  # asks a silent rank for its stacks
_SECONDS_TO_END = 10.0  # between SIGTERM and SIGKILL


class CommandTimeoutError(RuntimeError):
    """Ranks were still running at the time-out; the message holds what each has written, stacks included."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. A negative exit code is the signal that ended it."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class CommandResult:
    """How a command ended on all its ranks."""

    ranks: list[RankOutcome]
    seconds: float

    @property
    def exit_codes(self) -> list[int]:
        """Of rank 0, 1, ..."""
        return [rank.exit_code for rank in self.ranks]

    @property
    def stdout(self) -> str:
        """Of rank 0, which speaks for the run."""
        return self.ranks[0].stdout

    @property
    def stderr(self) -> str:
        """Of all ranks, one after another."""
        return "".join(rank.stderr for rank in self.ranks)

    def __str__(self) -> str:
        sections = [
            f"----- rank {index}, exit code {rank.exit_code} -----\n{rank.stdout}{rank.stderr}"
            for index, rank in enumerate(self.ranks)
        ]
        return f"after {self.seconds:.1f} s\n" + "\n".join(sections)


@dataclass
class _Process:
    pid: int
    stdout: Path
    stderr: Path
    exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code, once the process is gone."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def outcome(self) -> RankOutcome:
        code = self.poll()
        stdout, stderr = (path.read_text(errors="replace") for path in (self.stdout, self.stderr))
        return RankOutcome(-signal.SIGKILL if code is None else code, stdout, stderr)


def run_command(
    argv: Sequence[str],
    world_size: int = 1,
    *,
    local_world_size: int | None = None,
    directory: Path | None = None,
    in_rank: Callable[[int], None] | None = None,
    timeout_s: float = 120,
    ends_others: bool = True,
) -> CommandResult:
    """Runs `pretrain_llama.py ARGV` on `world_size` ranks and waits for their end.

    Args:
        local_world_size: ranks of a node; default all.
        directory: working directory of the ranks.
        in_rank: called with the rank in each of its processes first; may replace attributes there.
        timeout_s: seconds for the whole run.
        ends_others: once a rank has failed send SIGTERM to the others and after 10 s SIGKILL, as torchrun does.

    Raises:
        CommandTimeoutError: a rank did not end in time. All have been killed then.
    """
    assert not dist.is_initialized(), "a process with a process group cannot be forked"
    get_platform("cpu").initialize()
    for module in ("megatron_edit.train.main", "megatron_edit.train.trainer"):  # once, for all ranks to come
        importlib.import_module(module)
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    processes: list[_Process] = []
    with tempfile.TemporaryDirectory() as written, _store(world_size) as store:
        try:
            for rank in range(world_size):
                files = Path(written, f"{rank}.stdout"), Path(written, f"{rank}.stderr")
                for file in files:
                    file.touch()  # a rank may be ended before it has opened them
                environment = _environment(rank, world_size, local_world_size or world_size, store.port)
                pid = os.fork()
                if pid == 0:
                    store.let_go()
                    _rank(argv, rank, environment, directory, in_rank, *files)
                processes.append(_Process(pid, *files))
            _wait(processes, timeout_s, ends_others)
            return CommandResult([process.outcome() for process in processes], time.monotonic() - started)
        finally:
            for process in processes:
                process.send(signal.SIGKILL)
            while any(process.poll() is None for process in processes):
                time.sleep(0.01)


def _environment(rank: int, world_size: int, local_world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _wait(processes: list[_Process], timeout_s: float, ends_others: bool) -> None:
    """Until all have ended; `ends_others`: once one has failed the others are told to."""
    deadline, kill_at = time.monotonic() + timeout_s, float("inf")
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if ends_others and kill_at == float("inf") and any(process.poll() for process in processes):
            kill_at = now + _SECONDS_TO_END
            for process in processes:
                process.send(signal.SIGTERM)
        if now > kill_at:
            for process in processes:
                process.send(signal.SIGKILL)
        if now > deadline:
            silent = [rank for rank, process in enumerate(processes) if process.poll() is None]
            for rank in silent:
                processes[rank].send(_STACK_SIGNAL)
            time.sleep(0.3)
            result = CommandResult([process.outcome() for process in processes], timeout_s)
            raise CommandTimeoutError(f"rank(s) {silent} did not end within {timeout_s:g} s, {result}")
        time.sleep(0.01)


@dataclass(frozen=True)
class _Store:
    """The parent's hold on the store of a run: its port, and the pipe with whose end it ends."""

    listener: socket.socket
    pipe: int

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def let_go(self) -> None:
        """In a process that was forked from the parent, and in the parent at the end."""
        os.close(self.pipe)
        self.listener.close()


@contextmanager
def _store(world_size: int) -> Iterator[_Store]:
    """A store for `world_size` ranks, in a process of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=world_size + 8)
    released, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        _keep_store(listener, world_size, released)
    store = _Store(listener, release)
    try:
        yield store
    finally:
        store.let_go()
        os.close(released)
        os.waitpid(pid, 0)


def _keep_store(listener: socket.socket, world_size: int, released: int) -> NoReturn:
    """Body of the process that holds the store until the parent lets go of the pipe."""
    try:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, world_size + 1, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        os.read(released, 1)
        del store
    finally:
        os._exit(0)


def _rank(
    argv: Sequence[str],
    rank: int,
    environment: dict[str, str],
    directory: Path | None,
    in_rank: Callable[[int], None] | None,
    stdout: Path,
    stderr: Path,
) -> NoReturn:
    """Body of a rank; never returns into the parent's stack."""
    code = 1
    try:
        for path, descriptor in ((stdout, 1), (stderr, 2)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  a test runner has put its own there
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.register(_STACK_SIGNAL, file=sys.stderr, all_threads=True)
        os.environ.update(environment)
        torch.set_num_threads(1)
        if directory is not None:
            os.chdir(directory)
        if in_rank is not None:
            in_rank(rank)
        from megatron_edit.train.main import main

        code = main(list(argv), owns_process=True)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
