"""What a user should be told about the replicas that a sync averaged, beside its line in the log. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.sync.detector import WARN_EVERY
from megatron_edit.sync.event import SyncDecision
from megatron_edit.sync.penalty import effective_replicas

COLLAPSED_SYNCS = 3  # in a row below half of the replicas, before the weights count as collapsed (ours)
ROUNDING = 1e-5  # relative distance of two copies of an anchor, up to which it is that of sums in another order (ours)
IDLE_SYNCS, IDLE_ITERATIONS = 5, 100  # in a row without any change of the weights, both, before a run is ended (ours)
ADVICE = (
    "The log's skipped and nan iterations say which. Look at the loss mask of the data and at the learning rate, and "
    "resume from a checkpoint before it began"
)


class NothingStepsError(RuntimeError):
    """No replica has changed the weights for so long that the run is not training."""


class SyncWarnings:
    """Turns decisions into lines; keeps how long the weights have been collapsed.

    told_elsewhere  of each module, whether another stage tells of it: a tied matrix is on two
    """

    def __init__(self, module_keys: Sequence[str], told_elsewhere: Sequence[bool] | None = None) -> None:
        self._keys = list(module_keys)
        self._own = ~torch.tensor(told_elsewhere or [False] * len(self._keys), dtype=torch.bool)  # [M]
        self._collapsed = 0  # syncs in a row

    def after_sync(self, decision: SyncDecision) -> list[str]:
        """Lines on one sync, each with its replica and all modules that it is of."""
        verdict, own = decision.verdict, self._own & decision.due
        lines = []
        for replica in range(decision.num_replicas):
            flagged, streak = verdict.flagged[replica] & own, verdict.streak[replica]
            lines += self._flagged(decision, replica, flagged & (streak == 1))
            for count in sorted({int(n) for n in streak[flagged & (streak % WARN_EVERY == 0)]}):
                keys = self._names(flagged & (streak == count))
                lines.append(f"replica {replica} left out of {keys} for {count} syncs in a row")
        for module in (verdict.restarted & own).nonzero().flatten().tolist():
            lines.append(
                f"most replicas were flagged in {self._keys[module]} in 3 syncs in a row: its norms have moved, its "
                "detectors start anew"
            )
        lines += self._rolled_back(decision, decision.rolled_back & own)
        for replica in range(decision.num_replicas):
            broken, differ = verdict.non_finite[replica] & own, decision.norms[replica].isneginf()
            for which, fault in (
                (broken & ~differ, f"replica {replica} is not finite in"),
                (broken & differ, f"replica {replica}: the two copies, on first and last stage, differ of the tied"),
            ):
                if which.any():
                    done = "left out there, set back to the anchor, its inner moments zeroed"
                    lines.append(f"{fault} {self._names(which)}: {done}")
        return [*(f"warning: sync {decision.index}: {line}" for line in lines), *self._collapse(decision)]

    def anchors_apart(self, index: int, distances: Sequence[float]) -> list[str]:
        """Lines on the relative distances [R] between the two copies of the anchor of a tied matrix."""
        return [
            f"warning: sync {index}: replica {replica}: the anchor's two copies of the tied embedding were "
            f"{distance:.1e} of its length apart, which is more than rounding (a fault of memory or of a link?): the "
            "last stage took the first's"
            for replica, distance in enumerate(distances)
            if not distance <= ROUNDING
        ]

    def _flagged(self, decision: SyncDecision, replica: int, first_time: torch.Tensor) -> list[str]:
        """The line on the modules [M] in which this replica is flagged for the first time in a row."""
        if not first_time.any():
            return []
        norms = decision.norms  # [R, M]
        largest = int(norms[replica].masked_fill(~first_time, -1.0).argmax())
        beside_it = norms[:, largest].isfinite() & (decision.steps[:, largest] > 0)
        beside_it[replica] = False
        others = norms[beside_it, largest]
        beside = f", others {float(others.median()):.2g}" if others.numel() else ""
        return [
            f"replica {replica} is far above its own past in {self._names(first_time)} (norm "
            f"{float(norms[replica, largest]):.2g} in {self._keys[largest]}{beside}): left out there, set back to the "
            "anchor"
        ]

    def _rolled_back(self, decision: SyncDecision, rolled_back: torch.Tensor) -> list[str]:
        """One line for all modules [M] whose replicas were left out for the same reasons."""
        modules_of: dict[str, list[int]] = {}
        for module in rolled_back.nonzero().flatten().tolist():
            modules_of.setdefault(self._reasons(decision, module), []).append(module)
        return [
            f"every replica left out ({reasons}), rolled back to the anchor: "
            + self._names(torch.tensor([m in modules for m in range(len(self._keys))]))
            for reasons, modules in modules_of.items()
        ]

    def _reasons(self, decision: SyncDecision, module: int) -> str:
        """Why the replicas were left out of a module."""
        verdict, stepped = decision.verdict, decision.steps[:, module] > 0
        broken, flagged = verdict.non_finite[:, module], verdict.flagged[:, module]
        reasons: list[tuple[str, torch.Tensor]] = [
            ("not finite", broken & ~decision.norms[:, module].isneginf()),
            ("copies differ", broken & decision.norms[:, module].isneginf()),
            ("far above its own past", flagged),
            ("made no step", ~stepped & ~broken),
        ]
        found = [(reason, which.nonzero().flatten().tolist()) for reason, which in reasons if which.any()]
        if len(found) == 1:
            return "none made a step since the sync before" if found[0][0] == "made no step" else f"all {found[0][0]}"
        return "; ".join(f"{_replicas(which)} {reason}" for reason, which in found)

    def _names(self, modules: torch.Tensor) -> str:
        """The keys where `modules` [M] is true; of many the first and their number."""
        keys = [key for key, chosen in zip(self._keys, modules.tolist(), strict=True) if chosen]
        if len(keys) == len(self._keys) > 2:
            return f"all {len(keys)} modules of this stage ({keys[0]} to {keys[-1]})"
        return ", ".join(keys) if len(keys) <= 8 else f"{', '.join(keys[:8])} and {len(keys) - 8} more"

    def _collapse(self, decision: SyncDecision) -> list[str]:
        averaged = decision.weights[:, decision.weights.sum(0) > 0]
        if decision.num_replicas == 1 or averaged.numel() == 0:
            return []
        lowest = float(effective_replicas(averaged).min())
        self._collapsed = self._collapsed + 1 if lowest < decision.num_replicas / 2 else 0
        if self._collapsed % WARN_EVERY != COLLAPSED_SYNCS:
            return []
        return [
            f"note: sync {decision.index}: the softmax weights have been close to one replica for {self._collapsed} "
            f"syncs (N_eff {lowest:.2f} of {decision.num_replicas}): a higher --edit-softmax-temperature, or "
            "--edit-weighting mean, would use more of the replicas"
        ]


def _replicas(which: Sequence[int]) -> str:
    return f"replica{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"


class IdleWatch:
    """Ends a run that has stood still: IDLE_SYNCS syncs that changed nothing, and IDLE_ITERATIONS iterations (ours).

    All ranks of a stage feed it the same decisions, and so end after the same sync. It starts anew with the process.
    """

    def __init__(self) -> None:
        self._syncs = 0  # in a row whose every module was rolled back
        self._iterations = 0  # synchronous ones in a row that were skipped
        self._last_change: int | None = None  # iteration of the last sync that changed something

    def after_sync(self, decision: SyncDecision) -> None:
        """One sync. Raises NothingStepsError when it is enough."""
        if not decision.due.any():
            return
        if self._last_change is None or not bool(decision.rolled_back[decision.due].all()):
            self._syncs, self._last_change = 0, decision.iteration
            return
        self._syncs += 1
        iterations = decision.iteration - self._last_change
        if self._syncs < IDLE_SYNCS or iterations < IDLE_ITERATIONS:
            return
        why = "every replica was left out of every module"
        if not decision.stepped.any():
            why = "no replica has made a step: no token counted, or no gradient was finite"
        raise NothingStepsError(f"the weights have not changed in the last {self._syncs} syncs, {iterations} "
                                f"iterations: {why}. {ADVICE}")  # fmt: skip

    def after_synchronous_step(self, updated: bool) -> None:
        """One step of all replicas together. Raises NothingStepsError when it is enough."""
        self._iterations = 0 if updated else self._iterations + 1
        if self._iterations >= IDLE_ITERATIONS:
            raise NothingStepsError(
                f"the weights have not changed in the last {self._iterations} iterations, which were all skipped: no "
                f"token counted, or no gradient was finite. {ADVICE}"
            )
