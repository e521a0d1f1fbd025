"""The model's parts in one process: shapes, shards, names, initial weights, frequencies, norm, activation, loss."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.config.schema import ModelConfig, ParallelConfig
from megatron_edit.platform import get_platform

get_platform("cpu").initialize()

from megatron_edit.model import transformer_engine  # noqa: E402
from megatron_edit.model.attention import _SplitAndRotate  # noqa: E402
from megatron_edit.model.init import initial_tensor  # noqa: E402
from megatron_edit.model.llama import transformer_config  # noqa: E402
from megatron_edit.model.loss import loss_function, vocabulary_parallel_cross_entropy  # noqa: E402
from megatron_edit.model.names import canonical_name  # noqa: E402
from megatron_edit.model.norm import RMSNorm  # noqa: E402
from megatron_edit.model.rope import rotary_inverse_frequencies  # noqa: E402
from megatron_edit.model.sharding import tensor_parallel_join, tensor_parallel_slice  # noqa: E402
from megatron_edit.model.swiglu import SwiGLU  # noqa: E402
from megatron_edit.tables.parameters import (  # noqa: E402
    full_parameter_shapes,
    module_key,
    padded_vocabulary_size,
    parameter_count,
)

TINY = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4, kv_channels=8,
    seq_length=32, untie_embeddings_and_output_weights=True, add_qkv_bias=True,
)  # fmt: skip
VOCABULARY = 259


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("part", ["add_qkv_bias", "add_attention_output_bias", "qk_layernorm"])
@pytest.mark.parametrize("present", [False, True])
def test_parameter_count_is_the_formula(untied: bool, part: str, present: bool):
    """V H (2 V H untied) + L (H (N + 2 G) D + H N D + 3 H F + 2 H, and (N + 2 G) D with a QKV bias, H with an output
    bias, 2 D with norms of queries and keys) + H."""
    model = replace(TINY, untie_embeddings_and_output_weights=untied, **{part: present})
    hidden, ffn, qkv, query = 64, 128, (8 + 2 * 4) * 8, 8 * 8
    layer = hidden * qkv + hidden * query + 3 * hidden * ffn + 2 * hidden + model.add_qkv_bias * qkv
    layer += model.add_attention_output_bias * hidden + model.qk_layernorm * 2 * 8
    assert parameter_count(model, VOCABULARY) == (1 + untied) * VOCABULARY * hidden + 4 * layer + hidden


def test_parameter_count_of_known_models():
    llama2_7b = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
        kv_channels=128, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    assert parameter_count(llama2_7b, 32000) == 6_738_415_616  # as the model's card says
    llama3_8b = replace(llama2_7b, ffn_hidden_size=14336, num_query_groups=8)
    assert parameter_count(llama3_8b, 128256) == 8_030_261_248


def test_layers_that_do_not_divide_are_never_dropped():
    """Field report B17: the checks of the config refuse it for users; here it is a programmer error."""
    five = replace(TINY, num_layers=5)
    with pytest.raises(AssertionError, match="5 layers do not divide over 2 stages"):
        transformer_config(
            five, ParallelConfig(pipeline_model_parallel_size=2), params_dtype=torch.float32, device_type="cpu"
        )
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    with pytest.raises(AssertionError, match="3 layers of a stage do not divide into chunks of 2"):
        transformer_config(replace(TINY, num_layers=6), parallel, params_dtype=torch.float32, device_type="cpu")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_slices_join_to_the_full_tensor(tp_size: int):
    generator = torch.Generator().manual_seed(0)
    for name, shape in full_parameter_shapes(TINY, VOCABULARY).items():
        full = torch.randn(shape, generator=generator)
        shards = [tensor_parallel_slice(full, name, TINY, rank, tp_size) for rank in range(tp_size)]
        assert len({shard.shape for shard in shards}) == 1, name
        assert torch.equal(tensor_parallel_join(shards, name, VOCABULARY), full), name


def test_gate_and_up_are_cut_apart_and_padding_is_zero():
    gate, up = torch.ones(128, 64), torch.full((128, 64), 2.0)
    shard = tensor_parallel_slice(torch.cat((gate, up)), "decoder.layers.0.mlp.linear_fc1.weight", TINY, 1, 2)
    assert shard[:64].eq(1).all() and shard[64:].eq(2).all()
    rows = tensor_parallel_slice(torch.ones(VOCABULARY, 64), "output_layer.weight", TINY, 1, 2)
    assert rows.shape == (256, 64) and rows[:3].eq(1).all() and rows[3:].eq(0).all()
    empty = tensor_parallel_slice(torch.ones(VOCABULARY, 64), "output_layer.weight", TINY, 3, 4)
    assert empty.shape == (128, 64) and empty.eq(0).all()


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tp_size", "padded"),
    [(259, 128, 1, 384), (259, 128, 2, 512), (256, 128, 2, 256), (32000, 128, 8, 32768), (5, 1, 1, 5)],
)
def test_padded_vocabulary_size(vocab_size: int, divisible_by: int, tp_size: int, padded: int):
    assert padded_vocabulary_size(vocab_size, divisible_by, tp_size) == padded


def test_canonical_names_and_module_keys():
    layers = [SimpleNamespace(layer_number=3), SimpleNamespace(layer_number=4)]
    model = torch.nn.Module()
    model.decoder = SimpleNamespace(layers=layers)  # type: ignore[assignment]
    model.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    wrapped = torch.nn.Module()
    wrapped.module = model
    expected = {
        "module.decoder.layers.1.mlp.linear_fc1.weight": "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ("decoder.layers.2.input_layernorm.weight"),
        "module.output_layer.weight": "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    }
    for name, canonical in expected.items():
        assert canonical_name(wrapped, name) == canonical
        assert canonical_name(model, name) == canonical
    model.share_embeddings_and_output_weights = False  # type: ignore[assignment]
    assert canonical_name(model, "output_layer.weight") == "output_layer.weight"

    keys = [module_key(name) for name in full_parameter_shapes(TINY, VOCABULARY)]
    assert list(dict.fromkeys(keys)) == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def test_initial_tensors():
    shapes = full_parameter_shapes(TINY, VOCABULARY)
    first = {name: initial_tensor(name, shape, TINY, 1) for name, shape in shapes.items()}
    for name, tensor in first.items():
        assert torch.equal(tensor, initial_tensor(name, shapes[name], TINY, 1)), name
        if name.endswith("norm.weight"):
            assert tensor.eq(1).all(), name
        elif name.endswith("bias"):
            assert tensor.eq(0).all(), name
        else:
            small = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = 0.02 / math.sqrt(8) if small else 0.02
            assert abs(tensor.std().item() / std - 1) < 0.05, name
            assert not torch.equal(tensor, initial_tensor(name, shapes[name], TINY, 2)), name
    same_shape = [first[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] for layer in range(4)]
    assert not any(torch.equal(same_shape[0], other) for other in same_shape[1:])
    # One draw, written down: a change of the rule would start every user's runs from other weights.
    assert first["embedding.word_embeddings.weight"][0, 0].item() == pytest.approx(-0.0061499071, rel=1e-4)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
@pytest.mark.parametrize("original", [64, 8192])
def test_rotary_frequencies_are_those_of_transformers(scaling: str, original: int):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = replace(
        TINY, kv_channels=64, rotary_base=500000.0, rope_scaling_type=scaling, rope_scaling_factor=8.0,
        rope_scaling_low_freq_factor=1.0, rope_scaling_high_freq_factor=4.0,
        rope_scaling_original_max_position_embeddings=original,
    )  # fmt: skip
    found = rotary_inverse_frequencies(model)
    assert found.dtype == torch.float32 and found.shape == (32,)
    if scaling == "none":
        expected = 1 / 500000.0 ** (torch.arange(0, 64, 2).double() / 64)
    else:
        config = LlamaConfig(
            hidden_size=64 * 8, num_attention_heads=8, head_dim=64, max_position_embeddings=original * 8,
            rope_parameters={
                "rope_type": scaling, "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": original,
            },
        )  # fmt: skip
        expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"))
        assert attention_factor == 1.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


def test_rotary_frequencies_refuse_nonsense():
    with pytest.raises(ValueError, match=r"rope-scaling-factor 0\.5"):
        rotary_inverse_frequencies(replace(TINY, rope_scaling_type="linear", rope_scaling_factor=0.5))
    bad = replace(TINY, rope_scaling_type="llama3", rope_scaling_low_freq_factor=4.0)
    with pytest.raises(ValueError, match=r"low-freq-factor 4\.0 .*high-freq-factor 4\.0"):
        rotary_inverse_frequencies(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype):
    config = SimpleNamespace(params_dtype=dtype, use_cpu_initialization=True, sequence_parallel=True)
    norm = RMSNorm(config, 48, eps=1e-3)
    assert norm.weight.sequence_parallel and norm.weight.dtype == dtype
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    x = torch.randn(5, 3, 48, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 48, generator=generator).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    found = (y, *torch.autograd.grad(y, (x, norm.weight), grad))
    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    y64 = x64 / torch.sqrt(x64.square().mean(-1, keepdim=True) + 1e-3) * weight64
    expected = (y64, *torch.autograd.grad(y64, (x64, weight64), grad.double()))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **tolerance)


def test_swiglu():
    x = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    activation = SwiGLU(config=None)  # type: ignore[arg-type]
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(activation(x), functional.silu(gate) * up)
    assert torch.autograd.gradcheck(activation, (x,))


@pytest.mark.parametrize(("groups", "per_group"), [(4, 1), (2, 3), (1, 2)])
def test_split_and_rotate(groups: int, per_group: int):
    sequence, batch, size = 6, 2, 8
    shape = (sequence, batch, groups, per_group + 2, size)
    mixed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(sequence, 1, 1, 1, size // 2, dtype=torch.float64)

    def ours(mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _SplitAndRotate.apply(mixed, angles.cos(), angles.sin())

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    query, key, value = ours(mixed)
    expected_query = rotated(mixed[..., :per_group, :]).flatten(2, 3)
    torch.testing.assert_close(query, expected_query)
    torch.testing.assert_close(key, rotated(mixed[..., per_group : per_group + 1, :]).squeeze(3))
    torch.testing.assert_close(value, mixed[..., -1, :])
    assert torch.autograd.gradcheck(ours, (mixed,))


ONE_RANK = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


@pytest.mark.parametrize("columns", [VOCABULARY, 384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(columns: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(7, 3, columns, generator=generator)).to(dtype)
    labels = torch.randint(VOCABULARY, (7, 3), generator=generator)
    weights = torch.rand(7, 3, generator=generator)
    reference = logits.double().requires_grad_()
    valid = reference[..., :VOCABULARY].flatten(0, 1)
    expected = functional.cross_entropy(valid, labels.flatten(), reduction="none")
    (expected_grad,) = torch.autograd.grad(expected, reference, weights.flatten().double())

    leaf = logits.clone().requires_grad_()
    losses, none = vocabulary_parallel_cross_entropy(leaf * 1, labels, VOCABULARY, ONE_RANK)  # type: ignore[arg-type]
    assert none is None
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected.view(7, 3), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(losses, leaf, weights)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
    assert grad[..., VOCABULARY:].eq(0).all()


@pytest.mark.parametrize("columns", [VOCABULARY, 384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_z_loss(columns: int, dtype: torch.dtype):
    """c logsumexp^2 over the real ids beside the cross entropy, both with the gradient of plain PyTorch."""
    coefficient = 0.03
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(7, 3, columns, generator=generator) + 5).to(dtype)
    labels = torch.randint(VOCABULARY, (7, 3), generator=generator)
    weights = torch.rand(2, 7, 3, generator=generator)  # of losses and of z-losses
    reference = logits.double().requires_grad_()
    valid = reference[..., :VOCABULARY]
    cross_entropy = functional.cross_entropy(valid.flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
    expected = torch.stack([cross_entropy, coefficient * torch.logsumexp(valid, -1) ** 2])
    (expected_grad,) = torch.autograd.grad(expected, reference, weights.double())

    leaf = logits.clone().requires_grad_()
    found = vocabulary_parallel_cross_entropy(leaf * 1, labels, VOCABULARY, ONE_RANK, coefficient)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.stack(found).double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(torch.stack(found), leaf, weights)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
    assert grad[..., VOCABULARY:].eq(0).all()


def test_the_loss_with_z_losses_is_their_sum_and_the_reported_one_is_not():
    losses = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.1, 0.2], [0.3, 0.4]]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    with _NoHostWait():
        loss_sum, tokens, report = loss_function(mask, losses)
    assert loss_sum.item() == pytest.approx(8.8) and tokens.item() == 3
    assert report["lm loss"].tolist() == pytest.approx([8.0, 3.0, 0.8]) and not report["lm loss"].requires_grad
    loss_sum.backward()
    assert torch.equal(losses.grad, mask.float().expand(2, 2, 2))


class _NoHostWait(TorchDispatchMode):
    """Fails on the operations with which the host reads a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_loss_function_sums_and_counts_without_waiting():
    losses = torch.tensor([[1.0, 2.0], [3.0, math.nan]]).nan_to_num(4.0).requires_grad_()
    mask = torch.tensor([[1, 0], [1, 1]])
    with _NoHostWait():
        loss_sum, tokens, report = loss_function(mask, losses)
    assert (loss_sum.item(), tokens.item(), tokens.dtype) == (8.0, 3, torch.int32)
    assert report["lm loss"].tolist() == [8.0, 3.0] and not report["lm loss"].requires_grad
    loss_sum.backward()
    assert torch.equal(losses.grad, mask.float())


def test_a_fully_masked_share_adds_nothing():
    losses = torch.rand(2, 3, requires_grad=True)
    loss_sum, tokens, report = loss_function(torch.zeros(2, 3), losses)
    loss_sum.backward()
    assert loss_sum.item() == 0 and tokens.item() == 0 and losses.grad.eq(0).all()
    assert report["lm loss"].tolist() == [0.0, 0.0]


def test_transformer_engine_absent_bare_and_present(tmp_path, monkeypatch):
    assert transformer_engine.transformer_engine_state() == "absent"
    transformer_engine.check_transformer_engine("local")
    with pytest.raises(transformer_engine.TransformerEngineError, match="--transformer-impl local"):
        transformer_engine.check_transformer_engine("transformer_engine")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('empty package')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert transformer_engine.transformer_engine_state() == "bare"
    for impl in ("local", "transformer_engine"):
        with pytest.raises(transformer_engine.TransformerEngineError, match="pip uninstall transformer-engine"):
            transformer_engine.check_transformer_engine(impl)
    (tmp_path / "transformer_engine_torch.py").write_text("")
    assert transformer_engine.transformer_engine_state() == "present"
    transformer_engine.check_transformer_engine("transformer_engine")


def test_the_bare_package_is_named_before_megatron_core_fails_on_it(tmp_path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('empty package')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", "import megatron_edit.model.llama"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert "TransformerEngineError: The package transformer-engine is installed without" in run.stderr
