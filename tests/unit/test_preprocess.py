"""Preprocessing of real inputs: every format, partitions, restarts after a kill, damaged files. B26, B29, B30."""

import bz2
import contextlib
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_edit.corpora import batches
from megatron_edit.corpora.batches import cut_long_text
from megatron_edit.corpora.indexed_writer import IndexedWriter
from megatron_edit.corpora.inputs import find_inputs, lines_before, portions
from megatron_edit.corpora.merge import merge_corpora
from megatron_edit.corpora.preprocess import CorpusReport, TokenizerSpec, preprocess
from megatron_edit.corpora.progress import Progress
from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import Manifest
from megatron_edit.data.tokenizers import ByteTokenizer, Tokenizer
from tests.unit.test_corpus_tools import BYTES, EOD, REPOSITORY, documents, run_tool, texts_of, write_lines
from tests.unit.test_tokenizers import BOTH, hf_folder

SUFFIXES = (".bin", ".idx", ".manifest.json")


def quiet(line: str) -> None:
    pass


def run(inputs: list[str], prefix: Path, spec: TokenizerSpec = BYTES, **options: Any) -> list[CorpusReport]:
    return preprocess(inputs, str(prefix), spec, **{"log": quiet, **options})


def contents(prefix: str) -> dict[str, bytes]:
    return {suffix: Path(prefix + suffix).read_bytes() for suffix in SUFFIXES}


def as_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def zstd(content: bytes, frames: int = 1) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra data is not installed")
    cut = -(-len(content) // frames)
    pieces = [content[start : start + cut] for start in range(0, len(content), cut)]
    return b"".join(zstandard.ZstdCompressor().compress(piece) for piece in pieces)


def bzip2_in_two(content: bytes) -> bytes:
    """Two streams, as parallel packers write."""
    cut = len(content) // 2
    return bz2.compress(content[:cut]) + bz2.compress(content[cut:])


def write_parquet(path: Path, columns: dict[str, list[Any]], row_group_size: int = 1000) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


TEXTS = [f"text {i} of many\nwith a line more " + "x" * (i * 7 % 50) for i in range(400)]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "json", "ndjson.gz", "parquet"])
def test_every_format_gives_the_same_corpus(tmp_path: Path, form: str) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(as_lines(TEXTS))
    path = tmp_path / f"in.{form}"
    if form == "parquet":  # the columns of FineWeb-Edu
        columns = {"text": TEXTS, "id": list(map(str, range(400))), "score": [0.5] * 400, "token_count": [3] * 400}
        write_parquet(path, columns, row_group_size=150)
    else:
        pack = {
            "gz": gzip.compress, "zst": lambda content: zstd(content, frames=3), "bz2": bzip2_in_two,
        }.get(form.split(".")[-1], bytes)  # fmt: skip
        path.write_bytes(pack(as_lines(TEXTS)))
    (expected,) = run([str(plain)], tmp_path / "plain")
    (report,) = run([str(path)], tmp_path / "out", workers=2)
    assert contents(report.prefix) == contents(expected.prefix)


def test_folders_patterns_and_files_come_in_order(tmp_path: Path) -> None:
    """A folder by name with its subfolders, hidden files and other endings passed over; a pattern; a file."""
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    wanted = [("c.jsonl", "3"), ("b/a.jsonl.gz", "2"), ("a.txt", "1")]
    for name, text in [*wanted, (".hidden/x.jsonl", "no"), ("_OK", "no")]:
        content = text.encode() if name == "a.txt" else as_lines([text])
        (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    single = write_lines(tmp_path / "one.jsonl", ["0"])
    (report,) = run([single, str(folder)], tmp_path / "out")
    assert texts_of(report.prefix) == ["0", "1", "2", "3"]
    (report,) = run([str(folder / "**/*.jsonl*"), single], tmp_path / "out")
    assert texts_of(report.prefix) == ["2", "3", "0"]
    with pytest.raises(DataError, match=r"c\.jsonl is there more than once"):
        run([str(folder), str(folder / "c.jsonl")], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is a folder without files whose names end in \.jsonl"):
        find_inputs([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], ["a", "b"]), (["--input-format", "text"], ['{"text": "a"}\n{"text": "b"}\n'])],
)
def test_standard_input(tmp_path: Path, flags: list[str], expected: list[str]) -> None:
    command = [sys.executable, str(REPOSITORY / "tools/preprocess_data.py"), "--input", "-", "--output-prefix",
               str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer", *flags]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, input=b'{"text": "a"}\n{"text": "b"}\n', env=environment, timeout=60)
    assert result.returncode == 0
    assert texts_of(f"{tmp_path}/out_text_document") == expected
    assert sorted(os.listdir(tmp_path)) == [f"out_text_document{suffix}" for suffix in SUFFIXES]


def awkward_lines() -> bytes:
    """Documents of very unequal length, blank lines, CRLF, no newline at the end; two keys, some titles missing."""
    draw = random.Random(3)
    lines = []
    for i in range(300):
        entry = {"text": f"{i} " + "é" * draw.choice([0, 1, 30, 3000]), "title": f"title {i}"}
        if i % 50 == 7:
            del entry["title"]
        line = json.dumps(entry, ensure_ascii=bool(i % 2)).encode()
        lines.append(line + draw.choice([b"\n", b"\r\n", b"\n\n", b"\n"]))
    return b"".join(lines).rstrip()


def test_workers_and_partitions_change_no_byte(tmp_path: Path) -> None:
    """B26: both pairs exist and are equal for every count; a missing title is skipped by flag, and counted."""
    (tmp_path / "a.jsonl").write_bytes(awkward_lines())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(awkward_lines()))
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
    options = {"json_keys": ["text", "title"], "append_eod": True, "on_error": "skip"}
    expected = run(inputs, tmp_path / "one", **options)
    assert [report.failed_documents for report in expected] == [0, 12]
    assert [report.documents for report in expected] == [600, 588]
    for workers, partitions in [(2, 2), (4, 2)]:
        folder = tmp_path / f"{workers} {partitions}"
        found = run(inputs, folder / "one", workers=workers, partitions=partitions, **options)
        for mine, right in zip(found, expected, strict=True):
            assert contents(mine.prefix) == contents(right.prefix)
            assert vars(mine) == vars(right) | {"prefix": mine.prefix}
        assert len(os.listdir(folder)) == 6, "nothing but the two corpora is left"


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 40), max_size=20), parts=st.integers(1, 7), end=st.sampled_from(["", "\n"]))
def test_parts_are_all_lines_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], parts: int, end: str
) -> None:
    """Also lines that are cut by a part's border, lie on it, or are longer than a part; with their numbers."""
    path = tmp_path_factory.mktemp("p") / "in.txt"
    lines = [f"{i}" + "x" * length for i, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + end)
    if not path.stat().st_size:
        return
    file = find_inputs([str(path)])
    found = []
    for part in range(parts):
        for batch in batches.raw_batches(portions(file, "line", part, parts), ["text"], "line"):
            before = lines_before(batch.portion)
            found += [(document.line + before, document.content.decode()) for document in batch.documents]
    wanted = path.read_text().split("\n")
    wanted = wanted[:-1] if wanted[-1] == "" else wanted
    assert found == list(enumerate(wanted, 1))


def test_parquet_is_cut_between_row_groups_and_rows_are_numbered(tmp_path: Path) -> None:
    texts: list[Any] = [f"row {i}" for i in range(100)]
    texts[83] = None
    write_parquet(tmp_path / "in.parquet", {"text": texts}, row_group_size=10)
    inputs = [str(tmp_path / "in.parquet")]
    (expected,) = run(inputs, tmp_path / "one", on_error="skip")
    (report,) = run(inputs, tmp_path / "out", on_error="skip", workers=2, partitions=2)
    assert contents(report.prefix) == contents(expected.prefix)
    assert (report.documents, report.failed_documents) == (99, 1)
    with pytest.raises(DataError, match=r"in\.parquet, row 84: no text in the column 'text'"):
        run(inputs, tmp_path / "out")


def test_single_parts_and_the_merge_tool(tmp_path: Path) -> None:
    """--partition on several machines, one of them empty; a part that is there is not made again."""
    path = write_lines(tmp_path / "in.jsonl", ["a" * 2000, *TEXTS[:5]])
    (expected,) = run([path], tmp_path / "whole", append_eod=True)
    prefixes = []
    for part in (1, 0, 2, 3):
        log: list[str] = []
        for _ in range(2):
            (report,) = run([path], tmp_path / "o", append_eod=True, partitions=4, partition=part, log=log.append)
        assert any("was finished by an earlier run" in line for line in log)
        if report.documents:
            prefixes.append(report.prefix)
    assert len(prefixes) < 4, "the long first document leaves a part without one"
    result = run_tool("merge_corpora.py", "--input", *sorted(prefixes), "--output-prefix", tmp_path / "merged")
    assert result.returncode == 0, result.stderr
    assert contents(str(tmp_path / "merged")) == contents(expected.prefix)


def test_an_error_in_one_partition_is_the_message_with_the_line_of_the_file(tmp_path: Path) -> None:
    lines = as_lines(TEXTS).splitlines(keepends=True)
    lines[349] = b'{"text": "cut\n'
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(lines))
    for options in ({}, {"workers": 2}, {"workers": 2, "partitions": 2}):
        with pytest.raises(DataError, match=r"in\.jsonl, line 350: no JSON"):
            run([str(path)], tmp_path / "out", **options)
        left = {name for name in os.listdir(tmp_path) if "part-0-of-2" not in name}  # a finished part may stay
        assert left == {"in.jsonl"}


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_skipped_documents_are_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(b'{"text": "ok"}\n' + b'{"text": "\xff"}\n' for _ in range(15)))
    lines: list[str] = []
    (report,) = run([str(path)], tmp_path / "out", on_error="skip", log=lines.append)
    assert (report.documents, report.failed_documents) == (15, 15)
    assert Manifest.read(report.prefix).failed_documents == 15  # type: ignore[union-attr]
    named = [int(number) for line in lines for number in re.findall(r"line (\d+): no UTF-8", line)]
    assert named == list(range(2, 22, 2))
    assert lines[-1] == "left out: 15 documents in all, of which the first 10 are named above"
    assert "15 left out for errors" in str(report)


def test_no_utf8_in_plain_text_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\ntwo\nthree \xff\nfour\n")
    for unit in ("file", "paragraph", "line"):
        with pytest.raises(DataError, match=r"in\.txt, line 3: no UTF-8"):
            run([str(path)], tmp_path / "out", text_unit=unit)


CUT = r"is damaged or cut, after line \d+"


def cut_parquet(path: Path) -> None:
    write_parquet(path, {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:-20])


def damaged_parquet(path: Path) -> None:
    """Whole at the end, where the description lies; the pages are overwritten."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"{i} " * 50 for i in range(2000)]})
    parquet.write_table(table, path, row_group_size=500, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = len(content) // 2
    content[start : start + 2000] = b"\x55" * 2000
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("cut.jsonl.gz", lambda p: p.write_bytes(gzip.compress(as_lines(TEXTS))[:-30]), CUT),
        ("cut.jsonl.bz2", lambda p: p.write_bytes(bz2.compress(as_lines(TEXTS))[:-30]), CUT),
        ("cut.jsonl.zst", lambda p: p.write_bytes(zstd(as_lines(TEXTS))[:-30]), CUT),
        ("text.jsonl.gz", lambda p: p.write_bytes(as_lines(TEXTS)), "is not a gzip file"),
        ("text.jsonl.zst", lambda p: p.write_bytes(as_lines(TEXTS)), "is not a zstd file"),
        ("cut.parquet", cut_parquet, "is not a whole Parquet file"),
        ("damaged.parquet", damaged_parquet, r"is damaged or cut, after row \d+"),
        ("text.parquet", lambda p: p.write_bytes(as_lines(TEXTS)), "is not a whole Parquet file"),
        ("column.parquet", lambda p: write_parquet(p, {"body": TEXTS}), r"has no column 'text' \(columns body\)"),
        ("numbers.parquet", lambda p: write_parquet(p, {"text": [1, 2]}), ": column 'text' is int64, not text"),
        ("gone.jsonl", lambda p: p.symlink_to("nowhere"), "may not be read: No such file"),
        ("empty.jsonl", lambda p: p.touch(), "is empty"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_file_in_the_middle_of_a_folder(
    tmp_path: Path, name: str, write: Any, message: str, workers: int
) -> None:
    """Exit code 2, the file and the place named, nothing under the final name, nothing left at all."""
    folder = tmp_path / "in"
    folder.mkdir()
    for other in ("a.jsonl", "z.jsonl"):
        write_lines(folder / other, TEXTS[:50])
    write(folder / name)
    with pytest.raises(DataError, match=rf"{re.escape(name)}(?: |(?=:)){message}"):
        run([str(folder)], tmp_path / "out", workers=workers)
    assert os.listdir(tmp_path) == ["in"]


def test_an_unreadable_file_in_the_middle_of_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the first document is read. Refused here by hand, as root may read every file."""
    from megatron_edit.corpora import formats

    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        write_lines(folder / f"{name}.jsonl", ["x"])

    def refusing(path: str, *rest: Any) -> Any:
        if path.endswith("b.jsonl"):
            raise PermissionError(13, "Permission denied")
        return open(path, *rest)

    monkeypatch.setattr(formats, "open", refusing, raising=False)
    with pytest.raises(DataError, match=r"--input .*b\.jsonl may not be read: Permission denied"):
        run([str(folder / "*.jsonl")], tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_read_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failing disk gives, at its place."""
    from megatron_edit.corpora import inputs

    path = write_lines(tmp_path / "in.jsonl", TEXTS)

    class Failing:
        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, 30

        def __iter__(self) -> Any:
            for line in self.stream:
                self.left -= 1
                if not self.left:
                    raise OSError(5, "Input/output error")
                yield line

    monkeypatch.setattr(inputs, "unpacked", lambda raw, packed, path: Failing(raw))
    with pytest.raises(DataError, match=r"in\.jsonl is damaged or cut, after line 29: .*Input/output error"):
        run([path], tmp_path / "out")


@pytest.mark.parametrize(("package", "name"), [("zstandard", "in.jsonl.zst"), ("pyarrow.parquet", "in.parquet")])
def test_missing_packages_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd1234")
    package = package.split(".")[0]
    with pytest.raises(DataError, match=rf"{name} needs the package {package}: pip install -e '\.\[data\]'"):
        run([str(tmp_path / name)], tmp_path / "out")


# ---- long documents --------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 40))
def test_pieces_of_a_long_text_are_the_text(text: str, longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "LONG", longest)
        pieces = list(cut_long_text(text))
    assert "".join(pieces) == text and all(len(piece) <= longest for piece in pieces)
    assert all(pieces[:-1]), "no empty piece"


def prose(words: int, seed: int = 1) -> str:
    draw = random.Random(seed)
    vocabulary = ["the", "quick", "brown", "fox", "jumps", "über", "lazy", "dogs,", "x = 1\n\ty", "naïve  "]
    return " ".join(draw.choices(vocabulary, k=words))


def test_long_documents_have_the_ids_of_one_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of tokenizer, in JSON and text, with other documents around, several keys and workers."""
    lines = [prose(12, seed) for seed in range(300)]
    own = train_sentencepiece([write_lines(tmp_path / "t.jsonl", lines)], str(tmp_path / "own"), 320)
    unigram = train_sentencepiece([str(tmp_path / "t.jsonl")], str(tmp_path / "unigram"), 300, model_type="unigram")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "default"), vocab_size=50, minloglevel=2
    )
    specs = [BYTES, TokenizerSpec("HuggingFaceTokenizer", str(hf_folder(tmp_path / "hf", BOTH)))]
    specs += [
        TokenizerSpec("SentencePieceTokenizer", str(model)) for model in (own, unigram, tmp_path / "default.model")
    ]
    monkeypatch.setattr(batches, "LONG", 2000)
    texts = ["short", prose(5000), "another", " " * 5000, prose(3000, 2) + "\ud800"]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": t, "title": t[::-1]}).encode() + b"\n" for t in texts))
    for spec in specs:
        tokenizer = spec.build()
        reports = run([str(path)], tmp_path / "out", spec, json_keys=["text", "title"], append_eod=True)
        for report, mine in zip(reports, (texts, [text[::-1] for text in texts]), strict=True):
            wanted = [[*tokenizer.tokenize(text), tokenizer.eod_id] for text in mine if text.strip()]
            assert documents(report.prefix) == wanted
            assert (report.skipped_documents, report.replaced_characters) == (1, 1)
    (tmp_path / "in.txt").write_text(prose(5000))
    (report,) = run([str(tmp_path / "in.txt")], tmp_path / "out")
    assert documents(report.prefix) == [list(prose(5000).encode())]


def test_long_documents_with_workers(tmp_path: Path) -> None:
    """The true limit, as workers do not see a patched one."""
    texts = ["a", prose(400_000), "b"]
    path = write_lines(tmp_path / "in.jsonl", texts)
    assert len(texts[1]) > 2 * batches.LONG
    for workers in (1, 2):
        (report,) = run([path], tmp_path / "out", append_eod=True, workers=workers)
        assert documents(report.prefix) == [[*text.encode(), EOD] for text in texts]


def test_a_long_document_with_an_error_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LONG", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(as_lines(["a", "b"]) + b'{"text": "' + b"x" * 5000 + b'\xff"}\n' + as_lines(["c"]))
    (report,) = run([str(path)], tmp_path / "out", on_error="skip")
    assert texts_of(report.prefix) == ["a", "b", "c"] and report.failed_documents == 1
    with pytest.raises(DataError, match=r"line 3: no UTF-8"):
        run([str(path)], tmp_path / "out")


# ---- restart ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@settings(max_examples=10)
@given(stops=st.lists(st.integers(0, 30), max_size=4), partitions=st.sampled_from([1, 2]))
def test_a_stopped_command_goes_on_and_gives_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], partitions: int
) -> None:
    """Stopped after any number of documents, again and again; each document is used once."""
    folder = tmp_path_factory.mktemp("restart")
    (folder / "a.jsonl").write_bytes(as_lines(TEXTS[:40], "text"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(as_lines(TEXTS[40:60])))
    inputs = [str(folder / "a.jsonl"), str(folder / "b.jsonl.gz")]
    options: dict[str, Any] = {"append_eod": True, "partitions": partitions, "checkpoint_seconds": 0}
    if partitions > 1:
        options["partition"] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_BYTES", 100)
        (expected,) = run(inputs, folder / "expected", **options)
        for stop in stops:

            def log(line: str, stop: int = stop) -> None:
                if line.startswith("starting anew"):
                    raise AssertionError(line)
                match = re.match(r"(\d+) documents", line)
                if match and int(match[1]) >= stop:
                    raise Killed

            try:
                run(inputs, folder / "out", log_interval=1, **{**options, "log": log})
            except Killed:
                assert not list(folder.glob("out*.idx"))
        lines: list[str] = []
        (report,) = run(inputs, folder / "out", **{**options, "log": lines.append})
    assert contents(report.prefix) == contents(expected.prefix)
    assert vars(report) == vars(expected) | {"prefix": report.prefix}
    assert not list(folder.glob("*.partial"))


def processes_that_name(text: str) -> list[int]:
    """Processes with the environment variable MARK=text."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == text and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle of the command line, twice, with workers; then the same command again."""
    path = write_lines(tmp_path / "in.jsonl", [prose(60, seed) for seed in range(3000)])
    code = "import sys; from megatron_edit.corpora.preprocess import *; from megatron_edit.corpora import batches\n" \
           "batches.BATCH_BYTES = 4000\n" \
           "if __name__ == '__main__': preprocess([sys.argv[1]], sys.argv[2], TokenizerSpec('ByteTokenizer'), " \
           "workers=2, checkpoint_seconds=0.05, log_interval=100, append_eod=True)"  # fmt: skip
    (tmp_path / "run.py").write_text(code)
    command = [sys.executable, str(tmp_path / "run.py"), path, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MARK": str(tmp_path / "run.py")}
    kills = 0
    for documents_before_kill in (1000, 2000):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            for line in process.stderr:
                match = re.match(r"(\d+) documents", line)
                if match and int(match[1]) >= documents_before_kill:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
        assert not (tmp_path / "out_text_document.idx").exists()
        deadline = time.monotonic() + 20
        while processes_that_name(str(tmp_path / "run.py")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_that_name(str(tmp_path / "run.py")) == [], "workers end with the command"
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert kills == 2 and result.returncode == 0, result.stderr
    going_on = re.search(r"going on after (\d+) documents", result.stderr)
    assert going_on is not None and int(going_on[1]) > 0, "something was kept"
    (expected,) = run([path], tmp_path / "expected", append_eod=True)
    assert contents(f"{tmp_path}/out_text_document") == contents(expected.prefix)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*progress*"))


def stopped_run(tmp_path: Path) -> tuple[str, list[str]]:
    """A command stopped half-way; returns its input and a list for log lines."""
    path = write_lines(tmp_path / "in.jsonl", TEXTS)

    def log(line: str) -> None:
        if "documents" in line:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(batches, "BATCH_BYTES", 1000)
        preprocess([path], str(tmp_path / "out"), BYTES, log=log, log_interval=100, checkpoint_seconds=0)
    assert (tmp_path / "out.progress.json").exists()
    return path, []


@pytest.mark.parametrize("change", ["input", "setting", "tokenizer", "note", "partial", "lengths"])
def test_a_note_that_does_not_fit_is_said_and_not_used(tmp_path: Path, change: str) -> None:
    path, lines = stopped_run(tmp_path)
    spec, options, reason = BYTES, {"append_eod": False}, ""
    if change == "input":
        write_lines(Path(path), [*TEXTS, "more"])
        reason = "by a command with other files"
    elif change == "setting":
        options, reason = {"append_eod": True}, "by a command with other append_eod"
    elif change == "tokenizer":
        spec, reason = TokenizerSpec("NullTokenizer", vocab_size=300), "with other spec"
    elif change == "note":
        (tmp_path / "out.progress.json").write_text("{")
        reason = "cannot be read"
    else:
        suffix = "bin" if change == "partial" else "lengths"
        (tmp_path / f"out_text_document.{suffix}.partial").write_bytes(b"x")
        reason = f"out_text_document.{suffix}.partial is not there or shorter"
    if change == "tokenizer":
        with pytest.raises(DataError, match="NullTokenizer reads ids"):
            run([path], tmp_path / "out", spec, **options, log=lines.append)
    else:
        (report,) = run([path], tmp_path / "out", spec, **options, log=lines.append)
        (expected,) = run([path], tmp_path / "expected", spec, **options)
        assert contents(report.prefix) == contents(expected.prefix)
    assert lines[0].startswith("starting anew: ") and reason in lines[0]
    assert not list(tmp_path.glob("out*.partial")) and not (tmp_path / "out.progress.json").exists()


def test_two_commands_do_not_write_one_corpus(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["x"])
    writer = IndexedWriter(str(tmp_path / "out_text_document"), np.uint16)
    with writer, pytest.raises(DataError, match="out_text_document is being written by another command"):
        run([path], tmp_path / "out")
    run([path], tmp_path / "out")


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_tells_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("megatron_edit.corpora.progress.time.monotonic", lambda: now[0])
    lines: list[str] = []
    progress = Progress(400_000_000, 100, lines.append)
    for done, bytes_read in [(50, 50_000_000), (100, 100_000_000), (150, 1), (200, 200_000_000)]:
        now[0] += 10
        progress.show(done, bytes_read)
    assert lines == [
        "100 documents, 5 a second; 100 of 400 MB (25 %), 5.0 MB/s, 0:01:00 left",
        "200 documents, 5 a second; 200 of 400 MB (50 %), 5.0 MB/s, 0:00:40 left",
    ]
    resumed = Progress(400_000_000, 100, lines.append, documents=1000)
    resumed.show(1000, 300_000_000)
    now[0] += 10
    resumed.show(1100, 350_000_000)
    assert lines[-1] == "1100 documents, 10 a second; 350 of 400 MB (88 %), 5.0 MB/s, 0:00:10 left"


# ---- merge -----------------------------------------------------------------------------------------------------------


def core_corpus(prefix: Path, sequences: list[list[int]], dtype: type, marks: list[int] | None = None) -> str:
    """By megatron-core's writer; marks: sequences of each document."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    at = 0
    for count in marks or [1] * len(sequences):
        mine = sequences[at : at + count]
        builder.add_document(torch.tensor([i for sequence in mine for i in sequence]), [len(s) for s in mine])
        at += count
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_merge_is_preprocessing_of_all_texts(tmp_path: Path) -> None:
    """B29: three corpora, one with a single document."""
    cuts = [TEXTS[:100], TEXTS[100:101], [*TEXTS[101:], " "]]
    prefixes = []
    for i, texts in enumerate(cuts):
        (report,) = run([write_lines(tmp_path / f"{i}.jsonl", texts)], tmp_path / str(i), append_eod=True)
        prefixes.append(report.prefix)
    together = write_lines(tmp_path / "all.jsonl", [text for cut in cuts for text in cut])
    (expected,) = run([together], tmp_path / "all", append_eod=True)
    assert merge_corpora(prefixes, str(tmp_path / "merged")) == (400, expected.tokens)
    assert contents(str(tmp_path / "merged")) == contents(expected.prefix)


def test_merge_widens_ids_and_keeps_documents_of_several_sequences(tmp_path: Path) -> None:
    """B29: width 2 and 4, and document marks shifted; read back by megatron-core."""
    narrow = core_corpus(tmp_path / "n", [[1, 2], [3], [65000]], np.uint16, marks=[2, 1])
    wide = core_corpus(tmp_path / "w", [[70000], [4, 5], [], [6]], np.int32, marks=[1, 3])
    single = core_corpus(tmp_path / "s", [[9]], np.uint16)
    assert merge_corpora([narrow, wide, single], str(tmp_path / "m")) == (5, 9)
    merged = IndexedDataset(str(tmp_path / "m"))
    assert [merged[i].tolist() for i in range(len(merged))] == [[1, 2], [3], [65000], [70000], [4, 5], [], [6], [9]]
    assert merged.document_indices.tolist() == [0, 2, 3, 4, 7, 8]
    assert merged.index.dtype == np.int32 and not (tmp_path / "m.manifest.json").exists()


def test_merge_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    """B29: each damage one line; nothing is written."""
    path = write_lines(tmp_path / "in.jsonl", ["1 2 3"])
    (a,) = run([path], tmp_path / "a")
    (with_eod,) = run([path], tmp_path / "b", append_eod=True)
    (other,) = run([path], tmp_path / "c", TokenizerSpec("NullTokenizer", vocab_size=9))
    bare = core_corpus(tmp_path / "bare", [[1]], np.uint16)
    cut = core_corpus(tmp_path / "cut", [[1]], np.uint16)
    Path(f"{cut}.idx").write_bytes(Path(f"{cut}.idx").read_bytes()[:-1])
    before = sorted(os.listdir(tmp_path))
    for prefixes, message in [
        ([a.prefix, with_eod.prefix], "b_text_document was made with --append-eod and .*a_text_document without"),
        ([a.prefix, other.prefix], "c_text_document was made with another tokenizer than .*a_text_document"),
        ([a.prefix, bare], "bare has no manifest and others have one"),
        ([a.prefix, f"{tmp_path}/none"], "none.idx does not exist"),
        ([bare, cut], "cut.idx is cut"),
        ([a.prefix, a.prefix], "there more than once"),
        ([a.prefix, f"{tmp_path}/m"], "m is one of the corpora to merge"),
        ([f"{a.prefix}.bin"], "give the prefix"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            merge_corpora(prefixes, f"{tmp_path}/m")
        assert "\n" not in str(caught.value)
    result = run_tool("merge_corpora.py", "--input", a.prefix, bare, "--output-prefix", tmp_path / "m")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == before


# ---- properties ------------------------------------------------------------------------------------------------------

any_text = st.text(alphabet=st.characters(), max_size=300)  # surrogates too


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[TokenizerSpec]:
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = write_lines(folder / "t.jsonl", [prose(12, seed) for seed in range(300)])
    model = str(train_sentencepiece([lines], str(folder / "own"), 320))
    return [BYTES, TokenizerSpec("SentencePieceTokenizer", model),
            TokenizerSpec("HuggingFaceTokenizer", str(hf_folder(folder / "hf", BOTH)))]  # fmt: skip


@settings(max_examples=60)
@given(
    short=st.lists(any_text, max_size=8),
    repeated=st.tuples(any_text.filter(str.strip), st.integers(1, 10**6)),
    append_eod=st.booleans(),
    ascii_only=st.booleans(),
    which=st.integers(0, 2),
)
def test_documents_of_any_text_and_length(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizers: list[TokenizerSpec],
    short: list[str],
    repeated: tuple[str, int],
    append_eod: bool,
    ascii_only: bool,
    which: int,
) -> None:
    """Any unicode, lengths from 0 to a million: the file holds a direct encode of each, plus one end id."""
    pattern, length = repeated
    if which and length > 20_000:
        length //= 50  # a million characters are for the byte tokenizer, which takes no time
    texts = [*short, (pattern * (length // len(pattern) + 1))[:length], "end"]
    folder = tmp_path_factory.mktemp("any")
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    (folder / "in.jsonl").write_bytes("\n".join(lines).encode("utf-8", errors="replace"))
    texts = [json.loads(line)["text"] for line in (folder / "in.jsonl").read_bytes().split(b"\n")]
    tokenizer: Tokenizer = tokenizers[which].build()
    (report,) = run([str(folder / "in.jsonl")], folder / "out", tokenizers[which], append_eod=append_eod)
    wanted = [ids for text in texts if text.strip() and (ids := tokenizer.tokenize(text))]
    end = [tokenizer.eod_id] if append_eod else []
    assert documents(report.prefix) == [[*ids, *end] for ids in wanted]
    assert report.documents + report.skipped_documents == len(texts)
    assert ByteTokenizer.eod_id == EOD
    for suffix in SUFFIXES:
        Path(f"{report.prefix}{suffix}").unlink()
    (folder / "in.jsonl").unlink()
