"""Stop requests: all ranks of all replicas end after the same iteration, without a collective in any step.

A request is SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any one rank (or to all of them at once), the end of
`--exit-duration-in-mins`, or a call of `request_stop`. It travels through a `torch.distributed.Store`,
handled by one background thread a rank with a client connection of its own (`Store.clone`), so that it
spreads while main threads compute, sleep or sit in a collective.

The agreement (ours). A *boundary* k lies after iteration k; the main thread calls `should_stop(k)` at each.
1. The rank that is asked writes the request. The first writer wins (compare-and-set).
2. The thread of every rank polls the store. When it sees the request it fixes the rank's *proposal*, a
   boundary that the main thread has not passed yet, under the lock that the main thread takes to pass a
   boundary; then it publishes the proposal. From that moment the rank cannot pass its own proposal unnoticed.
3. The thread that publishes last (an atomic counter tells) writes the *target*: the largest of all proposals.
4. A main thread that reaches its proposal before the target is known waits there for it; then it goes on to
   the target, and stops.

Why all stop together: target >= every proposal, and no rank passes its proposal without knowing the target.
That needs no assumption on how far ranks or replicas are apart. Why nothing hangs: a main thread waits for
background threads only, and these wait for nobody; a rank that waits at a boundary holds its peers up inside
their iteration, never their threads. Why a slow replica holds nobody up: the wait is for one poll of its
thread, not for its step. Where iterations are short, proposals lie a few boundaries ahead, so that even this
wait is rare; where they are long, the proposal is the end of the iteration in progress. A rank that has died
or is frozen publishes nothing: the others raise `StopAgreementError`, naming it, after the time-out.

Signals are taken through `signal.set_wakeup_fd` (`signal_pipe`): the interpreter's C handler writes the number into a
pipe that the thread reads. A Python handler alone would run only when the main thread comes out of a collective.

A second SIGINT (Ctrl-C again), a second or more after the first, ends that rank at once with exit code 1,
without saving. Further SIGTERM, SIGUSR1 and SIGHUP are ignored: schedulers send several as normal course (USR1 as a
warning, TERM at the limit), launchers pass them on twice, and a save in progress must survive both; SIGKILL
remains. In a process of its own (`until_exit`) signals stay ignored after the end too: a rank that has saved must end
with its own exit code, or the launcher would take the stop for a failure.
torchrun kills its workers 30 s after it was asked to stop, unless it is given a longer `--shutdown-timeout`, and
passes SIGUSR1 on only when its `--signals-to-handle` lists it (torch 2.13: torchrun itself overwrites
TORCHELASTIC_SIGNALS_TO_HANDLE).

`should_stop` counts boundaries, not optimizer steps: a method whose replicas make unequal numbers of steps
calls it at its syncs, with the number of the sync. Such a replica reads `requested` in every step and enters its
next sync early; the others come as soon as their threads have seen the request.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from torch.distributed import PrefixStore, Store

from megatron_edit.ranks.signal_pipe import SignalPipe
from megatron_edit.ranks.store import first_line

SECOND_INTERRUPT_SECONDS = 1.0  # SIGINTs that are closer together than this are one: launchers pass them on
AGREEMENT_POLL_SECONDS = 0.01  # between polls while the target is being agreed on
SILENCE_SECONDS = 3.0  # after which the rank that was asked says who has not answered
MOST_ITERATIONS_AHEAD = 16  # a proposal lies at most so many boundaries beyond the next one


class StopAgreementError(RuntimeError):
    """A stop was requested, and the ranks could not agree on the iteration."""


@dataclass(frozen=True)
class StopReason:
    """Why and where the run stops; equal on all ranks."""

    cause: str  # "SIGTERM", "exit duration of 30 minutes", ...
    rank: int  # global rank that was asked
    iteration: int  # the boundary at which all ranks stop

    def __str__(self) -> str:
        return f"{self.cause} on rank {self.rank}: all ranks stop after iteration {self.iteration}"


class StopCoordinator:
    """One rank's part in the agreement. Made and closed by the main thread; see the module's text.

    `store`: shared by all ranks, and alive until the last of them has called `close`.
    `next_boundary`: argument of the first `should_stop` call: the iterations completed so far when the
    trainer asks before its first step too (recommended: a request during start-up then costs no step), else
    one more.
    `timeout_seconds`: longest wait for the threads of the other ranks.
    `exit_duration_minutes`: request a stop so many minutes after `started` (a `time.monotonic()` value;
    default now); rank 0's clock decides. `handle_signals=False` leaves the process's signal handlers alone
    (`--no-exit-signal-handler`); requests of other ranks are still followed. Handlers can be set by a
    process's main thread only. `until_exit`: the process belongs to the run: `close` ignores the signals from then on.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        next_boundary: int,
        timeout_seconds: float,
        exit_duration_minutes: float | None = None,
        started: float | None = None,
        handle_signals: bool = True,
        until_exit: bool = False,
        poll_seconds: float = 0.2,
    ) -> None:
        own_connection = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = PrefixStore("stop_request", own_connection)
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._poll_seconds = poll_seconds
        self._exit_duration_minutes = exit_duration_minutes if rank == 0 else None
        self._until_exit = until_exit
        self._started = time.monotonic() if started is None else started

        self._lock = threading.Lock()  # guards the next five, which both threads use
        self._next_boundary = next_boundary
        self._boundary_time: float | None = None
        self._iteration_seconds: float | None = None
        self._proposal: int | None = None
        self._proposed_at = math.inf  # time.monotonic(); inf again when silence was said
        self._failure: BaseException | None = None

        self._request: dict[str, str | int] = {}
        self._target = -1
        self._settled = threading.Event()  # the target is known, or the thread has failed
        self._closing = threading.Event()
        self._pending_cause: str | None = None
        self._first_interrupt: float | None = None
        self._pipe = SignalPipe(handles=handle_signals)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()

    # ---- main thread

    def should_stop(self, iteration: int) -> StopReason | None:
        """Called at every boundary in turn; None: go on with the next iteration.

        Costs an uncontended lock and reads no store. After a request it may wait, at one boundary of the run,
        until the threads of all ranks have answered. Raises StopAgreementError when one of them does not
        within `timeout_seconds`, or when the store is gone.
        """
        with self._lock:
            if self._failure is not None:
                raise self._store_lost()
            assert iteration == self._next_boundary, f"boundary {iteration}, expected {self._next_boundary}"
            if self._proposal is None or iteration < self._proposal:
                self._pass_boundary()
                return None
        self._wait_for_target()
        if iteration < self._target:
            with self._lock:
                self._pass_boundary()
            return None
        return StopReason(str(self._request["cause"]), int(self._request["rank"]), self._target)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request, so that its proposal is fixed. Costs an uncontended lock."""
        with self._lock:
            return self._proposal is not None

    def request_stop(self, cause: str) -> None:
        """Asks all ranks to stop; returns at once. `cause` is shown to the user. Any thread may call it."""
        if not self._closing.is_set():
            self._pending_cause = self._pending_cause or cause
            self._pipe.wake()

    def close(self) -> None:
        """Gives the signal handlers back (`until_exit`: ignores the signals) and ends the thread.

        Call it after the run's last collective.
        A rank that has closed no longer answers, so it leaves its next boundary as its proposal for a request
        that comes later: ranks that are still on their way then run to the end of the training.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._pipe.give_back(ignore=self._until_exit)
        self._pipe.wake()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # else it hangs in a store that is gone: a daemon, it keeps its pipe
            self._pipe.close()

    def __enter__(self) -> StopCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pass_boundary(self) -> None:
        """With the lock held."""
        now = time.monotonic()
        if self._boundary_time is not None:
            self._iteration_seconds = now - self._boundary_time
        self._boundary_time = now
        self._next_boundary += 1

    def _wait_for_target(self) -> None:
        if not self._settled.wait(self._timeout_seconds):
            raise StopAgreementError(
                f"{self._request['cause']} on rank {self._request['rank']}: no answer from rank "
                f"{self._missing()} within {self._timeout_seconds:g} s; without it the ranks cannot agree where to stop"
            )
        if self._failure is not None:
            raise self._store_lost()

    def _missing(self) -> str:
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"proposal/{rank}"])]
        return ", ".join(map(str, missing)) or "(last one)"

    def _store_lost(self) -> StopAgreementError:
        assert self._failure is not None
        return StopAgreementError(
            f"rank {self._rank}: the store through which stop requests travel is gone ({first_line(self._failure)}); "
            "the process that holds it, rank 0 or the launcher, has probably ended"
        )

    # ---- background thread

    def _watch(self) -> None:
        try:
            poller = select.poll()
            poller.register(self._pipe.read_end, select.POLLIN)
            while not self._closing.is_set():
                agreeing = self._proposal is not None and not self._settled.is_set()
                poller.poll(1000 * (AGREEMENT_POLL_SECONDS if agreeing else self._poll_seconds))
                self._read_signals()
                self._check_duration()
                if self._settled.is_set():
                    continue
                if self._pending_cause is not None and self._proposal is None:
                    self._write_request(self._pending_cause)
                if self._proposal is None and self._store.check(["request"]):
                    self._request = json.loads(self._store.get("request"))
                    self._propose(self._iterations_ahead())
                if self._proposal is not None and self._store.check(["target"]):
                    self._target = int(self._store.get("target"))
                    self._settled.set()
                elif time.monotonic() - self._proposed_at > SILENCE_SECONDS:
                    self._proposed_at = math.inf
                    self._say(f"no answer yet from rank {self._missing()}; without it the run cannot stop and save")
            if self._proposal is None:
                self._propose(0)
        except Exception as error:
            with self._lock:
                self._failure = error
            self._settled.set()

    def _read_signals(self) -> None:
        for number in self._pipe.read():
            self._pending_cause = self._pending_cause or number.name
            if number == signal.SIGINT:
                now = time.monotonic()
                if self._first_interrupt is None:
                    self._first_interrupt = now
                elif now - self._first_interrupt >= SECOND_INTERRUPT_SECONDS:
                    print(f"rank {self._rank}: second SIGINT: ends now, without saving", file=sys.stderr, flush=True)
                    os._exit(1)

    def _check_duration(self) -> None:
        minutes = self._exit_duration_minutes
        if minutes is not None and time.monotonic() - self._started >= 60 * minutes:
            self._pending_cause = self._pending_cause or f"exit duration of {minutes:g} minutes"

    def _write_request(self, cause: str) -> None:
        mine = json.dumps({"cause": cause, "rank": self._rank})
        if self._store.check(["request"]):
            return
        self._store.compare_set("request", "", mine)

    def _say(self, what: str) -> None:
        print(f"rank {self._request['rank']}: {self._request['cause']}: {what}", file=sys.stderr, flush=True)

    def _iterations_ahead(self) -> int:
        """As many iterations as fit into the time that a request takes to reach every thread: two polls."""
        with self._lock:
            seconds = self._iteration_seconds
        if seconds is None:
            return 0
        return min(MOST_ITERATIONS_AHEAD, int(2 * self._poll_seconds / max(seconds, 1e-6)))

    def _propose(self, iterations_ahead: int) -> None:
        with self._lock:
            self._proposal = self._next_boundary + iterations_ahead
        if self._request.get("rank") == self._rank:
            self._proposed_at = time.monotonic()
        self._store.set(f"proposal/{self._rank}", str(self._proposal))
        if self._store.add("proposals", 1) == self._world_size:
            proposals = self._store.multi_get([f"proposal/{rank}" for rank in range(self._world_size)])
            self._store.set("target", str(max(map(int, proposals))))
            if self._request:
                self._say("all ranks will save and stop after the same iteration")
