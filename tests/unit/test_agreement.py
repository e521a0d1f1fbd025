"""What all ranks compare before anything is built, how they compare it, and the store that it goes through."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore, Store

from megatron_edit.config import ResolvedConfig, configure
from megatron_edit.config.settings import SETTINGS
from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.data.checked import check_data
from megatron_edit.data.tokenizers import ByteTokenizer
from megatron_edit.ranks import store as store_module
from megatron_edit.ranks.agreement import AbsentRankError, RanksDifferError, Report, agree, differences, ranks_text
from megatron_edit.ranks.facts import CORPORA, OF_ONE_RANK, data_facts, program_facts, setting_facts
from megatron_edit.ranks.stopped import MARK, leave_mark, restart_notes, stopped_before
from megatron_edit.ranks.store import Rendezvous, StoreError, first_line, open_store

FLAGS = ["--mock-data", "--global-batch-size", "8", "--train-iters", "4", "--edit-num-replicas", "2"]


def meet(reports: dict[int, Report], world_size: int, timeout_seconds: float = 10) -> dict[int, str]:
    """Each rank of `reports` in a thread; what each was refused with, "" for agreement."""
    store: Store = HashStore()
    said = {}

    def come(rank: int, report: Report) -> None:
        try:
            agree(Rendezvous(store, rank, world_size, "rank 0"), report, timeout_seconds=timeout_seconds)
            said[rank] = ""
        except (RanksDifferError, AbsentRankError) as error:
            said[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=come, args=each) for each in reports.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_the_same_on_all_ranks() -> None:
    assert meet({rank: Report({"--lr": "1"}) for rank in range(4)}, 4) == dict.fromkeys(range(4), "")


def test_a_difference_is_named_with_values_and_ranks_on_all_ranks() -> None:
    reports = {rank: Report({"--lr": "0.05" if rank == 2 else "0.001", "--seed": "1"}) for rank in range(4)}
    said = meet(reports, 4)
    assert set(said.values()) == {"RanksDifferError: the ranks differ in --lr: 0.001 on rank 0 to 1, 3; 0.05 on rank 2"}


def test_a_rank_whose_own_checks_failed_comes_too() -> None:
    reports = {0: Report({"--lr": "1"}), 1: Report({}, "--data-path x: no such file"), 2: Report({"--lr": "2"})}
    (said,) = set(meet(reports, 3).values())
    assert said.splitlines() == [
        "RanksDifferError: on rank 1: --data-path x: no such file",
        "the ranks differ in --lr: 1 on rank 0; 2 on rank 2",
    ]
    said_by_all = meet(dict.fromkeys(range(3), Report({}, "--lr -1\n--seed -1")), 3)
    assert set(said_by_all.values()) == {"RanksDifferError: --lr -1\n--seed -1"}


def test_a_rank_that_does_not_come_is_named() -> None:
    said = meet({0: Report(), 2: Report()}, 4, timeout_seconds=0.3)
    assert said[0] == said[2] and said[0].startswith("AbsentRankError: rank 1, 3 of 4 did not come to the start")


def test_long_lists_are_cut() -> None:
    facts = [{f"--f{i}": str(rank) for i in range(50)} for rank in range(2)]
    lines = differences([[0], [1]], [Report(each) for each in facts])
    assert len(lines) == 21 and lines[-1] == "... and 30 differences more"
    assert ranks_text([0, 1, 2, 5]) == "0 to 2, 5" and ranks_text(range(0, 40, 2)).endswith("14, ...")


# ---- what is compared ------------------------------------------------------------------------------------------------


def configured(*flags: str) -> ResolvedConfig:
    config = configure(flags, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "cpu")
    assert config is not None
    return config


def facts_of(*extra: str) -> dict[str, str]:
    return setting_facts(configured(*FLAGS, *extra))


def test_every_setting_is_compared_but_for_those_that_may_differ() -> None:
    flags = {setting.flag for name, setting in SETTINGS.items() if name not in (*OF_ONE_RANK, *CORPORA)}
    assert facts_of().keys() == flags
    for extra in (["--lr", "5e-2"], ["--edit-sync-interval", "3"], ["--bf16"], ["--save", "x"], ["--dry-run"]):
        assert facts_of(*extra) != facts_of()
    for extra in (["--num-workers", "3"], ["--metrics-file", "m"], ["--progress", "plain"]):
        assert facts_of(*extra) == facts_of()
    assert facts_of("--save", "/node1/x") == facts_of("--save", "/node2/x")


def test_derived_and_given_values_differ() -> None:
    """They act differently when a run goes on with another batch."""
    given, derived = facts_of("--lr-decay-iters", "4"), facts_of()
    assert (given["--lr-decay-iters"], derived["--lr-decay-iters"]) == ("4", "4 (derived)")


def test_versions_code_and_environment() -> None:
    facts = program_facts({"NCCL_ALGO": "Ring", "HOME": "/root"})
    assert facts["the environment variable NCCL_ALGO"] == "Ring" and "HOME" not in str(facts)
    assert facts["the version of torch"][0].isdigit() and facts["the code of megatron_edit"].startswith("sha256 ")


@pytest.mark.parametrize("manifest", [True, False])
def test_another_corpus_of_the_same_name_and_size(manifest: bool, tmp_path: Path) -> None:
    found = []
    for node, seed in enumerate((1, 1, 2)):
        prefix = str(tmp_path / f"node{node}" / "corpus")
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_documents(np.random.default_rng(seed).integers(0, 256, 5000), [2000, 3000])
            writer.prepare(ByteTokenizer(), append_eod=False)
            writer.finish()
        if not manifest:
            Path(f"{prefix}.manifest.json").unlink()
        flags = [
            *FLAGS[1:],
            "--data-path",
            prefix,
            "--split",
            "1",
            "--tokenizer-type",
            "ByteTokenizer",
            "--eval-iters",
            "0",
        ]
        found.append(data_facts(check_data(configured(*flags, "--eval-iters", "0"))))
    assert found[0] == found[1], "the content counts, not where it lies"
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {"corpus 1 of --data-path"}
    assert "bin 10000 bytes" in found[0]["corpus 1 of --data-path"]


def test_another_tokenizer() -> None:
    checked = check_data(configured(*FLAGS))
    other = ByteTokenizer()
    other.fingerprint = "0" * 64
    assert data_facts(checked) != data_facts(replace(checked, tokenizer=other))


# ---- the store -------------------------------------------------------------------------------------------------------


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SECONDS_FOR_A_LAUNCHER", 0.1)
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(StoreError, match=r"nobody answers at 127\.0\.0\.1:1 .* where the launcher \(torchrun\) should"):
        open_store({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 600)
    with pytest.raises(StoreError, match="where rank 0 should"):
        open_store(environment, 0.1)
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        open_store({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, 1)


def test_messages_of_torch_are_cut_before_their_frames() -> None:
    text = "Connection reset by peer\nException raised from recvBytes at x.hpp:1 (most recent call first):\nframe #0: a"
    assert first_line(RuntimeError(text)) == "Connection reset by peer" and first_line(KeyError()) == "KeyError"


# ---- a stop that a launcher would undo -------------------------------------------------------------------------------


def test_a_restart_after_a_stop_knows_of_it(tmp_path: Path) -> None:
    first = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "a"}
    restart, save = {**first, "TORCHELASTIC_RESTART_COUNT": "1"}, str(tmp_path)
    assert stopped_before(save, restart) is None, "it crashed before any stop"
    leave_mark(save, "SIGTERM on rank 1", first)
    assert stopped_before(save, restart) == "SIGTERM on rank 1"
    assert stopped_before(save, {**restart, "TORCHELASTIC_RUN_ID": "b"}) is None
    assert stopped_before(save, first) is None and stopped_before(save, restart) is None, "a first start forgets it"
    (tmp_path / MARK).write_text(json.dumps([]))
    assert stopped_before(save, restart) is None
    leave_mark(str(tmp_path / "sub"), "no launcher that restarts", {})
    assert not (tmp_path / "sub").exists()


def test_notes_on_restarts() -> None:
    restarts = {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert (
        restart_notes("run", {}) == restart_notes("run", {**restarts, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) == []
    )
    (note,) = restart_notes("run", restarts)
    assert "--max-restarts 3: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note
    assert "begins at iteration 1" in restart_notes(None, restarts)[1]
