"""What differs between the releases of megatron-core that are taken, 0.16.1 to 0.19: all of it stands here.

A difference is found by looking at the thing itself (an attribute, a parameter of a signature), not by a version
number, so that a release in between, or one not yet known, is served by what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist


def mlp_parts(layer: Any) -> Any:
    """The `MLPSubmodules` of a layer's spec: in a ModuleSpec up to 0.17, later an argument of a partial function."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Gradients of this rank's shard that count in the norm, of one part of the optimizer: 0.19 has a shorter name."""
    found = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return list(found())


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
            raise RuntimeError(f"megatron-core's process group {name} {ranks} reaches beyond the replica {list(replica)}")
        setattr(groups, name, ours[inside])
