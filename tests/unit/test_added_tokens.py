"""Tokens that stand in the files beside tokenizer.json alone: the ids of transformers, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.convert.tokenizer_json import write_byte_tokenizer
from megatron_edit.corpora.train_tokenizer import train_sentencepiece
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer

TEXTS = ["say <|im_start|> and <tool> or<tool>  <x> <eod> now", "<tool>", "plain 你好"]


def token(content: str, *, special: bool = False, **flags: Any) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, "special": special, **plain, **flags}


def write(folder: Path, config: dict[str, Any], own: list[dict[str, Any]], legacy: dict[str, int] | None) -> None:
    """The byte tokenizer of 259 ids; `own`: further added tokens of tokenizer.json; `legacy`: added_tokens.json."""
    write_byte_tokenizer(folder)
    for name, change in (
        ("tokenizer_config.json", lambda found: found.update(config)),
        ("tokenizer.json", lambda found: found["added_tokens"].extend(own)),
    ):
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))
    if legacy is not None:
        (folder / "added_tokens.json").write_text(json.dumps(legacy))


START, TOOL = token("<|im_start|>", special=True), token("<tool>")
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, int] | None]] = {
    "config alone": ({"added_tokens_decoder": {"259": START, "260": TOOL}}, [], None),
    "order of ids": ({"added_tokens_decoder": {"260": START, "259": TOOL}}, [], None),
    "eats blanks": ({"added_tokens_decoder": {"259": token("<tool>", lstrip=True)}}, [], None),
    "legacy file": ({}, [], {"<|im_start|>": 259, "<tool>": 260}),
    "legacy file with special ones": (
        {"additional_special_tokens": ["<|im_start|>"]}, [], {"<|im_start|>": 259, "<tool>": 260},
    ),
    "legacy file beside a config": ({"added_tokens_decoder": {"259": START}}, [], {"<tool>": 260}),
    "other flags in the config": (
        {"added_tokens_decoder": {"259": TOOL}}, [{"id": 259, **TOOL, "special": True}], None,
    ),
    "other flags in the legacy file": ({}, [{"id": 259, **TOOL, "special": True}], {"<tool>": 259}),
    "in the vocabulary": ({"added_tokens_decoder": {"97": token("a")}}, [], None),
    "a mark of a role": ({"added_tokens_decoder": {"259": token("<x>", special=True)}, "pad_token": "<x>"}, [], None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_declared_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(tmp_path, *CASES[case])
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), HuggingFaceTokenizer(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:  # special tokens are plain text here
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.tokenize(text) == expected
        assert ours.tokenize_batch([text]) == [expected]
    changes = case != "other flags in the legacy file"
    assert (ours.fingerprint != fingerprint_without(tmp_path)) == changes


def fingerprint_without(folder: Path) -> str:
    """Of the same tokenizer.json, when nothing declares tokens beside it."""
    (folder / "added_tokens.json").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key != "added_tokens_decoder" and value != "<x>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(folder).fingerprint


@pytest.mark.parametrize(
    ("config", "own", "named"),
    [
        ({"added_tokens_decoder": {"270": TOOL}}, [], ("'<tool>' the id 270", "would be 259")),
        ({"added_tokens_decoder": {"260": TOOL}}, [{"id": 259, **TOOL}], ("'<tool>' the id 260", "gives it 259")),
        ({"added_tokens_decoder": {"259": "<tool>"}}, [], ("tokenizer_config.json", "cannot be read")),
        ({"added_tokens_decoder": ["<tool>"]}, [], ("tokenizer_config.json", "cannot be read")),
        ({"added_tokens_decoder": {"259": {"content": "<tool>", "lstrip": "x"}}}, [], ("'<tool>'", "of 'bool'")),
    ],
)
def test_declared_tokens_that_cannot_be_had_are_refused(
    config: dict[str, Any], own: list[dict[str, Any]], named: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path, config, own, None)
    with pytest.raises(DataError) as refused:
        HuggingFaceTokenizer(tmp_path)
    assert all(word in str(refused.value) for word in named), refused.value


def test_a_sentencepiece_model_that_lacks_declared_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text of a few words, again and again\n" * 50)
    model = train_sentencepiece([str(tmp_path / "text.txt")], str(tmp_path / "tokenizer"), 300)
    size = SentencePieceTokenizer(model).vocab_size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size}))
    with pytest.raises(DataError, match=rf"'<tool>' \({size}\).*tokenizer\.json"):
        SentencePieceTokenizer(model)
    special = {"added_tokens_decoder": {"0": token("<unk>", special=True), str(size): token("<pad>", special=True)}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    assert SentencePieceTokenizer(model).vocab_size == size  # special ones are plain text
