"""One trial of chaos: a small run is disturbed at a random moment, restarted until it ends, and judged.

The ranks are forked; their stderr goes to one file, the *screen*, in the order in which it is said. A trial is a pure
function of its seed but for where the moment falls.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.folders import POINTER, CheckpointFolder
from megatron_edit.testing.command import CommandResult
from tests.e2e.runs import TINY, differences, losses, start

END = 24  # iterations
BEGUN_BEFORE = 19  # a disturbance begins before this iteration
CODES_OF_THE_LAST = {1, -signal.SIGTERM, -signal.SIGKILL}  # of ranks that end since another one is lost

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "R2": (2, {}),
    "R2xTP2": (4, {"tensor_model_parallel_size": 2}),
    "R2xPP2": (4, {"pipeline_model_parallel_size": 2}),
    "R3": (3, {"edit_num_replicas": 3, "global_batch_size": 12}),
}
METHODS: dict[str, dict[str, Any]] = {
    "edit": {},
    "streaming": {"edit_method": "streaming", "edit_sync_delay": 2},
    "co2": {"edit_method": "co2"},
    "baseline": {"edit_method": "baseline"},
}
SIGNALS = {"killed": signal.SIGKILL, "segmentation fault": signal.SIGSEGV, "bus error": signal.SIGBUS,
           "frozen": signal.SIGSTOP}  # fmt: skip
STOPS = {"SIGTERM": [signal.SIGTERM], "SIGHUP": [signal.SIGHUP], "SIGTERM twice": [signal.SIGTERM] * 2,
         "SIGHUP, SIGTERM": [signal.SIGHUP, signal.SIGTERM]}  # fmt: skip
DAMAGES = ("cut", "flipped", "pointer removed")
KINDS = (*SIGNALS, *STOPS, *DAMAGES, "folder removed", "corpus cut", "another --lr", "disk full")


@dataclass(frozen=True)
class Trial:
    """What is done to which run. A damage comes after one more disturbance, which leaves checkpoints behind."""

    seed: int
    kind: str
    layout: str
    method: str
    world_size: int
    settings: dict[str, Any]
    victim: int
    iteration: int
    delay_s: float
    pause_s: float
    fallback: bool

    def __str__(self) -> str:
        extra = "".join(f", {name}" for name in ("async_save", "edit_comm_dtype") if self.settings.get(name))
        return f"{self.kind}, rank {self.victim}, {self.iteration}; {self.layout} {self.method}{extra}"


@dataclass
class Judged:
    """Each start: what was done, the first line on screen, and the exit codes. `wrong`: what is not as documented."""

    trial: Trial
    starts: list[tuple[str, str, list[int]]]
    wrong: list[str]
    shown: str


def drawn(seed: int) -> Trial:
    draw = random.Random(seed)
    layout, method = draw.choice(list(LAYOUTS)), draw.choice(list(METHODS))
    world_size, settings = LAYOUTS[layout]
    settings = {**settings, **METHODS[method], "save_interval": draw.choice([2, 3, 5]), "train_iters": END,
                "async_save": draw.random() < 0.4, "distributed_timeout_seconds": 8}  # fmt: skip
    if method != "baseline" and draw.random() < 0.3:
        settings["edit_comm_dtype"] = "int8"
    return Trial(seed, KINDS[seed % len(KINDS)], layout, method, world_size, settings, draw.randrange(world_size),
                 draw.randrange(8, BEGUN_BEFORE), draw.uniform(0, 0.1), draw.uniform(0, 0.3),
                 draw.random() < 0.5)  # fmt: skip


# ---- what is done in a rank ------------------------------------------------------------------------------------------


def later(trial: Trial, victims: set[int], act: Callable[[], None]) -> Callable[[int], None]:
    """The victims do `act` some time after the trial's iteration has begun, whatever they are at then."""

    def in_rank(rank: int) -> None:
        from megatron_edit.train.trainer import StopCoordinator, Trainer

        if rank not in victims:
            return
        original = Trainer._train_step

        def train_step(self: Trainer, stop: StopCoordinator) -> bool:
            if self.iteration + 1 == trial.iteration:
                timer = threading.Timer(trial.delay_s, act)
                timer.daemon = True
                timer.start()
            return original(self, stop)

        Trainer._train_step = train_step  # type: ignore[method-assign]

    return in_rank


def signalled(numbers: list[signal.Signals], pause_s: float) -> Callable[[], None]:
    def act() -> None:
        for index, number in enumerate(numbers):
            if index:
                threading.Event().wait(pause_s)
            os.kill(os.getpid(), number)

    return act


def full_disk(trial: Trial) -> Callable[[int], None]:
    """The disk of the victim is full from its second save on."""

    def in_rank(rank: int) -> None:
        from megatron_edit.checkpoint import torch_dist

        original, opened = torch_dist._HashingStream.__init__, 0

        class Full:
            def write(self, data: Any) -> int:
                raise OSError(28, "No space left on device")

        def made(self: Any, file: Any) -> None:
            nonlocal opened
            opened += 1
            original(self, Full() if opened > 1 and rank == trial.victim else file)  # type: ignore[arg-type]

        torch_dist._HashingStream.__init__ = made  # type: ignore[method-assign]

    return in_rank


def another_rate(trial: Trial) -> Callable[[int], None]:
    def in_rank(rank: int) -> None:
        import megatron_edit.train.main as entry

        original = entry.configure

        def configure(argv: Any, *others: Any) -> Any:
            return original([*argv, *(["--lr", "5e-2"] if rank == trial.victim else [])], *others)

        entry.configure = configure

    return in_rank


# ---- a trial ---------------------------------------------------------------------------------------------------------


class Chaos:
    def __init__(self, trial: Trial, corpus: str, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        self.run, self.screen = folder / "run", folder / "screen"
        self.corpus = folder / "corpus"
        for extension in (".bin", ".idx", ".manifest.json"):
            shutil.copy(corpus + extension, f"{self.corpus}{extension}")
        self.judged = Judged(trial, [], [], "")
        self.losses: dict[int, str] = {}

    def start(self, what: str, in_rank: Callable[[int], None] | None = None, **changed: Any) -> CommandResult:
        self.screen.write_text("")

        def on_screen(rank: int) -> None:
            screen = os.open(self.screen, os.O_WRONLY | os.O_APPEND)
            os.dup2(screen, 2)
            os.close(screen)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
            if in_rank is not None:
                in_rank(rank)

        data = {"mock_data": None, "data_path": str(self.corpus), "split": "1", "tokenizer_type": "ByteTokenizer"}
        folders = {"save": str(self.run), "load": str(self.run)}
        settings = {**data, **folders, **self.trial.settings, **changed}
        result = start(self.trial.world_size, in_rank=on_screen, **settings)
        said = self.screen.read_text()
        self.judged.starts.append((what, next(iter(said.splitlines()), ""), result.exit_codes))
        self.judged.shown += f"\n===== {what}\n{said}----- stdout and codes\n{result}"
        for iteration, loss in losses(result.stdout).items():
            if self.losses.setdefault(iteration, loss) != loss:
                self.wrong(f"{what}: iteration {iteration} has loss {loss}, before {self.losses[iteration]}")
        return result

    def wrong(self, what: str) -> None:
        self.judged.wrong.append(what)

    def expect(self, first: str, codes: Callable[[list[int]], bool], *, anywhere: bool = False) -> None:
        """Of the last start: what the first line on screen matches (or a later one), and the exit codes."""
        what, line, found = self.judged.starts[-1]
        said = self.screen.read_text() if anywhere else line
        if not re.search(first, said):
            self.wrong(f"{what}: first on screen is {line!r}, not {first!r}")
        if not codes(found):
            self.wrong(f"{what}: exit codes {found}")

    # ---- disturbances while it trains

    def disturbed(self) -> None:
        trial, kind, victim = self.trial, self.trial.kind, self.trial.victim
        if kind in SIGNALS:
            number = SIGNALS[kind]
            self.start(kind, later(trial, {victim}, signalled([number], 0)))
            end = signal.SIGKILL if kind == "frozen" else number
            words = {"segmentation fault": "Fatal Python error: Segmentation fault",
                     "bus error": "Fatal Python error: Bus error",
                     "killed": rf"\[rank \d\] rank {victim} \(.*is lost: it has died without a word",
                     "frozen": rf"\[rank \d\] rank {victim} \(.*is lost: it does not answer"}  # fmt: skip
            self.expect(words[kind], lambda codes: codes[victim] == -end and self.others_end(codes))
            self.expect(rf"rank {victim} \(.*is lost|rank {victim} is lost", lambda codes: True, anywhere=True)
        elif kind in STOPS or kind in DAMAGES:
            numbers = STOPS.get(kind, [signal.SIGTERM])
            self.start(kind if kind in STOPS else "SIGTERM", later(trial, {victim}, signalled(numbers, trial.pause_s)))
            names = "|".join(number.name for number in numbers)
            self.expect(rf"^rank {victim}: ({names}): all ranks will save and stop", lambda codes: not any(codes))
        elif kind == "folder removed":
            moved = self.folder / "moved"
            result = self.start(kind, later(trial, {0}, lambda: self.run.rename(moved) and None))
            if not re.search(rf"^\*\*\* --save {self.run} was removed or moved away", result.stdout, re.MULTILINE):
                self.wrong("the removed folder is not named")
            self.expect("^$", lambda codes: not any(codes))
        elif kind == "corpus cut":
            self.corpus_cut()
        elif kind == "another --lr":
            self.start(kind, another_rate(trial))
            said = "error: the ranks differ in --lr: "
            self.expect(rf"{said}.*0\.05 on rank {victim}\b", lambda codes: set(codes) == {2})
            if self.run.exists():
                self.wrong("a refused start has written")
        elif kind == "disk full":
            self.start(kind, full_disk(trial))
            self.expect(rf"rank {victim}.*No space left on device", lambda codes: 1 in codes and self.others_end(codes))

    def others_end(self, codes: list[int]) -> bool:
        return all(code in CODES_OF_THE_LAST for rank, code in enumerate(codes) if rank != self.trial.victim)

    def corpus_cut(self) -> None:
        data = Path(f"{self.corpus}.bin")
        whole = data.read_bytes()

        def cut() -> None:
            os.truncate(data, 100)

        self.start("corpus cut", later(self.trial, {0}, cut))
        self.expect(
            rf"Fatal Python error: Bus error|{data}", lambda codes: 0 not in codes and set(codes) <= {1, -7, -9, -15}
        )  # fmt: skip
        before = self.content()
        self.start("with the cut corpus")
        self.expect(rf"^error: .*{data}", lambda codes: set(codes) == {2})
        if self.content() != before:
            self.wrong("a refused start has changed the save folder")
        data.write_bytes(whole)

    # ---- damage between two starts

    def content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.run.rglob("*") if path.is_file() and path.name != ".lock"}

    def damaged(self) -> None:
        """The start after it is refused, and names the file; nothing changes; then a fallback, or it is put back."""
        folder = CheckpointFolder(self.run)
        newest = folder.pointer()
        assert newest is not None
        shards = sorted(folder.path(newest).glob("*.distcp"))
        file = self.run / POINTER if self.trial.kind == "pointer removed" else shards[self.trial.victim % len(shards)]
        whole = file.read_bytes()
        if self.trial.kind == "pointer removed":
            file.unlink()
        elif self.trial.kind == "cut":
            file.write_bytes(whole[: len(whole) // 2])
        else:
            middle = len(whole) // 2
            file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        if self.trial.kind == "pointer removed":  # the newest complete one is taken, and said
            result = self.start(f"{self.trial.kind}")
            self.expect("^$", lambda codes: not any(codes))
            if f"there is no {POINTER}" not in result.stdout:
                self.wrong("the removed pointer is not named")
            return
        before = self.content()
        self.start(f"{self.trial.kind}: {file.name}")
        self.expect(rf"^error: .*{file.name}", lambda codes: set(codes) == {2})
        if self.content() != before:
            self.wrong("a refused start has changed the save folder")
        older = len(folder.complete_iterations()) > 1
        if not (self.trial.fallback and older):
            file.write_bytes(whole)
            return
        result = self.start("--load-fallback", load_fallback=True)
        self.expect("^$", lambda codes: not any(codes))
        if "falling back to" not in result.stdout or file.name not in result.stdout:
            self.wrong("--load-fallback does not say why")

    # ---- all of it

    def play(self) -> Judged:
        straight = self.start("undisturbed", save=str(self.folder / "straight"), load=None)
        self.expect("^$", lambda codes: not any(codes))
        self.disturbed()
        if self.trial.kind in DAMAGES:
            self.damaged()
        if not self.complete():
            self.start("again")
            self.expect("^$", lambda codes: not any(codes))
        if len(losses(straight.stdout)) != END:
            self.wrong("the undisturbed run has not logged every loss")
        last = f"iter_{END:07d}"
        if not self.complete():
            self.wrong(f"{last} is not complete")
        elif found := differences(self.run / last, self.folder / "straight" / last):
            self.wrong(f"differs from the undisturbed run in {found[:5]}")
        if [path.name for path in self.run.iterdir() if path.name.endswith((".partial", ".replaced"))]:
            self.wrong("something half made is left")
        return self.judged

    def complete(self) -> bool:
        return END in CheckpointFolder(self.run).complete_iterations()


def play(seed: int, corpus: str, folder: Path) -> Judged:
    """A corpus prefix of the byte tokenizer, an empty folder."""
    assert TINY["log_interval"] == 1
    return Chaos(drawn(seed), corpus, folder).play()
