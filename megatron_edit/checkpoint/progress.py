"""What the checkpoint of --load has behind it, for the first lines of a run. No torch."""

from __future__ import annotations

from pathlib import Path

from megatron_edit.checkpoint.errors import CheckpointError
from megatron_edit.checkpoint.folders import Candidate, CheckpointFolder, complete_checkpoint, is_checkpoint
from megatron_edit.config.arithmetic import Done
from megatron_edit.config.schema import CheckpointConfig


def done_by(settings: CheckpointConfig) -> Done | None:
    """Iterations and samples of the checkpoint that a run with `settings` goes on from; None where there is none.

    Its files are not read: what is wrong with them is said when they are loaded.
    """
    if settings.load is None or settings.finetune:
        return None
    try:
        directory = Path(settings.load)
        candidate: Candidate | None
        if is_checkpoint(directory):
            candidate = complete_checkpoint(directory)
        else:
            choices = CheckpointFolder(directory).to_load(settings.ckpt_step, settings.load_fallback)
            candidate, _ = next(choices, (None, ""))
    except CheckpointError:
        return None
    if candidate is None or "consumed_samples" not in candidate.manifest.content:
        return None
    content = candidate.manifest.content
    beyond = (content.get("reserves") or {}).get("samples_beyond_iteration", 0)
    return Done(candidate.manifest.iteration, int(content["consumed_samples"]), int(beyond))
