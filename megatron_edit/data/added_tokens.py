"""Tokens that the files beside a tokenizer.json or tokenizer.model add to it.

tokenizer_config.json may declare tokens (`added_tokens_decoder`: id -> token) that tokenizer.json lacks, or has with
other flags; transformers adds them in the order of their ids. Without that key it reads added_tokens.json (text -> id).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_edit.data.errors import DataError

CONFIG, LEGACY, SPECIAL_MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SHOWN = 4


def read_mapping(path: Path) -> dict[str, Any]:
    """The JSON mapping in `path`; empty without the file. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no mapping")
    return found


def declared_tokens(folder: Path) -> dict[int, dict[str, Any]]:
    """Declared tokens by id, as keywords of `tokenizers.AddedToken`, in the order of their ids. Raises DataError."""
    config = read_mapping(folder / CONFIG)
    if "added_tokens_decoder" in config:
        path, declared = folder / CONFIG, config["added_tokens_decoder"]
    else:
        path, legacy = folder / LEGACY, read_mapping(folder / LEGACY)
        special = _special(config) | _special(read_mapping(folder / SPECIAL_MAP))
        declared = {
            i: {"content": content, "special": content in special, "normalized": content not in special}
            for content, i in legacy.items()
        }
    try:
        found = {int(i): {key: value for key, value in dict(token).items() if not key.startswith("__")}
                 for i, token in declared.items()}  # fmt: skip
        if not all(isinstance(token["content"], str) for token in found.values()):
            raise TypeError("content is not text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: the added tokens cannot be read ({error!r})") from None
    return dict(sorted(found.items()))


def take_declared_tokens(backend: Any, folder: Path, file: Path) -> list[list[Any]]:
    """Gives the `tokenizers.Tokenizer` of `file` the declared tokens of `folder`; [id, content, flags] of what was new.

    Raises DataError for a token that would get another id than the declared one.
    """
    from tokenizers import AddedToken

    of_config = "added_tokens_decoder" in read_mapping(folder / CONFIG)
    where = folder / (CONFIG if of_config else LEGACY)
    added: list[list[Any]] = []
    own = {token.content: (i, token) for i, token in backend.get_added_tokens_decoder().items()}
    for i, flags in declared_tokens(folder).items():
        try:
            token = AddedToken(**flags)
        except TypeError as error:
            raise DataError(f"{where}: the added token {flags['content']!r} cannot be read ({error})") from None
        known = own.get(token.content)
        if known is not None and known[0] != i:
            raise DataError(f"{where} gives the token {token.content!r} the id {i}, {file} gives it {known[0]}")
        if known is not None and (not of_config or repr(known[1]) == repr(token)):
            continue
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != i:
            raise DataError(
                f"{where} gives the token {token.content!r} the id {i}, but behind the tokens of {file} its id would "
                f"be {found}: save the tokenizer anew with transformers, so that {file.name} holds all tokens"
            )
        added.append([i, token.content, repr(token)])
    return added


def check_sentencepiece(folder: Path, pieces: Mapping[str, int], file: Path) -> None:
    """Raises DataError for declared tokens that the sentencepiece model `file` lacks and that texts would have.

    Special ones are plain text here and are not missed.
    """
    lost = [
        f"{token['content']!r} ({i})"
        for i, token in declared_tokens(folder).items()
        if not token.get("special") and token["content"] not in pieces
    ]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise DataError(
            f"the files beside {file} add tokens that it does not have: {', '.join(lost[:_SHOWN])}{more}. Save the "
            "tokenizer with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)), and give that "
            "folder with its tokenizer.json as a HuggingFaceTokenizer"
        )


def _special(entries: Mapping[str, Any]) -> set[str]:
    """Texts of the special tokens of tokenizer_config.json or special_tokens_map.json."""
    named = [entries.get(role) for role in _ROLES]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        several = entries.get(key) or []
        named += several.values() if isinstance(several, dict) else several
    texts = (token.get("content") if isinstance(token, dict) else token for token in named)
    return {text for text in texts if isinstance(text, str)}
