"""Which checkpoint is loaded: rank 0 chooses, all ranks look at its files, all take the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_edit.checkpoint.collective import gather_lists, on_first_rank
from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import Candidate, CheckpointFolder, complete_checkpoint
from megatron_edit.checkpoint.manifest import MANIFEST, content_problem, read_manifest

_SHOWN = 8  # problems that are listed


def find_checkpoint(
    directory: str | Path,
    group: dist.ProcessGroup,
    *,
    step: int | None = None,
    fallback: bool = False,
    say: Callable[[str], None],
) -> Candidate | None:
    """The checkpoint to load from `directory`, a folder of checkpoints or one of them; None when there is none.

    Every file is read once, by one rank each, and its checksum compared. `step`: this iteration or none (--ckpt-step).
    `fallback`: go back to the one before a damaged one, with a loud line (--load-fallback). Collective over `group`,
    all ranks. Raises CheckpointError, the same on all ranks.
    """
    candidates = _candidates(Path(directory), step, fallback)  # looked at by the first rank only
    rejected = ""
    while True:
        choice = on_first_rank(lambda: next(candidates, None), group)
        if choice is None:
            if rejected:
                raise CheckpointError(rejected)
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
            raise CheckpointError(f"{rejected}\n--load-fallback would take the complete checkpoint before it")


def _candidates(directory: Path, step: int | None, fallback: bool) -> Iterator[tuple[Candidate, str]]:
    if not (directory / MANIFEST).exists():
        yield from CheckpointFolder(directory).to_load(step, fallback)
        return
    candidate = complete_checkpoint(directory)
    if step is not None and candidate.manifest.iteration != step:
        raise CheckpointError(f"{directory} is iteration {candidate.manifest.iteration}, --ckpt-step asks for {step}")
    yield candidate, ""


def _damage(candidate: Candidate, group: dist.ProcessGroup) -> list[str]:
    """What all ranks together find wrong with the files."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    problems = []
    try:
        if read_manifest(candidate.folder) != candidate.manifest:
            problems.append(f"rank {rank} sees another {candidate.folder} than rank 0: is it a shared folder?")
    except CheckpointError as error:
        problems.append(f"rank {rank}: {error}")
    largest_first = sorted(candidate.manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, entry in largest_first[rank::world_size]:
        if problem := content_problem(candidate.folder, name, entry):
            problems.append(problem)
    return gather_lists(problems, group)
