"""Which rank is lost, when a rank dies, freezes or hangs: asked through the store, said once, and all ranks end (ours).

A background thread on each rank, with a store connection of its own, answers while the main thread computes or waits.
1. A rank whose collective has failed, or that sees the next process of its node gone, sets the *call*; the first to do
   so is the judge.
2. Every thread answers a call with where its main thread is, and since when it is in its step.
3. The judge waits a few seconds. Lost is who did not answer; if all did, who has not come to a collective and has been
   in its step for as long as the judge. It writes and says the *verdict*.
4. Every thread follows it: a lost rank ends first (with its stack; a frozen one of the same node is killed), so that
   the launcher reports that one; the others end with code 1, wherever their main threads are.

A rank that fails by itself says its cause and leaves a verdict without words, so that no other rank goes on training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict

import psutil
from torch.distributed import DistError, PrefixStore

from megatron_edit.ranks.agreement import ranks_text
from megatron_edit.ranks.store import Rendezvous, first_line
from megatron_edit.ranks.whereabouts import Answer, Process, machine, main_thread_answer, place_of

SECONDS_TO_ANSWER = 4.0
SECONDS_TO_END = 3.0  # for a main thread that ends by itself; then the thread ends the process
SECONDS_TO_LEAVE = 1.0
HEAD_START = 1.0  # of a lost rank, before the others end


class Presence:
    """One rank's part. Made by the main thread as soon as there is a store."""

    def __init__(self, rendezvous: Rendezvous, environment: Mapping[str, str], *, poll_seconds: float = 0.5) -> None:
        own_connection = rendezvous.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = PrefixStore("presence", own_connection)
        self._rank = rank = rendezvous.rank
        self._world_size = rendezvous.world_size
        self._holder, self._keeps_store = rendezvous.holder, rendezvous.is_holder
        self._poll_seconds = poll_seconds
        local_rank, local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        self._speaks_for_node = local_rank == 0
        self._neighbour_rank = rank - local_rank + (local_rank + 1) % local if local > 1 else None
        self._neighbour: Process | None = None
        self._step = ("the start", time.monotonic())
        self._suspicion: str | None = None
        self._called = self._is_judge = False
        self._ending = threading.Event()  # the main thread ends by itself
        self._closing = threading.Event()
        self._judged = threading.Event()
        self._wake = threading.Event()
        self._farewell = ""
        self._verdict = ""
        self._thread = threading.Thread(target=self._watch, name="presence", daemon=True)
        self._thread.start()

    # ---- main thread

    def note(self, step: str) -> None:
        """What the main thread begins; shown when it does not come to its end."""
        self._step = (step, time.monotonic())

    def begin_end(self) -> None:
        """From here on this rank ends by itself, and who holds the store may end too."""
        self._ending.set()

    def explain(self, error: BaseException) -> str:
        """A collective has failed with `error`: asks who is lost. Returns what to say of it here; "" when nobody is."""
        self.begin_end()
        self._suspicion = f"rank {self._rank} waited for it in {self._step[0]}, in {place_of(error)}"
        self._wake.set()
        if not self._judged.wait(SECONDS_TO_ANSWER + SECONDS_TO_END):
            return f"{self._holder}, which holds the store, does not answer: it is frozen or cut off"
        return self._verdict

    def leave(self, *, failed: bool) -> None:
        """This rank ends now. `failed`: for a cause of its own, so that the others must end too."""
        self.begin_end()
        self._farewell = "failed" if failed else "done"
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=SECONDS_TO_LEAVE)
        if self._keeps_store:
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """The store goes with this process: the others are given the time to read its last word and to leave."""
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        with contextlib.suppress(Exception):
            while int(self._store.add("gone", 0)) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.01)

    # ---- background thread

    def _watch(self) -> None:
        try:
            process = Process(machine(), socket.gethostname(), os.getpid(), psutil.Process().create_time())
            self._store.set(f"process/{self._rank}", json.dumps(asdict(process)))
            while not self._closing.is_set() and not self._judged.is_set():
                self._wake.wait(self._poll_seconds if not self._called else 0.1)
                self._wake.clear()
                self._look()
            if self._farewell == "failed":
                self._store.set(f"ended/{self._rank}", "failed")
                self._publish({"text": "", "failed": self._rank, "lost": []})
            elif self._farewell:
                self._store.set(f"ended/{self._rank}", "done")
            self._store.add("gone", 1)
        except DistError as error:
            self._store_lost(error)
        except Exception as error:  # without an answer of this rank the run goes on
            _say(f"[rank {self._rank}] no longer answers who is lost: {type(error).__name__}: {error}")
            self._judged.set()

    def _look(self) -> None:
        if self._suspicion is None and self._neighbour_is_gone():
            self._suspicion = ""
        if self._suspicion is not None and not self._called:
            self._store.set("call", "1")
            self._is_judge = self._store.add("judges", 1) == 1
        if not self._called and self._store.check(["call"]):
            self._called = True
            answer = main_thread_answer(*self._step, has_failed=self._ending.is_set())
            self._store.set(f"here/{self._rank}", json.dumps(asdict(answer)))
            if self._is_judge:
                self._publish(self._judge(self._suspicion or ""))
        if self._called and self._store.check(["verdict"]):
            self._follow(json.loads(self._store.get("verdict")))

    def _neighbour_is_gone(self) -> bool:
        if self._neighbour_rank is None:
            return False
        if self._neighbour is None:
            key = f"process/{self._neighbour_rank}"
            if self._store.check([key]):
                self._neighbour = Process(**json.loads(self._store.get(key)))
                if not self._neighbour.is_here or self._neighbour.state is None:
                    self._neighbour_rank = None  # not to be seen from here
            return False
        return self._neighbour.state is None and not self._store.check([f"ended/{self._neighbour_rank}"])

    def _judge(self, suspicion: str) -> dict[str, object]:
        """Waits for the answers, then names who is lost."""
        deadline, others = time.monotonic() + SECONDS_TO_ANSWER, set(range(self._world_size)) - {self._rank}
        silent = others
        while silent and time.monotonic() < deadline:
            silent = {rank for rank in silent if not self._has(f"here/{rank}") and not self._has(f"ended/{rank}")}
            if silent and all(self._is_gone(rank) for rank in silent):
                break
            time.sleep(0.1)
        failed = [rank for rank in sorted(others - silent) if self._ended(rank) == "failed"]
        if failed:
            return {"text": "", "failed": failed[0], "lost": []}
        here = {rank: self._of(rank) for rank in range(self._world_size) if self._has(f"here/{rank}")}
        own = here[self._rank].seconds
        late = [rank for rank, answer in here.items() if not answer.waits and answer.seconds >= 0.5 * own]
        lost = sorted(silent) or late
        parts = [self._describe(rank, here.get(rank)) for rank in lost[:4]]
        if len(lost) > 4:
            parts.append(f"likewise rank {ranks_text(lost[4:])}")
        if not lost:
            parts = ["no rank is lost, but they wait in different places"]
            parts += [f"rank {rank} in {each.step}, {each.place}" for rank, each in list(here.items())[:8]]
        elif suspicion:
            parts.append(suspicion)
        text = f"{'; '.join(parts)}. All ranks end; a run goes on from its last complete checkpoint"
        return {"text": text, "lost": lost}

    def _describe(self, rank: int, answer: Answer | None) -> str:
        process = self._process(rank)
        name = f"rank {rank} ({process})" if process else f"rank {rank}"
        if answer is not None:
            return f"{name} answers but has not come: {answer.seconds:.0f} s in {answer.step}, at {answer.place}"
        if process is None:
            return f"{name} is lost: it never answered"
        if not process.is_here:
            return f"{name} is lost: it does not answer, so it has died, is frozen or cut off"
        state = process.state
        how = "has died without a word" if state is None else f"does not answer, it is frozen (state: {state})"
        return f"{name} is lost: it {how}"

    def _follow(self, verdict: dict[str, object]) -> None:
        lost, failed = verdict["lost"], verdict.get("failed")
        assert isinstance(lost, list)
        if self._rank in lost:
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            self._end_process()
        for rank in lost:
            process = self._process(rank)
            if process is not None and process.is_here and not self._has(f"here/{rank}") and process.state is not None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
        if failed is not None:
            self._verdict = f"rank {failed} has failed, its message says why"
        elif lost:
            self._verdict = f"rank {ranks_text(lost)} is lost"
            time.sleep(HEAD_START)
        self._judged.set()
        if not self._ending.wait(SECONDS_TO_END) and not self._closing.is_set():
            _say(f"[rank {self._rank}] ends: {self._verdict or 'another rank has ended'}")
            self._end_process()

    def _publish(self, verdict: dict[str, object]) -> None:
        """The first verdict counts."""
        text = json.dumps(verdict)
        if self._store.compare_set("verdict", "", text) == text.encode() and verdict["text"]:
            _say(f"[rank {self._rank}] {verdict['text']}")
        self._store.set("call", "1")

    def _store_lost(self, error: Exception) -> None:
        if self._closing.is_set():
            return
        self._verdict = f"{self._holder}, which holds the store, has ended ({first_line(error)})"
        said = self._ending.is_set()
        self._judged.set()
        if said:
            return
        if self._speaks_for_node:
            _say(f"[rank {self._rank}] {self._verdict}: all ranks end")
        if not self._ending.wait(SECONDS_TO_END):
            self._end_process()

    def _end_process(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    # ---- the store

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _ended(self, rank: int) -> str:
        return self._store.get(f"ended/{rank}").decode() if self._has(f"ended/{rank}") else ""

    def _of(self, rank: int) -> Answer:
        return Answer(**json.loads(self._store.get(f"here/{rank}")))

    def _process(self, rank: int) -> Process | None:
        key = f"process/{rank}"
        return Process(**json.loads(self._store.get(key))) if self._has(key) else None

    def _is_gone(self, rank: int) -> bool:
        process = self._process(rank)
        return process is not None and process.is_here and process.state is None


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
