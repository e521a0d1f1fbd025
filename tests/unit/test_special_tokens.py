"""Special tokens that a text spells: plain text, counted; their ids with --parse-special-tokens."""

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sentencepiece

from megatron_edit.corpora import batches
from megatron_edit.corpora.inspect import corpus_lines
from megatron_edit.corpora.merge import merge_corpora
from megatron_edit.corpora.preprocess import TokenizerSpec, preprocess
from megatron_edit.data.errors import DataError
from megatron_edit.data.indexed import Manifest
from megatron_edit.data.tokenizers import Tokenizer, build_tokenizer
from megatron_edit.inference.start import Started, add_flags
from tests.unit.test_corpus_tools import documents, write_lines
from tests.unit.test_preprocess import contents
from tests.unit.test_tokenizers import BOTH, hf_folder

SP_MARKS = ["<file>", "<|im_start|>", "<|im_start|>x"]
TEXTS = [
    "<file>a.py<file>", "no mark", "hello <|im_start|>world</s>", "<s>hello", "<|im_start|>xhello <  |im_start|>",
    "</s>", "x <mask> y  <mask>", "<filename>hello<|im_end|>\nworld", "lone \ud83d<file>",
]  # fmt: skip


def hugging_face(folder: Path) -> str:
    """Special tokens of the vocabulary, added ones, one that takes the blanks on its left; and one not special."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    path = hf_folder(folder, BOTH, ("bos",)) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    names = ("<filename>", "<|im_start|>", "<|im_end|>", "<file>")
    marks = [tokenizers.AddedToken(name, special=True) for name in names]
    backend.add_special_tokens([*marks, tokenizers.AddedToken("<mask>", special=True, lstrip=True)])
    backend.add_tokens(["<tool>"])
    backend.save(str(path))
    return str(folder)


def sentencepiece_model(folder: Path, *, adds_blank: bool) -> str:
    folder.mkdir()
    lines = [f"hello world a py x y {i} hello" for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "m"), vocab_size=330, minloglevel=2, pad_id=3,
        control_symbols=SP_MARKS, byte_fallback=True, add_dummy_prefix=adds_blank, remove_extra_whitespaces=False,
        normalization_rule_name="identity", hard_vocab_limit=False,
    )  # fmt: skip
    return str(folder / "m.model")


def specs(folder: Path) -> dict[str, TokenizerSpec]:
    return {
        "hf": TokenizerSpec("HuggingFaceTokenizer", hugging_face(folder / "hf"), None, True),
        "sp": TokenizerSpec("SentencePieceTokenizer", sentencepiece_model(folder / "sp", adds_blank=False), None, True),
    }


def test_hugging_face_parses_as_the_library_does(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    folder = hugging_face(tmp_path / "hf")
    library = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    library.no_padding()
    library.no_truncation()
    plain = build_tokenizer("HuggingFaceTokenizer", folder)
    parsing = build_tokenizer("HuggingFaceTokenizer", folder, parse_special_tokens=True)
    assert plain.fingerprint == parsing.fingerprint and plain.special_tokens == parsing.special_tokens
    assert set(plain.special_tokens) == {"<s>", "</s>", "<filename>", "<|im_start|>", "<|im_end|>", "<file>", "<mask>"}
    texts = [text.replace("\ud83d", "\ufffd") for text in TEXTS]
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert parsing.tokenize_batch(TEXTS) == expected == [parsing.tokenize(text) for text in TEXTS]
    assert sum(i in parsing.special_tokens.values() for ids in expected for i in ids) == 12
    special = set(plain.special_tokens.values())
    for text, ids in zip(texts, plain.tokenize_batch(TEXTS), strict=True):
        assert special.isdisjoint(ids) and plain.detokenize(ids) == text
    (tool,) = plain.tokenize("<tool>")  # not special: found in every text, as always
    assert [tool] == parsing.tokenize("<tool>")


@pytest.mark.parametrize("adds_blank", [False, True])
def test_sentencepiece_parses_control_symbols(tmp_path: Path, adds_blank: bool) -> None:
    """What lies between two of them is what the library makes of it alone."""
    model = sentencepiece_model(tmp_path / "sp", adds_blank=adds_blank)
    library = sentencepiece.SentencePieceProcessor(model_file=model)
    plain = build_tokenizer("SentencePieceTokenizer", model)
    parsing = build_tokenizer("SentencePieceTokenizer", model, parse_special_tokens=True)
    assert plain.fingerprint == parsing.fingerprint
    assert set(plain.special_tokens) == {"<s>", "</s>", "<pad>", *SP_MARKS}
    ids = library.piece_to_id
    for text, expected in [
        ("<file>a.py<file>", [ids("<file>"), *library.encode("a.py"), ids("<file>")]),
        ("hello <|im_start|>world</s>", [*library.encode("hello "), ids("<|im_start|>"), *library.encode("world"), 2]),
        ("<|im_start|>xhello", [ids("<|im_start|>x"), *library.encode("hello")]),  # the longest mark
        ("<s></s><pad>", [1, 2, 3]),
        ("<unk> <0x0A>", library.encode("<unk> <0x0A>")),
        ("", []),
    ]:
        assert parsing.tokenize(text) == expected
        assert plain.tokenize(text) == library.encode(text)
        assert set(plain.special_tokens.values()).isdisjoint(plain.tokenize(text))
    assert parsing.tokenize_batch(TEXTS) == [parsing.tokenize(text) for text in TEXTS]


@pytest.mark.parametrize("kind", ["hf", "sp"])
@pytest.mark.parametrize("parse", [False, True])
def test_a_corpus_of_texts_with_marks(tmp_path: Path, kind: str, parse: bool) -> None:
    """Ids, counts and manifest, for every number of workers and partitions; a short and a long document."""
    spec = specs(tmp_path)[kind]
    spec = TokenizerSpec(spec.tokenizer_type, spec.tokenizer_model, None, parse)
    tokenizer = spec.build()
    texts = [text.replace("\ud83d", "") for text in TEXTS]
    path = write_lines(tmp_path / "in.jsonl", texts)
    options: dict[str, Any] = {"append_eod": True, "log": lambda line: None}
    (report,) = preprocess([path], str(tmp_path / "one"), spec, **options)
    assert documents(report.prefix) == [[*tokenizer.tokenize(text), tokenizer.eod_id] for text in texts]
    marked = [text for text in texts if any(mark in text for mark in tokenizer.special_tokens)]
    assert report.marked_documents == len(marked)
    counts = {mark: sum(mark in text for text in texts) for mark in ("<file>", "</s>", "<s>")}
    assert {mark: report.special_tokens[mark] for mark in counts} == counts == {"<file>": 2, "</s>": 2, "<s>": 1}
    became = "they became its ids" if parse else "plain text like any other; with --parse-special-tokens"
    counted = rf"\n{len(marked)} documents spell special tokens of the tokenizer \(.*</s> in 2.*\): .*{became}"
    assert re.search(counted, str(report))
    manifest = Manifest.read(report.prefix)
    assert manifest is not None
    assert (manifest.parse_special_tokens, manifest.marked_documents) == (parse, len(marked))
    for workers, partitions in [(2, 1), (2, 2)]:
        (other,) = preprocess([path], str(tmp_path / f"w{workers}{partitions}"), spec, workers=workers,
                              partitions=partitions, **options)  # fmt: skip
        assert contents(other.prefix) == contents(report.prefix)
        assert vars(other) == vars(report) | {"prefix": other.prefix}
    assert any(f"{len(marked)} documents spell special tokens" in line for line in corpus_lines(report.prefix))
    merge_corpora([report.prefix, other.prefix], str(tmp_path / "both"))
    both = Manifest.read(str(tmp_path / "both"))
    assert both is not None and (both.parse_special_tokens, both.marked_documents) == (parse, 2 * len(marked))


def test_nothing_is_said_where_there_are_no_marks(tmp_path: Path) -> None:
    spec = TokenizerSpec("SentencePieceTokenizer", sentencepiece_model(tmp_path / "sp", adds_blank=False))
    path = write_lines(tmp_path / "in.jsonl", ["hello <world> <", "s>"])
    (report,) = preprocess([path], str(tmp_path / "out"), spec, log=lambda line: None)
    assert "special" not in str(report) and report.marked_documents == 0


@pytest.mark.parametrize("kind", ["hf", "sp"])
def test_a_long_text_is_not_cut_inside_a_mark(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few characters, whose ends come to lie at every place of a mark: the ids are those of one call."""
    monkeypatch.setattr(batches, "LONG", 320)
    spec = specs(tmp_path)[kind]
    tokenizer = spec.build()
    mark = "<mask>" if kind == "hf" else "<file>"
    for width in range(295, 325):
        text = f"{'x' * width}  {mark} y {mark}{'y' * width}{mark} end"
        pieces = list(batches.cut_long_text(text, tokenizer.special_pattern))
        assert "".join(pieces) == text and len(pieces) > 1
        assert [i for piece in pieces for i in tokenizer.tokenize(piece)] == tokenizer.tokenize(text)
    path = write_lines(tmp_path / "in.jsonl", [f"{mark}{'hello ' * 100}{mark}{'x' * 1000}{mark}"])
    (report,) = preprocess([path], str(tmp_path / "out"), spec, log=lambda line: None)
    (ids,) = documents(report.prefix)
    assert ids.count(tokenizer.special_tokens[mark]) == 3
    assert (report.marked_documents, report.special_tokens) == (1, {mark: 1})


def test_a_killed_command_with_the_other_choice_starts_anew(tmp_path: Path) -> None:
    from megatron_edit.corpora.preprocess import Job
    from megatron_edit.corpora.restart import Journal

    spec = TokenizerSpec("ByteTokenizer")
    one = Journal("p", Job((), spec), "f")
    other = Journal("p", Job((), TokenizerSpec("ByteTokenizer", None, None, True)), "f")
    assert one.command["spec"] != other.command["spec"]


@pytest.mark.parametrize(("name", "vocab_size"), [("ByteTokenizer", None), ("NullTokenizer", 9)])
def test_a_tokenizer_without_special_tokens_in_texts_is_refused(
    tmp_path: Path, name: str, vocab_size: int | None
) -> None:
    spec = TokenizerSpec(name, None, vocab_size, True)
    path = write_lines(tmp_path / "in.jsonl", ["1 2"])
    with pytest.raises(DataError, match=r"--parse-special-tokens: the (Byte|Null)Tokenizer given has no special token"):
        preprocess([path], str(tmp_path / "out"), spec)


def test_the_tools_of_inference_take_texts_as_a_corpus_does_but_for_generate() -> None:
    for default, flags, expected in [
        ({}, [], False),
        ({}, ["--parse-special-tokens"], True),
        ({"parse_special_tokens": True}, [], True),
        ({"parse_special_tokens": True}, ["--no-parse-special-tokens"], False),
    ]:
        parser = argparse.ArgumentParser()
        add_flags(parser, **default)
        assert parser.parse_args(["--load", "x", *flags]).parse_special_tokens is expected


def test_a_prompt_that_begins_with_the_begin_mark_gets_no_second_one(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf")

    def ids(text: str, parse: bool) -> list[int]:
        tokenizer: Tokenizer = build_tokenizer("HuggingFaceTokenizer", folder, parse_special_tokens=parse)
        started = SimpleNamespace(tokenizer=tokenizer, begins_with_bos=True)
        return Started.encode(cast(Started, started), text)

    assert ids("<s>hello", True) == ids("hello", True) == ids("hello", False)
    assert ids("<s>hello", False)[:1] == [0] and ids("<s>hello", False).count(0) == 1
    assert len(ids("<s>hello", False)) > len(ids("hello", False))
    assert json.loads((Path(folder) / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
