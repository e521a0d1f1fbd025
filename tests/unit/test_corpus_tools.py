"""The data tools: what is written, what is refused, and that workers change nothing. B25, B26 (keys), B30 to B32."""

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_edit.corpora.preprocess import CorpusReport, TokenizerSpec, preprocess
from megatron_edit.corpora.quickstart import split_docstrings
from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.corpora.unigram import unigram_loss
from megatron_edit.data.blend import resolve_sources
from megatron_edit.data.check import check_data_files
from megatron_edit.data.datasets import build_split
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import Manifest
from megatron_edit.data.tokenizers import ByteTokenizer, SentencePieceTokenizer

REPOSITORY = Path(__file__).parents[2]
BYTES = TokenizerSpec("ByteTokenizer")
EOD = ByteTokenizer.eod_id


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "tools" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def documents(prefix: str) -> list[list[int]]:
    """Read back by megatron-core."""
    dataset = IndexedDataset(prefix)
    assert len(dataset) == len(dataset.document_indices) - 1
    return [dataset[i].tolist() for i in range(len(dataset))]


def texts_of(prefix: str) -> list[str]:
    return [ByteTokenizer().detokenize(ids) for ids in documents(prefix)]


def write_lines(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return str(path)


def run_bytes(inputs: list[str], tmp_path: Path, **options: object) -> CorpusReport:
    (report,) = preprocess(inputs, str(tmp_path / "out"), BYTES, **options)  # type: ignore[arg-type]
    return report


LONG = "x" * 300_000


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("append_eod", [False, True])
def test_empty_documents_are_skipped_and_counted(tmp_path: Path, append_eod: bool, workers: int) -> None:
    """B25: empty first text, blanks only, newline only, blank line, long line, CRLF, no newline at the end."""
    lines = ['{"text": ""}\n', '{"text": "  "}\n', '{"text": "\\n"}\n', "\n", '{"text": "one"}\r\n', "   \n",
             json.dumps({"text": LONG}) + "\n", '{"text": "last"}']  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_bytes("".join(lines).encode())
    report = run_bytes([str(path)], tmp_path, append_eod=append_eod, workers=workers)
    end = [EOD] if append_eod else []
    expected = [[*text.encode(), *end] for text in ("one", LONG, "last")]
    assert documents(report.prefix) == expected
    assert (report.documents, report.skipped_documents) == (3, 3)
    assert report.tokens == sum(map(len, expected))
    manifest = Manifest.read(report.prefix)
    assert manifest is not None
    assert (manifest.documents, manifest.skipped_documents, manifest.append_eod) == (3, 3, append_eod)
    assert manifest.largest_token_id == (EOD if append_eod else ord("x"))


def test_a_corpus_of_odd_documents_trains_for_two_epochs(tmp_path: Path) -> None:
    """B25: what the tool made passes the checks and is read, twice over."""
    path = write_lines(tmp_path / "in.jsonl", ["", *(f"document {i}" * (i % 7) for i in range(50)), " "])
    report = run_bytes([path], tmp_path, append_eod=True)
    sources = resolve_sources(data_path=[report.prefix], split="90,10")
    assert len(check_data_files(sources, seq_length=16, tokenizer=ByteTokenizer())) == 2
    assert sources["train"] is not None
    split = build_split(sources["train"], seq_length=16, tokenizer=ByteTokenizer())
    order = split.training_order(seed=1)
    for k in range(2 * len(split.datasets[0])):
        dataset, sample = order[k]
        assert split.datasets[dataset][sample]["tokens"].shape == (16,)


def test_several_keys_and_workers_give_equal_files(tmp_path: Path) -> None:
    """B26: both pairs exist and are byte-equal for every worker count; several inputs keep their order."""
    inputs = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        entries = [{"text": f"{name} text {i} " * (i % 50), "title": f"{name} title {i}"} for i in range(3000)]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        inputs.append(str(path))
    for workers in (1, 2, 4):
        reports = preprocess(
            inputs, str(tmp_path / str(workers)), BYTES, json_keys=["text", "title"], append_eod=True, workers=workers
        )
        assert [report.prefix for report in reports] == [
            f"{tmp_path}/{workers}_{key}_document" for key in ("text", "title")
        ]
    for key in ("text", "title"):
        for suffix in ("bin", "idx", "manifest.json"):
            contents = {(tmp_path / f"{workers}_{key}_document.{suffix}").read_bytes() for workers in (1, 2, 4)}
            assert len(contents) == 1
    titles = texts_of(f"{tmp_path}/2_title_document")
    assert titles == [f"{name} title {i}" for name in ("a", "b") for i in range(3000)]
    assert reports[0].skipped_documents == 120


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "no JSON"),
        ('{"title": "no text"}', r"no text under the key 'text' \(keys \['title'\]\)"),
        ('{"text": 5}', "'text' is a int"),
        ('{"text": null}', "'text' is a NoneType"),
        ('["text"]', "a list"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_broken_line_is_named_and_nothing_is_left(tmp_path: Path, line: str, reason: str) -> None:
    """B26: line 7, after six good ones."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n' * 6 + line + '\n{"text": "good"}\n')
    with pytest.raises(DataError, match=f"in.jsonl, line 7: .*{reason}"):
        run_bytes([str(path)], tmp_path)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_broken_line_is_named_by_a_worker(tmp_path: Path) -> None:
    """B26: the first one in the order of the input, whichever worker meets which first."""
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": f"{i} " * 100}) for i in range(5000)]
    lines[3999] = lines[4999] = "{"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"in.jsonl, line 4000: no JSON"):
        run_bytes([str(path)], tmp_path, workers=2)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_failure_leaves_the_earlier_corpus(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", ["old"])
    report = run_bytes([good], tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "new"}\n{')
    with pytest.raises(DataError, match="line 2"):
        run_bytes([str(bad)], tmp_path)
    assert texts_of(report.prefix) == ["old"]
    run_bytes([write_lines(tmp_path / "new.jsonl", ["newer"])], tmp_path)
    assert texts_of(report.prefix) == ["newer"]


BROKEN_LINES = [
    b'{"text": "high \\ud83d alone"}',
    b'{"text": "low \\ude00 alone"}',
    b'{"text": "whole \\ud83d\\ude00 pair"}',
    b'{"text": "split \\ud83d-\\ude00"}',
    b'{"text": "NUL \\u0000 inside"}',
    '{"text": "combining e\u0301, \u05e9\u05dc\u05d5\u05dd"}'.encode(),
]
NO_UTF8 = b'{"text": "bad byte \xff"}'
MENDED = [
    "high \ufffd alone", "low \ufffd alone", "whole \U0001f600 pair", "split \ufffd-\ufffd", "NUL \0 inside",
    "combining e\u0301, \u05e9\u05dc\u05d5\u05dd",
]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_what_utf8_cannot_spell_is_replaced_and_counted(tmp_path: Path, workers: int) -> None:
    """B30: lone surrogates become U+FFFD, a document that is not UTF-8 is left out, a byte order mark is dropped; the
    other documents are unaffected."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([*BROKEN_LINES[:3], NO_UTF8, *BROKEN_LINES[3:]]))
    lines: list[str] = []
    report = run_bytes([str(path)], tmp_path, workers=workers, on_error="skip", log=lines.append)
    assert texts_of(report.prefix) == MENDED
    assert (report.replaced_characters, report.failed_documents) == (4, 1)
    assert [line for line in lines if "left out" in line] == [
        f"left out: {path}, line 4: no UTF-8 (byte 20 of the document: invalid start byte)"
    ]
    with pytest.raises(DataError, match=r"in.jsonl, line 4: no UTF-8 .*; --on-error skip would leave it out"):
        run_bytes([str(path)], tmp_path, workers=workers)


def test_broken_texts_in_sentencepiece_and_hugging_face(tmp_path: Path) -> None:
    """B30, B32: tokens are a direct encode of the mended text, with no special id but the appended one."""
    texts = write_lines(tmp_path / "texts.jsonl", [f"some words {i}, split, high, low" for i in range(200)])
    model = str(train_sentencepiece([texts], str(tmp_path / "tok"), 300))
    specs = [TokenizerSpec("Llama2Tokenizer", model)]
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None, byte_fallback=False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"])
    backend.train_from_iterator(["some words"], trainer)
    (tmp_path / "hf").mkdir()
    backend.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    specs.append(TokenizerSpec("HuggingFaceTokenizer", str(tmp_path / "hf")))
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*BROKEN_LINES, b'{"text": "mark </s> in text"}']))
    for spec in specs:
        tokenizer = spec.build()
        (report,) = preprocess([str(path)], str(tmp_path / "out"), spec, append_eod=True)
        expected = [[*tokenizer.tokenize(text), tokenizer.eod_id] for text in [*MENDED, "mark </s> in text"]]
        assert documents(report.prefix) == expected
        assert [ids.count(tokenizer.eod_id) for ids in expected] == [1] * 7, "no forged end id"


def test_append_eod_without_an_end_id_is_refused(tmp_path: Path) -> None:
    """B31."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.save(str(tmp_path / "tokenizer.json"))
    path = write_lines(tmp_path / "in.jsonl", ["x"])
    spec = TokenizerSpec("HuggingFaceTokenizer", str(tmp_path))
    with pytest.raises(DataError, match="--append-eod: the HuggingFaceTokenizer given has no end id"):
        preprocess([path], str(tmp_path / "out"), spec, append_eod=True)


@pytest.mark.parametrize(
    ("text_unit", "expected"),
    [
        ("file", ["one\ntwo\r\n\n \nthree\n"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_plain_text_units(tmp_path: Path, text_unit: str, expected: list[str]) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\r\n\n \nthree\n")
    report = run_bytes([str(path)], tmp_path, text_unit=text_unit)
    assert texts_of(report.prefix) == expected


def test_ids_beyond_16_bits(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["1 2 99999"])
    spec = TokenizerSpec("NullTokenizer", vocab_size=100_000)
    (report,) = preprocess([path], str(tmp_path / "out"), spec, append_eod=True)
    assert documents(report.prefix) == [[1, 2, 99999, 100_000]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{tmp}/missing.jsonl"], "--input {tmp}/missing.jsonl is not a file"),
        (["--input", "{tmp}"], "--input {tmp}/empty.jsonl is empty"),
        (["--input", "{tmp}/empty.jsonl"], "--input {tmp}/empty.jsonl is empty"),
        (["--input", "{tmp}/blank.jsonl"], "no document is left"),
        (["--input", "{tmp}/good.jsonl", "--workers", "0"], "--workers 0"),
        (["--input", "{tmp}/good.jsonl", "--partitions", "0"], "--partitions 0 must be 1 or more"),
        (
            ["--input", "{tmp}/good.jsonl", "--partitions", "2", "--workers", "3"],
            "--workers 3 cannot be dealt out to --partitions 2: 2 workers would work",
        ),
        (["--input", "{tmp}/good.jsonl", "--partition", "1"], "--partition 1 of --partitions 1"),
        (["--input", "-", "--partitions", "2", "--workers", "2"], "standard input cannot be cut"),
        (["--input", "{tmp}/*.nothing"], "no file has such a name"),
        (["--input", "{tmp}/cut.jsonl.gz"], "{tmp}/cut.jsonl.gz is damaged or cut, after line "),
        (["--input", "{tmp}/bytes.jsonl"], "{tmp}/bytes.jsonl, line 2: no UTF-8"),
        (["--input", "{tmp}/good.jsonl", "--json-keys", "body"], "line 1: no text under the key 'body'"),
        (["--input", "{tmp}/good.jsonl", "--json-keys", "text", "text"], "give each key once"),
        (["--input", "{tmp}/plain.txt", "--json-keys", "body"], "{tmp}/plain.txt is plain text"),
        (["--input", "{tmp}/good.jsonl", "--tokenizer-model", "x"], "takes no --tokenizer-model"),
        (["--input", "{tmp}/good.jsonl", "--append-eo"], "unrecognized arguments"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n\n')
    (tmp_path / "plain.txt").write_text("plain")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 9)[:-12])
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    write_lines(tmp_path / "good.jsonl", ["good"])
    before = sorted(os.listdir(tmp_path))
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    output = ["--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    result = run_tool("preprocess_data.py", *filled, *output)
    assert result.returncode == 2, result.stderr
    assert message.format(tmp=tmp_path) in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert sorted(os.listdir(tmp_path)) == before


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good = write_lines(tmp_path / "good.jsonl", ["good"])
    with pytest.raises(DataError, match="cannot be written"):
        preprocess([good], str(tmp_path / "file" / "out"), BYTES)


def test_a_full_disk_ends_with_1_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_edit.corpora import indexed_writer, tool

    def full(stream: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexed_writer, "_sync", full)
    good = write_lines(tmp_path / "good.jsonl", ["good"])
    with pytest.raises(SystemExit) as caught:
        tool.run_tool(lambda: print(preprocess([good], str(tmp_path / "out"), BYTES)))
    assert caught.value.code == 1
    assert os.listdir(tmp_path) == ["good.jsonl"]


def test_the_tools_make_a_corpus_from_nothing(tmp_path: Path) -> None:
    """quickstart text -> tokenizer -> token files -> unigram loss, by the command lines, as in the README."""
    corpus, tokenizer, prefix = tmp_path / "c.jsonl", tmp_path / "tok", tmp_path / "c"
    for name in ("first", "again"):
        result = run_tool("build_quickstart_corpus.py", "--output", tmp_path / name, "--max-bytes", 400_000)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    (tmp_path / "first").rename(corpus)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert 350_000 < sum(len(text.encode()) for text in texts) <= 400_000 and len(texts) > 50

    result = run_tool("train_tokenizer.py", "--input", corpus, "--vocab-size", 1000, "--output-prefix", tokenizer)
    assert result.returncode == 0, result.stderr
    model = SentencePieceTokenizer(f"{tokenizer}.model")
    assert model.vocab_size == 1000
    assert all(model.detokenize(model.tokenize(text)) == text for text in texts)

    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{tokenizer}.model", "--append-eod"]
    result = run_tool("preprocess_data.py", "--input", corpus, "--output-prefix", prefix, *flags)
    assert result.returncode == 0, result.stderr
    assert f"{len(texts)} documents" in result.stdout
    ids = documents(f"{prefix}_text_document")
    assert ids == [[*model.tokenize(text), 2] for text in texts]

    result = run_tool("unigram_loss.py", "--data-path", f"{prefix}_text_document", "--split", "90,10")
    assert result.returncode == 0, result.stderr
    cut = round(0.9 * len(ids))
    train, valid = (np.array([i for document in part for i in document]) for part in (ids[:cut], ids[cut:]))
    counts = np.bincount(train, minlength=1000)
    expected = float(np.mean([-math.log((counts[i] + 1) / (len(train) + 1000)) for i in valid[1:]]))
    assert f"unigram loss {expected:.4f} nats a token over {len(valid) - 1} " in result.stdout


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (
            "train_tokenizer.py",
            ["--input", "{tmp}/x", "--output-prefix", "{tmp}/t", "--vocab-size", "300"],
            "is not a file",
        ),
        (
            "train_tokenizer.py",
            ["--input", "{tmp}/in", "--output-prefix", "{tmp}/t", "--vocab-size", "200"],
            "too small",
        ),
        (
            "train_tokenizer.py",
            ["--input", "{tmp}/in", "--output-prefix", "{tmp}/t", "--vocab-size", "90000"],
            "too high",
        ),
        ("train_tokenizer.py", ["--input", "{tmp}/nl", "--output-prefix", "{tmp}/t", "--vocab-size", "300"], "no text"),
        ("build_quickstart_corpus.py", ["--output", "{tmp}/o.jsonl", "--max-bytes", "1"], "--max-bytes 1 is too small"),
        ("build_quickstart_corpus.py", ["--output", "{tmp}/in/o.jsonl", "--max-bytes", "99999"], "cannot be written"),
        ("unigram_loss.py", ["--data-path", "{tmp}/none"], "none.idx does not exist"),
        ("unigram_loss.py", ["--data-path", "{tmp}/none", "--split", "1,x"], "has the field 'x'"),
    ],
)
def test_other_tools_refuse_bad_input(tmp_path: Path, tool: str, arguments: list[str], message: str) -> None:
    (tmp_path / "in").write_text("some text to learn pieces from\n" * 20)
    (tmp_path / "nl").write_text("\n\n")
    before = sorted(os.listdir(tmp_path))
    result = run_tool(tool, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert message in result.stderr.splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == before


def test_tokenizer_training_repeats_and_survives_odd_text(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    texts = ["tab\tand NUL \0 and \ud800 broken", "x" * 100_000, *(f"line {i}\n    indented" for i in range(100))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    models = [train_sentencepiece([str(path)], str(tmp_path / name), 300).read_bytes() for name in ("a", "b")]
    assert models[0] == models[1]


def test_docstrings_and_code_are_apart() -> None:
    source = (
        '"""Module text."""\nx = 1\n\n\nclass A:\n    """Class\n    text."""\n\n    def f(self):\n        return "kept"'
    )
    docstrings, code = split_docstrings(source)
    assert docstrings == "Module text.\n\nA\nClass\ntext."
    assert code == 'x = 1\n\n\nclass A:\n\n    def f(self):\n        return "kept"'


def test_unigram_loss_by_hand() -> None:
    """Counts 3, 1, 0 over a vocabulary of 3: probabilities 4/7, 2/7, 1/7."""
    loss = unigram_loss(np.array([3, 1, 0]), np.array([0, 0, 1, 2]))
    assert loss == pytest.approx(-(2 * math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 4)
    assert unigram_loss(np.zeros(5), np.array([1])) == pytest.approx(math.log(5))
    for tokens in ([], [3]):
        with pytest.raises(DataError):
            unigram_loss(np.array([3, 1, 0]), np.array(tokens, dtype=np.int64))
