"""Field report B36: no index cache is kept, so jobs that start at once on a shared folder have nothing to race on."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.data.blend import SplitSource, resolve_sources
from megatron_edit.data.check import check_data_files
from megatron_edit.data.datasets import build_split
from megatron_edit.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


def corpus(folder: Path, first: int) -> SplitSource:
    with IndexedWriter(str(folder / "c"), np.uint16) as writer:
        for i in range(500):
            ids = np.arange(first + i, first + i + 40) % 250
            writer.add_documents(ids, [len(ids)])
        writer.prepare(BYTES, append_eod=False)
        writer.finish()
    source = resolve_sources(train_data_path=[str(folder / "c")])["train"]
    assert source is not None
    return source


def samples(source: SplitSource) -> list[list[int]]:
    check_data_files({"train": source}, seq_length=16, tokenizer=BYTES, wanted=["train"])
    (dataset,) = build_split(source, seq_length=16, tokenizer=BYTES).datasets
    return [dataset[i]["tokens"].tolist() for i in range(0, len(dataset), 97)]


def in_processes(count: int, work: Callable[[Any], None]) -> list[Any]:
    """`work(connection)` in `count` forked processes that start at once; what each sent."""
    context = multiprocessing.get_context("fork")  # torch and megatron-core are imported already
    pairs = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=work, args=(sender,)) for _, sender in pairs]
    for process in processes:
        process.start()
    received = [receiver.recv() if receiver.poll(60) else None for receiver, _ in pairs]
    for process in processes:
        process.join(10)
    return received


@pytest.mark.parametrize("writable", [True, False])
def test_jobs_that_start_at_once_read_the_same(tmp_path: Path, writable: bool) -> None:
    """Six processes as of several jobs, on a folder that may be read-only: equal samples, no file written."""
    source = corpus(tmp_path, 0)
    expected, before = samples(source), sorted(os.listdir(tmp_path))
    if not writable:
        for path in (*tmp_path.iterdir(), tmp_path):
            path.chmod(0o555 if path.is_dir() else 0o444)

    def work(connection: Any) -> None:
        connection.send(samples(source))

    try:
        assert in_processes(6, work) == [expected] * 6
    finally:
        tmp_path.chmod(0o755)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_killed_builder_leaves_nothing_that_others_meet(tmp_path: Path) -> None:
    source = corpus(tmp_path, 0)
    expected, before = samples(source), sorted(os.listdir(tmp_path))
    context = multiprocessing.get_context("fork")

    def build_for_ever() -> None:
        while True:
            samples(source)

    process = context.Process(target=build_for_ever)
    process.start()
    time.sleep(0.3)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    assert samples(source) == expected and sorted(os.listdir(tmp_path)) == before


def test_a_corpus_rebuilt_under_its_name_is_read_anew(tmp_path: Path) -> None:
    """There is no stale cache; and who has it open goes on with the old one, as files are renamed into place."""
    old_source = corpus(tmp_path, 0)
    (opened,) = build_split(old_source, seq_length=16, tokenizer=BYTES).datasets
    assert torch.equal(opened[0]["tokens"], torch.arange(16))  # its file is open from here on
    old = samples(old_source)
    new_source = corpus(tmp_path, 7)
    new = samples(new_source)
    assert new != old and new[0] == list(range(7, 23))
    assert torch.equal(opened[0]["tokens"], torch.arange(16))
