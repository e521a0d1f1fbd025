"""The global batch size as a function of the samples that were consumed before an iteration. Pure integers.

A constant batch has one step. `--step-batch-size-schedule` and `--rampup-batch-size` have several; their meaning is
that of Megatron-LM. Iterations and samples convert both ways from any place in the data, so that a resumed run needs
nothing but its position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """`steps`: (samples consumed from which on it holds, global batch size) ascending, the first from 0 on."""

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        assert starts and starts[0] == 0 and all(a < b for a, b in pairwise(starts)), self.steps
        assert all(size > 0 for _, size in self.steps), self.steps

    @classmethod
    def constant(cls, global_batch_size: int) -> BatchSchedule:
        """The same batch in every iteration."""
        return cls(((0, global_batch_size),))

    @classmethod
    def from_steps(cls, words: Sequence[str], seq_length: int) -> BatchSchedule:
        """Of --step-batch-size-schedule: TOKENS:BATCH entries in any order, between blanks or commas.

        TOKENS and BATCH may end in K, M, B or T (10^3 to 10^12). Tokens are cut to whole samples of `seq_length`
        tokens, as in Megatron-LM. Raises ValueError that names the bad entry.
        """
        entries = " ".join(words).replace(",", " ").split()
        if not entries:
            raise ValueError("is empty: entries are TOKENS:BATCH, like 0:768 250B:1536")
        found: dict[int, tuple[str, int]] = {}
        for entry in entries:
            tokens_text, colon, size_text = entry.partition(":")
            tokens, size = _whole_number(tokens_text), _whole_number(size_text)
            if not colon or tokens is None or not size:
                raise ValueError(
                    f"has the entry {entry!r}: entries are TOKENS:BATCH, whole numbers that may end in K, M, B or T, "
                    "the batch from 1 on, like 0:768 250B:1536"
                )
            start = tokens // seq_length
            if start in found:
                raise ValueError(
                    f"has two batches from sample {start} on, {found[start][0]} and {entry}: samples have "
                    f"--seq-length {seq_length} tokens; leave one out"
                )
            found[start] = entry, size
        if 0 not in found:
            raise ValueError(f"does not say the batch at the start: its first entry must be at 0, like 0:{size}")
        return cls(tuple((start, found[start][1]) for start in sorted(found)))

    @classmethod
    def from_rampup(cls, words: Sequence[str], global_batch_size: int) -> BatchSchedule:
        """Of --rampup-batch-size START INCREMENT SAMPLES: up to `global_batch_size` in increments, each over an equal
        share of SAMPLES. Raises ValueError that says what does not fit.
        """
        numbers = [_whole_number(word) for word in words]
        if len(numbers) != 3 or not all(numbers):
            raise ValueError("must be three whole numbers from 1 on: START INCREMENT SAMPLES, like 16 8 300000")
        start, increment, samples = (number or 0 for number in numbers)
        rise = global_batch_size - start
        if rise <= 0:
            raise ValueError(
                f"starts at {start}, which is not below --global-batch-size {global_batch_size}: start lower, or leave "
                "it out"
            )
        if rise % increment:
            works = [n for n in range(1, rise + 1) if rise % n == 0] if rise < 10**6 else [rise]
            near = [*(n for n in works if n < increment)][-1:] + [*(n for n in works if n > increment)][:1]
            raise ValueError(
                f"does not come to --global-batch-size {global_batch_size}: {global_batch_size} - {start} = {rise} is "
                f"not a multiple of the increment {increment}; {' or '.join(map(str, near))} would work"
            )
        count, sizes = rise // increment, {}
        for k in range(count + 1):
            first = -(-k * samples // count)
            # Megatron-LM takes int(consumed / (SAMPLES / count)) in floats, which may come out just below k here
            late = int(first / (samples / count)) < k
            sizes[first + late] = start + k * increment  # of steps that fall together the last
        return cls(tuple(sizes.items()))

    @property
    def is_constant(self) -> bool:
        """Whether every iteration has the same batch."""
        return len(self.steps) == 1

    @property
    def last_size(self) -> int:
        """The batch that holds for good in the end."""
        return self.steps[-1][1]

    def size_at(self, samples: int) -> int:
        """Global batch size of the iteration before which `samples` samples were consumed."""
        return self.steps[bisect_right(self.steps, samples, key=lambda step: step[0]) - 1][1]

    def stretches(self, samples: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """(samples before, global batch size, iterations with it; None: all that follow) one after the other, of a
        run that stands at `samples`. A size that is jumped over by a larger batch does not come.
        """
        for k, (_, size) in enumerate(self.steps):
            if k + 1 == len(self.steps):
                yield samples, size, None
            elif (following := self.steps[k + 1][0]) > samples:
                iterations = -(-(following - samples) // size)
                yield samples, size, iterations
                samples += iterations * size

    def samples_after(self, iterations: int, samples: int = 0) -> int:
        """Samples consumed `iterations` iterations after `samples`."""
        for before, size, number in self.stretches(samples):
            if number is None or iterations <= number:
                return before + iterations * size
            iterations -= number
        raise AssertionError("the last stretch has no end")

    def iterations_until(self, end: float, samples: int = 0) -> int:
        """Whole iterations from `samples` on that consume no more than `end` samples in all."""
        iterations = 0
        for before, size, number in self.stretches(samples):
            fit = max(0, int(end) - before) // size
            if number is None or fit < number:
                return iterations + fit
            iterations += number
        raise AssertionError("the last stretch has no end")

    def iteration_at(self, samples: float) -> float:
        """Iterations after which `samples` samples are consumed, with the share of the one that begins before."""
        whole = self.iterations_until(samples)
        before = self.samples_after(whole)
        return whole + (samples - before) / self.size_at(before)


def _whole_number(text: str) -> int | None:
    """12, 1.5M, 1e9: a whole number from 0 on, exactly; None when it is not one."""
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        value = Decimal(text if factor == 1 else text[:-1]) * factor
    except ArithmeticError:
        return None
    return int(value) if value.is_finite() and value >= 0 and value < 2**63 and value == int(value) else None
