"""Sparsification and sign consensus: by hand, and against element by element loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.sync.reducers import consensus_average, consensus_mask, sparsify_, votes

few_values = st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), min_size=0, max_size=30)


class TestSparsify:
    @settings(max_examples=150, deadline=None)
    @given(few_values, st.floats(0, 0.999))
    def test_magnitude_keeps_the_largest_and_of_equals_the_first(self, values: list[float], sparsity: float) -> None:
        delta = torch.tensor(values)
        sparsify_(delta, sparsity, "magnitude")
        order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
        kept = set(order[: len(values) - math.floor(sparsity * len(values))])
        assert delta.tolist() == [value if i in kept else 0.0 for i, value in enumerate(values)]

    def test_by_hand(self) -> None:
        delta = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0])
        sparsify_(delta, 0.5, "magnitude")  # floor(2.5) are dropped
        assert delta.tolist() == [0.0, -2.0, 2.0, 0.0, -2.0]
        delta = torch.tensor([1.0, -2.0, 2.0, 0.5, -2.0])
        sparsify_(delta, 0.6, "magnitude")
        assert delta.tolist() == [0.0, -2.0, 2.0, 0.0, 0.0]

    @pytest.mark.parametrize("method", ["random", "rescaled-random"])
    def test_random_keeps_the_share_and_repeats_with_the_generator(self, method: str) -> None:
        start = torch.randn(20000, generator=torch.Generator().manual_seed(0))
        first, second = start.clone(), start.clone()
        for delta in (first, second):
            sparsify_(delta, 0.3, method, torch.Generator().manual_seed(5))
        assert torch.equal(first, second)
        other = start.clone()
        sparsify_(other, 0.3, method, torch.Generator().manual_seed(6))
        assert not torch.equal(first, other)
        kept = first != 0
        assert kept.float().mean().item() == pytest.approx(0.7, abs=0.02)
        scale = 1 / 0.7 if method == "rescaled-random" else 1.0
        torch.testing.assert_close(first[kept], start[kept] * scale)

    def test_rescaled_random_is_right_in_expectation(self) -> None:
        total, generator = torch.zeros(50), torch.Generator().manual_seed(1)
        for _ in range(4000):
            delta = torch.ones(50)
            sparsify_(delta, 0.5, "rescaled-random", generator)
            total += delta
        assert total.mean().item() / 4000 == pytest.approx(1.0, abs=0.02)

    @pytest.mark.parametrize("method", ["magnitude", "random", "rescaled-random"])
    def test_sparsity_0_and_empty_shards(self, method: str) -> None:
        delta = torch.tensor([1.0, 0.0, -3.0])
        sparsify_(delta, 0.0, method)
        assert delta.tolist() == [1.0, 0.0, -3.0]
        sparsify_(torch.zeros(0), 0.5, method)

    def test_bad_settings_are_refused(self) -> None:
        for sparsity in (-0.1, 1.0, math.nan):
            with pytest.raises(ValueError, match=f"got {sparsity}; try"):
                sparsify_(torch.ones(3), sparsity, "random")
        with pytest.raises(ValueError, match="known: magnitude, random, rescaled-random"):
            sparsify_(torch.ones(3), 0.5, "smallest")


def averages(deltas: list[Tensor], weights: list[float], mode: str) -> list[Tensor]:
    """`consensus_average` of each replica; its sums are taken from runs of the others that have come as far."""
    sums: list[Tensor] = []  # those that are known so far
    while True:
        flats, asked = [delta.clone() for delta in deltas], []
        for flat, weight in zip(flats, weights, strict=True):
            calls: list[Tensor] = []

            def sum_(tensor: Tensor, calls: list[Tensor] = calls) -> None:
                calls.append(tensor.clone())
                if len(calls) <= len(sums):
                    tensor.copy_(sums[len(calls) - 1])

            consensus_average(flat, weight, mode, sum_)
            asked.append(calls)
        if len(sums) == 3:
            assert all(len(calls) == 3 for calls in asked)
            return flats
        sums.append(torch.stack([calls[len(sums)] for calls in asked]).sum(0))


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def average_of_one_element(values: list[float], weights: list[float], mode: str) -> float:
    if mode == "sum":
        winner = sign(sum(w * v for v, w in zip(values, weights, strict=True) if w > 0))
    else:
        winner = sign(sum(sign(v) for v, w in zip(values, weights, strict=True) if w > 0))
    agree = [(v, w) for v, w in zip(values, weights, strict=True) if w > 0 and winner and sign(v) == winner]
    return sum(w * v for v, w in agree) / sum(w for _, w in agree) if agree else 0.0


class TestConsensus:
    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 4), st.integers(0, 8), st.sampled_from(["sum", "count"]), st.data())
    def test_equals_a_loop_over_the_elements(self, replicas: int, n: int, mode: str, data: st.DataObject) -> None:
        """Values and weights are dyadic, so that a vote of exactly 0 is one in both."""
        dyadic = st.sampled_from([-4.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
        deltas = [data.draw(st.lists(dyadic, min_size=n, max_size=n)) for _ in range(replicas)]
        weights = [data.draw(st.sampled_from([0.0, 0.125, 0.25, 0.5])) for _ in range(replicas)]
        expected = [average_of_one_element([d[k] for d in deltas], weights, mode) for k in range(n)]
        for found in averages([torch.tensor(d) for d in deltas], weights, mode):
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)

    def test_by_hand(self) -> None:
        """Two weak replicas agree on minus, one strong one says plus: the values and the heads decide differently."""
        deltas = [torch.tensor([8.0, 1.0, 0.0]), torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-2.0, 3.0, 1.0])]
        weights = [0.5, 0.25, 0.25]
        assert averages(deltas, weights, "sum")[0].tolist() == [8.0, pytest.approx(1.25 / 0.75), 1.0]
        assert averages(deltas, weights, "count")[0].tolist() == [-1.5, pytest.approx(1.25 / 0.75), 1.0]

    @pytest.mark.parametrize("mode", ["sum", "count"])
    def test_a_replica_of_weight_0_has_no_vote_and_adds_nothing(self, mode: str) -> None:
        deltas = [torch.tensor([1.0, -1.0]), torch.full((2,), math.nan), torch.tensor([3.0, -1.0])]
        for found in averages(deltas, [0.5, 0.0, 0.5], mode):
            assert found.tolist() == [2.0, -1.0]

    def test_all_agreeing_is_the_weighted_average(self) -> None:
        deltas = [torch.rand(50, generator=torch.Generator().manual_seed(i)) + 0.1 for i in range(3)]
        expected = 0.2 * deltas[0] + 0.3 * deltas[1] + 0.5 * deltas[2]
        torch.testing.assert_close(averages(deltas, [0.2, 0.3, 0.5], "sum")[0], expected)

    def test_votes_and_mask(self) -> None:
        delta = torch.tensor([2.0, -2.0, 0.0, 5.0])
        assert votes(delta, 0.5, "sum").tolist() == [1.0, -1.0, 0.0, 2.5]
        assert votes(delta, 0.5, "count").tolist() == [1.0, -1.0, 0.0, 1.0]
        assert votes(delta, 0.0, "count").tolist() == [0.0] * 4
        mask = consensus_mask(delta, torch.tensor([1.0, 1.0, 1.0, 0.0]))
        assert mask.tolist() == [True, False, False, False]

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="known: sum, count"):
            votes(torch.ones(2), 1.0, "median")
