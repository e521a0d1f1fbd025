"""A sentencepiece BPE model from text: what tools/train_tokenizer.py does."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_edit.data.corpus import check_inputs, document_texts, raw_batches
from megatron_edit.data.errors import DataError

# The trainer drops longer pieces of text; it counts bytes.
PIECE_BYTES = 4096
SPECIAL_PIECES = 4
BYTES = 256


def training_pieces(inputs: Sequence[str], json_key: str) -> Iterator[str]:
    """Lines of the inputs' documents, as sentencepiece wants them: not too long, no NUL, and no tab, which is
    a mark of its own there (a model encodes tabs as a byte)."""
    for batch in raw_batches(inputs, "line"):
        for entry in document_texts(batch, json_key):
            if entry is None:
                continue
            for line in entry[0].replace("\t", "\n").replace("\0", "\n").splitlines():
                for start in range(0, len(line), PIECE_BYTES // 4):  # a character has at most 4 bytes
                    if line[start:].strip():
                        yield line[start : start + PIECE_BYTES // 4]


def train_sentencepiece(inputs: Sequence[str], output_prefix: str, vocab_size: int, *, json_key: str = "text") -> Path:
    """Trains a BPE model and writes PREFIX.model (whole or not at all); returns its path.

    decode(encode(text)) is the text: no normalisation, no space added or removed, and bytes stand in for
    characters without a piece. Ids: 0 <unk>, 1 <s>, 2 </s>, 3 <pad>, 4-259 the bytes, then the pieces.

    Raises:
        DataError: unusable inputs, or a vocabulary too small or too large for the text.
    """
    import sentencepiece

    check_inputs(inputs)
    smallest = SPECIAL_PIECES + BYTES + 1
    if vocab_size < smallest:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: {SPECIAL_PIECES} marks and {BYTES} bytes come first; "
            f"{max(512, smallest)} would work"
        )
    pieces = training_pieces(inputs, json_key)
    first = next(pieces, None)
    if first is None:
        raise DataError(f"--input {' '.join(inputs)} holds no text")

    def all_pieces() -> Iterator[str]:
        yield first
        yield from pieces

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=all_pieces(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=PIECE_BYTES,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()  # after the library's file, line and condition
        raise DataError(f"--vocab-size {vocab_size} does not fit this text: {reason}") from None
    path = Path(f"{output_prefix}.model")
    partial = Path(f"{path}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(model.getvalue())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path
