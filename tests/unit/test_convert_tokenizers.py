"""Tokenizers of this program as tokenizer.json: the same ids in transformers' library."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

from megatron_edit.convert.tokenizer_json import write_byte_tokenizer, write_sentencepiece_tokenizer
from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

TEXT = "\n".join(pydoc_data.topics.topics.values())
SAMPLES = [
    "", " ", "x", "  two  blanks,\ta tab\r\n\n and lines", "naïve 你好 🙂 ①ﬁ\u0000", TEXT[:20_000], TEXT[70_000:90_000],
]  # fmt: skip


def assert_same(ours: Tokenizer, folder: Path) -> None:
    theirs = HuggingFaceTokenizer(folder)
    assert (theirs.vocab_size, theirs.bos_id, theirs.eod_id, theirs.pad_id) == (
        ours.vocab_size, ours.bos_id, ours.eod_id, ours.pad_id,
    )  # fmt: skip
    for text in SAMPLES:
        ids = ours.tokenize(text)
        assert theirs.tokenize(text) == ids, text[:40]
        assert theirs.detokenize(ids) == ours.detokenize(ids)


def test_byte_tokenizer(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert_same(ByteTokenizer(), tmp_path)


def test_sentencepiece_of_this_program(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:200_000])
    model = train_sentencepiece([str(tmp_path / "text.txt")], str(tmp_path / "tokenizer"), 1000)
    assert write_sentencepiece_tokenizer(model, tmp_path) == []
    assert_same(SentencePieceTokenizer(model), tmp_path)


def test_sentencepiece_that_has_no_such_form_is_said(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text(TEXT[:100_000])
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "unigram"), model_type="unigram", vocab_size=400,
        minloglevel=2,
    )  # fmt: skip
    (note,) = write_sentencepiece_tokenizer(tmp_path / "unigram.model", tmp_path)
    assert "unigram.model" in note and not (tmp_path / "tokenizer.json").exists()
