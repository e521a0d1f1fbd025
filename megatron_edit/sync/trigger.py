"""When a replica synchronises. A trigger counts a replica's optimizer steps; it knows no group and no model.

The trainer asks `in_warmup` before a step (are gradients averaged over the replicas?) and calls `advance()`
once after it. A step whose update was skipped for a non-finite gradient counts too: its replica must meet the
others at the same iteration. Micro-batches and parameter groups do not count.

A trigger by wall clock needs one more thing: all ranks of a replica must come to the same decision. One of them asks
`wants_sync()`, the answer travels with the reduction of the gradient's norm, and all pass it to `advance`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_edit.config.resolved import ResolvedEdit
from megatron_edit.tables.methods import Method
from megatron_edit.tables.timetable import Timetable, fragments_of


class WarmupError(ValueError):
    """A saved run whose replicas already differ cannot go back into the synchronous warm-up."""


@dataclass(frozen=True)
class StepDecision:
    """What follows from the step that has just ended.

    step         its number, from 1
    synchronous  it belonged to the warm-up: its gradients were averaged over all replicas
    set_anchor   it ended the warm-up: anchor := parameters, now
    due          fragments of the model whose sync is due; of a method without fragments (0,) or ()
    syncs        syncs that were due so far, this one included
    """

    step: int
    synchronous: bool
    set_anchor: bool
    due: tuple[int, ...]
    syncs: int

    @property
    def sync_due(self) -> bool:
        """Whether any fragment is due."""
        return bool(self.due)


class Trigger(ABC):
    """Warm-up over steps 1..warmup_steps, and what the triggers have in common.

    One that is not `in_warmup` before its first step (no warm-up, or one that ended with the loaded state)
    never reports `set_anchor`: who builds it then takes the parameters as anchor, unless one was loaded.

    warmup_steps  optimizer steps, at least 0; None: the warm-up never ends, as in method `baseline`
    Raises ValueError for a number out of range.
    """

    num_fragments = 1  # F: parts of the model that are due after steps of their own

    def __init__(self, warmup_steps: int | None = 0) -> None:
        if warmup_steps is not None and warmup_steps < 0:
            raise ValueError(f"warm-up must be at least 0 steps, got {warmup_steps}; try 0")
        self.warmup_steps = warmup_steps
        self.steps = 0
        self.syncs = 0
        self.last_sync_step = 0  # step after which the last sync was due, or the warm-up ended
        # The last step of the warm-up; None as long as it lasts.
        self.warmup_end: int | None = 0 if warmup_steps == 0 else None

    @property
    def in_warmup(self) -> bool:
        """Whether the next step is synchronous data parallelism."""
        return self.warmup_end is None

    @property
    def steps_since_sync(self) -> int:
        """Steps since the last sync of any fragment, or since the warm-up ended."""
        return self.steps - self.last_sync_step

    def advance(self, asked: bool = False) -> StepDecision:
        """Counts one step and says what follows from it. `asked`: what the replica agreed on, see `wants_sync`."""
        self.steps += 1
        if self.warmup_end is None:
            ends = self.steps == self.warmup_steps
            if ends:
                self.warmup_end = self.last_sync_step = self.steps
                self.restart_clock()
            return StepDecision(self.steps, True, set_anchor=ends, due=(), syncs=self.syncs)
        due = self.due_after(self.steps, asked)
        if due:
            self.syncs += 1
            self.last_sync_step = self.steps
        return StepDecision(self.steps, False, set_anchor=False, due=due, syncs=self.syncs)

    @abstractmethod
    def due_after(self, step: int, asked: bool = False) -> tuple[int, ...]:
        """Fragments that are due after `step`, counted over the whole run; the warm-up is over."""

    def count_of(self, fragment: int, step: int) -> int:
        """How often `fragment` has been due, the sync after `step` included."""
        return self.syncs

    def wants_sync(self) -> bool:
        """Whether this rank would synchronise after the step in progress; always False for a trigger by steps."""
        return False

    def restart_clock(self) -> None:  # noqa: B027  a trigger by steps has none
        """A sync has just been decided by all replicas."""

    def state_dict(self) -> dict[str, int | None]:
        """Counts in steps and syncs; no settings."""
        return {
            "steps": self.steps,
            "syncs": self.syncs,
            "warmup_end": self.warmup_end,
            "last_sync_step": self.last_sync_step,
        }

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Goes on from a saved state. The interval may have changed; it is counted from the same origin.

        A run saved in its warm-up (or by `baseline`) leaves it there if this trigger's is already over.
        Raises WarmupError when the saved warm-up was over and this one is not: the replicas already differ.
        """
        steps, syncs, warmup_end = state["steps"], state["syncs"], state["warmup_end"]
        assert steps is not None and syncs is not None
        over = self.warmup_steps is not None and steps >= self.warmup_steps
        if warmup_end is None:
            warmup_end = steps if over else None
        elif not over:
            wanted = "without end" if self.warmup_steps is None else f"of {self.warmup_steps} steps"
            raise WarmupError(
                f"the saved run left its warm-up at step {warmup_end} and is at step {steps}, its replicas "
                f"differ; a warm-up {wanted} cannot take it up; {warmup_end} steps would work"
            )
        self.steps, self.syncs, self.warmup_end = steps, syncs, warmup_end
        self.last_sync_step = state.get("last_sync_step") or warmup_end or 0
        self.restart_clock()


class StepTrigger(Trigger):
    """Syncs by a `Timetable`, which begins where the warm-up ends.

    interval       tau, optimizer steps, at least 1
    num_fragments  F, at least 1
    Raises ValueError for numbers out of range.
    """

    def __init__(self, interval: int, warmup_steps: int | None = 0, num_fragments: int = 1) -> None:
        super().__init__(warmup_steps)
        self._from_zero = Timetable(interval, num_fragments)
        self.num_fragments = num_fragments

    @property
    def timetable(self) -> Timetable:
        """Of this run: from where the warm-up did end (also in a run that this one resumes), or is to end."""
        assert self.warmup_steps is not None, "without local steps there is no timetable"
        return replace(self._from_zero, warmup_end=self.warmup_steps if self.warmup_end is None else self.warmup_end)

    def due_after(self, step: int, asked: bool = False) -> tuple[int, ...]:
        """See Trigger."""
        return self.timetable.due_after(step)

    def count_of(self, fragment: int, step: int) -> int:
        """See Trigger."""
        return self.timetable.count_of(fragment, step)


class TimeTrigger(Trigger):
    """A sync after the first step whose gradients are ready `seconds` or more after the last sync (A-EDiT, T).

    The clock is monotonic, is read by one rank of each replica, and is never compared with another. Time is added up
    from one reading to the next: a clock that is set back (a fault) costs the time of one step, not a hang.

    seconds  T, above 0
    clock    seconds, `time.monotonic`
    Raises ValueError for numbers out of range.
    """

    def __init__(
        self, seconds: float, warmup_steps: int | None = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"the time between two syncs must be above 0 seconds, got {seconds}; try 600")
        super().__init__(warmup_steps)
        self.seconds = seconds
        self._clock = clock
        self._elapsed, self._read_at = 0.0, clock()

    def due_after(self, step: int, asked: bool = False) -> tuple[int, ...]:
        """See Trigger."""
        return (0,) if asked else ()

    def wants_sync(self) -> bool:
        """See Trigger."""
        now = self._clock()
        self._elapsed += max(0.0, now - self._read_at)
        self._read_at = now
        return not self.in_warmup and self._elapsed >= self.seconds

    def restart_clock(self) -> None:
        """See Trigger."""
        self._elapsed, self._read_at = 0.0, self._clock()


def build_trigger(config: ResolvedEdit, method: Method, num_modules: int) -> Trigger:
    """The trigger of `method`; a method without local steps never leaves its warm-up."""
    warmup_steps = config.edit_warmup_steps if method.is_local else None
    if config.sync_seconds is not None:
        return TimeTrigger(config.sync_seconds, warmup_steps)
    interval = max(config.edit_sync_interval, 1)
    return StepTrigger(interval, warmup_steps, fragments_of(method, config.edit_num_fragments, num_modules, interval))
