"""All ranks compare what a run rests on, before anything is built from it: settings, data, versions (`facts`).

It goes through the rendezvous store, not through a collective: ranks that were given different settings would make
different groups. A rank whose own checks have failed comes here too, so that all of them hear of it and end together.

1. Every rank publishes a digest of its report.
2. Rank 0 waits for all digests and names one rank of each kind, the speakers; one kind without a problem ends it.
3. The speakers publish their reports, rank 0 writes the verdict, and all ranks follow it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed import PrefixStore, Store

from megatron_edit.ranks.store import Rendezvous

MOST_KINDS = 8  # different reports that are looked at
MOST_LINES = 20  # of differences
SECONDS_TO_LEAVE = 5.0
ABSENT = "absent: "  # begins a verdict that is not about differences


class RanksDifferError(ValueError):
    """The ranks cannot train together: settings, data or versions differ, or the checks of one have failed."""


class AbsentRankError(RuntimeError):
    """A rank did not come to the comparison."""


@dataclass(frozen=True)
class Report:
    """What a rank brings: facts by name, and the problems that its own checks found, one a line."""

    facts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def agree(
    rendezvous: Rendezvous,
    report: Report,
    *,
    timeout_seconds: float,
    before_refusal: Callable[[], None] = lambda: None,
) -> None:
    """Returns when all ranks have brought the same facts and no problem.

    `before_refusal` is called before any rank can end for a refusal, which launchers answer with signals.

    Raises RanksDifferError with the same lines on all ranks; AbsentRankError naming the ranks that did not come.
    """
    store, rank, world_size = PrefixStore("agreement", rendezvous.store), rendezvous.rank, rendezvous.world_size
    text = report.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"digest/{rank}", digest + ("!" if report.problem else ""))
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        _judge(store, text, world_size, deadline, timeout_seconds)
    else:
        patience = deadline + SECONDS_TO_LEAVE  # rank 0 is the first to tell who is absent
        _await(store, ["speakers"], patience, f"rank 0 did not come to the start within {timeout_seconds:g} s")
        if rank in json.loads(store.get("speakers")):
            store.set(f"report/{rank}", text)
        _await(store, ["verdict"], patience, f"rank 0 did not answer at the start within {timeout_seconds:g} s")
    verdict = store.get("verdict").decode()
    if verdict:
        before_refusal()
    _leave_together(store, world_size)
    if verdict.startswith(ABSENT):
        raise AbsentRankError(verdict.removeprefix(ABSENT))
    if verdict:
        raise RanksDifferError(verdict)


def _judge(store: Store, own: str, world_size: int, deadline: float, timeout_seconds: float) -> None:
    keys = [f"digest/{rank}" for rank in range(world_size)]
    try:
        _await(store, keys, deadline, "")
    except AbsentRankError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        message = (
            f"rank {ranks_text(absent)} of {world_size} did not come to the start within {timeout_seconds:g} s "
            "(--distributed-timeout-seconds)"
        )
        store.set("speakers", "[]")
        store.set("verdict", ABSENT + message)
        return
    kinds: dict[str, list[int]] = {}
    for rank, digest in enumerate(store.multi_get(keys)):
        kinds.setdefault(digest.decode(), []).append(rank)
    alone = len(kinds) == 1 and not next(iter(kinds)).endswith("!")
    groups = [] if alone else list(kinds.values())[:MOST_KINDS]
    store.set("speakers", json.dumps([ranks[0] for ranks in groups]))
    reports = []
    for ranks in groups:
        key = f"report/{ranks[0]}"
        if ranks[0] != 0:
            _await(store, [key], deadline, f"rank {ranks[0]} did not answer at the start")
        reports.append(Report(**json.loads(own if ranks[0] == 0 else store.get(key))))
    store.set("verdict", "\n".join(differences(groups, reports)))


def _await(store: Store, keys: Sequence[str], deadline: float, message: str) -> None:
    pause = 0.002
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise AbsentRankError(message)
        time.sleep(pause)
        pause = min(0.2, 1.3 * pause)


def _leave_together(store: Store, world_size: int) -> None:
    """The store of rank 0 stays until all have read; and no launcher ends a rank before it has its own exit code."""
    store.add("left", 1)
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while int(store.add("left", 0)) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)


def differences(groups: Sequence[Sequence[int]], reports: Sequence[Report]) -> list[str]:
    """Lines on `reports`, each brought by the ranks of one of `groups`; [] when nothing is wrong. Pure."""
    lines = []
    everybody = sum(map(len, groups))
    problems: dict[str, list[int]] = {}
    for ranks, report in zip(groups, reports, strict=True):
        for problem in report.problem.splitlines():
            problems.setdefault(problem, []).extend(ranks)
    for problem, ranks in problems.items():
        lines.append(problem if len(ranks) == everybody else f"on rank {ranks_text(sorted(ranks))}: {problem}")
    names = dict.fromkeys(name for report in reports for name in report.facts)
    for name in names:
        values: dict[str, list[int]] = {}
        for ranks, report in zip(groups, reports, strict=True):
            if name in report.facts or not report.problem:  # checks that failed leave facts out
                values.setdefault(report.facts.get(name, "not there"), []).extend(ranks)
        if len(values) > 1:
            said = "; ".join(f"{value} on rank {ranks_text(sorted(ranks))}" for value, ranks in values.items())
            lines.append(f"the ranks differ in {name}: {said}")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} differences more"]
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] is "0 to 2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:8], "..."])
