"""What a sync costs the training over a slow link: the time of its steps beyond that of local steps.

Root is needed (else one line says so): two network namespaces are joined by a veth pair whose ends are rate limited
with `tc ... tbf`, and one replica of one rank trains in each. Per rate the model is as large as a link of that rate
sends in about SYNC_SECONDS (so a slower link has a smaller model), and the batch such that this is 0.8 of a forward
pass. 16 modules of equal size: embedding, 14 layers, head.

All ways of syncing are measured in turns in one run, each on a replica of its own over the same process groups. A turn
is a step that ends in a sync and the step after, in whose forward pass the sync is completed; for streaming TURN_STEPS
steps, each with the sync of one module. Of each turn

    stall   its seconds less those of as many local steps (median of the run without syncs), mean of the two ranks,
            without rank skew
    inside  the part of it that is spent in the engine; in the rest the computation is slower than in a local step, as
            messages are sent on the same cores

and the medians over the turns are printed. Rank skew: the engine does the same calls on both ranks, and of each
the shorter one counts, for in the longer one a rank has waited for the other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rate_limited_link import DEVICE, LinkError, bits_per_second, limit_rate, linked_namespaces

RATES = ("2g", "1g", "500m", "200m", "100m")
QUICK_RATES = ("1g", "200m")
SYNC_SECONDS = 0.125  # that a sync takes alone, about
SYNC_OF_FORWARD = 0.8  # of a forward pass
NUM_LAYERS, HEAD_SIZE, SEQ_LENGTH = 14, 8, 64
PARAMETERS_OF_MODULE = 12  # times hidden size squared, each
TURN_STEPS = 4
LOCAL = "no sync"
MODES: dict[str, dict[str, Any]] = {
    LOCAL: {"edit_sync_interval": 1_000_000},
    "blocking": {"edit_sync_placement": "step"},
    "edit": {},
    "edit, all launched at once": {"edit_prefetch_depth": 64},
    "edit, sublayer": {"edit_modules": "sublayer"},
    "edit, bf16": {"edit_comm_dtype": "bf16"},
    "edit, int8": {"edit_comm_dtype": "int8"},
    "streaming, delay 2": {"edit_method": "streaming", "edit_sync_interval": 16, "edit_sync_delay": 2},
}


@dataclass
class Turn:
    """One turn of a mode on one rank: its seconds, and the own seconds of each call in the engine, by part."""

    seconds: float
    calls: dict[str, list[float]]

    @property
    def inside(self) -> float:
        """Seconds in the engine."""
        return sum(map(sum, self.calls.values()))


def parts_of(together: Sequence[Turn]) -> dict[str, float]:
    """Seconds in the engine by part, without rank skew, of the ranks' views of one turn."""
    return {
        part: sum(map(min, zip(*(turn.calls[part] for turn in together), strict=True))) for part in together[0].calls
    }


# ---- arithmetic, without torch ---------------------------------------------------------------------------------------


def hidden_size_of(rate: str, seconds: float) -> int:
    """Hidden size of the model whose parameters, fp32, a link of `rate` sends in about `seconds`."""
    parameters = bits_per_second(rate) / 32 * seconds
    hidden = (parameters / ((NUM_LAYERS + 2) * PARAMETERS_OF_MODULE)) ** 0.5
    return max(2, round(hidden / HEAD_SIZE)) * HEAD_SIZE


def stalls(turns: Sequence[Sequence[Turn]], local_seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(stall, inside) of each turn, seconds: turns [ranks][n], seconds of as many local steps [ranks]."""
    result = []
    for together in zip(*turns, strict=True):
        inside = sum(parts_of(together).values())
        beside = [turn.seconds - turn.inside - local for turn, local in zip(together, local_seconds, strict=True)]
        result.append((inside + statistics.mean(beside), inside))
    return result


# ---- parent ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", help=f"comma-separated, bits per second; default {','.join(RATES)}")
    parser.add_argument("--quick", action="store_true", help=f"a minute: {','.join(QUICK_RATES)}, fewer turns")
    parser.add_argument("--seconds", type=float, help="of the whole, about; default 340, 60 with --quick")
    parser.add_argument("--sync-seconds", type=float, default=SYNC_SECONDS, help="of a sync alone, about: model size")
    parser.add_argument("--output", type=Path, help="also write the numbers as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # set in the two processes started here
    arguments = parser.parse_args()
    arguments.rates = arguments.rates.split(",") if arguments.rates else QUICK_RATES if arguments.quick else RATES
    arguments.seconds = arguments.seconds or (60 if arguments.quick else 340)
    try:
        for rate in arguments.rates:
            bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    if arguments.rank is not None:
        return run_rank(arguments)
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        print(f"slow links: skipped, {'no ' + ' and '.join(missing) if missing else 'root is needed'}")
        return 0
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    try:
        with linked_namespaces() as names:
            return run_ranks_in(names, time.time() + arguments.seconds)
    except LinkError as error:
        print(f"slow links: skipped, no namespaces joined by a rate limited link can be made here: {error}")
        return 0
    except KeyboardInterrupt:
        return 130


def run_ranks_in(names: Sequence[str], end: float) -> int:
    """One rank in each namespace, to be done at about `end` (time of day): the exit code."""
    environment = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that addresses have no names here
        "SLOW_LINKS_END": str(end),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, name in enumerate(names):
            this = ["ip", "netns", "exec", name, sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
            ranks.append(subprocess.Popen(this, env={**os.environ, **environment, "RANK": str(rank)}))
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        if any(rank.poll() for rank in ranks):
            return 1
        return max(rank.wait(timeout=30) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


# ---- a rank ----------------------------------------------------------------------------------------------------------


def run_rank(arguments: argparse.Namespace) -> int:
    """Measures all rates; the first rank prints."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank does not outlive the run
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    import torch
    import torch.distributed as dist

    from megatron_edit.platform import get_platform
    from megatron_edit.train.replica import mesh_of

    torch.set_num_threads(1)
    platform = get_platform("cpu")
    platform.initialize()
    dist.init_process_group("gloo")
    mesh = mesh_of(config_of(64, 1), platform)
    end = float(os.environ["SLOW_LINKS_END"])
    results = []
    for index, rate in enumerate(arguments.rates):
        limit_rate(rate)
        dist.barrier(mesh.world_control_group)
        now = time.time()
        result = LinkBenchmark(mesh, rate, arguments.sync_seconds).run(
            until=now + (end - now) / (len(arguments.rates) - index)
        )
        if mesh.rank == 0:
            print_result(result)
        results.append(result)
        gc.collect()
    if mesh.rank == 0 and arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier(mesh.world_control_group)
    dist.destroy_process_group()
    return 0


def config_of(hidden_size: int, micro_batch_size: int, **settings: Any) -> Any:
    """Two replicas of a Llama of 16 modules of 12 H^2 parameters each; a sync after every other step."""
    from megatron_edit.testing.tiny import tiny_config

    return tiny_config(
        2,
        **{
            "num_layers": NUM_LAYERS,
            "hidden_size": hidden_size,
            "ffn_hidden_size": round(8 / 3 * hidden_size),
            "num_attention_heads": hidden_size // HEAD_SIZE,
            "num_query_groups": hidden_size // HEAD_SIZE,
            "seq_length": SEQ_LENGTH,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": 2 * micro_batch_size,
            "edit_num_replicas": 2,
            "edit_sync_interval": 2,
            **settings,
        },
    )


class Parts:
    """Own time of each call of the engine's methods, by part, in order; main thread only."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)
        self._own: list[float] = []  # of the calls in progress, outermost first
        self._since = 0.0

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, timed as `part`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._switch()
            self._own.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                self._switch()
                self.calls[part].append(self._own.pop())

        return timed

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._own:
            self._own[-1] += now - self._since
        self._since = now


class TimedReplica:
    """A replica with its step, whose engine is timed from outside."""

    def __init__(self, mesh: Any, hidden_size: int, micro_batch_size: int, **settings: Any) -> None:
        import torch

        from megatron_edit.train.replica import build_replica
        from megatron_edit.train.step import TrainStep

        vocabulary = PARAMETERS_OF_MODULE * hidden_size
        config = config_of(hidden_size, micro_batch_size, **settings)
        self.step = TrainStep(build_replica(config, mesh, vocabulary))
        self.engine = self.step.replica.engine
        samples = torch.randint(vocabulary, (micro_batch_size, SEQ_LENGTH + 1))  # [b, S + 1]
        self.batch = {
            "tokens": samples[:, :-1].contiguous(),
            "labels": samples[:, 1:].contiguous(),
            "loss_mask": torch.ones(micro_batch_size, SEQ_LENGTH),
        }
        self.parts = Parts()
        self._time_the_engine()
        self.forward_seconds: list[float] = []
        self._started = 0.0
        chunk = self.step.replica.chunks[0]
        chunk.register_forward_pre_hook(lambda *_: setattr(self, "_started", time.perf_counter()))
        chunk.register_forward_hook(lambda *_: self.forward_seconds.append(time.perf_counter() - self._started))

    def _time_the_engine(self) -> None:
        """The own time of the outermost calls, and of timing, is "decision"."""
        engine: Any = self.engine
        transport = engine.fleet.transport
        for owner, name, part in (
            (engine, "after_step", "decision"),
            (engine.placement, "complete", "decision"),
            (engine.placement, "launch_after", "decision"),
            (engine.exchange, "_measure", "norms"),
            (engine.averages, "launch", "launch"),
            (engine.averages, "apply", "apply"),
            (transport, "all_gather", "exchange"),
        ):
            if hasattr(owner, name):  # only a placement in the forward pass is called there
                setattr(owner, name, self.parts.wrap(getattr(owner, name), part))
        for name in ("all_reduce", "_chain"):
            setattr(transport, name, self._with_timed_wait(getattr(transport, name)))

    def _with_timed_wait(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(*arguments: Any) -> Any:
            handle = send(*arguments)
            return None if handle is None else TimedHandle(self.parts.wrap(handle.wait, "waiting"))

        return sent

    def turn(self, steps: int) -> Turn:
        """That many steps, timed."""
        self.parts.calls = defaultdict(list)
        started = time.perf_counter()
        for _ in range(steps):
            self.step.run([self.batch], 3e-4)
        return Turn(time.perf_counter() - started, dict(self.parts.calls))

    def settle(self) -> None:
        """What still travels (streaming) has arrived, so that the link is free for the next one's turn."""
        for _, modules in self.engine.placement.under_way:
            for pending in modules:
                pending.arrived()


@dataclass
class TimedHandle:
    """A message under way whose waiting is timed."""

    wait: Callable[[], Any]


class LinkBenchmark:
    """All modes over a link of one rate."""

    def __init__(self, mesh: Any, rate: str, sync_seconds: float) -> None:
        import torch

        self.mesh, self.rate = mesh, rate
        self.hidden_size = hidden_size_of(rate, sync_seconds)
        numel = PARAMETERS_OF_MODULE * self.hidden_size**2
        self.messages = [torch.zeros(numel) for _ in range(NUM_LAYERS + 2)]

    def run(self, until: float) -> dict[str, Any]:
        """Rounds of turns of every mode, until the time of day `until` (at least 3)."""
        import torch.distributed as dist

        busy = Busy()
        micro_batch_size = self._micro_batch_size()
        replicas = {
            mode: TimedReplica(self.mesh, self.hidden_size, micro_batch_size, **settings)
            for mode, settings in MODES.items()
        }
        for replica in replicas.values():
            self._barrier()
            replica.turn(3)  # after it the interval's first step is done and the syncs' buffers are made
            replica.settle()
            replica.forward_seconds.clear()
        turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
        sends: list[float] = []
        modes, rounds, longest = list(MODES), 0, 0.0
        while rounds < 3 or self._agree(time.time() + longest < until):
            started = time.time()
            sends.append(self._send())
            for mode in modes[rounds % len(modes) :] + modes[: rounds % len(modes)]:
                self._barrier()
                turns[mode].append(replicas[mode].turn(steps_of(mode)))
                replicas[mode].settle()
            rounds, longest = rounds + 1, max(longest, time.time() - started)
        mine = {"turns": turns, "sends": sends, "forward": replicas[LOCAL].forward_seconds, "cpu": busy.own_seconds()}
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine, group=self.mesh.world_control_group)
        return {
            "rate": self.rate,
            "hidden_size": self.hidden_size,
            "micro_batch_size": micro_batch_size,
            "megabytes": sum(message.nbytes for message in self.messages) / 1e6,
            "rounds": rounds,
            **summary(everyone),
            **busy.of_machine(sum(rank["cpu"] for rank in everyone)),
        }

    def _micro_batch_size(self) -> int:
        """Samples whose forward pass takes a sync's time / 0.8, from two sizes and a line through them."""
        replica = TimedReplica(self.mesh, self.hidden_size, 1, edit_sync_interval=1_000_000)
        seconds = []
        for size in (1, 9):
            batch = {key: value.expand(size, -1).contiguous() for key, value in replica.batch.items()}
            self._barrier()
            for _ in range(5):
                replica.step.run([batch], 3e-4)
            seconds.append(min(replica.forward_seconds[-4:]))
        per_sample = max((seconds[1] - seconds[0]) / 8, 1e-5)
        send = min(self._send() for _ in range(3))
        size = 1 + (send / SYNC_OF_FORWARD - seconds[0]) / per_sample
        return max(1, round(self._mean(size)))

    def _send(self) -> float:
        """Seconds of a sync that does nothing but send: one all-reduce a module."""
        import torch.distributed as dist

        self._barrier()
        started = time.perf_counter()
        handles = [dist.all_reduce(flat, group=self.mesh.sync_group, async_op=True) for flat in self.messages]
        for handle in handles:
            handle.wait()
        return time.perf_counter() - started

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(self.mesh.world_control_group)

    def _mean(self, value: float) -> float:
        """Over the ranks."""
        import torch
        import torch.distributed as dist

        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.mesh.world_control_group)
        return float(total) / 2

    def _agree(self, value: bool) -> bool:
        return self._mean(float(value)) == 1.0


def steps_of(mode: str) -> int:
    """Steps of a turn."""
    return TURN_STEPS if mode == LOCAL or mode.startswith("streaming") else 2


def summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the local step, the forward pass, a sync alone; per mode stall, inside, its parts, share of a step."""
    step = [statistics.median(turn.seconds for turn in rank["turns"][LOCAL]) / TURN_STEPS for rank in ranks]
    modes = {}
    for mode in MODES:
        turns, steps = [rank["turns"][mode] for rank in ranks], steps_of(mode)
        both = stalls(turns, [steps * seconds for seconds in step])
        parts = [parts_of(together) for together in zip(*turns, strict=True)]
        in_steps = 1 / (steps * statistics.mean(step))
        modes[mode] = {
            "stall": statistics.median(stall for stall, _ in both),
            "inside": statistics.median(inside for _, inside in both),
            "mean_share": statistics.mean(stall for stall, _ in both) * in_steps,
            "median_share": statistics.median(stall for stall, _ in both) * in_steps,
            "inside_share": statistics.median(inside for _, inside in both) * in_steps,
            "parts": {name: statistics.median(of_turn[name] for of_turn in parts) for name in sorted(parts[0])},
        }
    return {
        "step": statistics.mean(step),
        "forward": statistics.mean(statistics.median(rank["forward"]) for rank in ranks),
        "send": statistics.median(min(together) for together in zip(*(rank["sends"] for rank in ranks), strict=True)),
        "modes": modes,
    }


class Busy:
    """How busy the machine was since this was made."""

    def __init__(self) -> None:
        self._started, self._ticks, self._own = time.time(), self._read(), time.process_time()

    @staticmethod
    def _read() -> list[int]:
        """User, nice, system, idle, iowait, irq, softirq, steal of all cores."""
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]

    def own_seconds(self) -> float:
        """CPU seconds of this process, its threads included."""
        return time.process_time() - self._own

    def of_machine(self, own_seconds: float) -> dict[str, float]:
        """Load average of the last minute, cores that others used, part of the time that was stolen."""
        spent = [now - before for now, before in zip(self._read(), self._ticks, strict=True)]
        seconds = (sum(spent) - spent[3] - spent[4] - spent[7]) / os.sysconf("SC_CLK_TCK")
        others = max(0.0, seconds - own_seconds) / (time.time() - self._started)
        return {"load": os.getloadavg()[0], "others": others, "steal": spent[7] / max(1, sum(spent))}


def print_result(result: dict[str, Any]) -> None:
    """A table of one rate."""
    send, forward, step = (1000 * result[name] for name in ("send", "forward", "step"))
    print(
        f"\n{result['rate']}bit/s: a sync of {result['megabytes']:.1f} MB alone C {send:.0f} ms, forward pass F "
        f"{forward:.0f} ms, C/F {send / forward:.2f}, local step {step:.0f} ms (hidden size {result['hidden_size']}, "
        f"micro-batch {result['micro_batch_size']})\n"
        f"  {result['rounds']} turns each; load average {result['load']:.1f} on {os.cpu_count()} cores, others used "
        f"{result['others']:.2f} cores, steal {100 * result['steal']:.1f} %"
    )
    blocking = result["modes"]["blocking"]
    print(f"  {'ms a sync':28}{'stall':>8}{'ratio':>8}{'inside':>8}{'ratio':>8}  inside, in parts")
    for mode, row in result["modes"].items():
        parts = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in row["parts"].items() if seconds > 5e-5)
        if mode.startswith("streaming"):
            print(
                f"  {mode:28}{100 * row['median_share']:.1f} % of a step (mean {100 * row['mean_share']:.1f} %, inside "
                f"{100 * row['inside_share']:.1f} %)  ms in {TURN_STEPS} steps: {parts}"
            )
        elif mode != LOCAL:
            columns = "".join(
                f"{1000 * row[name]:8.1f}{row[name] / blocking[name]:8.3f}" for name in ("stall", "inside")
            )
            print(f"  {mode:28}{columns}  {parts}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
