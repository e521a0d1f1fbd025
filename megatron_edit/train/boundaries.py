"""Where the boundaries of a run lie: the steps after which all replicas stand together.

With equal steps a boundary lies after every iteration, one optimizer step of every replica. With unequal ones, after
the warm-up, it is a meeting: the step after which all replicas decide their next sync. An iteration is then a global
batch of samples. What needs all replicas (evaluation, saving, the end) happens at a boundary.

    begin, then a step and `after_step` until that says that a boundary is reached, and again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from megatron_edit.ranks.signals import StopCoordinator
from megatron_edit.sync.engine import SyncEngine
from megatron_edit.sync.event import Meeting, SyncDecision
from megatron_edit.train.checkpointing import Position
from megatron_edit.train.feed import TrainingFeed
from megatron_edit.train.pace import Pace


class Boundaries(ABC):
    """Keeps `pace`, and deals `feed` out where that takes all replicas."""

    def __init__(self, engine: SyncEngine, pace: Pace, feed: TrainingFeed) -> None:
        self._engine, self._pace, self._feed = engine, pace, feed

    @property
    @abstractmethod
    def is_end(self) -> bool:
        """Whether the run is over. At a boundary, as what follows."""

    @property
    @abstractmethod
    def at_sync(self) -> bool | None:
        """Whether all replicas hold the same weights; None: the trigger's steps tell."""

    @property
    @abstractmethod
    def reserves(self) -> dict[str, Any] | None:
        """`Position.reserves`."""

    @abstractmethod
    def begin(self) -> None:
        """The next step is the first after a boundary."""

    @abstractmethod
    def asks_for_sync(self, stop: StopCoordinator) -> bool:
        """See `TrainStep.run`."""

    @abstractmethod
    def after_step(self, meeting: Meeting | None) -> bool:
        """Counts a step of this replica; whether it came to a boundary. `meeting`: `StepOutcome.meeting`."""

    @abstractmethod
    def iteration_of(self, decision: SyncDecision) -> int:
        """Where the run stood when a sync was decided; asked once, when it is reported."""


class EqualSteps(Boundaries):
    """All replicas take one step, and that is an iteration."""

    def __init__(self, engine: SyncEngine, pace: Pace, feed: TrainingFeed, *, train_iters: int) -> None:
        super().__init__(engine, pace, feed)
        self._train_iters = train_iters
        # A replica's own steps are more or fewer than the iterations after a run of unequal steps.
        self._steps_ahead = engine.trigger.steps - pace.iteration

    @property
    def is_end(self) -> bool:
        """See Boundaries."""
        return self._pace.iteration >= self._train_iters

    @property
    def at_sync(self) -> bool | None:
        """See Boundaries."""
        return None

    @property
    def reserves(self) -> dict[str, Any] | None:
        """See Boundaries. After a run of unequal steps only."""
        return {**self._feed.state, **self._pace.state} if self._pace.is_uneven else None

    def begin(self) -> None:
        """See Boundaries."""

    def asks_for_sync(self, stop: StopCoordinator) -> bool:
        """See Boundaries."""
        return False

    def after_step(self, meeting: Meeting | None) -> bool:
        """See Boundaries."""
        self._pace.step()
        self._pace.meet_after_one_step()
        return True

    def iteration_of(self, decision: SyncDecision) -> int:
        """See Boundaries."""
        return decision.iteration - self._steps_ahead


class UnequalSteps(Boundaries):
    """Each replica takes steps until its time is over, a stop is asked for, or its reserve is used up.

    In the warm-up all take one step, as with equal steps. `position`: where the run begins; `asks`: whether this rank
    is the one of its replica that asks for a sync.
    """

    def __init__(
        self,
        engine: SyncEngine,
        pace: Pace,
        feed: TrainingFeed,
        *,
        train_samples: int,
        position: Position,
        asks: bool,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(engine, pace, feed)
        self._train_samples = train_samples
        self._asks = asks
        self._say = say
        self._together = engine.synchronous  # of the interval under way
        self._at_sync = position.at_sync is not False  # whether the last meeting was averaged
        # Of an interval that another method has begun.
        self._steps_before = 0 if engine.synchronous else engine.trigger.steps_since_sync
        self._met_at: dict[int, int] = {}  # sync -> iteration, until it is reported

    @property
    def is_end(self) -> bool:
        """See Boundaries."""
        return self._pace.consumed_samples >= self._train_samples

    @property
    def at_sync(self) -> bool | None:
        """See Boundaries."""
        return self._at_sync

    @property
    def reserves(self) -> dict[str, Any] | None:
        """See Boundaries."""
        return {**self._feed.state, **self._pace.state}

    def begin(self) -> None:
        """See Boundaries. Deals the reserves."""
        self._together = self._engine.synchronous
        if not self._together:
            self._feed.deal(self._train_samples)
            self._engine.trigger.restart_clock()  # evaluation and saving are not time between two syncs

    def asks_for_sync(self, stop: StopCoordinator) -> bool:
        """See Boundaries."""
        if self._together or not self._asks:
            return False
        return self._engine.trigger.wants_sync() or stop.requested or self._feed.is_empty

    def after_step(self, meeting: Meeting | None) -> bool:
        """See Boundaries."""
        self._pace.step()
        if self._together:
            self._pace.meet_after_one_step()
        elif meeting is not None:
            self._meet(meeting)
        return self._together or meeting is not None

    def iteration_of(self, decision: SyncDecision) -> int:
        """See Boundaries."""
        return self._met_at.pop(decision.index, self._pace.iteration)

    def _meet(self, meeting: Meeting) -> None:
        """All replicas know now how many steps each has taken."""
        steps = tuple(n - self._steps_before for n in meeting.steps)
        self._steps_before = 0
        self._feed.give_back(steps)
        self._pace.meet(steps)
        self._at_sync = meeting.averaged
        if meeting.averaged:
            self._met_at[meeting.index] = self._pace.iteration
        else:
            self._say(
                f"sync {meeting.index} at iteration {self._pace.iteration}: put off, all replicas together have taken "
                f"fewer than --edit-min-total-steps {self._engine.config.edit_min_total_steps}"
            )
