"""What a replica counts from step to step: updates since the last sync of each module, and what a sync needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SyncCounts:
    """Counts of one replica, on every rank of it alike.

    fragments      fragment of each module of the whole model, in forward order: a module is counted on every stage,
                   since a checkpoint holds one number for each fragment
    num_fragments  F

    steps_at_average  steps of this replica up to its last sync that averaged something
    inner_lr          learning rate of the last step
    """

    def __init__(self, fragments: Sequence[int], num_fragments: int = 1) -> None:
        self._fragments = tuple(fragments)
        self.num_fragments = num_fragments
        self.steps_at_average = 0
        self.inner_lr = 0.0
        self._updates = 0  # steps that changed this replica's parameters
        self._at_launch = [0] * len(self._fragments)  # of each module's last sync

    def step(self, updated: bool) -> None:
        """A step has ended; `updated`: it changed the parameters."""
        self._updates += int(updated)

    def since(self, module: int) -> int:
        """Updates that the last sync of `module` (its position in the whole model) does not hold."""
        return self._updates - self._at_launch[module]

    def launched(self, fragments: Iterable[int]) -> None:
        """A sync of the modules of `fragments` has been decided: it holds all updates up to now."""
        due = set(fragments)
        self._at_launch = [
            self._updates if fragment in due else before
            for fragment, before in zip(self._fragments, self._at_launch, strict=True)
        ]

    def not_applied(self, module: int, since: int) -> None:
        """The last sync of `module` has failed: it again is `since` updates (as it was before) behind those so far."""
        self._at_launch[module] -= since

    def restart(self, since: Sequence[int]) -> None:
        """`since` [F]: updates of each fragment; of another number of fragments the largest for all."""
        known = list(since) if len(since) == self.num_fragments else [max(since)] * self.num_fragments
        self._updates = max(known)
        self._at_launch = [self._updates - known[fragment] for fragment in self._fragments]

    @property
    def of_fragments(self) -> list[int]:
        """[F] updates since each fragment's last sync: the most of its modules."""
        most = [0] * self.num_fragments
        for module, fragment in enumerate(self._fragments):
            most[fragment] = max(most[fragment], self.since(module))
        return most
