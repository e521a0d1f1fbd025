"""Weights of the average and clip of its result: formulas, edges, and the identities that need no engine."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.sync.outer import nesterov_step_
from megatron_edit.sync.penalty import clip_coefficient, effective_replicas, replica_weights


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NOBODY = torch.zeros(3, 2, dtype=torch.bool)

columns = st.integers(1, 5).flatmap(
    lambda size: st.tuples(
        st.lists(st.floats(0, 500), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
    )
)


class TestReplicaWeights:
    @settings(max_examples=100, deadline=None)
    @given(columns, st.floats(0.5, 100))
    def test_softmax_of_the_negative_norms_of_those_who_remain(
        self, column: tuple[list[float], list[bool]], temperature: float
    ) -> None:
        norms, left_out = column
        weights = replica_weights(
            float64(norms)[:, None], torch.tensor(left_out)[:, None], "softmax", temperature
        )[:, 0].tolist()
        remaining = [norm for norm, out in zip(norms, left_out, strict=True) if not out]
        scores = [
            0.0 if out else math.exp((min(remaining) - norm) / temperature)
            for norm, out in zip(norms, left_out, strict=True)
        ]
        expected = [score / sum(scores) for score in scores] if remaining else [0.0] * len(norms)
        assert weights == pytest.approx(expected, rel=1e-9, abs=1e-300)
        assert not any(weight for weight, out in zip(weights, left_out, strict=True) if out)

    def test_known_values(self) -> None:
        norms = float64([[0.0, 2.0], [math.log(2), 5.0], [math.log(4), 1.0]])
        left_out = torch.tensor([[False, False], [False, True], [False, False]])
        weights = replica_weights(norms, left_out, "softmax", 1.0)
        torch.testing.assert_close(weights[:, 0], float64([4, 2, 1]) / 7)
        half = 1 / (1 + math.exp(-0.5))
        torch.testing.assert_close(
            replica_weights(norms, left_out, "softmax", 2.0)[:, 1], float64([1 - half, 0, half])
        )

    @pytest.mark.parametrize("weighting", ["softmax", "mean"])
    @pytest.mark.parametrize("norm", [0.0, 1.0, 1e-300, 1e30])
    def test_equal_norms_give_exactly_one_over_r(self, weighting: str, norm: float) -> None:
        weights = replica_weights(torch.full((3, 2), norm, dtype=torch.float64), NOBODY, weighting, 1.0)
        assert (weights == 1 / 3).all()

    def test_mean_ignores_the_norms(self) -> None:
        norms = float64([[1.0, math.nan], [50.0, 3.0], [7.0, math.inf]])
        left_out = torch.tensor([[False, True], [False, False], [True, True]])
        assert replica_weights(norms, left_out, "mean").tolist() == [[0.5, 0], [0.5, 1], [0, 0]]

    @pytest.mark.parametrize("weighting", ["softmax", "mean"])
    def test_all_left_out_gives_zeros_whatever_the_norms(self, weighting: str) -> None:
        norms = float64([[math.nan, 1.0], [math.inf, 2.0], [-math.inf, 3.0]])
        assert not replica_weights(norms, ~NOBODY, weighting).any()

    @pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0, 1e300])
    @pytest.mark.parametrize("norm", [1.0, 1e4, 1e200])
    def test_neither_large_norms_nor_small_temperatures_lose_the_weights(
        self, norm: float, temperature: float
    ) -> None:
        norms = float64([[norm, norm], [2 * norm, norm], [3 * norm, 2 * norm]])
        weights = replica_weights(norms, NOBODY, "softmax", temperature)
        torch.testing.assert_close(weights.sum(0), float64([1, 1]))
        assert weights[0, 0] >= weights[1, 0] >= weights[2, 0]

    @settings(max_examples=100, deadline=None)
    @given(columns, st.floats(0, 1), st.sampled_from(["softmax", "mean"]), st.data())
    def test_shares_of_the_steps_enter_with_their_ratio(
        self, column: tuple[list[float], list[bool]], ratio: float, weighting: str, data: st.DataObject
    ) -> None:
        """w_i = (1 - r) softmax_i + r steps_i / sum of the steps, over those who remain; the sum is 1, or 0."""
        norms, left_out = (float64(column[0])[:, None], torch.tensor(column[1])[:, None])
        steps = data.draw(st.lists(st.integers(1, 500), min_size=len(norms), max_size=len(norms)))
        weights = replica_weights(norms, left_out, weighting, 1.0, torch.tensor(steps), ratio)[:, 0].tolist()
        without = replica_weights(norms, left_out, weighting, 1.0)[:, 0].tolist()
        total = sum(s for s, out in zip(steps, column[1], strict=True) if not out)
        for weight, plain, own, out in zip(weights, without, steps, column[1], strict=True):
            assert weight == (0.0 if out else pytest.approx((1 - ratio) * plain + ratio * own / total, rel=1e-12))
        assert sum(weights) == (pytest.approx(1.0) if total else 0.0)

    def test_steps_by_hand(self) -> None:
        """The slow replica has the smaller norm; the third made the most steps, but is left out of module 1."""
        left_out = torch.tensor([[False, False], [False, False], [False, True]])
        norms = torch.zeros(3, 2, dtype=torch.float64)
        weights = replica_weights(norms, left_out, "softmax", 1.0, float64([1.0, 3.0, 6.0]), 0.5)
        expected = float64([[1 / 6 + 0.05, 0.25 + 0.125], [1 / 6 + 0.15, 0.25 + 0.375], [1 / 6 + 0.3, 0.0]])
        torch.testing.assert_close(weights, expected)

    def test_bad_settings_are_refused(self) -> None:
        for ratio in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match=f"got {ratio}; try"):
                replica_weights(torch.ones(3, 2, dtype=torch.float64), NOBODY, "mean", 1.0, torch.ones(3), ratio)
        with pytest.raises(ValueError, match="known: softmax, mean"):
            replica_weights(torch.ones(3, 2, dtype=torch.float64), NOBODY, "median")
        for temperature in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match=f"got {temperature}; try"):
                replica_weights(torch.ones(3, 2, dtype=torch.float64), NOBODY, "softmax", temperature)


def test_effective_replicas() -> None:
    weights = float64([[0.25, 1.0, 0.5, 0.0], [0.25, 0, 0.5, 0], [0.25, 0, 0, 0], [0.25, 0, 0, 0]])
    assert effective_replicas(weights).tolist() == [4, 1, 2, 0]


class TestClipCoefficient:
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=8),
        st.sampled_from([1e-3, 1.0, 10.0, 1e6]),
    )
    def test_the_clipped_norm_is_at_most_phi(self, delta: list[float], phi: float) -> None:
        averaged_delta = float64(delta)
        beta = clip_coefficient(averaged_delta.norm(), phi)
        assert 0 < beta.item() <= 1
        assert (beta * averaged_delta).norm().item() <= phi * (1 + 1e-12)

    def test_formula(self) -> None:
        assert clip_coefficient(float64(19.0), 10.0).item() == 10.0 / (19.0 + 1e-6)
        assert clip_coefficient(float64(9.0), 10.0).item() == 1.0
        assert clip_coefficient(float64(0.0), 10.0).item() == 1.0
        assert clip_coefficient(float64(1.0), 1.0, eps=1.0).item() == 0.5

    def test_phi_0_is_off(self) -> None:
        for norm in (0.0, 1e30, math.inf):
            assert clip_coefficient(float64(norm), 0.0).item() == 1.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_stays_on_the_device_of_the_norm(self, dtype: torch.dtype) -> None:
        """A meta tensor has no value: reading one back to the host would raise."""
        for phi in (0.0, 10.0):
            beta = clip_coefficient(torch.tensor(3.0, dtype=dtype, device="meta"), phi)
            assert beta.device.type == "meta" and beta.dtype == dtype and beta.shape == ()

    def test_negative_phi_is_refused(self) -> None:
        for phi in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"got {phi}; try"):
                clip_coefficient(float64(1.0), phi)


class TestOneSyncByHand:
    """Weights, clip and outer step put together, without an engine."""

    @staticmethod
    def sync(anchor: Tensor, local: Tensor, weighting: str, phi: float, eta: float, mu: float) -> Tensor:
        """anchor [N], local [R, N] -> the anchor after a sync."""
        deltas = local - anchor
        norms = deltas.double().norm(dim=1)[:, None]
        weights = replica_weights(norms, torch.zeros_like(norms, dtype=torch.bool), weighting)
        averaged_delta = (weights.float() * deltas).sum(0)
        beta = clip_coefficient(averaged_delta.norm(), phi)
        updated = anchor.clone()
        nesterov_step_(updated, torch.zeros_like(anchor), averaged_delta, beta, eta, mu)
        return updated

    def test_equal_weights_and_a_plain_outer_step_give_the_mean_of_the_local_parameters(self) -> None:
        torch.manual_seed(0)
        anchor, local = torch.randn(50), torch.randn(3, 50)
        torch.testing.assert_close(self.sync(anchor, local, "mean", 0.0, 1.0, 0.0), local.mean(0))

    @pytest.mark.parametrize("weighting", ["softmax", "mean"])
    def test_one_replica_and_a_plain_outer_step_are_no_sync_at_all(self, weighting: str) -> None:
        torch.manual_seed(1)
        anchor, local = torch.randn(50), torch.randn(1, 50)
        torch.testing.assert_close(self.sync(anchor, local, weighting, 0.0, 1.0, 0.0), local[0])

    def test_with_momentum_one_replica_is_a_look_ahead_optimizer(self) -> None:
        anchor, local = torch.zeros(50), torch.ones(1, 50)
        torch.testing.assert_close(self.sync(anchor, local, "mean", 0.0, 1.0, 0.8), torch.full((50,), 1.8))

    def test_the_clip_bounds_how_far_the_anchor_moves(self) -> None:
        anchor, local = torch.zeros(4), torch.full((2, 4), 50.0)  # ||Dbar|| = 100
        moved = self.sync(anchor, local, "softmax", 10.0, 1.0, 0.0)
        torch.testing.assert_close(moved.norm(), torch.tensor(10.0))
