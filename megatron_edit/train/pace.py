"""Where a run stands when replicas may take unequal numbers of steps: counts, and what follows from them. No torch.

All replicas know the same at a *meeting*: the samples that all have used, and the iteration, which is those samples in
global batches. Between two meetings a replica knows its own steps only, and estimates the rest for its learning rate.
With equal step counts (every method but a-edit, and every warm-up) each iteration counts as a meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_edit.config.batch_schedule import BatchSchedule

if TYPE_CHECKING:
    from megatron_edit.sync.fleet import Fleet


class Pace:
    """Counts of one replica.

    iteration, consumed_samples  of all replicas, at the last meeting
    fleet                        the replicas: asked at use
    batch                        global batch of each iteration; a constant one where steps are unequal
    state                        of a run of unequal steps that goes on, else None; of another number of replicas it
                                 leaves only what does not depend on them
    """

    def __init__(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        fleet: Fleet,
        batch: BatchSchedule,
        state: dict[str, Any] | None = None,
    ) -> None:
        state = state or {}
        self.iteration = iteration
        self.consumed_samples = consumed_samples
        self.batch = batch
        self.last_steps: tuple[int, ...] | None = None  # of each replica between the last two meetings
        self._fleet = fleet
        self._iteration_before = iteration  # at the meeting before
        # Samples beyond the whole iterations, so that a global batch of another size never takes iterations back.
        self._rest = samples_beyond_iteration(state, batch)
        self._replica_steps = [iteration] * fleet.num_replicas  # over the whole run, up to the last meeting
        self._own_steps = 0  # since the last meeting
        known = state.get("replica_steps", [])
        if len(known) == fleet.num_replicas:
            self._replica_steps = list(known)
            self.last_steps = None if state["last_steps"] is None else tuple(state["last_steps"])
        elif known:  # the replicas count on from the furthest, so that none counts a step twice
            self._replica_steps = [max(known)] * fleet.num_replicas

    @property
    def state(self) -> dict[str, Any]:
        """JSON, the same on all replicas. At a meeting only."""
        assert self._own_steps == 0
        return {
            "samples_beyond_iteration": self._rest,
            "replica_steps": list(self._replica_steps),
            "last_steps": None if self.last_steps is None else list(self.last_steps),
        }

    @property
    def is_uneven(self) -> bool:
        """Whether the iteration does not say it all."""
        return self._rest > 0 or any(steps != self.iteration for steps in self._replica_steps)

    @property
    def global_batch_size(self) -> int:
        """Samples of the next iteration of all replicas."""
        return self.batch.size_at(self.consumed_samples)

    @property
    def replica_batch_size(self) -> int:
        """Samples of the next step of one replica."""
        return self.global_batch_size // self._fleet.num_replicas

    @property
    def own_step(self) -> int:
        """Steps of this replica over the whole run."""
        return self._replica_steps[self._fleet.replica] + self._own_steps

    @property
    def schedule_samples(self) -> float:
        """Samples before the next step, for the learning rate: own ones since the meeting, scaled to all replicas.

        By all / own of the interval before; by the number of replicas when that is not known.
        """
        if self._own_steps == 0:
            return self.consumed_samples
        last = self.last_steps
        ratio = sum(last) / last[self._fleet.replica] if last else self._fleet.num_replicas
        return self.consumed_samples + self._own_steps * self.replica_batch_size * ratio

    def step(self) -> None:
        """This replica has taken a step."""
        self._own_steps += 1

    def meet_after_one_step(self) -> None:
        """All replicas have taken one step."""
        self._meet([1] * self._fleet.num_replicas)

    def meet(self, steps: Sequence[int]) -> None:
        """All replicas have met after `steps` [R] of each; what they took last time says what to expect."""
        self._meet(steps)
        self.last_steps = tuple(steps)

    def _meet(self, steps: Sequence[int]) -> None:
        fleet = self._fleet
        assert len(steps) == fleet.num_replicas and steps[fleet.replica] == self._own_steps, (steps, self._own_steps)
        samples = sum(steps) * self.replica_batch_size
        iterations, self._rest = divmod(self._rest + samples, self.global_batch_size)
        self.consumed_samples += samples
        self._iteration_before = self.iteration
        self.iteration += iterations
        self._replica_steps = [before + now for before, now in zip(self._replica_steps, steps, strict=True)]
        self._own_steps = 0

    def crossed(self, interval: int | None) -> bool:
        """Whether a multiple of `interval` iterations was reached since the meeting before."""
        return bool(interval) and self.iteration // interval > self._iteration_before // interval  # type: ignore[operator]


def samples_beyond_iteration(state: dict[str, Any] | None, batch: BatchSchedule) -> int:
    """Of a saved `Pace.state`; none with a batch that grows, whose iterations are steps and not a count of samples."""
    return int((state or {}).get("samples_beyond_iteration", 0)) if batch.is_constant else 0
