"""The file of --log-sample-ids: one order, whenever the replicas came to their steps."""

import itertools
import json
import random
from pathlib import Path

import pytest

from megatron_edit.log.sample_ids import sort_lines


def lines(iterations: int, replicas: int) -> list[str]:
    return [
        json.dumps({"iteration": i, "replica": r, "samples": [i * 10 + r] * (1 + i % 3)}) + "\n"
        for i, r in itertools.product(range(1, iterations + 1), range(replicas))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_lines_come_in_the_order_of_iteration_and_replica(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "ids"
    wanted = lines(30, 3)
    written = list(wanted)
    random.Random(seed).shuffle(written)
    path.write_text("".join(written))
    sort_lines(path)
    assert path.read_text() == "".join(wanted) and list(tmp_path.iterdir()) == [path]


def test_a_sorted_file_is_left_alone_and_another_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids"
    sort_lines(path)
    path.write_text("".join(lines(3, 2)))
    before = path.stat().st_ino
    sort_lines(path)
    assert path.stat().st_ino == before and capsys.readouterr().err == ""
    path.write_text("something else\n")
    sort_lines(path)
    assert path.read_text() == "something else\n"
    assert "ids is not in the order of iterations: the line after 0 bytes" in capsys.readouterr().err
