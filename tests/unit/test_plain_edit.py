"""The reference itself is checked: its Llama against transformers, its runs against plain loops of torch's own ops."""

import ast
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tests.reference.plain_edit as plain_edit
from megatron_edit.sync.detector import AnomalyDetector
from tests.reference.plain_edit import (
    EMBEDDING,
    Batch,
    LlamaShape,
    ModuleDetectors,
    Parameters,
    PlainLlama,
    RunResult,
    RunSettings,
    run_edit,
)

SHAPE = LlamaShape(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=31,
    head_size=4,
)
TIED = replace(SHAPE, tied=True)
PLAIN_AVERAGE: dict[str, Any] = {
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "pseudo_grad_clip": 0.0,
    "anomaly_threshold": 0.0,
    "weighting": "mean",
}


def random_parameters(shape: LlamaShape, seed: int = 0) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if len(size) == 1 else 0.0) + 0.2 * torch.randn(size, generator=generator)
        for name, size in shape.parameter_shapes().items()
    }


def random_batches(iterations: int, replicas: int, *, masked: bool = False) -> list[list[Batch]]:
    """[iteration][replica], each of 3 samples of 8 tokens."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        samples = torch.randint(0, SHAPE.vocab_size, (3, 9), generator=generator)
        mask = torch.ones(3, 8)
        if masked:
            mask = (torch.rand(3, 8, generator=generator) < torch.rand((), generator=generator)).float()
        return {"tokens": samples[:, :-1], "labels": samples[:, 1:], "loss_mask": mask}

    return [[batch() for _ in range(replicas)] for _ in range(iterations)]


def run(
    replicas: int,
    iterations: int,
    settings: RunSettings,
    shape: LlamaShape = SHAPE,
    spoil: plain_edit.Spoil | None = None,
    batches: list[list[Batch]] | None = None,
    learning_rate: float = 1e-2,
) -> RunResult:
    return run_edit(
        shape,
        random_parameters(shape),
        batches or random_batches(iterations, replicas),
        [learning_rate] * iterations,
        settings,
        spoil,
    )


def assert_parameters_equal(found: Parameters, expected: Parameters, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        difference = (found[name] - expected[name]).abs().max().item()
        assert difference <= atol, f"{name}: {difference}"


def plain_adamw_run(
    shape: LlamaShape, batches: Sequence[Batch], learning_rates: list[float], settings: RunSettings
) -> tuple[Parameters, list[float], list[float]]:
    """One Llama trained with torch's own loss, clipping and AdamW: parameters, losses, gradient norms."""
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in random_parameters(shape).items()}
    model = PlainLlama(shape, dict(parameters))
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": settings.weight_decay if parameter.dim() == 2 else 0.0}
            for parameter in parameters.values()
        ],
        betas=settings.betas,
        eps=settings.eps,
    )
    losses, norms = [], []
    for batch, learning_rate in zip(batches, learning_rates, strict=True):
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
        loss = functional.cross_entropy(model.logits(batch["tokens"]).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip_grad).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in parameters.items()}, losses, norms


def test_imports_only_torch_and_the_standard_library() -> None:
    tree = ast.parse(Path(plain_edit.__file__).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in modules} <= {"torch"} | set(sys.stdlib_module_names)


class TestLlama:
    @pytest.mark.parametrize(
        ("heads", "groups", "head_size", "tied", "rotary_base", "epsilon"),
        [
            (8, 8, 4, False, 10000.0, 1e-5),
            (8, 4, 4, True, 10000.0, 1e-5),
            (8, 2, 6, False, 500000.0, 1e-6),
            (8, 1, 4, True, 10000.0, 1e-2),
        ],
    )
    def test_logits_equal_those_of_transformers(
        self, heads: int, groups: int, head_size: int, tied: bool, rotary_base: float, epsilon: float
    ) -> None:
        shape = LlamaShape(2, 32, 48, heads, groups, 31, head_size, tied, epsilon, rotary_base)
        parameters = random_parameters(shape)
        theirs = hugging_face_llama(shape, parameters)
        tokens = torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            torch.testing.assert_close(
                PlainLlama(shape, parameters).logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5
            )

    def test_masked_tokens_do_not_count(self) -> None:
        model = PlainLlama(SHAPE, random_parameters(SHAPE))
        batch = dict(random_batches(1, 1, masked=True)[0][0])
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
        logits = model.logits(batch["tokens"]).transpose(1, 2)
        expected = functional.cross_entropy(logits, labels, reduction="sum")
        torch.testing.assert_close(model.loss_sum(batch), expected)

    def test_wrong_parameters_are_named(self) -> None:
        parameters = random_parameters(SHAPE)
        del parameters["output_layer.weight"]
        with pytest.raises(AssertionError, match=r"output_layer\.weight"):
            PlainLlama(SHAPE, parameters)

    def test_every_parameter_is_in_one_module(self) -> None:
        for shape in (SHAPE, TIED):
            names = [name for module in shape.modules().values() for name in module]
            assert sorted(names) == sorted(shape.parameter_shapes())
            assert list(shape.modules()) == ["embedding", "layer 0", "layer 1", "head"]
        assert SHAPE.modules()["head"] == ["decoder.final_layernorm.weight", "output_layer.weight"]
        assert TIED.modules()["head"] == ["decoder.final_layernorm.weight"]


def hugging_face_llama(shape: LlamaShape, parameters: Parameters) -> torch.nn.Module:
    """The same weights in transformers' Llama, under its names, with q, k and v apart."""
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_size,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rotary_base},
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens.weight": parameters[EMBEDDING],
        "model.norm.weight": parameters["decoder.final_layernorm.weight"],
        "lm_head.weight": parameters[EMBEDDING if shape.tied else "output_layer.weight"],
    }
    size, per_group = shape.head_size, shape.num_attention_heads // shape.num_query_groups
    for i in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        query, key, value = [], [], []
        for group in parameters[ours + "self_attention.linear_qkv.weight"].split((per_group + 2) * size):
            query.append(group[: per_group * size])
            key.append(group[per_group * size : (per_group + 1) * size])
            value.append(group[(per_group + 1) * size :])
        gate, up = parameters[ours + "mlp.linear_fc1.weight"].split(shape.ffn_hidden_size)
        state |= {
            theirs + "input_layernorm.weight": parameters[ours + "input_layernorm.weight"],
            theirs + "self_attn.q_proj.weight": torch.cat(query),
            theirs + "self_attn.k_proj.weight": torch.cat(key),
            theirs + "self_attn.v_proj.weight": torch.cat(value),
            theirs + "self_attn.o_proj.weight": parameters[ours + "self_attention.linear_proj.weight"],
            theirs + "post_attention_layernorm.weight": parameters[ours + "pre_mlp_layernorm.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": parameters[ours + "mlp.linear_fc2.weight"],
        }
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


class TestInnerSteps:
    @pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
    @pytest.mark.parametrize("clip", [0.5, 1e9])
    def test_one_replica_with_a_plain_outer_step_is_a_plain_adamw_run(self, shape: LlamaShape, clip: float) -> None:
        settings = RunSettings(sync_interval=2, clip_grad=clip, **PLAIN_AVERAGE)
        batches = random_batches(5, 1, masked=True)
        learning_rates = [1e-2, 8e-3, 6e-3, 4e-3, 2e-3]
        result = run_edit(shape, random_parameters(shape), batches, learning_rates, settings)
        expected, losses, norms = plain_adamw_run(shape, [b[0] for b in batches], learning_rates, settings)
        assert len(result.syncs) == 2 and min(norms) > 0.5
        assert_parameters_equal(result.parameters[0], expected, atol=1e-5)
        assert [r.losses[0] for r in result.iterations] == pytest.approx(losses, rel=1e-5)
        assert [r.grad_norms[0] for r in result.iterations] == pytest.approx(norms, rel=1e-5)

    def test_warmup_is_one_run_on_all_tokens_of_all_replicas(self) -> None:
        settings = RunSettings(sync_interval=1, warmup_steps=4)
        batches = random_batches(4, 3, masked=True)
        result = run(3, 4, settings, batches=batches)
        joined = [{key: torch.cat([b[key] for b in step]) for key in step[0]} for step in batches]
        expected, losses, norms = plain_adamw_run(SHAPE, joined, [1e-2] * 4, settings)
        for parameters in result.parameters:
            assert_parameters_equal(parameters, expected, atol=1e-5)
        assert result.syncs == [] and result.anchor is not None
        assert_parameters_equal(result.anchor, result.parameters[0])
        for record, step, loss, norm in zip(result.iterations, batches, losses, norms, strict=True):
            assert record.grad_norms == pytest.approx([norm] * 3, rel=1e-5)
            tokens = [float(b["loss_mask"].sum()) for b in step]
            weighted = sum(part * n for part, n in zip(record.losses, tokens, strict=True)) / sum(tokens)
            assert weighted == pytest.approx(loss, rel=1e-5)

    def test_a_step_without_tokens_changes_nothing_and_is_none(self) -> None:
        batches = random_batches(4, 2)
        for iteration in (2, 3):
            batches[iteration][1] = {**batches[iteration][1], "loss_mask": torch.zeros(3, 8)}
        result = run(2, 4, RunSettings(sync_interval=2), batches=batches)
        assert [record.updated for record in result.iterations] == [[True] * 2] * 2 + [[True, False]] * 2
        second = result.syncs[1]
        assert_parameters_equal(second.local_parameters[1], result.syncs[0].parameters[1])
        assert second.left_out.tolist() == [[False] * 4, [True] * 4]
        assert second.weights.tolist() == [[1.0] * 4, [0.0] * 4]


class TestSync:
    def test_schedule(self) -> None:
        result = run(2, 9, RunSettings(sync_interval=3, warmup_steps=2))
        assert [sync.iteration for sync in result.syncs] == [5, 8]

    def test_replicas_differ_before_a_sync_and_are_equal_after_it(self) -> None:
        for sync in run(3, 4, RunSettings(sync_interval=2)).syncs:
            for i in (1, 2):
                assert not torch.equal(sync.local_parameters[0][EMBEDDING], sync.local_parameters[i][EMBEDDING])
                assert_parameters_equal(sync.parameters[i], sync.parameters[0])

    def test_a_plain_outer_step_gives_the_mean_of_the_local_parameters(self) -> None:
        for sync in run(3, 3, RunSettings(sync_interval=1, **PLAIN_AVERAGE)).syncs:
            local = sync.local_parameters
            mean = {name: torch.stack([p[name] for p in local]).mean(0) for name in local[0]}
            assert_parameters_equal(sync.parameters[0], mean, atol=1e-6)

    def test_local_sgd_with_interval_1_is_synchronous_sgd(self) -> None:
        """Adam with betas 0 and a huge eps is SGD at lr / eps."""
        sgd: dict[str, Any] = {"betas": (0.0, 0.0), "eps": 1e6, "weight_decay": 0.0, "clip_grad": 0.0}
        local = RunSettings(sync_interval=1, **sgd, **PLAIN_AVERAGE)
        synchronous = RunSettings(sync_interval=1, warmup_steps=5, **sgd)
        first = run(3, 5, local, learning_rate=1e6 * 0.1)
        second = run(3, 5, synchronous, learning_rate=1e6 * 0.1)
        assert_parameters_equal(first.parameters[0], second.parameters[0], atol=1e-6)
        moved = first.parameters[0][EMBEDDING] - random_parameters(SHAPE)[EMBEDDING]
        assert moved.abs().max() > 1e-2

    @pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
    def test_weights_clip_and_nesterov_against_torch(self, shape: LlamaShape) -> None:
        """Norms, softmax and torch.optim.SGD on the recorded local parameters give the recorded anchors."""
        settings = RunSettings(sync_interval=2, pseudo_grad_clip=0.2, softmax_temperature=0.1)
        result = run(3, 6, settings, shape)
        anchor = {name: torch.nn.Parameter(t) for name, t in random_parameters(shape).items()}
        outer = torch.optim.SGD(anchor.values(), lr=0.7, momentum=0.8, nesterov=True)
        for sync in result.syncs:
            for m, names in enumerate(shape.modules().values()):
                flat = torch.cat([anchor[name].detach().flatten() for name in names])
                local = [torch.cat([p[name].flatten() for name in names]) for p in sync.local_parameters]
                deltas = torch.stack(local) - flat  # [R, N]
                norms = deltas.double().norm(dim=1)
                weights = torch.softmax(-norms / 0.1, dim=0)
                average = (weights[:, None] * deltas).sum(0)
                beta = min(0.2 / (average.norm().item() + 1e-6), 1.0)
                pieces = (-beta * average).float().split([anchor[name].numel() for name in names])
                for name, piece in zip(names, pieces, strict=True):
                    anchor[name].grad = piece.view_as(anchor[name])
                torch.testing.assert_close(sync.norms[:, m], norms)
                torch.testing.assert_close(sync.weights[:, m], weights)
                assert sync.betas[m].item() == pytest.approx(beta, rel=1e-5)
            outer.step()
            assert_parameters_equal(sync.parameters[0], {n: p.detach() for n, p in anchor.items()}, atol=1e-6)
        assert sum((sync.betas < 1).sum().item() for sync in result.syncs) > 0

    def test_the_sync_leaves_the_moments_alone(self) -> None:
        """One step more, and the moments are those of a run whose last sync was not made."""
        with_sync = run(2, 2, RunSettings(sync_interval=2))
        without = run(2, 2, RunSettings(sync_interval=3))
        for i in range(2):
            for name, (first, second) in without.moments[i].items():
                assert torch.equal(first, with_sync.moments[i][name][0])
                assert torch.equal(second, with_sync.moments[i][name][1])


def put_nan(victims: set[int], at: int, name: str) -> plain_edit.Spoil:
    def spoil(iteration: int, replica: int, parameters: Parameters, anchor: Parameters | None) -> None:
        if iteration == at and replica in victims:
            parameters[name].view(-1)[0] = math.nan

    return spoil


def stretch(victims: set[int], at: int, names: list[str], factor: float) -> plain_edit.Spoil:
    def spoil(iteration: int, replica: int, parameters: Parameters, anchor: Parameters | None) -> None:
        if iteration == at and replica in victims:
            assert anchor is not None
            for name in names:
                parameters[name].copy_(anchor[name] + factor * (parameters[name] - anchor[name]))

    return spoil


class TestFaults:
    FC1 = "decoder.layers.0.mlp.linear_fc1.weight"

    def test_a_non_finite_module_is_left_out_reset_and_its_moments_zeroed(self) -> None:
        settings = RunSettings(sync_interval=2)
        result = run(3, 2, settings, spoil=put_nan({1}, 2, self.FC1))
        (sync,) = result.syncs
        layer = 1  # of [embedding, layer 0, layer 1, head]
        assert sync.left_out.nonzero().tolist() == [[1, layer]] and not sync.flagged.any()
        assert sync.weights[1, layer] == 0
        assert sync.weights.sum(0).tolist() == pytest.approx([1.0] * 4)
        for parameters in result.parameters:
            assert all(tensor.isfinite().all() for tensor in parameters.values())
            assert_parameters_equal(parameters, result.parameters[0])
        zeroed = {
            (i, name)
            for i in range(3)
            for name, (first, second) in result.moments[i].items()
            if not first.any() and not second.any()
        }
        assert zeroed == {(1, name) for name in SHAPE.modules()["layer 0"]}

    def test_a_replica_that_diverged_before_the_sync_trains_on_after_it(self) -> None:
        result = run(3, 6, RunSettings(sync_interval=2), spoil=put_nan({1}, 1, self.FC1))
        assert result.syncs[0].left_out.tolist() == [[False] * 4, [True] * 4, [False] * 4]
        assert math.isnan(result.iterations[1].losses[1]) and math.isnan(result.iterations[1].grad_norms[1])
        assert not result.syncs[1].left_out.any() and not result.syncs[2].left_out.any()
        assert all(math.isfinite(loss) for record in result.iterations[2:] for loss in record.losses)

    def test_all_non_finite_is_a_rollback_of_that_module(self) -> None:
        healthy = run(2, 4, RunSettings(sync_interval=2))
        result = run(2, 4, RunSettings(sync_interval=2), spoil=put_nan({0, 1}, 4, self.FC1))
        first, second = result.syncs
        assert second.rolled_back.tolist() == [False, True, False, False]
        assert second.betas[1] == 1 and not second.weights[:, 1].any()
        for module, names in SHAPE.modules().items():
            before, untouched = (first, True) if module == "layer 0" else (healthy.syncs[1], False)
            for name in names:
                assert torch.equal(second.parameters[0][name], before.parameters[0][name]), name
                assert torch.equal(second.outer_momentum[name], before.outer_momentum[name]), name
                moved = not torch.equal(second.parameters[0][name], first.parameters[0][name])
                assert moved != untouched

    @pytest.mark.parametrize(("victims", "rolled_back"), [({2}, False), ({0, 1, 2}, True)])
    def test_far_out_norms_are_flagged_once_the_detectors_are_warm(self, victims: set[int], rolled_back: bool) -> None:
        """8 syncs, detectors warm after 3; the sixth sync finds a module stretched twentyfold."""
        settings = RunSettings(sync_interval=2, anomaly_warmup_syncs=3)
        names = SHAPE.modules()["layer 1"]
        result = run(3, 16, settings, spoil=stretch(victims, 12, names, 20.0), learning_rate=1e-3)
        sync = result.syncs[5]
        assert len(result.syncs) == 8
        assert {i for i in range(3) if sync.flagged[i, 2]} == victims
        assert bool(sync.rolled_back[2]) == rolled_back
        assert not any(s.flagged[:, 2].any() for s in result.syncs[:3])
        unchanged = torch.equal(sync.parameters[0][names[0]], result.syncs[4].parameters[0][names[0]])
        assert unchanged == rolled_back


def test_its_detector_agrees_with_the_engines() -> None:
    """Statistics recomputed from all accepted norms, against the recursive ones; many norms near the threshold."""
    norms = 1 + 0.1 * torch.randn(
        50, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )  # [T, R, M]
    norms[25:, :, 0] *= 3
    norms[30, 1, 1] = math.nan
    stepped = torch.ones(50, 3, dtype=torch.bool)
    stepped[40, 2] = False
    engine = AnomalyDetector(3, 10, threshold=1.5, alpha=0.1, warmup=5)
    settings = RunSettings(sync_interval=1, anomaly_threshold=1.5, anomaly_alpha=0.1, anomaly_warmup_syncs=5)
    plain = [ModuleDetectors(3, settings) for _ in range(10)]
    flags: list[Tensor] = []
    for sync_norms, sync_stepped in zip(norms, stepped, strict=True):
        verdict = engine.observe(sync_norms, sync_stepped)
        columns = [detector.flag(sync_norms[:, m].tolist(), sync_stepped.tolist()) for m, detector in enumerate(plain)]
        assert torch.equal(torch.tensor(columns).T, verdict.flagged)
        flags.append(verdict.flagged)
    assert 0.05 < torch.stack(flags).double().mean().item() < 0.5
