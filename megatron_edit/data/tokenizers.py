"""Text to token ids and back.

One rule for every tokenizer: `tokenize` returns the ids of the text and nothing else. Begin and end ids are
added by the caller (`tools/preprocess_data.py --append-eod`), never by a tokenizer's own template. A special token such
as `</s>` that a text spells is ordinary text, and becomes the id of that token only with `parse_special_tokens`.

Half of a surrogate pair, which JSON can spell and UTF-8 cannot, is read as U+FFFD.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from megatron_edit.data.added_tokens import CONFIG, SPECIAL_MAP, check_sentencepiece, read_mapping, take_declared_tokens
from megatron_edit.data.errors import DataError

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> tuple[str, int]:
    """Replaces each lone surrogate by U+FFFD; returns the text and how many there were."""
    return _SURROGATE.subn("\ufffd", text)


class Tokenizer(ABC):
    """Text to ids. A special id that the tokenizer does not have is None.

    `vocab_size` is the largest id + 1, special and added ids included (before any padding of the model's
    vocabulary). `fingerprint` is a sha256 in hex of all that decides which ids a text becomes, but for
    `parse_special_tokens`, with which the ids mean the same. `special_tokens`: ids of those that a text can spell, by
    their text.
    """

    name: str
    vocab_size: int
    bos_id: int | None = None
    eod_id: int | None = None
    pad_id: int | None = None
    fingerprint: str
    special_tokens: Mapping[str, int] = MappingProxyType({})
    parse_special_tokens = False

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Any of the special tokens, the longest first. Grouped by their first two characters: a text is searched 10
        times as fast, and most vocabularies have hundreds that begin alike."""
        groups: dict[str, list[str]] = {}
        for token in sorted(self.special_tokens, key=len, reverse=True):
            groups.setdefault(token[:2], []).append(re.escape(token[2:]))
        longest_first = sorted(groups.items(), key=lambda group: -len(group[0]))
        parts = [f"{re.escape(begin)}(?:{'|'.join(rests)})" for begin, rests in longest_first]
        return re.compile("|".join(parts)) if parts else None

    def special_tokens_in(self, text: str) -> set[str]:
        """Those that `text` spells."""
        if self.special_pattern is None:
            return set()
        return {match.group() for match in self.special_pattern.finditer(text)}

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, without begin and end ids."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, where the library is faster with several at a time."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special ids give no text."""

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise DataError(f"{self.name}: id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return [int(i) for i in ids]

    def _plain_ids(self, text: str, encode: Callable[[str], list[int]], marks: Mapping[int, str]) -> list[int]:
        """`encode(text)`; where that has the id of a mark, the mark's characters are encoded in two parts."""
        ids = encode(text)
        if marks.keys().isdisjoint(ids):
            return ids
        pattern = "|".join(re.escape(mark) for mark in sorted(marks.values(), key=len, reverse=True))
        cuts = [0, *(match.start() + 1 for match in re.finditer(pattern, text)), len(text)]
        ids = [i for start, end in itertools.pairwise(cuts) for i in encode(text[start:end])]
        forged = marks.keys() & set(ids)
        if forged:
            raise DataError(f"{self.name} turns plain text into its special ids {sorted(forged)}")
        return ids


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0-255, then bos 256, eod 257, pad 258: vocabulary 259. Needs no file."""

    name = "ByteTokenizer"
    vocab_size, bos_id, eod_id, pad_id = 259, 256, 257, 258
    fingerprint = hashlib.sha256(b"ByteTokenizer bos=256 eod=257 pad=258").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return list(replace_surrogates(text)[0].encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(i for i in self._check_ids(ids) if i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text that already is ids with blanks between them; for mock data. As in Megatron the end id comes on
    top: `--vocab-size 100` gives ids 0-99, eod 100 and a vocabulary of 101."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 1")
        self.vocab_size, self.eod_id = vocab_size + 1, vocab_size
        self.fingerprint = hashlib.sha256(f"NullTokenizer {vocab_size}".encode()).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = self._check_ids([int(field) for field in text.split()])
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"NullTokenizer reads ids with blanks between them: {error}") from None
        if self.eod_id in ids:
            raise DataError(f"NullTokenizer: id {self.eod_id} is the end id and cannot be in a text")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in self._check_ids(ids) if i != self.eod_id)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file; ids are those of the library's own encode.

    Its special tokens are the control symbols, which the library never finds in a text. With `parse_special_tokens`,
    what lies between two of them is encoded as a text of its own. A model that begins a text with a blank, as Llama 2's
    does, so begins each part with one; its tokenizer.json does the same.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str | Path, parse_special_tokens: bool = False) -> None:
        import sentencepiece

        model = _read_file(Path(model_file), "--tokenizer-model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"--tokenizer-model {model_file} is not a sentencepiece model ({error})") from None
        self.vocab_size = self._processor.get_piece_size()
        pieces = {self._processor.id_to_piece(i): i for i in range(self.vocab_size)}
        check_sentencepiece(Path(model_file).parent, pieces, Path(model_file))
        special = (self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id())
        self.bos_id, self.eod_id, self.pad_id = (i if i >= 0 else None for i in special)
        # Control pieces never match text, but a model may declare its marks as user-defined pieces, which do.
        self._marks = {i: self._processor.id_to_piece(i) for i in special if i >= 0}
        control = [i for i in range(self.vocab_size) if self._processor.is_control(i)]
        self.special_tokens = {self._processor.id_to_piece(i): i for i in {*control, *self._marks}}
        self.parse_special_tokens = parse_special_tokens
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        text = replace_surrogates(text)[0]
        if self.parse_special_tokens:
            return self._parsed_ids(text)
        return self._plain_ids(text, self._processor.encode, self._marks)

    def _parsed_ids(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self.special_pattern.finditer(text) if self.special_pattern is not None else ():
            ids += self._processor.encode(text[end : match.start()])
            ids.append(self.special_tokens[match.group()])
            end = match.end()
        return ids + list(self._processor.encode(text[end:]))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = [replace_surrogates(text)[0] for text in texts]
        if self.parse_special_tokens:
            return [self._parsed_ids(text) for text in texts]
        found: list[list[int]] = self._processor.encode(texts, num_threads=1)
        return [
            ids if self._marks.keys().isdisjoint(ids) else self.tokenize(text)
            for text, ids in zip(texts, found, strict=True)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(self._check_ids(ids)))


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, or the folder that holds it.

    The special ids are those that `tokenizer_config.json` or `special_tokens_map.json` beside it name as
    bos_token, eos_token and pad_token, and tokens that these files add belong to it (see `added_tokens`). The file's
    template, truncation and padding are not used. Its special tokens are these three and the added tokens that are
    called special; other added tokens are found in every text.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, path: str | Path, parse_special_tokens: bool = False) -> None:
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(
                "--tokenizer-type HuggingFaceTokenizer needs the package tokenizers: pip install -e '.[hf]'"
            ) from None
        path = Path(path)
        tokenizer_file = path / "tokenizer.json" if path.is_dir() else path
        if path.is_dir() and not tokenizer_file.exists():
            hint = " (for its tokenizer.model use SentencePieceTokenizer)"
            raise DataError(
                f"--tokenizer-model {path} holds no tokenizer.json"
                + (hint if (path / "tokenizer.model").exists() else "")
            )
        content = _read_file(tokenizer_file, "--tokenizer-model")
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"--tokenizer-model {tokenizer_file} is not a tokenizer.json ({error})") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        taken = take_declared_tokens(self._backend, tokenizer_file.parent, tokenizer_file)
        marks = _special_marks(tokenizer_file.parent)
        ids = {role: self._backend.token_to_id(mark) for role, mark in marks.items()}
        missing = [f"{role} {marks[role]!r}" for role, mark_id in ids.items() if mark_id is None]
        if missing:
            raise DataError(f"{tokenizer_file} has no id for {', '.join(missing)} of the files beside it")
        self.bos_id, self.eod_id, self.pad_id = ids.get("bos"), ids.get("eos"), ids.get("pad")
        self._marks = {i: marks[role] for role, i in ids.items() if i is not None}
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.special_tokens |= {mark: i for i, mark in self._marks.items()}
        # Special tokens are read as plain text wherever a text spells them, or parsed as the file declares each.
        for mark in self._marks.values():
            declared = any(token.content == mark and token.special for token in added.values())
            if not (parse_special_tokens and declared):
                self._backend.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
        self._backend.encode_special_tokens = not parse_special_tokens
        self.parse_special_tokens = parse_special_tokens
        # Ids may have gaps, so this is not the number of entries.
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        others = json.dumps(marks, sort_keys=True) + (json.dumps(taken) if taken else "")
        self.fingerprint = hashlib.sha256(content + others.encode()).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        def encode(part: str) -> list[int]:
            return list(self._backend.encode(part, add_special_tokens=False).ids)

        text = replace_surrogates(text)[0]
        return encode(text) if self.parse_special_tokens else self._plain_ids(text, encode, self._marks)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = [replace_surrogates(text)[0] for text in texts]
        # "fast": without offsets; not in every release that is allowed
        encode = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        found = encode(texts, add_special_tokens=False)
        lists = [encoding.ids for encoding in found]
        if self.parse_special_tokens:
            return lists
        return [
            ids if self._marks.keys().isdisjoint(ids) else self.tokenize(text)
            for text, ids in zip(texts, lists, strict=True)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        plain = [i for i in self._check_ids(ids) if i not in self._marks]
        return str(self._backend.decode(plain, skip_special_tokens=False))


def _special_marks(folder: Path) -> dict[str, str]:
    """The marks of the roles bos, eos and pad; tokenizer_config.json wins over special_tokens_map.json."""
    marks: dict[str, str] = {}
    for name in (CONFIG, SPECIAL_MAP):
        entries = read_mapping(folder / name)
        for role in ("bos", "eos", "pad"):
            entry = entries.get(f"{role}_token")
            mark = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(mark, str) and mark:
                marks.setdefault(role, mark)
    return marks


def _read_file(path: Path, flag: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}") from None
    if not content:
        raise DataError(f"{flag} {path} is empty")
    return content


# Megatron's names for the same tokenizers. Its Llama2Tokenizer puts a begin id before each text; here no
# tokenizer adds ids (see the top of this file).
ALIASES = {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    *,
    parse_special_tokens: bool = False,
) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size name.

    `parse_special_tokens` does nothing to one whose special tokens have no text.

    Raises:
        DataError: unknown type, missing or broken file, a flag that the type lacks or does not take.
    """
    kind = ALIASES.get(tokenizer_type, tokenizer_type)
    if kind not in TOKENIZER_TYPES:
        known = ", ".join((*TOKENIZER_TYPES, *ALIASES))
        raise DataError(f"--tokenizer-type {tokenizer_type} is unknown; known are {known}")
    takes_file = kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer")
    if takes_file and not tokenizer_model:
        raise DataError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if not takes_file and tokenizer_model:
        raise DataError(f"--tokenizer-type {tokenizer_type} takes no --tokenizer-model")
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise DataError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    tokenizer: Tokenizer
    if kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "SentencePieceTokenizer":
        tokenizer = SentencePieceTokenizer(str(tokenizer_model), parse_special_tokens)
    else:
        tokenizer = HuggingFaceTokenizer(str(tokenizer_model), parse_special_tokens)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size} is below the tokenizer's {tokenizer.vocab_size}: leave the flag out, or give "
            "more for a model with rows that no token uses"
        )
    return tokenizer
