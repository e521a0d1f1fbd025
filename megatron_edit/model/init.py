"""Initial weights that do not depend on the layout.

Every tensor has a generator of its own, seeded by the seed and the tensor's canonical name, and is drawn
whole, without vocabulary padding, in fp32 on the CPU; each rank then takes its shard. So one seed gives one
model for every tensor, pipeline and data parallel size and every number of replicas, and a tied matrix is the
same on both stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_edit.config.resolved import ResolvedModel
from megatron_edit.model.names import canonical_name
from megatron_edit.model.sharding import tensor_parallel_slice
from megatron_edit.tables.parameters import full_parameter_shapes, kind_of


@torch.no_grad()
def initialize_weights(
    chunks: Sequence[nn.Module], model: ResolvedModel, vocab_size: int, seed: int, tp_group: dist.ProcessGroup
) -> None:
    """Writes the initial weights of `seed` into the parameters of this rank's chunks."""
    shapes = full_parameter_shapes(model, vocab_size)
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = canonical_name(chunk, local_name)
            full = initial_tensor(name, shapes[name], model, seed)
            shard = tensor_parallel_slice(full, name, model, tp_group.rank(), tp_group.size())
            assert shard.shape == parameter.shape, (name, shard.shape, parameter.shape)
            parameter.copy_(shard)


def initial_tensor(name: str, shape: Sequence[int], model: ResolvedModel, seed: int) -> Tensor:
    """The full initial tensor, fp32 on the CPU: norms 1, biases 0, matrices normal.

    Standard deviation init_method_std, and init_method_std / sqrt(2 num_layers) for the two projections of a
    layer that write into the residual stream (as in Megatron-LM).
    """
    if kind_of(name) == "norm":
        return torch.ones(*shape)
    if kind_of(name) == "bias":
        return torch.zeros(*shape)
    std = model.init_method_std
    if name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
        std /= math.sqrt(2 * model.num_layers)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(*shape).normal_(0.0, std, generator=generator)
