"""Tokens/s of A-EDiT against EDiT when one of two replicas is three times as slow: `python benchmarks/straggler.py`.

The slow replica is slow by sleeping: a step lasts --step-seconds on one replica and --slowdown times that on the other,
computation included, so what is measured is who waits for whom. T is --fast-steps steps of the fast one. EDiT goes as
fast as the slow replica, 2 steps in its time for one; A-EDiT ideally takes 1 + slowdown in it: ideal ratio
(1 + slowdown) / 2, so 2.0. What it lacks to that is the wait at each sync for the step in which the slow one is. Runs
of the two methods take turns; on a machine that is too busy for the asked step both get slower than asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_edit.testing.command import run_command

LIMIT = 1.8
SEQUENCE, REPLICA_BATCH = 32, 4
FLAGS = (
    "--device cpu --mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 8 --micro-batch-size 4 "
    f"--seq-length {SEQUENCE} --replica-batch-size {REPLICA_BATCH} --edit-num-replicas 2 --lr-decay-style constant "
    "--eval-iters 0 --log-interval 1000000"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, default=0.08, help="of the fast replica")
    parser.add_argument("--slowdown", type=float, default=3.0)
    parser.add_argument("--fast-steps", type=int, default=40, help="T, and the interval of EDiT, in fast steps")
    parser.add_argument("--intervals", type=int, default=2, help="syncs of EDiT in a run; A-EDiT runs as long")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each method")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    step, slowdown, fast_steps = arguments.step_seconds, arguments.slowdown, arguments.fast_steps
    slow_steps = round(fast_steps / slowdown)
    # As long as the intervals of EDiT, each of which takes `slowdown` times T.
    a_edit_samples = arguments.intervals * round(slowdown) * (fast_steps + slow_steps) * REPLICA_BATCH
    methods = {
        "edit": f"--edit-sync-interval {fast_steps} --train-iters {arguments.intervals * fast_steps}",
        "a-edit": f"--edit-sync-time {fast_steps * step} --train-samples {a_edit_samples}",
    }
    seconds, steps = dict.fromkeys(methods, 0.0), {name: [0, 0] for name in methods}
    for _ in range(arguments.rounds):
        for name, flags in methods.items():
            with tempfile.TemporaryDirectory() as folder:
                timed = padded([step, step * slowdown], Path(folder))
                argv = [*FLAGS.split(), "--edit-method", name, *flags.split()]
                result = run_command(argv, 2, in_rank=timed, timeout_s=600)
                assert result.exit_codes == [0, 0], result
                taken = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
            seconds[name] += max(each["seconds"] for each in taken)
            steps[name] = [before + each["steps"] for before, each in zip(steps[name], taken, strict=True)]
    tokens = {name: sum(steps[name]) * REPLICA_BATCH * SEQUENCE / seconds[name] for name in methods}
    print(f"{'method':10}{'fast steps':>12}{'slow steps':>12}{'seconds':>10}{'tokens/s':>10}")
    for name in methods:
        fast, slow = steps[name]
        print(f"{name:10}{fast:12d}{slow:12d}{seconds[name]:10.1f}{tokens[name]:10.0f}")
    ratio, faster = tokens["a-edit"] / tokens["edit"], steps["a-edit"][0] / steps["a-edit"][1]
    print(f"the fast replica of a-edit took {faster:.2f} times the steps of the slow one")
    print(f"tokens/s of a-edit / edit: {ratio:.2f} (ideal {(1 + slowdown) / 2:.2f}, at least {LIMIT:.1f} is wanted)")
    print(f"load average over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.output:
        numbers = {"ratio": ratio, "tokens_per_second": tokens, "steps": steps, "load": os.getloadavg()[0]}
        arguments.output.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


def padded(step_seconds: list[float], folder: Path) -> Callable[[int], None]:
    """Each step of rank r lasts `step_seconds[r]`; steps and seconds of the training loop go to `folder`/r.json."""

    def in_rank(rank: int) -> None:
        from megatron_edit.train.step import TrainStep
        from megatron_edit.train.trainer import Trainer

        run, iterate, count = TrainStep._clipped_gradient, Trainer._iterate, [0]
        began = [0.0]

        def padded_gradient(self: TrainStep, *arguments: object) -> object:
            """Sleeps before the norm, as a slow forward and backward pass would."""
            time.sleep(max(0.0, began[0] + step_seconds[rank] - time.perf_counter()))
            began[0] = time.perf_counter()
            count[0] += 1
            return run(self, *arguments)  # type: ignore[arg-type]

        def timed(self: Trainer, *arguments: object) -> object:
            started = began[0] = time.perf_counter()
            result = iterate(self, *arguments)  # type: ignore[arg-type]
            numbers = {"steps": count[0], "seconds": time.perf_counter() - started}
            Path(folder, f"{rank}.json").write_text(json.dumps(numbers))
            return result

        TrainStep._clipped_gradient, Trainer._iterate = padded_gradient, timed  # type: ignore[method-assign,assignment]

    return in_rank


if __name__ == "__main__":
    sys.exit(main())
