"""The reference of the methods is checked: against `plain_edit`, and against the formulas on its own records."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.reference.plain_methods as plain_methods
import tests.reference.plain_reducers as plain_reducers
from tests.reference.plain_edit import EMBEDDING, Parameters, Spoil, run_edit
from tests.reference.plain_methods import (
    AllNonFiniteError,
    MethodResult,
    MethodSettings,
    run_method,
)
from tests.reference.plain_reducers import compressed_sum, quantised, sparse
from tests.unit.test_plain_edit import SHAPE, put_nan, random_batches, random_parameters, stretch

NO_PENALTY: dict[str, Any] = {"pseudo_grad_clip": 0.0, "anomaly_threshold": 0.0, "weighting": "mean"}
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def run(
    replicas: int, steps: int, *, spoil: Spoil | None = None, flushed: bool = False, lr: float = 1e-2, **settings: Any
) -> MethodResult:
    rates = [lr * (1 - 0.03 * n) for n in range(steps)]
    made = MethodSettings(**{"sync_interval": 2, **settings})
    batches = random_batches(steps, replicas)
    return run_method(SHAPE, random_parameters(SHAPE), batches, rates, made, spoil, flushed=flushed)


def flat(parameters: Parameters) -> Tensor:
    return torch.cat([parameters[name].flatten() for name in SHAPE.parameter_shapes()])


def mean_of(parameters: list[Parameters]) -> Tensor:
    return torch.stack([flat(each) for each in parameters]).mean(0)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_imports_only_torch_the_standard_library_and_the_reference_of_edit() -> None:
    own = set()
    for file in (plain_methods, plain_reducers):
        tree = ast.parse(Path(file.__file__).read_text())
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        own |= {name for name in modules if name.split(".")[0] not in {"torch"} | set(sys.stdlib_module_names)}
    assert own == {"tests.reference.plain_edit", "tests.reference.plain_reducers"}


@pytest.mark.parametrize(
    "spoil", [None, put_nan({1}, 3, FC1), put_nan({0, 1, 2}, 5, FC1), stretch({2}, 9, [FC1], 20.0)]
)
def test_edit_is_the_reference_of_edit(spoil: Spoil | None) -> None:
    settings = MethodSettings(sync_interval=2, warmup_steps=1, pseudo_grad_clip=0.2, anomaly_warmup_syncs=3)
    batches, rates = random_batches(12, 3, masked=True), [1e-2] * 12
    found = run_method(SHAPE, random_parameters(SHAPE), batches, rates, settings, spoil)
    expected = run_edit(SHAPE, random_parameters(SHAPE), batches, rates, settings, spoil)
    assert len(found.syncs) == len(expected.syncs) == 5
    for mine, theirs in zip(found.syncs, expected.syncs, strict=True):
        assert mine.iteration == theirs.iteration and torch.equal(mine.left_out, theirs.left_out)
        torch.testing.assert_close(mine.weights, theirs.weights, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.betas, theirs.betas, rtol=1e-5, atol=0)
        close(flat(mine.outer_momentum), flat(theirs.outer_momentum))
    for i in range(3):
        torch.testing.assert_close(flat(found.parameters[i]), flat(expected.parameters[i]), rtol=0, atol=1e-5)


class TestMethodsOverSteps:
    def test_post_local_sgd_takes_the_mean_of_the_parameters(self) -> None:
        result = run(3, 6, method="post-local-sgd", **NO_PENALTY)
        assert result.anchor is None and len(result.syncs) == 3
        for sync in result.syncs:
            for parameters in sync.parameters:
                close(flat(parameters), mean_of(sync.local_parameters))

    def test_post_local_sgd_with_interval_1_is_synchronous_sgd(self) -> None:
        sgd: dict[str, Any] = {"betas": (0.0, 0.0), "eps": 1e6, "weight_decay": 0.0, "clip_grad": 0.0, "lr": 1e5}
        local = run(3, 5, method="post-local-sgd", sync_interval=1, **sgd, **NO_PENALTY)
        synchronous = run(3, 5, method="edit", warmup_steps=5, **sgd, **NO_PENALTY)
        close(flat(local.parameters[0]), flat(synchronous.parameters[0]))
        assert (flat(local.parameters[0]) - flat(random_parameters(SHAPE))).abs().max() > 1e-2

    def test_post_local_sgd_without_anyone_finite_has_nothing_to_go_on_from(self) -> None:
        with pytest.raises(AllNonFiniteError, match="layer 0"):
            run(2, 2, method="post-local-sgd", spoil=put_nan({0, 1}, 2, FC1), **NO_PENALTY)

    def test_slowmo_on_its_own_records(self) -> None:
        result = run(3, 6, method="slowmo", outer_lr=0.9, outer_momentum=0.5, **NO_PENALTY)
        theta = flat(random_parameters(SHAPE))
        u = torch.zeros_like(theta)
        for k, sync in enumerate(result.syncs, 1):
            gamma = 1e-2 * (1 - 0.03 * (2 * k - 1))
            u = 0.5 * u + (theta - mean_of(sync.local_parameters)) / gamma
            theta = theta - 0.9 * gamma * u
            close(flat(sync.parameters[0]), theta)
        close(flat(result.outer_momentum), u, atol=1e-4)

    def test_diloco_on_torchs_own_optimizer(self) -> None:
        result = run(2, 6, method="diloco", outer_lr=0.7, outer_momentum=0.9, **NO_PENALTY)
        theta = torch.nn.Parameter(flat(random_parameters(SHAPE)))
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        for sync in result.syncs:
            theta.grad = theta.detach() - mean_of(sync.local_parameters)
            outer.step()
            close(flat(sync.parameters[1]), theta.detach())

    @pytest.mark.parametrize("method", ["co2", "co2-sharded"])
    @pytest.mark.parametrize("clip", [0.0, 0.005])
    def test_co2_on_its_own_records(self, method: str, clip: float) -> None:
        """theta_{k+2} = theta_{k+1} - eta m_k, with m_k of the round before."""
        numbers = {"outer_lr": 0.8, "outer_momentum": 0.5, "gap_penalty": 2.0, "momentum_clip": clip}
        result = run(3, 9, method=method, **numbers, **NO_PENALTY)
        theta = flat(random_parameters(SHAPE))  # theta_k
        m, moves = torch.zeros_like(theta), [torch.zeros_like(theta)]  # eta m_{k-1} that arrives at the end of round k
        for sync in result.syncs:
            m = 0.5 * m + (theta - mean_of(sync.local_parameters)) / 2.0
            if clip:
                assert (m.abs() > clip).any()
                m = m.clamp(-clip, clip)
            moves.append(0.8 * m)
            theta = theta - moves[-2]
            close(flat(sync.parameters[2]), theta)
        assert len(result.syncs) == 4 and result.anchor is not None
        close(flat(result.anchor), theta)

    def test_co2_flushed(self) -> None:
        """Nine steps, four rounds of two and one of one: D of both last rounds arrives."""
        kept = run(3, 9, method="co2", outer_lr=1.0, outer_momentum=0.5, **NO_PENALTY)
        flushed = run(3, 9, method="co2", outer_lr=1.0, outer_momentum=0.5, flushed=True, **NO_PENALTY)
        assert kept.anchor is not None and flushed.anchor is not None
        before, theta = kept.syncs[-2].parameters[0], flat(kept.anchor)
        m = flat(kept.outer_momentum)  # m_{k-1}
        m = 0.5 * m + flat(before) - mean_of(kept.syncs[-1].local_parameters)
        last = 0.5 * m + theta - mean_of(kept.parameters)
        close(flat(flushed.anchor), theta - m - last)
        for parameters in flushed.parameters:
            close(flat(parameters), flat(flushed.anchor), atol=0.0)

    @pytest.mark.parametrize("method", ["slowmo", "diloco", "co2", "streaming", "post-local-sgd"])
    def test_a_non_finite_replica_is_left_out_and_reset(self, method: str) -> None:
        result = run(3, 6, method=method, spoil=put_nan({1}, 2, FC1), **NO_PENALTY)
        assert result.syncs[0].left_out.nonzero().tolist() == [[1, 1]]
        assert result.syncs[0].weights[:, 1].tolist() == [0.5, 0.0, 0.5]
        assert not result.syncs[1].left_out.any()
        assert all(flat(parameters).isfinite().all() for parameters in result.parameters)


STREAMING: dict[str, Any] = {"method": "streaming", "outer_lr": 0.7, "outer_momentum": 0.9, **NO_PENALTY}


class TestStreaming:
    def test_one_fragment_without_delay_is_diloco(self) -> None:
        found, expected = run(3, 7, **STREAMING), run(3, 7, **{**STREAMING, "method": "diloco"})
        for i in range(3):
            assert torch.equal(flat(found.parameters[i]), flat(expected.parameters[i]))

    def test_fragments_are_due_at_their_own_steps(self) -> None:
        result = run(2, 9, sync_interval=4, num_fragments=2, **STREAMING)
        due = [(sync.iteration, sync.due.tolist()) for sync in result.syncs]
        first, second = [True, True, False, False], [False, False, True, True]
        assert due == [(2, second), (4, first), (6, second), (8, first)]
        assert [sync.steps[0].tolist() for sync in result.syncs[:3]] == [[0, 0, 2, 2], [4, 4, 0, 0], [0, 0, 4, 4]]

    @pytest.mark.parametrize("alpha", [None, 0.25])
    @pytest.mark.parametrize("delay", [1, 2])
    def test_a_delay_keeps_or_mixes_the_progress(self, delay: int, alpha: float | None) -> None:
        """Up to the first application the replicas train as without any sync, whose parameters then are known."""
        steps = 2 + delay
        result = run(2, steps, sync_interval=2, delay=delay, mixing_alpha=alpha, **STREAMING)
        alone = run(2, steps, sync_interval=99, **{**STREAMING, "method": "diloco"})
        (sync,) = result.syncs[:1]
        start = flat(random_parameters(SHAPE))
        new = start + 0.7 * 1.9 * (mean_of(sync.local_parameters) - start)
        for i in range(2):
            now, launched = flat(alone.parameters[i]), flat(sync.local_parameters[i])
            expected = new + now - launched if alpha is None else alpha * now + (1 - alpha) * new
            close(flat(result.parameters[i]), expected)
        assert result.anchor is not None
        close(flat(result.anchor), new)

    def test_the_flush_applies_what_is_in_flight_and_then_synchronises(self) -> None:
        kept = run(2, 5, sync_interval=4, delay=3, **STREAMING)
        flushed = run(2, 5, sync_interval=4, delay=3, flushed=True, **STREAMING)
        start = flat(random_parameters(SHAPE))
        g = start - mean_of(kept.syncs[0].local_parameters)
        theta, m = start - 0.7 * 1.9 * g, g
        progress = mean_of(kept.parameters) - mean_of(kept.syncs[0].local_parameters)
        m = 0.9 * m - progress
        theta = theta - 0.7 * (-progress + 0.9 * m)
        for parameters in flushed.parameters:
            close(flat(parameters), theta)

    def test_whoever_was_left_out_drops_its_progress_since_the_launch(self) -> None:
        spoil = put_nan({1}, 2, FC1)
        result = run(3, 3, sync_interval=2, delay=1, spoil=spoil, **STREAMING)
        assert result.anchor is not None
        assert torch.equal(result.parameters[1][FC1], result.anchor[FC1])
        assert not torch.equal(result.parameters[0][FC1], result.anchor[FC1])
        assert not result.moments[1][FC1][0].any() and result.iterations[2].updated == [True, False, True]

    def test_what_is_in_flight_at_the_end_is_told(self) -> None:
        assert run(2, 5, sync_interval=2, delay=2, **STREAMING).in_flight == [1]
        assert run(2, 4, method="co2", **NO_PENALTY).in_flight == [1]
        assert run(2, 6, sync_interval=2, delay=2, flushed=True, **STREAMING).in_flight == []


class TestAEdit:
    def test_equal_steps_without_their_share_are_edit(self) -> None:
        found = run(2, 6, method="a-edit", steps_of_intervals=((2, 2), (2, 2), (2, 2)), step_weight_ratio=0.0)
        expected = run(2, 6, method="edit")
        for i in range(2):
            assert torch.equal(flat(found.parameters[i]), flat(expected.parameters[i]))

    def test_unequal_steps_weigh_in(self) -> None:
        result = run(
            2,
            9,
            method="a-edit",
            steps_of_intervals=((3, 1), (5, 2), (1, 1)),
            last_interval_is_open=True,
            weighting="mean",
        )
        assert [sync.iterations for sync in result.syncs] == [[3, 1], [8, 3]]
        assert result.syncs[0].weights[:, 0].tolist() == [0.25 + 0.375, 0.25 + 0.125]
        assert math.isnan(result.iterations[4].losses[1]) and not math.isnan(result.iterations[8].losses[0])

    def test_too_few_steps_put_the_sync_off(self) -> None:
        result = run(2, 6, method="a-edit", steps_of_intervals=((1, 1), (2, 1), (2, 2)), min_total_steps=4)
        assert [sync.iterations for sync in result.syncs] == [[3, 2], [5, 4]]
        assert result.syncs[0].steps[:, 0].tolist() == [3, 2]


class TestExtras:
    def test_sublayers(self) -> None:
        result = run(2, 2, sublayer=True)
        assert result.syncs[0].norms.shape == (2, 6)
        joined = run(2, 2)
        squares = result.syncs[0].norms.square()
        torch.testing.assert_close((squares[:, 1] + squares[:, 2]).sqrt(), joined.syncs[0].norms[:, 1])

    def test_moments_are_averaged_every_second_sync(self) -> None:
        result = run(3, 4, average_moments_every=2)
        for name, (first, second) in result.moments[0].items():
            for i in (1, 2):
                assert torch.equal(first, result.moments[i][name][0]) and torch.equal(
                    second, result.moments[i][name][1]
                )
        once = run(3, 2, average_moments_every=2)
        assert not torch.equal(once.moments[0][EMBEDDING][0], once.moments[1][EMBEDDING][0])

    def test_consensus_and_sparsity_change_the_average_as_they_should(self) -> None:
        plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, **NO_PENALTY}
        start = flat(random_parameters(SHAPE))
        result = run(3, 2, consensus="count", **plain)
        deltas = torch.stack([flat(p) - start for p in result.syncs[0].local_parameters])  # [R, N]
        agrees = deltas.sign() == deltas.sign().sum(0).sign()
        expected = (deltas * agrees).sum(0) / agrees.sum(0).clamp(min=1)
        close(flat(result.parameters[0]), start + expected)
        result = run(3, 2, sparsity=0.75, **plain)
        moved = (flat(result.parameters[0]) != start).double().mean()
        assert 0.25 < moved < 0.75

    def test_order_and_padding_matter_to_what_looks_at_positions_only(self) -> None:
        order = tuple(reversed(list(SHAPE.parameter_shapes())))
        settings = {"flat_order": order, "padding": ((EMBEDDING, 96), ("output_layer.weight", 96))}
        close(flat(run(2, 4, **settings).parameters[0]), flat(run(2, 4).parameters[0]), atol=1e-7)
        found, other = run(2, 4, comm_dtype="int4", **settings), run(2, 4, comm_dtype="int4")
        assert (flat(found.parameters[0]) - flat(other.parameters[0])).abs().max() > 1e-5

    def test_sparse(self) -> None:
        assert sparse(torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0]), 0.6).tolist() == [0.0, -2.0, 2.0, 0.0, 0.0]

    def test_quantised(self) -> None:
        x = torch.tensor([127.0, 0.4, -3.6])
        assert quantised(x, "int8").tolist() == [127.0, 0.0, -4.0]
        assert quantised(torch.tensor([7.0, 1.4, -3.6]), "int4").tolist() == [7.0, 1.0, -4.0]
        assert quantised(torch.tensor([1 + 2**-9]), "bf16").tolist() == [1.0]

    @pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
    def test_a_compressed_sum_and_what_is_owed_are_the_sum(self, dtype: str) -> None:
        contributions = [torch.randn(301, dtype=torch.float64) for _ in range(3)]
        errors = [torch.zeros(301, dtype=torch.float64) for _ in range(3)]
        result = compressed_sum([*contributions[:2], None], errors, dtype)
        torch.testing.assert_close(result + sum(errors), contributions[0] + contributions[1])
        assert (result - contributions[0] - contributions[1]).abs().max() > 1e-4

    @pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
    def test_compression_stays_close_to_none(self, dtype: str) -> None:
        plain, compressed = run(3, 8), run(3, 8, comm_dtype=dtype)
        distance = (flat(plain.parameters[0]) - flat(compressed.parameters[0])).norm()
        moved = (flat(plain.parameters[0]) - flat(random_parameters(SHAPE))).norm()
        assert 0 < distance < {"bf16": 0.05, "int8": 0.05, "int4": 0.3}[dtype] * moved
