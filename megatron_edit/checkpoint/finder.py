"""Which checkpoint is loaded: rank 0 chooses, all ranks look at its files, all take the same one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import FINAL, Candidate, CheckpointFolder, complete_checkpoint, is_checkpoint
from megatron_edit.checkpoint.manifest import MANIFEST, content_problem, read_manifest
from megatron_edit.ranks.collective import gather_lists, on_first_rank

_SHOWN = 8  # problems that are listed
_WITHOUT_FINAL = "--load-fallback would take the checkpoint that the pointer names, without the last sync"


def find_checkpoint(
    directory: str | Path,
    group: dist.ProcessGroup,
    *,
    step: int | None = None,
    fallback: bool = False,
    weights_only: bool = False,
    say: Callable[[str], None],
) -> Candidate | None:
    """The checkpoint to load from `directory`, a folder of checkpoints or one of them; None when there is none.

    Every file is read once, by one rank each, and its checksum compared. `step`: this iteration or none (--ckpt-step).
    `fallback`: go back to the one before a damaged one, with a loud line (--load-fallback). `weights_only`: `final/`
    is taken, where no later checkpoint is. Collective over `group`, all ranks. Raises CheckpointError, the same on all
    ranks, also where something is there and nothing can be used.
    """
    folder = CheckpointFolder(directory)
    candidates = _candidates(folder, step, fallback, weights_only)  # looked at by the first rank only
    rejected = ""
    candidate: Candidate | None = None
    while True:
        choice = on_first_rank(lambda: next(candidates, None), group)
        if choice is None:
            if candidate is not None:
                raise CheckpointError(f"{rejected}; {_help(folder, candidate, group, fallback=True)}")
            return None
        candidate, remark = choice
        if remark or rejected:
            say(f"*** {rejected or remark} ***\n*** falling back to {candidate.folder} ***")
        problems = _damage(candidate, group)
        if not problems:
            return candidate
        more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        rejected = "\n".join(problems[:_SHOWN]) + more
        if not fallback:
            raise CheckpointError(f"{rejected}; {_help(folder, candidate, group, fallback=False)}")


def _help(folder: CheckpointFolder, candidate: Candidate, group: dist.ProcessGroup, *, fallback: bool) -> str:
    """What can be done when the files of `candidate` are damaged; `fallback`: and those before it, too."""
    if candidate.folder == folder.directory:
        return "put back a copy of what is damaged, or give another checkpoint"
    if candidate.folder.name == FINAL and not fallback:
        return _WITHOUT_FINAL
    iteration = candidate.manifest.iteration
    return on_first_rank(lambda: folder.what_would_help(iteration, fallback=fallback), group)


def _candidates(
    folder: CheckpointFolder, step: int | None, fallback: bool, weights_only: bool
) -> Iterator[tuple[Candidate, str]]:
    directory = folder.directory
    if not is_checkpoint(directory):
        problem = ""
        if weights_only and step is None:
            try:
                if (final := folder.final_to_load()) is not None:
                    yield final, ""
            except CheckpointError as error:
                if not fallback:
                    raise CheckpointError(f"{error}; {_WITHOUT_FINAL}") from error
                problem = str(error)
        for candidate, remark in folder.to_load(step, fallback):
            yield candidate, remark or problem
        return
    candidate = complete_checkpoint(directory)
    if step is not None and candidate.manifest.iteration != step:
        raise CheckpointError(f"{directory} is iteration {candidate.manifest.iteration}, --ckpt-step asks for {step}")
    yield candidate, ""


def _damage(candidate: Candidate, group: dist.ProcessGroup) -> list[str]:
    """What all ranks together find wrong with the files.

    Ranks that see the same files read a part of them each. Copies on several machines are each looked at as a whole.
    """
    rank, folder = dist.get_rank(group), candidate.folder
    problems: list[str] = []
    identity: tuple[int, ...] = ()  # of the manifest's file: a copy has another one
    try:
        if read_manifest(folder) != candidate.manifest:
            raise CheckpointError(f"{folder} is another checkpoint than rank 0 sees")
        found = (folder / MANIFEST).stat()
        identity = (found.st_ino, found.st_mtime_ns)
    except (CheckpointError, OSError) as error:
        problems.append(
            f"rank {rank} on {socket.gethostname()}: {error}: --load must be a folder that all ranks share, or a full "
            "copy of it on each machine"
        )
    identities: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(identities, identity, group=group)
    peers = [other for other, theirs in enumerate(identities) if theirs == identity]
    largest_first = sorted(candidate.manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, entry in largest_first[peers.index(rank) :: len(peers)] if identity else ():
        if problem := content_problem(folder, name, entry):
            problems.append(problem)
    return gather_lists(problems, group)
