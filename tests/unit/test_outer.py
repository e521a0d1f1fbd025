"""The outer steps against torch.optim.SGD and their formulas; none allocates or waits for a device."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_edit.sync.outer import OUTER_STEPS, InnerLearningRateError, OuterSettings, nesterov_step_
from megatron_edit.tables.methods import METHODS
from megatron_edit.tables.methods import OuterStep as OuterStepName

SIZE = 257


def deltas_and_betas(steps: int) -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(SIZE, generator=generator), torch.rand((), generator=generator).item()) for _ in range(steps)]


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("beta_as_tensor", [False, True])
def test_equals_torch_sgd_on_the_pseudo_gradient(mu: float, beta_as_tensor: bool) -> None:
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    anchor, momentum = start.clone(), torch.zeros(SIZE)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=mu, nesterov=mu > 0, dampening=0)
    for delta, beta in deltas_and_betas(5):
        parameter.grad = -beta * delta
        sgd.step()
        nesterov_step_(anchor, momentum, delta.clone(), torch.tensor(beta) if beta_as_tensor else beta, 0.7, mu)
        torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-6, atol=1e-7)
    if mu:
        torch.testing.assert_close(momentum, sgd.state[parameter]["momentum_buffer"], rtol=1e-6, atol=1e-7)


def test_closed_formula_of_three_steps() -> None:
    """Delta 1 each time, eta 0.5, mu 0.5: m = -1, -1.5, -1.75 and steps of 0.5 (1 + 0.5 |m|)."""
    anchor, momentum = torch.zeros(2), torch.zeros(2)
    for expected in (0.75, 1.625, 2.5625):
        nesterov_step_(anchor, momentum, torch.ones(2), 1.0, 0.5, 0.5)
        assert anchor.tolist() == [expected] * 2
    assert momentum.tolist() == [-1.75] * 2


def test_beta_in_float64_leaves_the_shards_in_fp32() -> None:
    anchor, momentum = torch.zeros(3), torch.zeros(3)
    nesterov_step_(anchor, momentum, torch.ones(3), torch.tensor(0.5, dtype=torch.float64), 1.0, 0.0)
    assert anchor.dtype == momentum.dtype == torch.float32 and anchor.tolist() == [0.5] * 3


def test_views_into_a_larger_buffer_are_updated_in_place_and_nothing_else_is() -> None:
    buffer = torch.zeros(30)
    anchor, momentum, delta = buffer[0:10], buffer[10:20], torch.ones(10)
    nesterov_step_(anchor, momentum, delta, 1.0, 0.5, 0.0)
    assert buffer.tolist() == [0.5] * 10 + [-1.0] * 10 + [0.0] * 10


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest result of any operation that lies in none of the given storages."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, leaf.numel())
        return result


EVERY_SETTING = OuterSettings(0.7, 0.8, inner_lr=0.1, gap_penalty=2.0, momentum_clip=1.0)


@pytest.mark.parametrize("name", OUTER_STEPS)
def test_allocates_nothing_of_the_shards_size(name: str) -> None:
    anchor, momentum, delta = torch.ones(SIZE), torch.ones(SIZE), torch.ones(SIZE)
    with LargestAllocation(anchor, momentum, delta) as watch:
        OUTER_STEPS[name](anchor, momentum, delta, torch.tensor(0.5), EVERY_SETTING)
    assert watch.numel <= 1
    with LargestAllocation(anchor) as watch:  # the watch itself sees an allocation
        torch.add(anchor, anchor)
    assert watch.numel == SIZE


@pytest.mark.parametrize("name", OUTER_STEPS)
def test_shards_give_what_the_whole_gives_an_empty_one_among_them(name: str) -> None:
    whole = [torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    cut = [[piece.clone() for piece in tensor.split([100, 0, SIZE - 100])] for tensor in whole]
    before = whole[0].clone()
    OUTER_STEPS[name](*whole, 0.9, EVERY_SETTING)
    for shard in zip(*cut, strict=True):
        OUTER_STEPS[name](*shard, 0.9, EVERY_SETTING)
    for tensor, pieces in zip(whole[:2], cut[:2], strict=True):  # anchor, outer momentum
        torch.testing.assert_close(torch.cat(pieces), tensor, rtol=1e-6, atol=1e-7)
    assert not torch.equal(whole[0], before)


@pytest.mark.parametrize("name", OUTER_STEPS)
def test_does_not_read_the_device_back(name: str) -> None:
    """A meta tensor has no value: reading one back to the host would raise."""
    anchor, momentum, delta = (torch.empty(SIZE, device="meta") for _ in range(3))
    OUTER_STEPS[name](anchor, momentum, delta, torch.empty((), device="meta"), EVERY_SETTING)


@pytest.mark.parametrize("name", OUTER_STEPS)
def test_shards_of_different_sizes_are_a_programmers_error(name: str) -> None:
    with pytest.raises(AssertionError, match="different sizes"):
        OUTER_STEPS[name](torch.zeros(3), torch.zeros(3), torch.zeros(1), 1.0, EVERY_SETTING)


def test_the_table_names_the_steps_that_methods_may_name() -> None:
    assert {"none", *OUTER_STEPS} == set(get_args(OuterStepName))
    assert {row.outer_step for row in METHODS.values()} == {"none", *OUTER_STEPS}


def test_nesterov_of_the_table_is_the_step_above() -> None:
    results = []
    for _ in range(2):
        anchor, momentum, delta = (torch.randn(SIZE, generator=torch.Generator().manual_seed(s)) for s in range(3))
        results.append((anchor, momentum, delta))
    nesterov_step_(*results[0], 0.9, 0.7, 0.8)
    OUTER_STEPS["nesterov"](*results[1], 0.9, OuterSettings(0.7, 0.8))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("beta_as_tensor", [False, True])
def test_slowmo_follows_its_paper(beta_as_tensor: bool) -> None:
    """With the mean of the replicas, and a rate that falls: u = mu u + (theta - mean)/gamma, theta -= a gamma u."""
    anchor, momentum = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)), torch.zeros(SIZE)
    theta, u = anchor.double(), torch.zeros(SIZE, dtype=torch.float64)
    for gamma, (delta, beta) in zip((0.3, 0.2, 0.01), deltas_and_betas(3), strict=True):
        mean = theta + beta * delta.double()
        u = 0.5 * u + (theta - mean) / gamma
        theta = theta - 0.9 * gamma * u
        clip = torch.tensor(beta) if beta_as_tensor else beta
        OUTER_STEPS["slowmo"](anchor, momentum, delta.clone(), clip, OuterSettings(0.9, 0.5, inner_lr=gamma))
        torch.testing.assert_close(anchor, theta.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(momentum, u.float(), rtol=1e-5, atol=1e-5)


def test_slowmo_without_momentum_and_slow_rate_1_takes_the_mean() -> None:
    anchor = torch.zeros(3)
    OUTER_STEPS["slowmo"](anchor, torch.zeros(3), torch.ones(3), 1.0, OuterSettings(1.0, 0.0, inner_lr=0.25))
    assert anchor.tolist() == [1.0] * 3


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan])
def test_slowmo_refuses_an_inner_learning_rate_of_0_before_it_changes_anything(gamma: float) -> None:
    tensors = [torch.ones(3) for _ in range(3)]
    with pytest.raises(InnerLearningRateError, match=f"is {gamma}.*--min-lr"):
        OUTER_STEPS["slowmo"](*tensors, 1.0, OuterSettings(1.0, 0.5, inner_lr=gamma))
    assert all(tensor.tolist() == [1.0] * 3 for tensor in tensors)
    assert issubclass(InnerLearningRateError, ValueError)


def test_co2_follows_its_formula() -> None:
    """Delta 1, Lambda 2, mu 0.5, eta 0.5: m = -1/2, -3/4, -7/8 and steps of |m|/2."""
    anchor, momentum = torch.zeros(2), torch.zeros(2)
    for expected in (0.25, 0.625, 1.0625):
        OUTER_STEPS["co2"](anchor, momentum, torch.ones(2), 1.0, OuterSettings(0.5, 0.5, gap_penalty=2.0))
        assert anchor.tolist() == [expected] * 2
    assert momentum.tolist() == [-0.875] * 2


def test_co2_scales_with_beta() -> None:
    anchor, momentum = torch.zeros(2), torch.zeros(2)
    OUTER_STEPS["co2"](anchor, momentum, torch.ones(2), torch.tensor(0.25), OuterSettings(1.0, 0.5))
    assert anchor.tolist() == [0.25] * 2 and momentum.tolist() == [-0.25] * 2


def test_the_clip_of_co2_takes_effect_on_the_step_and_on_what_is_kept() -> None:
    anchor, momentum = torch.zeros(3), torch.zeros(3)
    settings = OuterSettings(1.0, 0.5, momentum_clip=2.0)
    OUTER_STEPS["co2"](anchor, momentum, torch.tensor([1.0, -8.0, 8.0]), 1.0, settings)
    assert momentum.tolist() == [-1.0, 2.0, -2.0] and anchor.tolist() == [1.0, -2.0, 2.0]
    OUTER_STEPS["co2"](anchor, momentum, torch.zeros(3), 1.0, settings)
    assert momentum.tolist() == [-0.5, 1.0, -1.0]
