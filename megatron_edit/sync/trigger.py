"""When a replica synchronises. A trigger counts a replica's optimizer steps; it knows no group and no model.

The trainer asks `in_warmup` before a step (are gradients averaged over the replicas?) and calls `advance()`
once after it. A step whose update was skipped for a non-finite gradient counts too: its replica must meet the
others at the same iteration. Micro-batches and parameter groups do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class WarmupError(ValueError):
    """A saved run whose replicas already differ cannot go back into the synchronous warm-up."""


@dataclass(frozen=True)
class StepDecision:
    """What follows from the step that has just ended.

    step         its number, from 1
    synchronous  it belonged to the warm-up: its gradients were averaged over all replicas
    set_anchor   it ended the warm-up: anchor := parameters, now
    sync_due     a sync is due, to be completed before or during the next forward pass
    syncs        syncs that were due so far, this one included
    """

    step: int
    synchronous: bool
    set_anchor: bool
    sync_due: bool
    syncs: int


class Trigger(Protocol):
    """What the engine and the trainer use of a trigger, be it by steps or by wall clock.

    One that is not `in_warmup` before its first step (no warm-up, or one that ended with the loaded state)
    never reports `set_anchor`: who builds it then takes the parameters as anchor, unless one was loaded.
    """

    @property
    def in_warmup(self) -> bool: ...

    def advance(self) -> StepDecision: ...

    def state_dict(self) -> dict[str, int | None]: ...

    def load_state_dict(self, state: dict[str, int | None]) -> None: ...


class StepTrigger:
    """A sync every `interval` steps of the replica.

    Warm-up covers steps 1..warmup_steps; syncs follow steps warmup_steps + k interval, k = 1, 2, ...: the
    interval is counted from the end of the warm-up (ours: the sources say "every tau steps" only).

    interval      tau, optimizer steps, at least 1
    warmup_steps  optimizer steps, at least 0; None: the warm-up never ends, as in method `baseline`
    Raises ValueError for numbers out of range.
    """

    def __init__(self, interval: int, warmup_steps: int | None = 0) -> None:
        if interval < 1:
            raise ValueError(f"sync interval must be at least 1 step, got {interval}; try 128")
        if warmup_steps is not None and warmup_steps < 0:
            raise ValueError(f"warm-up must be at least 0 steps, got {warmup_steps}; try 0")
        self.interval, self.warmup_steps = interval, warmup_steps
        self.steps = 0
        self.syncs = 0
        # The last step of the warm-up; None as long as it lasts.
        self.warmup_end: int | None = 0 if warmup_steps == 0 else None

    @property
    def in_warmup(self) -> bool:
        """Whether the next step is synchronous data parallelism."""
        return self.warmup_end is None

    def advance(self) -> StepDecision:
        """Counts one step and says what follows from it."""
        self.steps += 1
        if self.warmup_end is None:
            ends = self.steps == self.warmup_steps
            self.warmup_end = self.steps if ends else None
            return StepDecision(self.steps, True, set_anchor=ends, sync_due=False, syncs=self.syncs)
        due = (self.steps - self.warmup_end) % self.interval == 0
        self.syncs += due
        return StepDecision(self.steps, False, set_anchor=False, sync_due=due, syncs=self.syncs)

    def state_dict(self) -> dict[str, int | None]:
        """Counts in steps and syncs; no settings."""
        return {"steps": self.steps, "syncs": self.syncs, "warmup_end": self.warmup_end}

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
