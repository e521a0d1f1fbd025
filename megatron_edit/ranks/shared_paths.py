"""Folders and files that all ranks must share: found out at the start, not when a checkpoint is to be read."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_edit.config.schema import Config, ConfigError
from megatron_edit.config.settings import flag_of, value_of
from megatron_edit.ranks.shared import ranks_that_do_not_share

_WRITTEN_BY_SEVERAL = {
    "save": "all ranks write one checkpoint together",
    "log_sample_ids": "one rank of each replica writes to it",
}
_WRITTEN_BY_RANK_0 = ("metrics_file", "tensorboard_dir")
_SHOWN = 4  # ranks that are named


def check_shared_paths(config: Config, group: dist.ProcessGroup) -> list[str]:
    """What the user should know. Collective over `group`, all ranks.

    Raises ConfigError, the same on all ranks, where several ranks write to what they do not share.
    """
    problems, remarks, timeout = [], [], config.parallel.distributed_timeout_seconds
    for name in (*_WRITTEN_BY_SEVERAL, *_WRITTEN_BY_RANK_0):
        path = value_of(config, name)
        ranks = ranks_that_do_not_share(Path(path), group, timeout_seconds=timeout) if path is not None else []
        if not ranks:
            continue
        who = ", ".join(ranks[:_SHOWN]) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
        if name in _WRITTEN_BY_SEVERAL:
            problems.append(
                f"{flag_of(name)} {path} is not one place for all ranks: {_WRITTEN_BY_SEVERAL[name]}, and what rank 0 "
                f"writes there is not seen by {who}. Disks of their own are not supported: give a path on a file "
                "system that all nodes share, and give it as an absolute one"
            )
        else:
            remarks.append(
                f"{flag_of(name)} {path} is written by rank 0 alone and not seen by {who}: a restart with rank 0 on "
                "another machine would not go on with it"
            )
    if problems:
        raise ConfigError(problems)
    return remarks
