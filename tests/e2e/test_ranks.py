"""Ranks that were not given the same, ranks that no torchrun has started, and launchers that restart a stopped run."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corpora
from tests.e2e.runs import losses, start, train


def more_flags(rank_1: list[str]) -> Callable[[int], None]:
    """Rank 1 is given `rank_1` besides, as by another script on its node."""

    def in_rank(rank: int) -> None:
        import megatron_edit.train.main as entry

        original = entry.configure

        def configure(argv: Any, *others: Any) -> Any:
            return original([*argv, *(rank_1 if rank == 1 else [])], *others)

        entry.configure = configure

    return in_rank


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr", "5e-2"], ["the ranks differ in --lr: 0.001 on rank 0; 0.05 on rank 1"]),
        (["--edit-sync-interval", "3"], ["the ranks differ in --edit-sync-interval: 4 on rank 0; 3 on rank 1"]),
        (["--lr", "-1"], ["on rank 1: --lr must be at least 0, not -1.0"]),
        (
            ["--edit-num-replicas", "1"],
            ["the ranks differ in --edit-num-replicas: 2 on rank 0; 1 on rank 1",
             "the ranks differ in --replica-batch-size: 4 (derived) on rank 0; 8 (derived) on rank 1"],
        ),
    ],
)  # fmt: skip
def test_settings_of_one_rank_alone(flags: list[str], said: list[str], tmp_path: Path) -> None:
    result = start(2, directory=tmp_path, save="run", in_rank=more_flags(flags))
    assert result.exit_codes == [2, 2] and result.stderr.splitlines() == [f"error: {line}" for line in said], result
    assert list(tmp_path.iterdir()) == []


def test_what_is_found_when_the_run_is_built_ends_all_ranks_with_2(tmp_path: Path) -> None:
    train(2, directory=tmp_path, save="run", train_iters=2)
    result = start(2, directory=tmp_path, load="run", ckpt_step=1)
    assert result.exit_codes == [2, 2] and "iter_0000001" in result.stderr, result
    assert len(result.stderr.splitlines()) == 1, f"said once: {result}"


def test_another_corpus_of_the_same_name_on_one_node(corpora: Corpora, tmp_path: Path) -> None:
    for rank, prefix in enumerate((corpora.documents_200, corpora.documents_200, corpora.one_short)):
        (tmp_path / f"node{rank}").mkdir()
        for extension in (".bin", ".idx", ".manifest.json"):
            shutil.copy(prefix + extension, tmp_path / f"node{rank}" / f"corpus{extension}")

    def run(nodes: tuple[int, int], **settings: Any) -> Any:
        data = {"mock_data": None, "data_path": "corpus", "split": "1", "tokenizer_type": "ByteTokenizer", **settings}
        return start(2, in_rank=lambda rank: os.chdir(tmp_path / f"node{nodes[rank]}"), train_iters=2, **data)

    assert run((0, 1)).exit_codes == [0, 0], "copies are not a difference"
    result = run((0, 2), seq_length=8)
    assert result.exit_codes == [2, 2] and "the ranks differ in corpus 1 of --data-path: idx " in result.stderr, result
    assert "bin 22 bytes" in result.stderr and " on rank 0; " in result.stderr, result


def test_ranks_that_mpirun_has_started() -> None:
    """Two processes with Open MPI's variables and without torchrun's are one run of two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def in_rank(rank: int) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[f"OMPI_COMM_WORLD_{name}"] = str(rank)
        for name in ("SIZE", "LOCAL_SIZE"):
            os.environ[f"OMPI_COMM_WORLD_{name}"] = "2"
        os.environ["MASTER_PORT"] = str(port)

    result = train(2, train_iters=4, in_rank=in_rank)
    note = f"started by mpirun (Open MPI): 2 ranks, 2 on this node, rank 0 at 127.0.0.1:{port}"
    assert result.stdout.splitlines()[0] == note
    assert losses(result.stdout) == losses(train(2, train_iters=4).stdout)


def test_a_stop_is_not_undone_by_a_launcher_that_restarts(tmp_path: Path) -> None:
    """torchrun --max-restarts: after a crash a restart goes on, after a stop it has nothing to do."""

    def started(restart: int) -> Callable[[int], None]:
        def in_rank(rank: int) -> None:
            os.environ.update(
                TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_RESTART_COUNT=str(restart), TORCHELASTIC_RUN_ID="one",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0",
            )  # fmt: skip

        return in_rank

    folder = {"directory": tmp_path, "save": "run", "load": "run", "save_interval": 2}
    train(2, **folder, train_iters=4)
    restarted = train(2, **folder, in_rank=started(1), exit_interval=6)
    assert set(losses(restarted.stdout)) == {5, 6}, "the start before did not stop on request"
    assert "--max-restarts 3: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in restarted.stdout
    again = train(2, **folder, in_rank=started(2))
    assert (
        losses(again.stdout) == {}
        and "nothing is left to do" in again.stdout
        and "stop after iteration 6" in (again.stdout)
    )
    fresh = train(2, **folder, in_rank=started(0))
    assert set(losses(fresh.stdout)) == set(range(7, 13)), "a user who gives the command again goes on"
