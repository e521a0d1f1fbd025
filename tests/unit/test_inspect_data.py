"""tools/inspect_data.py: what it prints is what training reads."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_edit.corpora.inspect import corpus_lines, document_lines
from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess
from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.datasets import build_split
from megatron_edit.data.tokenizers import ByteTokenizer
from tests.unit.test_corpus_tools import REPOSITORY, run_tool

TEXTS = ["first document", "second", *(f"document number {i} of a corpus" for i in range(2, 100))]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, " "]))
    spec = TokenizerSpec("ByteTokenizer")
    (report,) = preprocess([str(folder / "in.jsonl")], str(folder / "c"), spec, append_eod=True, log=lambda line: None)
    return report.prefix


def test_statistics_and_documents(prefix: str) -> None:
    tokens = sum(len(text) + 1 for text in TEXTS)
    first, lengths, made_by, left_out = corpus_lines(prefix)
    assert first == f"{prefix}: 100 documents, {tokens} tokens, ids of 2 bytes"
    assert lengths == f"  tokens of a document: least 7, median 31, 9 of 10 up to 31, most 31, mean {tokens / 100:.1f}"
    assert "ByteTokenizer, vocabulary 259" in made_by and "largest id 257, with end ids" in made_by
    assert left_out.startswith("  1 empty documents skipped, 0 left out")
    assert list(document_lines(prefix, 1, ByteTokenizer())) == ["document 1: tokens 15 to 21", "second"]
    assert list(document_lines(prefix, 1, None))[1] == "115 101 99 111 110 100 257"


def test_order_is_that_of_training(prefix: str) -> None:
    """Positions, ids, texts, and the slices of the replicas of the next iteration."""
    result = run_tool(
        "inspect_data.py", "order", "--position", 4, "--count", 3, "--decode", "--data-path", prefix, "--split", "1",
        "--tokenizer-type", "ByteTokenizer", "--seq-length", 16, "--seed", 7, "--edit-num-replicas", 2,
        "--global-batch-size", 4,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    source = resolve_sources(data_path=[prefix], split="1")["train"]
    assert source is not None
    split = build_split(source, seq_length=16, tokenizer=ByteTokenizer())
    order = split.training_order(7)
    ids = order.sample_ids(np.arange(4, 8)).tolist()
    lines = result.stdout.splitlines()
    for offset in range(3):
        at = lines.index(f"position {4 + offset}: epoch 0, id {ids[offset]} = sample {ids[offset]} of {prefix}")
        text = ByteTokenizer().detokenize(split.datasets[0][ids[offset]]["tokens"].tolist())
        assert lines[at + 1] == text
    assert lines[-2:] == [
        f"replica 0: positions 4 to 5, ids {ids[0]} {ids[1]}", f"replica 1: positions 6 to 7, ids {ids[2]} {ids[3]}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "{prefix}x"], "x.idx does not exist"),
        (["corpus", "{prefix}", "--document", "100"], "has documents 0 to 99"),
        (["corpus", "{prefix}", "--documents", "1"], "unrecognized arguments: --documents"),
        (["order", "--position", "-1", "--mock-data"], "positions count from 0"),
        (["order", "--position", "0"], "no training data"),
        (["order", "--position", "0", "--data-path", "{prefix}", "--tokenizer-type", "ByteTokenizer",
          "--data-split", "test", "--split", "1"], "there is no test split"),
        (["order", "--position", "0", "--data-paht", "x"], "did you mean --data-path"),
    ],
)  # fmt: skip
def test_bad_input(prefix: str, arguments: list[str], message: str) -> None:
    result = run_tool("inspect_data.py", *(argument.format(prefix=prefix) for argument in arguments))
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_is_not_an_error(prefix: str) -> None:
    """`inspect_data.py ... | head`: all tools that end with `run_tool` share it."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "tools/inspect_data.py", "corpus", prefix, "--document", "1"]
    with os.fdopen(writes, "w") as stdout:
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, timeout=120,
                                env=os.environ | {"PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert result.returncode == 0 and result.stderr == ""
