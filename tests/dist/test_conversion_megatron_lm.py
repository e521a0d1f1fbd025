"""A checkpoint as Megatron-LM's training loop writes it, made with megatron-core's own GPTModel and dist_checkpointing:
the converted weights compute what that model computes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.platform import get_platform

get_platform("cpu").initialize()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_edit.convert.command import main as convert  # noqa: E402
from megatron_edit.convert.errors import ConversionError  # noqa: E402
from megatron_edit.convert.megatron import MegatronWeights  # noqa: E402
from megatron_edit.convert.megatron_lm import MegatronLMWeights  # noqa: E402
from megatron_edit.convert.open import open_weights  # noqa: E402
from megatron_edit.inference.model import InferenceModel  # noqa: E402
from megatron_edit.parallel.layout import Layout  # noqa: E402
from megatron_edit.parallel.mesh import build_mesh  # noqa: E402
from megatron_edit.testing.ranks import run_ranks  # noqa: E402

VOCABULARY, PADDED = 301, 384

MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_query_groups": 4,
    "kv_channels": 16, "qk_layernorm": True, "add_qkv_bias": True,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {  # as Megatron-LM's parser names them
    **MODEL, "group_query_attention": True, "swiglu": True, "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 500000,
    "rotary_percent": 1.0, "max_position_embeddings": 128, "seq_length": 128, "norm_epsilon": 1e-5, "vocab_size": None,
    "padded_vocab_size": PADDED, "num_experts": None, "use_rope_scaling": False, "params_dtype": torch.float32,
    "rank": 0, "lr": 1e-4,
}  # fmt: skip


class Enumeration:
    """Such objects stand among the arguments; their code must not be needed, nor run."""


def save(
    rank: int, world_size: int, folder: Path, tp: int, pp: int, metadata: dict[str, Any]
) -> torch.Tensor | None:
    """Writes the checkpoint; on one rank logits [1, 40, V] where the whole model is on it."""
    mesh = build_mesh(Layout(tp=tp, pp=pp), get_platform("cpu"), timeout_seconds=60)
    mesh.seed_dropout(1)
    config = TransformerConfig(
        **MODEL, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, perform_initialization=False,
        masked_softmax_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    model = GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=128, pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=500000, pg_collection=mesh.process_groups,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * rank + number)
            alike = torch.Generator().manual_seed(number)  # what every tensor parallel rank holds
            own = alike if "layernorm" in name or "norm" in name else generator
            parameter.copy_(torch.randn(parameter.shape, generator=own) * 0.1 + (parameter.dim() == 1))
    checkpoint = folder / "iter_0000007"
    if rank == 0:
        checkpoint.mkdir(parents=True)
    dist.barrier()
    state = {
        "model": model.sharded_state_dict(metadata={"dp_cp_group": mesh.shard_group, **metadata}),
        "args": argparse.Namespace(**ARGUMENTS, strange=Enumeration()),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }
    dist_checkpointing.save(state, str(checkpoint))
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    if world_size > 1:
        return None
    tokens = torch.arange(40)[None]
    mask = torch.ones(1, 1, 40, 40).triu(1).bool()
    with torch.no_grad():
        return model(tokens, torch.arange(40)[None], mask)[..., :VOCABULARY]


def logits(rank: int, world_size: int, folder: Path) -> torch.Tensor:
    mesh = build_mesh(Layout(), get_platform("cpu"), timeout_seconds=60)
    return InferenceModel(open_weights(folder), mesh, torch.float32).logits(torch.arange(40)[None])


def converted(source: Path, target: Path) -> MegatronWeights:
    words = ["megatron-lm-to-megatron", "--input", source, "--output", target, "--vocab-size", VOCABULARY, "--quiet"]
    assert convert([str(word) for word in words]) == 0
    return MegatronWeights(target)


@pytest.mark.parametrize("metadata", [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}], ids=str)
def test_converted_weights_compute_the_same(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """The three ways in which megatron-core names layers and gated projections."""
    (expected,) = run_ranks(save, 1, tmp_path / "run", 1, 1, metadata)
    weights = converted(tmp_path / "run", tmp_path / "ours")
    assert weights.vocab_size == VOCABULARY and weights.model.rotary_base == 500000.0
    (found,) = run_ranks(logits, 1, tmp_path / "ours")
    assert (found - expected).abs().max() < 1e-5


def test_shards_of_other_layouts_are_joined(tmp_path: Path) -> None:
    run_ranks(save, 4, tmp_path / "run", 2, 2, {}, timeout_s=120)
    weights = converted(tmp_path / "run", tmp_path / "ours")
    source = MegatronLMWeights(tmp_path / "run", vocab_size=VOCABULARY)
    assert asdict(source.model) == asdict(weights.model)
    state = {name: torch.zeros(shape) for name, shape in source.shapes.items()}
    for name, tensor in state.items():
        tensor.copy_(weights.read(name))
        assert torch.equal(tensor, source.read(name))
    # the first rank's rows of a layer that another stage holds: rank 2, parameter by parameter
    rows = state["decoder.layers.3.mlp.linear_fc2.weight"]
    assert rows.shape == (64, 96) and not torch.equal(rows, state["decoder.layers.2.mlp.linear_fc2.weight"])


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(save, 1, tmp_path / "run", 1, 1, {})
    common = tmp_path / "run" / "iter_0000007" / "common.pt"

    def message(**changes: Any) -> str:
        values = {**ARGUMENTS, "vocab_size": VOCABULARY, **changes}
        torch.save({"args": argparse.Namespace(**values), "iteration": 7}, common)
        with pytest.raises(ConversionError) as failure:
            MegatronLMWeights(tmp_path / "run")
        return str(failure.value)

    assert "give --vocab-size" in message(vocab_size=None) and "384 rows" in message(vocab_size=None)
    assert "num_experts 8" in message(num_experts=8)
    assert "position_embedding_type 'learned_absolute'" in message(position_embedding_type="learned_absolute")
    assert "decoder.layers.self_attention.q_layernorm.weight [4, 16] is not expected" in message(qk_layernorm=False)
    assert "4 layers, expected 5" in message(num_layers=5)
    assert "expected [160, 64]" in message(ffn_hidden_size=80)
    assert "output_layer.weight [384, 64] is not expected" in message(untie_embeddings_and_output_weights=False)
    torch.save({"iteration": 7}, common)
    with pytest.raises(ConversionError, match=r"--config FILE\.yaml"):
        MegatronLMWeights(tmp_path / "run", vocab_size=VOCABULARY)
    lines = [f"{name}: {value}" for name, value in MODEL.items()]
    (tmp_path / "model.yaml").write_text("\n".join([*lines, "untie_embeddings_and_output_weights: true"]))
    weights = MegatronLMWeights(tmp_path / "run", vocab_size=VOCABULARY, config=tmp_path / "model.yaml")
    assert weights.model.num_query_groups == 4
    (tmp_path / "run" / "iter_0000007" / ".metadata").unlink()
    words = ["megatron-lm-to-megatron", "--input", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    assert convert(words) == 2 and "torch_dist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
