"""The model over ranks: equal to transformers' Llama, and the same loss, gradients and weights in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.config.schema import ModelConfig, ParallelConfig
from megatron_edit.platform import get_platform

get_platform("cpu").initialize()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402

from megatron_edit.model.init import initial_tensor, initialize_weights  # noqa: E402
from megatron_edit.model.llama import build_model_chunks, transformer_config  # noqa: E402
from megatron_edit.model.loss import forward_step  # noqa: E402
from megatron_edit.model.names import canonical_name  # noqa: E402
from megatron_edit.tables.parameters import EMBEDDING  # noqa: E402
from megatron_edit.model.sharding import gather_full_parameters, local_parameter_count  # noqa: E402
from megatron_edit.tables.parameters import (  # noqa: E402
    full_parameter_shapes,
    parameter_count,
    partition_dim,
)
from megatron_edit.parallel.layout import Layout  # noqa: E402
from megatron_edit.parallel.mesh import build_mesh  # noqa: E402
from megatron_edit.testing.ranks import run_ranks  # noqa: E402

VOCABULARY = 259
SAMPLES, MICRO_BATCH = 8, 2

TINY = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=2, kv_channels=8,
    seq_length=32, untie_embeddings_and_output_weights=True,
)  # fmt: skip
TIED = replace(TINY, untie_embeddings_and_output_weights=False)


@dataclass
class Result:
    """What one rank reports; gradients and weights are full tensors, equal on all ranks."""

    losses: list[float]
    grad_norms: list[float]
    initial: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of the first iteration
    weights: dict[str, torch.Tensor]  # after the last
    replicated: dict[str, torch.Tensor]  # this rank's copies of what every TP rank holds, after the last
    embedding: list[torch.Tensor]  # this rank's embedding shard, initial and after the last; [] without one
    parameters: int
    padding: float  # largest absolute weight of a padded row, after the last iteration


def train(
    rank: int,
    world_size: int,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    iterations: int = 1,
    dtype: torch.dtype = torch.float32,
    clip_grad: float = 1e9,
    adam_eps: float = 1e-8,
) -> Result:
    """Trains on fixed samples with megatron-core's own data parallelism and distributed optimizer."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layout = Layout.from_world(world_size, num_replicas=1, tp=tp, pp=pp)
    config = transformer_config(model, parallel, params_dtype=dtype, device_type="cpu")
    mesh = build_mesh(
        layout,
        get_platform("cpu"),
        timeout_seconds=60,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
    )
    mesh.seed_dropout(1)
    groups = mesh.process_groups
    chunks = build_model_chunks(model, config, VOCABULARY, groups)
    initialize_weights(chunks, model, VOCABULARY, 1234, groups.tp)
    parameters = torch.tensor(local_parameter_count(chunks, VOCABULARY, groups.tp))
    for group in (groups.tp, groups.pp):
        dist.all_reduce(parameters, group=group)

    def gather(read: Any = lambda p: p.detach().float().clone()) -> dict[str, torch.Tensor]:
        return gather_full_parameters(chunks, VOCABULARY, groups.tp, groups.pp, read)

    embedding = [
        p for chunk in chunks for name, p in chunk.named_parameters() if canonical_name(chunk, name) == EMBEDDING
    ]
    embedding_before = [p.detach().clone() for p in embedding]
    initial = gather()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
        grad_reduce_in_fp32=True,
    )  # fmt: skip
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0, pg_collection=groups)
        for i, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.1, adam_beta2=0.95, adam_eps=adam_eps, clip_grad=clip_grad,
            bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        wrapped,
        use_gloo_process_groups=False,
        pg_collection=groups,
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    config.no_sync_func = [ddp.no_sync for ddp in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync

    losses, grad_norms, gradients = [], [], {}
    for iteration in range(iterations):
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        batch = microbatches(iteration, mesh.place.dp, layout.dp, model.seq_length)
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batch) for _ in wrapped] if len(wrapped) > 1 else iter(batch),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(batch),
            seq_length=model.seq_length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
            pg_collection=groups,
            p2p_communicator=P2PCommunicator(groups.pp, config) if pp > 1 else None,
        )
        total = sum((report["lm loss"] for report in reports), torch.zeros(2))
        for group in (groups.dp_cp, groups.pp):
            dist.all_reduce(total, group=group)
        losses.append((total[0] / total[1]).item())
        if iteration == 0 and layout.dp == 1:
            gradients = gather(lambda p: p.main_grad.clone())
        succeeded, grad_norm, _ = optimizer.step()
        assert succeeded
        grad_norms.append(float(grad_norm))
    for ddp in wrapped:
        ddp.disable_forward_pre_hook(param_sync=True)
    return Result(
        losses, grad_norms, initial, gradients, gather(),
        {
            canonical_name(chunk, name): p.detach().clone()
            for chunk in chunks for name, p in chunk.named_parameters()
            if partition_dim(canonical_name(chunk, name)) is None
        },
        embedding_before + [p.detach().clone() for p in embedding],
        int(parameters),
        largest_padding(chunks, groups.tp.rank()),
    )  # fmt: skip


def microbatches(iteration: int, dp_rank: int, dp_size: int, seq_length: int) -> list[dict[str, torch.Tensor]]:
    """This data parallel rank's share of an iteration's samples; the loss counts for most tokens, unevenly."""
    generator = torch.Generator().manual_seed(iteration)
    samples = torch.randint(VOCABULARY, (SAMPLES, seq_length + 1), generator=generator)
    mask = (torch.rand(SAMPLES, seq_length, generator=generator) < torch.linspace(0.2, 1, SAMPLES)[:, None]).float()
    share = SAMPLES // dp_size
    return [
        {
            "tokens": samples[rows, :-1].contiguous(),
            "labels": samples[rows, 1:].contiguous(),
            "loss_mask": mask[rows],
        }
        for start in range(dp_rank * share, (dp_rank + 1) * share, MICRO_BATCH)
        for rows in [slice(start, start + MICRO_BATCH)]
    ]


def largest_padding(chunks: list[Any], tp_rank: int) -> float:
    largest = 0.0
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                valid = max(VOCABULARY - tp_rank * p.shape[0], 0)
                largest = max(largest, p[valid:].abs().max().item() if valid < p.shape[0] else 0.0)
    return largest


def run(world_size: int, model: ModelConfig, parallel: ParallelConfig, **options: Any) -> list[Result]:
    return run_ranks(partial(train, **options), world_size, model, parallel)


_references: dict[Any, Result] = {}


def reference(model: ModelConfig, **options: Any) -> Result:
    """The same training on one rank; computed once for all layouts."""
    key = (model, tuple(sorted(options.items(), key=str)))
    if key not in _references:
        _references[key] = run(1, model, ParallelConfig(), **options)[0]
    return _references[key]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Largest difference of each tensor against the largest value of the expected one."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max().item()
        assert difference <= tolerance * max(tensor.abs().max().item(), 1e-3), (name, difference)


LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2-sequence-parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-interleaved": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    "tp2-pp2-sequence-parallel": (
        4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "sequence-parallel-full-recompute": (
        2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full",
                "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "block-recompute": (
        1, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ),
    "selective-recompute-tp2": (2, {"tensor_model_parallel_size": 2, "recompute_granularity": "selective"}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [TINY, TIED], ids=["untied", "tied"])
def test_loss_gradients_and_initial_weights_are_those_of_one_rank(layout: str, model: ModelConfig):
    world_size, settings = LAYOUTS[layout]
    expected = reference(model)
    for found in run(world_size, model, ParallelConfig(**settings)):
        assert found.initial.keys() == full_parameter_shapes(model, VOCABULARY).keys()
        for name, tensor in expected.initial.items():
            assert torch.equal(found.initial[name], tensor), name
        assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
        assert_same(found.gradients, expected.gradients, 1e-5)
        assert found.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=1e-5)
        assert found.parameters == parameter_count(model, VOCABULARY)
        assert found.padding == 0


SHARED_GROUPS = {
    "tp4": (TINY, 4, {"tensor_model_parallel_size": 4}),
    "one-group-tp2": (replace(TINY, num_query_groups=1), 2, {"tensor_model_parallel_size": 2}),
    "tp4-sequence-parallel-all-features": (
        replace(TINY, add_qkv_bias=True, add_attention_output_bias=True, qk_layernorm=True, kv_channels=16),
        4, {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    ),
    "pp2-all-features": (
        replace(TINY, add_qkv_bias=True, add_attention_output_bias=True, qk_layernorm=True, kv_channels=16),
        2, {"pipeline_model_parallel_size": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED_GROUPS)
def test_more_ranks_than_query_groups_and_optional_parts_follow_one_rank(case: str):
    """Field report B42: ranks that share a group, against one rank; copies of what all ranks hold stay equal."""
    model, world_size, settings = SHARED_GROUPS[case]
    expected = reference(model, iterations=3)
    results = run(world_size, model, ParallelConfig(**settings), iterations=3)
    for found in results:
        assert found.losses == pytest.approx(expected.losses, abs=2e-5)
        assert_same(found.gradients, expected.gradients, 1e-5)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
        assert found.parameters == parameter_count(model, VOCABULARY)
    for other in results[1 : settings.get("tensor_model_parallel_size", 1)]:
        for name, tensor in results[0].replicated.items():
            assert torch.equal(other.replicated[name], tensor), name


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2-sequence-parallel", "dp2"])
def test_ten_iterations_follow_one_rank_and_copies_stay_equal(layout: str):
    """Field report B09."""
    world_size, settings = LAYOUTS.get(layout, (2, {}))
    expected = reference(TINY, iterations=10)
    results = run(world_size, TINY, ParallelConfig(**settings), iterations=10)
    for found in results:
        assert found.losses == pytest.approx(expected.losses, abs=2e-5)
    tp = settings.get("tensor_model_parallel_size", 1)
    for first in range(0, world_size, tp):
        for other in results[first + 1 : first + tp]:
            for name, tensor in results[first].replicated.items():
                assert torch.equal(other.replicated[name], tensor), name


@pytest.mark.parametrize("model", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2-sequence-parallel"])
def test_one_gradient_norm_and_the_same_clipped_update(model: ModelConfig, layout: str):
    """Field report B14. A large epsilon makes Adam's first update proportional to the clipped gradient."""
    world_size, settings = LAYOUTS[layout]
    true_norm = reference(model).grad_norms[0]
    full = math.sqrt(sum(g.double().square().sum().item() for g in reference(model).gradients.values()))
    assert true_norm == pytest.approx(full, rel=1e-5)
    options = {"clip_grad": true_norm / 2, "adam_eps": 1.0}
    expected = reference(model, **options)
    unclipped = reference(model, adam_eps=1.0)
    for found in run(world_size, model, ParallelConfig(**settings), **options):
        assert found.grad_norms[0] == pytest.approx(true_norm, rel=1e-4)
        for name, weight in expected.weights.items():
            update = weight - expected.initial[name]
            difference = (found.weights[name] - weight).abs().max().item()
            assert difference <= 1e-3 * update.abs().max().item() + 1e-8, name
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert not torch.allclose(expected.weights[name], unclipped.weights[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("layout", ["pp2", "pp2-interleaved", "tp2-pp2-sequence-parallel"])
def test_tied_matrix_is_the_same_on_both_stages(layout: str):
    world_size, settings = LAYOUTS[layout]
    results = run(world_size, TIED, ParallelConfig(**settings), iterations=3)
    tp = settings.get("tensor_model_parallel_size", 1)
    for first, last in zip(results[:tp], results[-tp:], strict=True):
        before, after = first.embedding
        assert torch.equal(last.embedding[0], before) and torch.equal(last.embedding[1], after)
        assert not torch.equal(before, after)


@pytest.mark.parametrize(("world_size", "divisible_by"), [(1, 1), (1, 512), (2, 2), (2, 256)])
def test_vocabulary_padding_changes_nothing(world_size: int, divisible_by: int):
    """259 ids in 259, 512, 260 (one padded row) and 512 rows, where the second rank has 3 ids and 253 padded."""
    expected = reference(TIED, iterations=3)
    model = replace(TIED, make_vocab_size_divisible_by=divisible_by)
    parallel = ParallelConfig(tensor_model_parallel_size=world_size)
    for found in run(world_size, model, parallel, iterations=3):
        assert found.losses == pytest.approx(expected.losses, abs=1e-5)
        assert_same(found.gradients, expected.gradients, 1e-5)
        assert found.padding == 0


def test_padded_ids_have_probability_zero():
    def logits(rank: int, world_size: int) -> torch.Tensor:
        parallel = ParallelConfig(tensor_model_parallel_size=world_size)
        mesh = build_mesh(Layout(tp=world_size), get_platform("cpu"), timeout_seconds=60)
        config = transformer_config(TINY, parallel, params_dtype=torch.float32, device_type="cpu")
        chunks = build_model_chunks(TINY, config, VOCABULARY, mesh.process_groups)
        initialize_weights(chunks, TINY, VOCABULARY, 1, mesh.process_groups.tp)
        tokens = torch.arange(32)[None]
        own = chunks[0](tokens, None, None)
        gathered = chunks[0](tokens, None, None, runtime_gather_output=True)
        assert torch.equal(gathered.chunk(world_size, -1)[rank], own)
        return gathered.detach()

    (one,), two = run_ranks(logits, 1), run_ranks(logits, 2)
    assert one.shape == (1, 32, 384) and two[0].shape == (1, 32, 512)
    for found in (one, *two):
        assert found[..., VOCABULARY:].eq(-math.inf).all()
        torch.testing.assert_close(found[..., :VOCABULARY], one[..., :VOCABULARY], rtol=1e-5, atol=1e-6)


def test_bf16_parameters_train_in_every_layout():
    expected = reference(TIED)
    for world_size, settings in (LAYOUTS["tp2-sequence-parallel"], LAYOUTS["pp2-interleaved"]):
        for found in run(world_size, TIED, ParallelConfig(**settings), dtype=torch.bfloat16, iterations=2):
            assert found.losses[0] == pytest.approx(expected.losses[0], abs=2e-2)
            assert found.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=5e-2)
            assert found.losses[1] < 1.05 * found.losses[0]
            assert all(math.isfinite(norm) for norm in found.grad_norms)


def test_recomputed_dropout_is_the_same_dropout():
    model = replace(TINY, attention_dropout=0.2, hidden_dropout=0.2)
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    plain = run(2, model, ParallelConfig(**tp2))[0]
    assert plain.losses[0] != pytest.approx(reference(TINY).losses[0], abs=1e-4)
    for recompute in (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
    ):
        found = run(2, model, ParallelConfig(**tp2, **recompute))[0]
        assert found.losses == plain.losses
        assert_same(found.gradients, plain.gradients, 1e-6)


def test_tensor_parallel_ranks_drop_different_attention_weights():
    def dropped(rank: int, world_size: int) -> torch.Tensor:
        from megatron_edit.model.attention import SDPACoreAttention

        mesh = build_mesh(Layout(tp=2), get_platform("cpu"), timeout_seconds=60)
        mesh.seed_dropout(1)
        parallel = ParallelConfig(tensor_model_parallel_size=2)
        model = replace(TINY, attention_dropout=0.5)
        config = transformer_config(model, parallel, params_dtype=torch.float32, device_type="cpu")
        core = build_model_chunks(model, config, VOCABULARY, mesh.process_groups)[0].decoder.layers[0]
        core = core.self_attention.core_attention
        assert isinstance(core, SDPACoreAttention)
        ones = torch.ones(32, 1, 4, 8)
        before = torch.get_rng_state()
        out = core(ones, ones[:, :, :1], ones[:, :, :1])
        assert torch.equal(torch.get_rng_state(), before)  # drawn from the tensor parallel stream
        assert torch.equal(core.eval()(ones, ones[:, :, :1], ones[:, :, :1]), ones.flatten(2))
        return out.detach()

    first, second = run_ranks(dropped, 2)
    assert not torch.equal(first, second)
    assert abs(first[8:].mean().item() - 1) < 0.2


HUGGING_FACE_MODELS = {
    "gqa": TINY,
    "tied": TIED,
    "mha-large-base": replace(TINY, num_query_groups=8, rotary_base=500000.0, norm_epsilon=1e-3),
    "one-group-wide-heads": replace(TINY, num_query_groups=1, kv_channels=16, ffn_hidden_size=96),
    "linear": replace(TINY, rope_scaling_type="linear", rope_scaling_factor=4.0),
    "llama3": replace(
        TINY, kv_channels=16, rope_scaling_type="llama3", rope_scaling_factor=8.0,
        rope_scaling_original_max_position_embeddings=16,
    ),
    "bias": replace(TINY, add_qkv_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", HUGGING_FACE_MODELS)
def test_logits_and_loss_are_those_of_transformers(kind: str):
    model = HUGGING_FACE_MODELS[kind]
    weights = varied_weights(model)
    expected_logits, expected_loss = hugging_face(model, weights)

    def ours(rank: int, world_size: int) -> tuple[torch.Tensor, float]:
        mesh = build_mesh(Layout(), get_platform("cpu"), timeout_seconds=60)
        config = transformer_config(model, ParallelConfig(), params_dtype=torch.float32, device_type="cpu")
        (chunk,) = build_model_chunks(model, config, VOCABULARY, mesh.process_groups)
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                full = weights[canonical_name(chunk, name)]
                parameter.zero_()[: full.shape[0]] = full
        batch = microbatches(0, 0, 1, model.seq_length)[0]
        logits = chunk(batch["tokens"], None, None)
        losses = chunk(batch["tokens"], None, None, labels=batch["labels"])
        return logits.detach(), losses.mean().item()

    logits, loss = run_ranks(ours, 1)[0]
    torch.testing.assert_close(logits[..., :VOCABULARY], expected_logits, rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(expected_loss, abs=1e-5)


def varied_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights of which no two parts are alike: norms and biases too, and large enough to matter."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in full_parameter_shapes(model, VOCABULARY).items():
        if len(shape) == 1:
            weights[name] = 1 + 0.3 * torch.randn(shape, generator=generator)
        else:
            weights[name] = 5 * initial_tensor(name, shape, model, 1)
    return weights


def hugging_face(model: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Logits and mean loss of transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size, groups = model.kv_channels, model.num_query_groups
    assert size and groups and model.ffn_hidden_size
    per_group = model.num_attention_heads // groups
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=groups, head_dim=size, rms_norm_eps=model.norm_epsilon, max_position_embeddings=128,
        attention_bias=model.add_qkv_bias, tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        rope_parameters={
            "rope_type": {"none": "default"}.get(model.rope_scaling_type, model.rope_scaling_type),
            "rope_theta": model.rotary_base, "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        },
        attn_implementation="eager",
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        llama.model.embed_tokens.weight.copy_(weights["embedding.word_embeddings.weight"])
        llama.model.norm.weight.copy_(weights["decoder.final_layernorm.weight"])
        if model.untie_embeddings_and_output_weights:
            llama.lm_head.weight.copy_(weights["output_layer.weight"])
        for number, layer in enumerate(llama.model.layers):
            own = {
                name.removeprefix(f"decoder.layers.{number}."): tensor
                for name, tensor in weights.items() if name.startswith(f"decoder.layers.{number}.")
            }  # fmt: skip
            layer.input_layernorm.weight.copy_(own["input_layernorm.weight"])
            layer.post_attention_layernorm.weight.copy_(own["pre_mlp_layernorm.weight"])
            gate, up = own["mlp.linear_fc1.weight"].chunk(2)
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            layer.mlp.down_proj.weight.copy_(own["mlp.linear_fc2.weight"])
            layer.self_attn.o_proj.weight.copy_(own["self_attention.linear_proj.weight"])
            if model.add_qkv_bias:
                layer.self_attn.o_proj.bias.zero_()
            for kind in ("weight", "bias") if model.add_qkv_bias else ("weight",):
                qkv = own[f"self_attention.linear_qkv.{kind}"]
                qkv = qkv.view(groups, per_group + 2, size, *qkv.shape[1:])
                parts = qkv[:, :per_group], qkv[:, per_group], qkv[:, per_group + 1]
                projections = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
                for projection, part in zip(projections, parts, strict=True):
                    target = getattr(projection, kind)
                    target.copy_(part.reshape(target.shape))
        batch = microbatches(0, 0, 1, model.seq_length)[0]
        logits = llama(batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return logits, loss.item()
