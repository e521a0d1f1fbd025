"""Runs disturbed at random: the first message names the cause, and what comes out is the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.chaos import drawn, play
from tests.e2e.conftest import Corpora

TRIALS = 30
IN_EVERY_RUN = (0, 4, 9)  # a rank is killed, SIGTERM, a byte of a shard is flipped


@pytest.mark.parametrize(
    "seed",
    [
        seed if seed in IN_EVERY_RUN else pytest.param(seed, marks=pytest.mark.full(reason="more trials of chaos"))
        for seed in range(TRIALS)
    ],
    ids=lambda seed: f"{seed}-{drawn(seed).kind}",
)
def test_chaos(seed: int, corpora: Corpora, tmp_path: Path) -> None:
    judged = play(seed, corpora.documents_200, tmp_path)
    for what, first, codes in judged.starts[1:]:
        print(f"| {seed} | {judged.trial} | {what} | {codes} | {first[:160]} |")
    assert not judged.wrong, f"{judged.trial}: {judged.wrong}\n{judged.shown}"
