"""Packed documents: with --reset-attention-mask each is computed as if it stood alone, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_edit.data.datasets import number_documents, positions_in_documents
from megatron_edit.model.loss import document_attention_mask
from megatron_edit.testing.ranks import run_ranks
from megatron_edit.testing.tiny import rank_microbatches, tiny_config, tiny_global_batch, tiny_replica
from megatron_edit.train.step import TrainStep

EOD = 257
RESETS = ("document_ids", "reset_position_ids")


def packed(config: Any, iteration: int = 0, keys: tuple[str, ...] = RESETS) -> dict[str, torch.Tensor]:
    """A global batch in which every sample holds several documents, of other lengths in each sample."""
    batch = tiny_global_batch(config, iteration)
    tokens = batch["tokens"]
    tokens[tokens == EOD] = 0
    for row, sample in enumerate(tokens):
        sample[[3 + row, 12 + row, 13 + row]] = EOD  # the third document is an end id alone
    numbers = torch.stack([number_documents(sample, EOD) for sample in tokens])
    positions = torch.stack([positions_in_documents(sample) for sample in numbers])
    return batch | {key: value for key, value in zip(RESETS, (numbers, positions), strict=True) if key in keys}


def token_losses(rank: int, world_size: int, keys: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [S] of one packed sample, and of its documents computed one by one and laid end to end."""
    config = tiny_config(world_size)
    (chunk,) = tiny_replica(config).chunks
    sample = {key: value[:1] for key, value in packed(config, keys=keys).items()}

    def losses(tokens: torch.Tensor, labels: torch.Tensor, **masks: Any) -> torch.Tensor:
        return chunk(input_ids=tokens, labels=labels, **{"position_ids": None, "attention_mask": None, **masks})[0]

    ids = sample.get("document_ids")
    mask = None if ids is None else document_attention_mask(ids)
    together = losses(
        sample["tokens"], sample["labels"], position_ids=sample.get("reset_position_ids"), attention_mask=mask
    )
    cuts = number_documents(sample["tokens"][0], EOD)
    alone = [
        losses(sample["tokens"][:, cuts == document], sample["labels"][:, cuts == document])
        for document in range(int(cuts.max()) + 1)
    ]
    return together.detach(), torch.cat(alone).detach()


@pytest.mark.parametrize("keys", [RESETS, ("document_ids",), ("reset_position_ids",), ()], ids=str)
def test_a_packed_document_is_computed_as_if_alone(keys: tuple[str, ...]) -> None:
    """The mask alone is enough, as rotary attention sees distances only; positions alone are not."""
    ((together, alone),) = run_ranks(token_losses, 1, keys)
    difference = (together - alone).abs()
    assert difference[:4].max() < 1e-5, "the first document has nothing before it"
    if "document_ids" in keys:
        assert difference.max() < 1e-5
    else:
        assert difference[4:].max() > 1e-3


def test_positions_reach_the_rotary_embedding() -> None:
    """Without the mask, positions that start again change what is computed."""
    ((reset, _),), ((plain, _),) = (run_ranks(token_losses, 1, keys) for keys in (("reset_position_ids",), ()))
    assert (reset - plain)[4:].abs().max() > 1e-4


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "TP2 sequence parallel, recomputed": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "PP2 interleaved, selective": {
        "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
        "recompute_granularity": "selective",
    },
    "shard group of 2": {},
}  # fmt: skip


def one_step(rank: int, world_size: int, settings: dict[str, Any], keys: tuple[str, ...]) -> list[float]:
    """[loss sum, tokens, grad norm] of a step and of the next, summed over the ranks that see them."""
    config = tiny_config(world_size, **settings)
    replica = tiny_replica(config)
    step, numbers = TrainStep(replica), []
    for iteration in range(2):
        batch = packed(config, iteration, keys)
        outcome = step.run(rank_microbatches(config, replica.mesh, batch), 1e-3)
        counts = torch.stack([outcome.loss_sum, outcome.tokens.float()])
        if not replica.mesh.reports_loss:
            counts.zero_()
        torch.distributed.all_reduce(counts)
        assert outcome.grad_norm is not None
        numbers += [*counts.tolist(), outcome.grad_norm]
    return numbers


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return run_ranks(one_step, 1, {}, RESETS)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(layout: str, one_rank: list[float]) -> None:
    for numbers in run_ranks(one_step, 2, LAYOUTS[layout], RESETS):
        assert numbers == pytest.approx(one_rank, rel=2e-5)


def test_the_step_sees_the_difference(one_rank: list[float]) -> None:
    """The comparison above would pass if no layout looked at the masks."""
    assert run_ranks(one_step, 1, {}, ())[0] != pytest.approx(one_rank, rel=1e-4)
