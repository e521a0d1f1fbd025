"""Syncs that are under way when a checkpoint is written: stored unapplied, taken up again as they were.

With a delay, or in `co2`, an average is applied some steps after it set out. Its tensors are `edit.in_flight.<name>`
and, with a delay, each replica's masters at the launch; what was decided is in the manifest, by module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_edit.checkpoint.torch_dist import ShardedTensor
from megatron_edit.checkpoint.training_state import AT_LAUNCH, IN_FLIGHT, TrainingState, own_key, shared_key
from megatron_edit.sync.detector import DetectorVerdict
from megatron_edit.sync.event import Pending, SyncDecision, SyncEvent


class SavedInFlight:
    """The syncs that a manifest says were under way, as empty tensors to read and then to go on with.

    That this run can apply them has been checked (`plan.py`).
    """

    def __init__(self, state: TrainingState, content: dict[str, Any]) -> None:
        self.state = state
        self._saved = content["in_flight"]
        device = state.mesh.platform.device
        self.events = {
            event["index"]: SyncEvent(
                self._decision(event),
                state.mesh.platform.record_event(),
                [torch.ones((), dtype=torch.float64) for _ in state.sync.modules],
                apply_after=event["apply_after"],
                inner_lr=event["inner_lr"],
            )
            for event in self._saved["events"]
        }
        self.pending: dict[int, Pending] = {}  # by index of the module
        for module in state.sync.modules:
            entry = self._saved["modules"].get(module.key)
            if entry is None:
                continue
            replica = state.sync.fleet.replica % len(entry["left_out"])
            pending = Pending(
                module.index,
                self.events[entry["event"]],
                weight=entry["weights"][replica],
                rolled_back=entry["rolled_back"],
                kept=not entry["left_out"][replica],
            )
            if not pending.rolled_back:
                pending.buffer = torch.zeros(module.numel, dtype=torch.float32, device=device)
            self.pending[module.index] = pending

    def _decision(self, event: dict[str, Any]) -> SyncDecision:
        modules = self.state.sync.modules
        entries = [self._saved["modules"].get(module.key) for module in modules]
        entries = [entry if entry is not None and entry["event"] == event["index"] else None for entry in entries]
        saved = (len(entry["left_out"]) for entry in self._saved["modules"].values())
        replicas = next(saved, self.state.sync.fleet.num_replicas)

        def columns(name: str, dtype: torch.dtype) -> torch.Tensor:
            rows = [[0] * replicas if entry is None else entry[name] for entry in entries]
            return torch.tensor(rows, dtype=dtype).view(len(modules), replicas).T  # [R, M]

        no = torch.zeros(replicas, len(modules), dtype=torch.bool)
        verdict = DetectorVerdict(no, no, columns("left_out", torch.bool), no[0], no.long())
        return SyncDecision(
            index=event["index"],
            iteration=event["iteration"],
            due=torch.tensor([entry is not None for entry in entries]),
            norms=columns("norms", torch.float64),
            steps=columns("steps", torch.int64),
            verdict=verdict,
            weights=columns("weights", torch.float64),
            rolled_back=torch.tensor([entry is not None and entry["rolled_back"] for entry in entries]),
        )

    def averages(self) -> Iterator[ShardedTensor]:
        """To be read: the averages under way."""
        for index, pending in self.pending.items():
            if pending.buffer is not None:
                yield from self._tensors(index, pending.buffer, partial(shared_key, IN_FLIGHT))

    def at_launch(self, replica: int) -> Iterator[ShardedTensor]:
        """To be read: the masters of the saved `replica` when they set out, where it is in the average."""
        for index, pending in self.pending.items():
            if pending.event.apply_after is None or pending.buffer is None or self._left_out(index, replica):
                continue
            if pending.at_launch is None:
                pending.at_launch = torch.zeros_like(pending.buffer)
            yield from self._tensors(index, pending.at_launch, partial(own_key, replica, AT_LAUNCH))

    def base(self, index: int, replica: int) -> torch.Tensor | None:
        """What the progress of the saved `replica` counts from, [numel], after `at_launch(replica)`; None: the anchor.

        A replica that was left out drops its progress (its masters will be the anchor's); it counts as none here.
        """
        pending = self.pending.get(index)
        if pending is None or pending.event.apply_after is None or pending.buffer is None:
            return None
        return None if self._left_out(index, replica) else pending.at_launch

    def drops_progress(self, index: int, replica: int) -> bool:
        """Whether the saved `replica` will take the anchor when the module's delayed sync is applied."""
        pending = self.pending.get(index)
        delayed = pending is not None and pending.event.apply_after is not None
        return delayed and self._left_out(index, replica)

    def average(self, index: int) -> torch.Tensor | None:
        """The module's average under way, [numel]."""
        pending = self.pending.get(index)
        return None if pending is None else pending.buffer

    def inner_lr(self, index: int) -> float:
        """Inner learning rate of the module's sync under way."""
        pending = self.pending.get(index)
        return 0.0 if pending is None else pending.event.inner_lr

    def _tensors(self, index: int, flat: torch.Tensor, key_of: Callable[[str], str]) -> Iterator[ShardedTensor]:
        return self.state.whole_module(self.state.sync.modules[index], flat, key_of)

    def _left_out(self, index: int, replica: int) -> bool:
        """Whether the saved `replica` was left out of the module's average under way."""
        return bool(self._saved["modules"][self.state.sync.modules[index].key]["left_out"][replica])

    def under_way(self) -> list[tuple[SyncEvent, list[Pending]]]:
        """To go on with: each sync, oldest first, with its modules on this rank in forward order."""
        pending = [self.pending[index] for index in sorted(self.pending)]
        return [(event, [each for each in pending if each.event is event]) for event in self.events.values()]
