"""The note beside an unfinished corpus from which the same command goes on after it was killed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_edit.corpora.indexed_writer import WriterState
from megatron_edit.corpora.inputs import STANDARD_INPUT


@dataclass(frozen=True)
class Position:
    """`documents` of the portion number `file` are used, and all portions before it."""

    file: int
    documents: int


@dataclass(frozen=True)
class Note:
    """What was safely written when the note was."""

    position: Position
    writers: list[WriterState]
    reports: list[dict[str, Any]]  # fields of CorpusReport
    finished: bool


class Journal:
    """PREFIX.progress.json. It belongs to one command: other inputs (by name, size, time), settings or another
    tokenizer make it void. What lies on standard input cannot be told again, so there it is not used."""

    def __init__(self, prefix: str, job: Any, tokenizer_fingerprint: str) -> None:
        self.path = Path(f"{prefix}.progress.json")
        self.is_unusable = any(file.path == STANDARD_INPUT for file in job.files)
        told = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
        told["files"] = [list(dataclasses.astuple(file)) for file in job.files]
        told["spec"] = tokenizer_fingerprint + (" parsing special tokens" if job.spec.parse_special_tokens else "")
        told["keys"] = list(job.keys)
        self.command: dict[str, Any] = told

    def read(self, log: Callable[[str], None]) -> Note | None:
        """The note, None when there is none that can be used; then what lies there will be written over."""
        if self.is_unusable:
            return None
        try:
            note = json.loads(self.path.read_text(encoding="utf-8"))
            other = [name for name in self.command if note["command"].get(name) != self.command[name]]
            if other:
                log(f"starting anew: {self.path} was written by a command with other {', '.join(other)}")
                return None
            writers = [WriterState(**state) for state in note["writers"]]
            found = Note(Position(**note["position"]), writers, note["reports"], note["finished"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log(f"starting anew: {self.path} cannot be read ({error!r})")
            return None
        missing = _missing(found)
        if missing:
            log(f"starting anew: {missing} is not there or shorter than {self.path} tells")
            return None
        return found

    def write(
        self, position: Position, writers: Sequence[WriterState], reports: Sequence[Any], *, finished: bool = False
    ) -> None:
        """Replaces the note."""
        note = Note(position, list(writers), [asdict(report) for report in reports], finished)
        partial = Path(f"{self.path}.partial")
        with open(partial, "w", encoding="utf-8") as stream:
            json.dump({"command": self.command, **asdict(note)}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _missing(note: Note) -> str:
    """A file that the note tells of and that is not as it tells."""
    for report, state in zip(note.reports, note.writers, strict=not note.finished):
        for suffix, size in ((".bin", 2 * state.tokens), (".lengths", 4 * state.sequences)):
            path = f"{report['prefix']}{suffix}.partial"
            if not os.path.exists(path) or os.path.getsize(path) < size:
                return path
    for report in note.reports if note.finished else []:
        if report["documents"] and not os.path.exists(f"{report['prefix']}.idx"):
            return f"{report['prefix']}.idx"
    return ""
