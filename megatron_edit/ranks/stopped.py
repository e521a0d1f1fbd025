"""A stop on request is not undone by a launcher that restarts the run (torchrun --max-restarts).

When all ranks have saved, rank 0 leaves a mark in the --save folder. A first start removes it; a restart by the same
launcher that finds it has nothing to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MARK = "stopped.json"


def leave_mark(save: str | None, reason: str, environment: Mapping[str, str]) -> None:
    """Where a restart can be: after a stop for `reason` whose checkpoint is complete."""
    if save is None or environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    with suppress(OSError):  # the run has ended well without it
        Path(save, MARK).write_text(json.dumps({"run": environment.get("TORCHELASTIC_RUN_ID", ""), "reason": reason}))


def stopped_before(save: str | None, environment: Mapping[str, str]) -> str | None:
    """The reason for which the run that this is a restart of had stopped. A first start removes the mark."""
    if save is None:
        return None
    path = Path(save, MARK)
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    try:
        mark = json.loads(path.read_text())
        return str(mark["reason"]) if mark["run"] == environment.get("TORCHELASTIC_RUN_ID", "") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def restart_notes(save: str | None, environment: Mapping[str, str]) -> list[str]:
    """What a user of --max-restarts should know."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0":
        return []
    notes = []
    if environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        notes.append(
            f"--max-restarts {restarts}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, else most restarts "
            "fail: they meet the keys of the start before in torchrun's store"
        )
    if save is None:
        notes.append(f"--max-restarts {restarts} without --save: every restart begins at iteration 1")
    return notes
