"""One rank decides or acts, all follow: results and errors of the first rank of a group, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def on_first_rank(action: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """`action()` on the first rank of `group` (which is rank 0 of the world); returned, or raised, on all."""
    message: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            message[0] = action()
        except Exception as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0, group=group)
    if message[1] is not None:
        raise message[1]
    result: Result = message[0]
    return result


def gather_lists(mine: list[str], group: dist.ProcessGroup) -> list[str]:
    """The lists of all ranks in order of rank, one after another, on all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return [line for lines in gathered for line in lines]
