"""Real text that every machine with Python has: what tools/build_quickstart_corpus.py does."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics

from megatron_edit.data.errors import DataError

# Not prose or code of general interest, or generated.
LEFT_OUT_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "__pycache__", "pydoc_data", "lib2to3", "encodings",
    "idlelib", "turtledemo", "ensurepip", "__phello__",
}  # fmt: skip
LONGEST_DOCUMENT = 200_000  # bytes


def standard_library_files() -> list[tuple[str, Path]]:
    """(name below the standard library's folder, path), sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_FOLDERS]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files)


def split_docstrings(source: str) -> tuple[str, str]:
    """All docstrings of a module as one text, and the source without them.

    Apart, so that no sentence is in the corpus twice: it could be in training and validation.
    """
    lines = source.splitlines()
    docstrings: list[str] = []
    removed: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        title = getattr(node, "name", "")
        docstrings.append(f"{title}\n{text}" if title else text)
        statement = node.body[0]
        removed.update(range(statement.lineno - 1, statement.end_lineno or statement.lineno))
    code = "\n".join(line for number, line in enumerate(lines) if number not in removed)
    return "\n\n".join(docstrings), code


def quickstart_documents() -> Iterator[tuple[str, str]]:
    """(name, text): first the language reference, then docstrings, then source; each sorted by name."""
    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    sources = []
    for name, path in standard_library_files():
        try:
            docstrings, code = split_docstrings(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue  # a file made for another encoding or to be broken
        sources.append((f"source {name}", code))
        yield f"docstrings {name}", docstrings
    yield from sources


def build_quickstart_corpus(output: str, max_bytes: int) -> tuple[int, int]:
    """Writes JSON lines with the key "text"; returns the number of documents and bytes.

    English first, source for the rest of `max_bytes` (of text). Lines are in the order of a hash of their
    names, so that training and validation, cut in file order, are of the same kind. The same interpreter
    gives the same file.

    Raises:
        DataError: a size too small for any document, an output that cannot be written.
    """
    chosen: list[tuple[str, str]] = []
    total = 0
    for name, text in quickstart_documents():
        size = len(text.encode("utf-8", errors="replace"))
        if not text.strip() or size > LONGEST_DOCUMENT:
            continue
        if total + size > max_bytes:
            break
        chosen.append((name, text))
        total += size
    if not chosen:
        raise DataError(f"--max-bytes {max_bytes} is too small for any document; 4000000 would work")
    chosen.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    partial = Path(f"{output}.partial-{os.getpid()}")
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8", newline="\n") as stream:
            for _, text in chosen:
                stream.write(json.dumps({"text": text}) + "\n")
        os.replace(partial, output)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DataError(f"--output {output} cannot be written: {error.strerror}") from None
    return len(chosen), total
