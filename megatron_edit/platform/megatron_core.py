"""What differs between the releases of megatron-core that are known, 0.16.1 to 0.19: all of it stands here.

A difference is found by looking at the thing itself (an attribute, a parameter of a signature), not by a version
number, so that a release in between, or one not yet known, is served by what it has.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

OLDEST, NEWEST = "0.16.1", "0.19"  # what differs between them is known
TESTED = "0.16"  # the whole suite has passed with it; with the later ones `make smoke`


def installed_release() -> str | None:
    """Version of the installed megatron-core, without importing it; None where it is not an installed package."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def release_notes(version: str | None) -> list[str]:
    """A line for rank 0 when `version` is not one that all tests have passed with; nothing is refused for it."""
    if version is None:
        return []
    known = _numbers(OLDEST) <= _numbers(version) and _numbers(version)[:2] <= _numbers(NEWEST)
    if known and _numbers(version)[:2] <= _numbers(TESTED):
        return []
    what = "only a part of the tests has passed with it" if known else "it is not known to this release"
    return [
        f"megatron-core {version}: {what} (all with {OLDEST}; what differs is known up to {NEWEST}). It runs, but "
        "compare the first losses and gradient norms with those of a tested one"
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: (0, 19, 2) of "0.19.2+cu130"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def mlp_parts(layer: Any) -> Any:
    """The `MLPSubmodules` of a layer's spec: in a ModuleSpec up to 0.17, later an argument of a partial function."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Gradients of this rank's shard that count in the norm, of one part of the optimizer: 0.19 has a shorter name."""
    found = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return list(found())


def layout_arguments(
    parameters: list[torch.nn.Parameter], bucket_size: Any, shard_group_size: int, ddp_config: Any
) -> dict[str, Any]:
    """Arguments for megatron-core's DDP that say where each parameter lies in its buffer.

    From 0.18 on it wants to be told, and warns when it has to ask the optimizer itself; before, it lays them out by
    its own bucket size. The places are the same.
    """
    from megatron.core.distributed import DistributedDataParallel  # late: they take seconds, and few callers ask
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if "full_param_layout" not in signature(DistributedDataParallel.__init__).parameters:
        return {}
    layout = DistributedOptimizer.compute_full_param_layout(parameters, bucket_size, shard_group_size, ddp_config)
    return {"full_param_layout": layout}


def end_at_the_replica(groups: Any, replica: Sequence[int], narrow: Sequence[dist.ProcessGroup]) -> None:
    """Replaces every group of megatron-core's collection that reaches beyond `replica`, ranks, by one of `narrow`.

    What the collection holds grows from release to release, and the data parallel groups in it span all replicas. One
    left as it is counts the tokens of all replicas and divides this one's gradient by them: no error, and Adam hides
    it (0.19: `dp_cp_gtp_remat`, which the schedule prefers to `dp_cp`).

    Raises:
        RuntimeError: a group beyond the replica of which no group in `narrow` is the part inside.
    """
    ours = {tuple(dist.get_process_group_ranks(group)): group for group in narrow}
    for name, group in list(vars(groups).items()):
        if name == "inter_dist_opt" or not isinstance(group, dist.ProcessGroup):  # it joins replicas; used by none
            continue
        ranks = dist.get_process_group_ranks(group)
        inside = tuple(rank for rank in ranks if rank in replica)
        if len(inside) == len(ranks):
            continue
        if inside not in ours:
            raise RuntimeError(
                f"megatron-core's process group {name} {ranks} reaches beyond the replica {list(replica)}"
            )
        setattr(groups, name, ours[inside])
