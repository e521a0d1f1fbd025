"""A tiny Llama on any layout, for tests: the fixture of most tests, and one call that builds a replica."""

from __future__ import annotations

from typing import Any

import torch

from megatron_edit.config.configure import resolve
from megatron_edit.config.resolved import ResolvedConfig
from megatron_edit.config.schema import Config
from megatron_edit.config.settings import with_values
from megatron_edit.parallel.mesh import Mesh
from megatron_edit.platform import get_platform
from megatron_edit.sync.engine import Observer
from megatron_edit.train.replica import Replica, build_replica, mesh_of

VOCABULARY = 259  # of the byte tokenizer

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "seq_length": 32,
    "untie_embeddings_and_output_weights": True,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 6,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "edit_sync_interval": 3,
    "edit_num_replicas": 1,
    "mock_data": True,
    "device": "cpu",
    "seed": 1234,
    "distributed_timeout_seconds": 60,
}


def tiny_config(world_size: int, **settings: Any) -> ResolvedConfig:
    """The fixture with `settings` changed, resolved for `world_size` ranks of one node."""
    config = with_values(Config(), {**TINY, **settings}, "flag")
    return resolve(config, world_size, world_size, "cpu")


def tiny_mesh(config: ResolvedConfig) -> Mesh:
    """The mesh of `config` over the ranks that run; collective."""
    platform = get_platform("cpu")
    platform.initialize()
    return mesh_of(config, platform)


def tiny_replica(config: ResolvedConfig, observer: Observer | None = None) -> Replica:
    """Mesh and replica of `config`; collective."""
    return build_replica(config, tiny_mesh(config), VOCABULARY, observer)


def tiny_global_batch(config: ResolvedConfig, iteration: int, *, masked: bool = False) -> dict[str, torch.Tensor]:
    """All samples of `iteration`, over all replicas, [B, S] each; it depends on nothing but the batch's size.

    `masked`: a pseudo-random third of the tokens does not count, unevenly over samples.
    """
    generator = torch.Generator().manual_seed(1_000_003 * iteration + 7)
    shape = (config.training.global_batch_size, config.model.seq_length + 1)
    samples = torch.randint(0, VOCABULARY, shape, generator=generator)
    mask = torch.ones(shape[0], shape[1] - 1)
    if masked:
        mask = (torch.rand(mask.shape, generator=generator) < torch.linspace(0.3, 1.0, shape[0])[:, None]).float()
    return {"tokens": samples[:, :-1].contiguous(), "labels": samples[:, 1:].contiguous(), "loss_mask": mask}


def rank_microbatches(
    config: ResolvedConfig, mesh: Mesh, batch: dict[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """This rank's microbatches of a global batch: replicas take equal slices in order, their shards again."""
    rows = batch["tokens"].shape[0] // (mesh.num_replicas * mesh.layout.dp)
    start = (mesh.replica * mesh.layout.dp + mesh.place.dp) * rows
    size = config.training.micro_batch_size
    return [
        {key: value[first : first + size] for key, value in batch.items()}
        for first in range(start, start + rows, size)
    ]


def tiny_batch(
    config: ResolvedConfig, mesh: Mesh, iteration: int, *, masked: bool = False
) -> list[dict[str, torch.Tensor]]:
    """This rank's microbatches of `tiny_global_batch`."""
    return rank_microbatches(config, mesh, tiny_global_batch(config, iteration, masked=masked))
