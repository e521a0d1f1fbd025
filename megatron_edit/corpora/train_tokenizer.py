"""A sentencepiece model from text: what tools/train_tokenizer.py does."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megatron_edit.corpora.batches import decoded, raw_batches
from megatron_edit.corpora.formats import Kind
from megatron_edit.corpora.inputs import InputFile, find_inputs, lines_before, portions
from megatron_edit.data.errors import DataError

ModelType = Literal["bpe", "unigram"]
# The trainer drops longer pieces of text; it counts bytes.
PIECE_BYTES = 4096
SPECIAL_PIECES = 4
FEWEST_SENTENCES = 100  # the library draws more than these, or takes all
BYTES = 256


def training_pieces(files: Sequence[InputFile], json_key: str) -> Iterator[str]:
    """Lines of the inputs' documents, as sentencepiece wants them: not too long, no NUL, and no tab, which is
    a mark of its own there (a model encodes tabs as a byte).

    Raises:
        DataError: a document that cannot be used; file and line are named.
    """
    for batch in raw_batches(portions(files, "line"), [json_key], "line"):
        for document in decoded(batch, [json_key], 0):
            if document.problem:
                line_number = document.line + lines_before(batch.portion)
                raise DataError(f"{batch.portion.file.path}, line {line_number}: {document.problem}")
            if document.text is None:
                continue
            for line in document.text.replace("\t", "\n").replace("\0", "\n").splitlines():
                for start in range(0, len(line), PIECE_BYTES // 4):  # a character has at most 4 bytes
                    if line[start:].strip():
                        yield line[start : start + PIECE_BYTES // 4]


def train_sentencepiece(
    inputs: Sequence[str],
    output_prefix: str,
    vocab_size: int,
    *,
    json_key: str = "text",
    model_type: ModelType = "bpe",
    input_kind: Kind | None = None,
    max_sentences: int = 0,
) -> Path:
    """Trains a model and writes PREFIX.model (whole or not at all); returns its path.

    decode(encode(text)) is the text: no normalisation, no space added or removed, and bytes stand in for
    characters without a piece. Ids: 0 <unk>, 1 <s>, 2 </s>, 3 <pad>, 4-259 the bytes, then the pieces.

    Args:
        inputs: as those of `preprocess`.
        max_sentences: lines to train on, drawn by the library from all; 0: all lines, held in memory.

    Raises:
        DataError: unusable inputs, or a vocabulary too small or too large for the text.
    """
    files = find_inputs(inputs, [json_key], input_kind)
    smallest = SPECIAL_PIECES + BYTES + 1
    if vocab_size < smallest:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: {SPECIAL_PIECES} marks and {BYTES} bytes come first; "
            f"{max(512, smallest)} would work"
        )
    if max_sentences and max_sentences <= FEWEST_SENTENCES:
        raise DataError(
            f"--max-sentences {max_sentences} is too few for sentencepiece; {FEWEST_SENTENCES + 1} would work"
        )
    pieces = training_pieces(files, json_key)
    first = next(pieces, None)
    if first is None:
        raise DataError(f"--input {' '.join(inputs)} holds no text")

    problems: list[DataError] = []

    def all_pieces() -> Iterator[str]:
        yield first
        try:
            yield from pieces
        except DataError as error:  # the library would lose it
            problems.append(error)

    try:
        model = _trained(all_pieces(), vocab_size, model_type, max_sentences)
    except RuntimeError as error:
        if problems:
            raise problems[0] from None
        reason = str(error).rsplit("] ", 1)[-1].strip() or str(error)  # after the library's file, line and condition
        raise DataError(f"--vocab-size {vocab_size} does not fit this text: {reason}") from None
    if problems:
        raise problems[0]
    path = Path(f"{output_prefix}.model")
    _write(path, model)
    return path


def _trained(pieces: Iterator[str], vocab_size: int, model_type: ModelType, max_sentences: int) -> bytes:
    """The model's file. Raises RuntimeError of the library where the vocabulary does not fit the text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=pieces,
        model_writer=model,
        model_type=model_type,
        input_sentence_size=max_sentences,
        shuffle_input_sentence=max_sentences > 0,
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
    return model.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all. Raises DataError."""
    partial = Path(f"{path}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
