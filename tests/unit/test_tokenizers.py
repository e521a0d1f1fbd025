"""Tokenizers: ids, special ids, marks in texts, files that are not tokenizers. Field reports B30 to B32."""

import gzip
import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
)

HARD_TEXTS = [
    "def f(x):\n\treturn  x   +  1\n\n\n",
    "  leading and trailing   ",
    "emoji 😀 and é́ combining, שלום right to left",
    "literal <s> and </s> and <pad> and <unk> and <0x0A> marks",
    "NUL \0 inside",
    "\r\n\t \u2581 the space mark itself excepted".replace("\u2581", ""),
]


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [f"    the quick brown fox number {i} jumps over lazy dogs\n\tx = {i}" for i in range(300)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def own_model(texts_file: Path) -> Path:
    return train_sentencepiece([str(texts_file)], str(texts_file.parent / "own"), 350)


@pytest.fixture(scope="module")
def default_model(texts_file: Path) -> Path:
    """A model of the library's own defaults (normalises spaces, no byte fallback, no pad)."""
    lines = [json.loads(line)["text"] for line in texts_file.read_text().splitlines()]
    prefix = texts_file.parent / "default"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=100, minloglevel=2
    )
    return Path(f"{prefix}.model")


def hf_folder(folder: Path, marks: dict[str, object], template: tuple[str, ...] = ()) -> Path:
    """A byte-level BPE with <s>, </s> in its vocabulary and a template that adds those named."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["hello world hello"] * 4, trainer)
    if template:
        single = " ".join(["<s>" if "bos" in template else "", "$A", "</s>" if "eos" in template else ""])
        backend.post_processor = processors.TemplateProcessing(
            single=single.strip(), special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return folder


BOTH = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {i for i in (tokenizer.bos_id, tokenizer.eod_id, tokenizer.pad_id) if i is not None}


def test_byte_tokenizer_layout() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eod_id, tokenizer.pad_id) == (
        259,
        256,
        257,
        258,
    )
    assert tokenizer.tokenize("hé") == [104, 195, 169]
    assert tokenizer.detokenize([104, 257, 195, 169, 258]) == "hé"
    assert tokenizer.tokenize("a\ud83db") == list("a\ufffdb".encode())


@given(st.text())
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_sentencepiece_ids_are_the_librarys_and_own_models_round_trip(
    text: str, own_model: Path, default_model: Path
) -> None:
    """B32."""
    for path in (own_model, default_model):
        tokenizer = SentencePieceTokenizer(path)
        library = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ids = tokenizer.tokenize(text)
        assert ids == library.encode(text)
        assert special_ids(tokenizer).isdisjoint(ids)
    tokenizer = SentencePieceTokenizer(own_model)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "bpe", "default", "hf"])
def test_a_batch_is_its_texts_one_by_one(kind: str, own_model: Path, default_model: Path, tmp_path: Path) -> None:
    """Also lone surrogates, marks in the text, and an empty text."""
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "hf":
        tokenizer = HuggingFaceTokenizer(hf_folder(tmp_path / "hf", BOTH, ("bos", "eos")))
    elif kind != "bytes":
        tokenizer = SentencePieceTokenizer(own_model if kind == "bpe" else default_model)
    texts = [*HARD_TEXTS, "", "a \ud83d b", "x</s></s>y<s>"]
    assert tokenizer.tokenize_batch(texts) == [tokenizer.tokenize(text) for text in texts]


def test_unigram_models_round_trip_and_read_packed_files(texts_file: Path, tmp_path: Path) -> None:
    """--model-type unigram: the documented ids, byte fallback, nothing normalised; the same text packed trains the
    same model, and --max-sentences draws lines."""
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress(texts_file.read_bytes()))
    models = [
        train_sentencepiece([str(path)], str(tmp_path / path.name), 300, model_type="unigram")
        for path in (texts_file, packed)
    ]
    assert models[0].read_bytes() == models[1].read_bytes()
    tokenizer = SentencePieceTokenizer(models[0])
    assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 3, 300)
    for text in HARD_TEXTS:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text and special_ids(tokenizer).isdisjoint(ids)
    fewer = train_sentencepiece([str(texts_file)], str(tmp_path / "few"), 320, max_sentences=150)
    assert SentencePieceTokenizer(fewer).vocab_size == 320
    with pytest.raises(DataError, match=r"--max-sentences 100 .*; 101 would work"):
        train_sentencepiece([str(texts_file)], str(tmp_path / "few"), 320, max_sentences=100)


def test_trained_model_has_the_documented_ids(own_model: Path, default_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(own_model)
    library = sentencepiece.SentencePieceProcessor(model_file=str(own_model))
    assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.pad_id, library.unk_id()) == (1, 2, 3, 0)
    assert tokenizer.vocab_size == 350
    assert [library.is_byte(i) for i in (3, 4, 259, 260)] == [False, True, True, False]
    assert SentencePieceTokenizer(default_model).pad_id is None
    assert tokenizer.fingerprint != SentencePieceTokenizer(default_model).fingerprint


def test_lone_surrogates_become_the_replacement_character(own_model: Path, tmp_path: Path) -> None:
    """B30: high, low, and a pair split by a letter, in each tokenizer."""
    folder = hf_folder(tmp_path / "hf", BOTH)
    for tokenizer in (ByteTokenizer(), SentencePieceTokenizer(own_model), HuggingFaceTokenizer(folder)):
        for broken in ("a \ud83d b", "a \ude00 b", "\ud83dx\ude00"):
            expected = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in broken)
            assert tokenizer.tokenize(broken) == tokenizer.tokenize(expected)
            assert tokenizer.detokenize(tokenizer.tokenize(broken)) == expected


def test_user_defined_end_piece_cannot_be_forged(texts_file: Path) -> None:
    prefix = texts_file.parent / "userdefined"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts_file.read_text().splitlines()), model_prefix=str(prefix), vocab_size=100,
        user_defined_symbols=["</s>"], minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(f"{prefix}.model")
    library = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    assert library.piece_to_id("</s>") in library.encode("the </s> fox")
    if tokenizer.eod_id is not None:
        assert tokenizer.eod_id not in tokenizer.tokenize("the </s> fox")


@pytest.mark.parametrize("template", [(), ("bos",), ("bos", "eos")])
def test_hugging_face_template_adds_nothing(tmp_path: Path, template: tuple[str, ...]) -> None:
    """B31: nothing but the text's ids, whatever the file's template, truncation and padding."""
    tokenizer = HuggingFaceTokenizer(hf_folder(tmp_path / "hf", BOTH, template))
    assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.pad_id) == (0, 1, None)
    text = "hello world, a text longer than the truncation length"
    ids = tokenizer.tokenize(text)
    assert len(ids) > 3 and special_ids(tokenizer).isdisjoint(ids)
    assert tokenizer.detokenize(ids) == text


@pytest.mark.parametrize(
    ("marks", "bos", "eod"),
    [({}, None, None), ({"eos_token": "</s>"}, None, 1), ({"bos_token": "<s>", "eos_token": None}, 0, None)],
)
def test_hugging_face_special_ids_are_not_guessed(
    tmp_path: Path, marks: dict[str, object], bos: int | None, eod: int | None
) -> None:
    """B31: without a begin mark there is no begin id (not the end id)."""
    tokenizer = HuggingFaceTokenizer(hf_folder(tmp_path / "hf", marks))
    assert (tokenizer.bos_id, tokenizer.eod_id) == (bos, eod)


@pytest.mark.parametrize("text", [*HARD_TEXTS, "</s>", "x</s></s>y<s>"])
def test_hugging_face_marks_in_text_stay_text(tmp_path: Path, text: str) -> None:
    """B32."""
    folder = hf_folder(tmp_path / "hf", BOTH)
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    ids = tokenizer.tokenize(text)
    assert special_ids(tokenizer).isdisjoint(ids)
    assert tokenizer.detokenize(ids) == text


def test_hugging_face_model_with_the_mark_as_a_piece(tmp_path: Path) -> None:
    """A unigram model whose vocabulary itself holds </s>: the library alone would return the end id."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -3.0), *((c, -4.0) for c in "</s>")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, False))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert 1 in backend.encode("a</s>a").ids
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.eod_id == 1
    assert tokenizer.tokenize("a</s>a") == [2, 3, 4, 5, 6, 2]


def test_added_ids_count_in_the_vocabulary(tmp_path: Path) -> None:
    """B32: extra ids come after the base ids and are counted."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    folder = hf_folder(tmp_path / "hf", BOTH)
    base = HuggingFaceTokenizer(folder).vocab_size
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<extra_0>", "<extra_1>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.vocab_size == base + 2
    assert tokenizer.tokenize("<extra_1>") == [base + 1]


def test_null_tokenizer() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (101, 100, None)
    assert tokenizer.tokenize("1 2 99") == [1, 2, 99] and tokenizer.detokenize([1, 100, 2]) == "1 2"
    for wrong in ("1 x", "101", "100", "-1"):
        with pytest.raises(DataError):
            tokenizer.tokenize(wrong)


def test_ids_outside_the_vocabulary_are_refused(own_model: Path, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", BOTH)
    for tokenizer in (ByteTokenizer(), SentencePieceTokenizer(own_model), HuggingFaceTokenizer(folder)):
        with pytest.raises(DataError, match=f"id {tokenizer.vocab_size} is outside"):
            tokenizer.detokenize([tokenizer.vocab_size])


def test_build_tokenizer_knows_megatrons_names(own_model: Path) -> None:
    fingerprints = {
        build_tokenizer(name, own_model).fingerprint
        for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    }
    assert fingerprints == {SentencePieceTokenizer(own_model).fingerprint}
    assert build_tokenizer("ByteTokenizer").vocab_size == 259
    assert build_tokenizer("NullTokenizer", vocab_size=7).vocab_size == 8
    assert build_tokenizer("ByteTokenizer", vocab_size=259).vocab_size == 259
    assert build_tokenizer("ByteTokenizer", vocab_size=300).vocab_size == 259  # rows of the model, no ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Nope",), "Nope is unknown; known are SentencePieceTokenizer"),
        (("SentencePieceTokenizer",), "needs --tokenizer-model"),
        (("SentencePieceTokenizer", "{tmp}/missing.model"), "missing.model: No such file"),
        (("SentencePieceTokenizer", "{tmp}/empty"), "is empty"),
        (("SentencePieceTokenizer", "{tmp}/text"), "is not a sentencepiece model"),
        (("SentencePieceTokenizer", "{tmp}"), "Is a directory"),
        (("HuggingFaceTokenizer", "{tmp}/text"), "is not a tokenizer.json"),
        (("HuggingFaceTokenizer", "{tmp}"), "holds no tokenizer.json"),
        (("ByteTokenizer", "{tmp}/text"), "takes no --tokenizer-model"),
        (("ByteTokenizer", None, 200), "--vocab-size 200 is below the tokenizer's 259"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("NullTokenizer", None, 0), "at least 1"),
    ],
)
def test_unusable_tokenizers_are_refused_by_name(
    tmp_path: Path, arguments: tuple[str | int | None, ...], message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("plain text")
    filled = [a.format(tmp=tmp_path) if isinstance(a, str) else a for a in arguments]
    with pytest.raises(DataError, match=message):
        build_tokenizer(*filled)  # type: ignore[arg-type]


def test_special_mark_without_id_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", {"eos_token": "<|end|>"})
    with pytest.raises(DataError, match=r"has no id for eos '<\|end\|>'"):
        HuggingFaceTokenizer(folder)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[hf\]'"):
        HuggingFaceTokenizer(tmp_path)
