"""Runs of a-edit whose replicas take the numbers of steps that a script says, and what they have written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Script = Sequence[Sequence[int]]  # [R][k]: steps of each replica in intervals k, k + len, ...
SEED = 1234
A_EDIT: dict[str, Any] = {
    "edit_method": "a-edit",
    "train_iters": None,
    "train_samples": 240,
    "edit_sync_interval": None,
    "edit_sync_time": 1.0,
    "edit_warmup_steps": 2,
    "seed": SEED,
}


def scripted(script: Script, *, epoch_size: int | None = None, rates: Path | None = None) -> Callable[[int], None]:
    """Clocks on which the first of T = 1 s is over after as many steps as `script` says.

    `epoch_size`: samples of the generated corpus. `rates`: folder for the learning rates of each replica's steps.
    """

    def in_rank(rank: int) -> None:
        from megatron_edit.data import datasets
        from megatron_edit.train import data
        from megatron_edit.train.trainer import Trainer

        original = Trainer.__init__

        def init(self: Trainer, *arguments: Any, **keywords: Any) -> None:
            original(self, *arguments, **keywords)
            trigger, run, now = self.engine.trigger, self._step.run, [0.0]
            trigger._clock = lambda: now[0]  # type: ignore[attr-defined]
            steps_of = script[self.mesh.replica]

            def step(microbatches: Any, learning_rate: float, *rest: Any) -> Any:
                leads = self.mesh.is_replica_leader
                now[0] += 1.001 / steps_of[trigger.syncs % len(steps_of)] if leads else 100  # others are not asked
                if rates is not None and leads:
                    with (rates / f"{self.mesh.replica}.rates").open("a") as file:
                        file.write(f"{learning_rate!r}\n")
                return run(microbatches, learning_rate, *rest)

            self._step.run = step  # type: ignore[method-assign]

        Trainer.__init__ = init  # type: ignore[method-assign]
        if epoch_size is not None:
            data.build_mock_split = (  # type: ignore[assignment]
                lambda *names, **options: datasets.build_mock_split(*names, **options, num_samples=epoch_size)
            )

    return in_rank


def slowed(seconds: Sequence[float]) -> Callable[[int], None]:
    """Each step of rank r takes `seconds[r]`, its computation included where the machine is not too busy for it."""

    def in_rank(rank: int) -> None:
        from megatron_edit.train.step import TrainStep

        run, ended = TrainStep.run, [time.monotonic()]

        def slow(self: TrainStep, *arguments: Any) -> Any:
            time.sleep(max(0.0, ended[0] + seconds[rank] - time.monotonic()))
            ended[0] = time.monotonic()
            return run(self, *arguments)

        TrainStep.run = slow  # type: ignore[method-assign]

    return in_rank


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(file: Path, num_replicas: int) -> list[int]:
    """Steps of each replica in a file of --log-sample-ids, which must be numbered without gap."""
    steps = [[line["iteration"] for line in lines_of(file) if line["replica"] == r] for r in range(num_replicas)]
    assert all(each == list(range(1, len(each) + 1)) for each in steps), steps
    return [len(each) for each in steps]


def audit(file: Path, epoch_size: int = 1 << 20) -> int:
    """Samples that were used: every one of an epoch once before one of the next epoch; raises when not so."""
    counts = Counter(sample for line in lines_of(file) for sample in line["samples"])
    whole, rest = divmod(sum(counts.values()), epoch_size)
    expected = {whole: epoch_size - rest, whole + 1: rest}
    found = Counter(counts.values())
    assert max(counts) < epoch_size and found == {n: k for n, k in expected.items() if n and k}, found
    return sum(counts.values())
