"""Token files that are read by position: few descriptors, and files that change while a run reads them."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_edit.config.batch_schedule import BatchSchedule
from megatron_edit.corpora.merge import merge_corpora
from megatron_edit.data import open_files
from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.check import check_data_files
from megatron_edit.data.datasets import build_split
from megatron_edit.data.errors import DataError, LoaderError
from megatron_edit.data.loader import MicrobatchLoader, RankPlace
from megatron_edit.data.open_files import OpenFiles, TokenFile, open_files_notes, raise_open_files_limit
from tests.unit.test_datasets import BYTES, source, write_core_corpus, write_corpus


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_number_of_corpora_does_not_count(tmp_path: Path) -> None:
    """Checking, building, reading and merging 60 corpora never holds more than a handful of descriptors."""
    prefixes = [write_corpus(tmp_path / f"c{i}", [[i] * 10] * 10) for i in range(60)]
    sources = resolve_sources(data_path=prefixes, split="80,20")
    before = descriptors()
    check_data_files(sources, seq_length=4, tokenizer=BYTES)
    assert descriptors() == before
    files = OpenFiles(limit=5)
    parts = [part for part in (sources["train"], sources["valid"]) if part is not None]
    splits = [build_split(part, seq_length=4, tokenizer=BYTES, files=files) for part in parts]
    assert [len(split.datasets) for split in splits] == [60, 60] and descriptors() == before
    for _ in range(2):
        for split in splits:
            for i, dataset in enumerate(split.datasets):
                assert dataset[0]["tokens"].tolist() == [i] * 4
                assert descriptors() <= before + 5 and len(files) <= 5
    del splits, files, dataset, split
    assert descriptors() == before


def test_more_corpora_than_descriptors_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write_corpus(tmp_path / f"c{i}", [[i] * 10]) for i in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 30, hard))
    try:
        assert merge_corpora(prefixes, str(tmp_path / "all")) == (60, 600)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        limit = raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert limit == (1 << 20 if hard == resource.RLIM_INFINITY else hard)
        assert OpenFiles().limit == limit // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_missing_is_said() -> None:
    assert open_files_notes(256, 1024) == []
    (note,) = open_files_notes(1000, 1024)
    assert note.startswith("1000 corpora, and this process may open 1024 files")
    assert "256 corpora stay open at a time" in note and "`ulimit -n 4000`" in note
    with pytest.raises(DataError, match=r"may open 100 files, .* needs 256 or more .*`ulimit -n 4096`"):
        open_files_notes(1, 100)


def test_a_file_that_is_read_stays_open_though_another_takes_its_place(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    files = OpenFiles(limit=1)
    held = files.get(tmp_path / "a")
    files.get(tmp_path / "b")
    assert len(files) == 1 and os.pread(held.number, 9, 0) == b"a"


# ---- files that change -----------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path, 100)


def _write_over(path: Path) -> None:
    path.write_bytes(b"\1\0" * 4000)


def _replace(path: Path) -> None:
    path.with_name("new").write_bytes(b"\1\0" * 4000)
    os.replace(path.with_name("new"), path)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("change", [_cut, _write_over, _empty, _replace, Path.unlink])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_file_that_changes_while_training_is_named(
    tmp_path: Path, change: Callable[[Path], None], reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No SIGBUS. What lies under another inode is met only when the file is opened again: the old one is read on."""
    monkeypatch.setattr(open_files, "SECONDS_BETWEEN_LOOKS", 0.0)
    prefix = write_corpus(tmp_path / "c", [[1] * 1000] * 3)
    other = write_corpus(tmp_path / "other", [[1] * 1000] * 3)
    files = OpenFiles(limit=1)
    split = build_split(source(prefix), seq_length=9, tokenizer=BYTES, files=files)
    place = RankPlace(num_replicas=1, replica=0, shard_size=1, shard_rank=0, micro_batch_size=2)
    loader = MicrobatchLoader(
        split.datasets, split.training_order(0), consumed_samples=0, place=place,
        batch=BatchSchedule.constant(8), num_workers=0,
    )  # fmt: skip
    loader.next_batch()
    change(Path(f"{prefix}.bin"))
    if reopened:
        files.get(Path(f"{other}.bin"))
    same_file = change in (_replace, Path.unlink)
    if same_file and not reopened:
        loader.next_batch()
        return
    reason = "can no longer be read: No such file"
    if change is not Path.unlink:
        reason = r"has \d+ bytes, and 6000 when the run began"
    with pytest.raises(LoaderError, match=rf"after 8 consumed samples: DataError: {prefix}.bin {reason}"):
        for _ in range(100):
            loader.next_batch()


def test_the_same_size_and_another_time_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "SECONDS_BETWEEN_LOOKS", 0.0)
    path = tmp_path / "c.bin"
    path.write_bytes(bytes(100))
    said: list[str] = []
    tokens = TokenFile(path, 100, OpenFiles(limit=1), said.append)
    assert tokens.read(np.dtype(np.uint16), 3, 0).tolist() == [0, 0, 0] and tokens.changed() == ""
    path.write_bytes(b"\1\0" * 50)
    os.utime(path, (1, 1))
    for _ in range(3):
        assert tokens.read(np.dtype(np.uint16), 3, 94).tolist() == [1, 1, 1]
    (line,) = said
    assert f"{path} was written to while the run reads it (1970-01-01" in line
    assert "its size, 100 bytes, is the same" in line


def test_a_bad_id_of_a_file_that_changed_says_so(tmp_path: Path) -> None:
    prefix = write_core_corpus(tmp_path / "c", [[1] * 21])
    (dataset,) = build_split(source(prefix), seq_length=4, tokenizer=BYTES).datasets
    dataset[0]
    for wrong in (300, -5):
        Path(f"{prefix}.bin").write_bytes(np.full(21, wrong, np.int32).tobytes())
        os.utime(f"{prefix}.bin", (1, 1))
        with pytest.raises(DataError, match=rf"token id {wrong} in sample 0, .*; the file was written to since"):
            dataset[0]


def test_files_that_changed_between_check_and_start_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[1] * 1000])
    check_data_files(resolve_sources(train_data_path=[prefix]), seq_length=4, tokenizer=BYTES, wanted=["train"])
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(DataError, match=rf"{prefix}.bin has 100 bytes but {prefix}.idx tells of 2000"):
        build_split(source(prefix), seq_length=4, tokenizer=BYTES)
