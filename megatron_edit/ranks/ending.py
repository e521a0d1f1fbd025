"""How a rank ends that does not end well: what it says, when, and with which code. The true cause comes first."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from megatron_edit.ranks.presence import Presence
from megatron_edit.ranks.signal_pipe import ignore_stop_signals
from megatron_edit.ranks.signals import StopAgreementError
from megatron_edit.ranks.store import Rendezvous, first_line
from megatron_edit.ranks.whereabouts import place_of

SECONDS_FOR_RANK_0 = 10.0  # which speaks for all when all have met the same error
SIGNS_OF_ANOTHER_RANK = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timeout caused pair closure",
    "NCCL",
)  # fmt: skip


def trace_fatal_signals() -> None:
    """A crash (SIGSEGV, SIGBUS from a file that became shorter, SIGABRT) leaves the stacks of this rank on stderr."""
    with suppress(Exception):  # stderr may not be a file
        faulthandler.enable(sys.stderr)


def say_error(error: Exception, prefix: str = "error", *, advice_of: Exception | None = None) -> None:
    """One line for each problem, and the advice that `error` (or `advice_of`) carries after them."""
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"{prefix}: {line}", file=sys.stderr, flush=True)
    for line in getattr(advice_of or error, "advice", ()):
        print(line, file=sys.stderr, flush=True)


def end_for_user_error(error: Exception, code: int, rendezvous: Rendezvous, presence: Presence | None) -> NoReturn:
    """Rank 0 speaks. Another rank speaks only when rank 0 does not say the same within some seconds."""
    _begin(presence)
    store = dist.PrefixStore("user_error", rendezvous.store)
    if rendezvous.rank == 0:
        say_error(error)
        with suppress(Exception):
            store.set("said", str(error))
    else:
        deadline, said = time.monotonic() + SECONDS_FOR_RANK_0, ""
        with suppress(Exception):
            while time.monotonic() < deadline and not store.check(["said"]):
                time.sleep(0.05)
            said = store.get("said").decode() if store.check(["said"]) else ""
        if said != str(error):
            say_error(error, f"error on rank {rendezvous.rank}")
    _end(code, presence, failed=True)


def end_after_another(error: BaseException, rendezvous: Rendezvous, presence: Presence | None) -> None:
    """Ends this rank when `error` says that another one is gone, once it is known which; returns when it is not."""
    if presence is None or not follows_from_another_rank(error):
        return
    _begin(presence)
    verdict = presence.explain(error)
    if verdict:
        what = f"{type(error).__name__}: {first_line(error)}"
        print(f"[rank {rendezvous.rank}] ends: {verdict}; {place_of(error)}: {what}", file=sys.stderr, flush=True)
        _end(1, presence, failed=False)


def end_for_own_cause(error: BaseException, rendezvous: Rendezvous, presence: Presence | None) -> NoReturn:
    """With everything that is known of `error`."""
    _begin(presence)
    print(f"[rank {rendezvous.rank}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    traceback.print_exception(error)
    _end(1, presence, failed=True)


def follows_from_another_rank(error: BaseException) -> bool:
    """Whether the error is that a collective, or the agreement on a stop, found another rank gone or late."""
    if isinstance(error, (dist.DistError, StopAgreementError)):
        return True
    return any(sign in str(error) for sign in SIGNS_OF_ANOTHER_RANK)


def _begin(presence: Presence | None) -> None:
    """No signal of the launcher, nor what other ranks find, cuts off what this rank has to say."""
    with suppress(ValueError):  # not the main thread
        ignore_stop_signals()
    if presence is not None:
        presence.begin_end()


def _end(code: int, presence: Presence | None, *, failed: bool) -> NoReturn:
    if presence is not None:
        presence.leave(failed=failed)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no collectives and no exit handlers: other ranks may be gone
