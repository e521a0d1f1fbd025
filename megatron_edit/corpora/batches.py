"""Raw documents to tokens: decoding, and long documents. The rules are told in preprocess.py."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_edit.corpora.indexed_writer import token_dtype
from megatron_edit.corpora.inputs import Portion, RawDocument, Reader, TextUnit
from megatron_edit.corpora.restart import Position
from megatron_edit.data.errors import DataError
from megatron_edit.data.tokenizers import Tokenizer, build_tokenizer, replace_surrogates

BATCH_BYTES = 1 << 18
LONG = 1 << 20  # characters; a document of more is encoded in pieces
_SINGLE_SPACE = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class TokenizerSpec:
    """What `build_tokenizer` needs; travels to the workers, which build their own."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    parse_special_tokens: bool = False

    def build(self) -> Tokenizer:
        return build_tokenizer(
            self.tokenizer_type, self.tokenizer_model, self.vocab_size, parse_special_tokens=self.parse_special_tokens
        )


@dataclass(frozen=True)
class RawBatch:
    """Documents of one file that are not yet decoded. `after`: where reading stands once they are used."""

    portion: Portion
    documents: list[RawDocument]
    after: Position
    bytes_read: int  # of all inputs, on disk

    @property
    def is_long(self) -> bool:
        """Whether it is one document too long for one call of a tokenizer."""
        return len(self.documents) == 1 and self.documents[0].size > LONG


class Document(NamedTuple):
    """A decoded document. text: None for a blank line, and where there is a problem."""

    line: int
    text: str | None
    replaced: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Piece:
    """A part of a long text of one key."""

    key_index: int
    text: str
    is_first: bool
    is_last: bool
    replaced: int  # in the whole document, told with its first piece
    special_tokens: frozenset[str] = frozenset()  # spelled in the whole document, likewise


@dataclass
class TokenBatch:
    """The documents of a batch for one key: ids one after the other, and lengths; what was left out.

    `marked`: documents that spell special tokens, `special_tokens`: documents that spell each of them.
    """

    tokens: np.ndarray
    lengths: list[int]
    skipped: int = 0
    replaced: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)  # line in the portion, what is wrong
    goes_on: bool = False  # the first length is the rest of the last document
    marked: int = 0
    special_tokens: Counter[str] = field(default_factory=Counter)

    def add_special_tokens(self, spelled: Collection[str]) -> None:
        """Of one document."""
        self.marked += bool(spelled)
        self.special_tokens.update(spelled)


def raw_batches(
    pieces: Sequence[Portion], keys: Sequence[str], text_unit: TextUnit, start: Position | None = None
) -> Iterator[RawBatch]:
    """All documents from `start` on in order, in batches of about BATCH_BYTES; none spans two files, and a long
    document has one of its own."""
    start = start or Position(0, 0)
    done = sum(portion.file.size for portion in pieces[: start.file])
    for index in range(start.file, len(pieces)):
        portion = pieces[index]
        reader = Reader(portion, keys, text_unit)
        taken, documents, size = 0, list[RawDocument](), 0
        for document in reader:
            taken += 1
            if index == start.file and taken <= start.documents:
                continue
            if documents and (size >= BATCH_BYTES or document.size > LONG):
                yield RawBatch(portion, documents, Position(index, taken - 1), done + reader.bytes_read)
                documents, size = [], 0
            documents.append(document)
            size += document.size
        if documents:
            yield RawBatch(portion, documents, Position(index, taken), done + reader.bytes_read)
        done += portion.file.size


def decoded(batch: RawBatch, keys: Sequence[str], key_index: int) -> Iterator[Document]:
    """The documents of a batch for the key `keys[key_index]`."""
    for raw in batch.documents:
        content = raw.content
        if not isinstance(content, bytes):
            cell = content[key_index]
            if cell is None:
                yield Document(raw.line, None, problem=f"no text in the column {keys[key_index]!r}")
                continue
            content = cell
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            # a text of several lines: the line of the file
            line = raw.line + content.count(b"\n", 0, error.start)
            yield Document(line, None, problem=f"no UTF-8 (byte {error.start + 1} of the document: {error.reason})")
            continue
        if batch.portion.file.kind == "jsonl":
            if is_blank(text):
                yield Document(raw.line, None)
                continue
            value = _json_text(text, keys[key_index])
            if isinstance(value, DataError):
                yield Document(raw.line, None, problem=str(value))
                continue
            text = value
        text, replaced = replace_surrogates(text)
        yield Document(raw.line, text, replaced)


def is_blank(text: str) -> bool:
    """Whether there is nothing but white space; makes no copy of a long text."""
    return not text or text.isspace()


def _json_text(line: str, key: str) -> str | DataError:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return DataError(f"no JSON ({error})")
    if isinstance(entry, dict) and isinstance(entry.get(key), str):
        return str(entry[key])
    found = f"keys {sorted(entry)}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
    if isinstance(entry, dict) and key in entry:
        found = f"{key!r} is a {type(entry[key]).__name__}"
    return DataError(f"no text under the key {key!r} ({found})")


def tokenize_batch(batch: RawBatch, keys: Sequence[str], tokenizer: Tokenizer, append_eod: bool) -> list[TokenBatch]:
    """Tokens of a batch for each key."""
    results = []
    dtype = token_dtype(tokenizer.vocab_size)
    for index in range(len(keys)):
        result = TokenBatch(np.empty(0, dtype), [])
        documents = []
        for document in decoded(batch, keys, index):
            if document.problem:
                result.problems.append((document.line, document.problem))
            elif document.text is not None and not is_blank(document.text):
                documents.append(document)
            elif document.text is not None:
                result.skipped += 1
        ids: list[int] = []
        for document, tokens in zip(
            documents, tokenizer.tokenize_batch([d.text or "" for d in documents]), strict=True
        ):
            if not tokens:
                result.skipped += 1
                continue
            if append_eod:
                assert tokenizer.eod_id is not None
                tokens.append(tokenizer.eod_id)
            ids += tokens
            result.lengths.append(len(tokens))
            result.replaced += document.replaced
            result.add_special_tokens(tokenizer.special_tokens_in(document.text or ""))
        result.tokens = np.array(ids, dtype=dtype)
        results.append(result)
    return results


def cut_long_text(text: str, uncut: re.Pattern[str] | None = None) -> Iterator[str]:
    """Pieces of at most LONG characters that are the text when joined; each but the first begins with a space that
    stands alone, where the second half of the piece before has one: there, tokenizers begin a new word anyway.

    uncut: no piece ends inside or right behind a match, nor in white space before one (a special token may take that).
    """
    start = 0
    while len(text) - start > LONG:
        end = start + LONG
        for match in _SINGLE_SPACE.finditer(text, end - LONG // 16, end):
            end = match.start()
        if end == start + LONG:  # text without such spaces
            line_end = text.rfind("\n", start + LONG // 2, end)
            end = end if line_end < 0 else line_end + 1
        for match in uncut.finditer(text, end - LONG // 16, end + LONG // 16) if uncut is not None else ():
            begin = match.start()
            while begin > start and text[begin - 1].isspace():
                begin -= 1
            if start < begin < end <= match.end():
                end = begin
                break
        yield text[start:end]
        start = end
    yield text[start:]


def long_document(
    batch: RawBatch, keys: Sequence[str], tokenizer: Tokenizer
) -> Iterator[Piece | list[TokenBatch]]:
    """The one document of a batch: pieces of its text for each key; or, of what is not text, what became of it."""
    for index in range(len(keys)):
        (document,) = decoded(batch, keys, index)
        text = document.text
        if text is None or is_blank(text):
            nothing = [TokenBatch(np.empty(0, np.uint16), []) for _ in keys]
            if document.problem:
                nothing[index].problems.append((document.line, document.problem))
            nothing[index].skipped = int(text is not None)
            yield nothing
            continue
        start = 0
        spelled = frozenset(tokenizer.special_tokens_in(text))
        for piece in cut_long_text(text, tokenizer.special_pattern if tokenizer.parse_special_tokens else None):
            end = start + len(piece)
            first = start == 0
            yield Piece(
                index, piece, is_first=first, is_last=end == len(text),
                replaced=document.replaced if first else 0, special_tokens=spelled if first else frozenset(),
            )  # fmt: skip
            start = end


def tokenize_piece(piece: Piece, keys: Sequence[str], tokenizer: Tokenizer, append_eod: bool) -> list[TokenBatch]:
    """Tokens of a piece for its key, and nothing for the others."""
    dtype = token_dtype(tokenizer.vocab_size)
    results = [TokenBatch(np.empty(0, dtype), []) for _ in keys]
    tokens = tokenizer.tokenize(piece.text)
    if append_eod and piece.is_last:
        assert tokenizer.eod_id is not None
        tokens.append(tokenizer.eod_id)
    results[piece.key_index] = TokenBatch(
        np.array(tokens, dtype=dtype), [len(tokens)], replaced=piece.replaced, goes_on=not piece.is_first
    )
    results[piece.key_index].add_special_tokens(piece.special_tokens)
    return results
