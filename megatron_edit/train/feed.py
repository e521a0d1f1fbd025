"""The training batches of one rank: slices of global batches, or reserves that are dealt out at each sync."""

from __future__ import annotations

from typing import Any

from megatron_edit.data.loader import Batch, MicrobatchLoader, ReserveLoader
from megatron_edit.data.reserves import Reserve, SamplePool
from megatron_edit.sync.fleet import Fleet
from megatron_edit.train.data import RunData
from megatron_edit.train.pace import Pace


class TrainingFeed:
    """Global batches until `deal` is called, reserves from then on. All ranks deal alike, and nothing travels.

    `state`: of the pool of a run that goes on; None, or without holes: all samples after those of `pace` are unused.
    """

    def __init__(self, data: RunData, pace: Pace, fleet: Fleet, state: dict[str, Any] | None) -> None:
        self._data = data
        self._pace = pace
        self._fleet = fleet
        self._state = state if state and state["ranges"] else None  # a warm-up may move on before the first deal
        self._loader: MicrobatchLoader | None = None
        self._reserve_loader: ReserveLoader | None = None
        self._pool: SamplePool | None = None
        self._reserves: list[Reserve] = []

    def next_batch(self) -> Batch:
        """Of the next step. Raises LoaderError."""
        if self._reserve_loader is not None:
            return self._reserve_loader.next_batch()
        if self._loader is None:
            self._loader = self._data.loader(self._pace.consumed_samples, self._pace.batch)
        return self._loader.next_batch()

    @property
    def is_empty(self) -> bool:
        """Whether the replica has used up its reserve and has to meet the others."""
        return self._reserve_loader is not None and self._reserve_loader.batches_left == 0

    def deal(self, train_samples: int) -> None:
        """Begins an interval of unequal steps, of a run that ends at `train_samples`."""
        pace = self._pace
        if self._reserve_loader is None:
            self.close()
            self._reserve_loader = self._data.reserve_loader()
            self._pool = self._data.pool(pace.consumed_samples, self._state)
        assert self._pool is not None and not self._reserves
        assert self._pool.consumed_samples == pace.consumed_samples, (self._pool.state, pace.consumed_samples)
        self._reserves = self._pool.deal(
            self._fleet.num_replicas,
            pace.replica_batch_size,
            left_of_run=train_samples - pace.consumed_samples,
            last_steps=pace.last_steps,
        )
        self._reserve_loader.refill(self._reserves[self._fleet.replica])

    def give_back(self, steps: tuple[int, ...]) -> None:
        """Ends the interval, in which the replicas have taken `steps` [R]."""
        assert self._pool is not None
        self._pool.give_back(self._reserves, steps)
        self._reserves = []

    @property
    def state(self) -> dict[str, Any]:
        """JSON, the same on all ranks. Between two intervals only."""
        assert not self._reserves
        return self._pool.state if self._pool is not None else {"frontier": self._pace.consumed_samples, "ranges": []}

    def close(self) -> None:
        """Ends the threads that read ahead."""
        for loader in (self._loader, self._reserve_loader):
            if loader is not None:
                loader.close()
