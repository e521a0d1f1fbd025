"""tokenizer.json for tokenizers of this program that have none: what transformers reads a folder with.

Needs the package tokenizers (extra `hf`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import ByteTokenizer, SentencePieceTokenizer

_SPACE = "▁"  # sentencepiece's mark of a blank
_PROBES = (
    "Hello world, 123 times!", "  two  blanks, a\ttab\n\n and lines\r\n", "naïve 你好 ①ﬁ", "x", " ",
    "the of and to in is that it was for on are with as his they be at this have from or had by not word but what " * 3,
)  # fmt: skip


def write_byte_tokenizer(folder: Path) -> None:
    """ByteTokenizer as a tokenizer.json: a token for each byte, without merges, and three marks."""
    tokenizers = _library()
    ours = ByteTokenizer()
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    marks = {"bos_token": "<bos>", "eos_token": "<eod>", "pad_token": "<pad>"}
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in marks.values()])
    for (role, mark), expected in zip(marks.items(), (ours.bos_id, ours.eod_id, ours.pad_id), strict=True):
        assert backend.token_to_id(mark) == expected, role
    _save(folder, backend, marks)


def write_sentencepiece_tokenizer(model_file: Path, folder: Path) -> list[str]:
    """A sentencepiece BPE model as a tokenizer.json with the same ids; what is to be said when that cannot be had.

    Pieces of a BPE model are numbered in the order in which they were merged, so that each way to make one of two
    others is a merge with its number.
    """
    import sentencepiece

    tokenizers = _library()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    plain = {
        piece for i, piece in enumerate(pieces)
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    }  # fmt: skip
    merges = []
    for piece in pieces:
        if piece in plain:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in plain and right in plain:
                    merges.append((left, right))
    unknown = processor.id_to_piece(processor.unk_id())
    bytes_too = any(processor.is_byte(i) for i in range(len(pieces)))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too
        )
    )
    prefix = processor.encode("x", out_type=str)[0].startswith(_SPACE)
    normalizers = [tokenizers.normalizers.Replace(" ", _SPACE)]
    decode = tokenizers.decoders
    decoders = [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    if prefix:
        normalizers.insert(0, tokenizers.normalizers.Prepend(_SPACE))
        decoders.append(decode.Strip(" ", 1, 0))
    backend.normalizer = tokenizers.normalizers.Sequence(normalizers)
    backend.decoder = decode.Sequence(decoders)
    ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "pad_token": processor.pad_id()}
    marks = {role: processor.id_to_piece(i) for role, i in ids.items() if i >= 0}
    backend.add_special_tokens([
        tokenizers.AddedToken(mark, special=True, normalized=False) for mark in {unknown, *marks.values()}
    ])  # fmt: skip
    ours = SentencePieceTokenizer(model_file)
    texts = [text for text in _PROBES if ours.tokenize(text) != backend.encode(text, add_special_tokens=False).ids]
    if texts:
        return [f"{model_file} cannot be written as a tokenizer.json with the same ids: use tokenizer.model"]
    _save(folder, backend, {**marks, "unk_token": unknown})
    return []


def _save(folder: Path, backend: Any, marks: dict[str, str]) -> None:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **marks, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table): itself where Latin-1
    prints one, else the next from code point 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("to write a tokenizer.json needs the package tokenizers: pip install -e '.[hf]'") from None
    return tokenizers
