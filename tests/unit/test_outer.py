"""The outer Nesterov step against torch.optim.SGD, and that it neither allocates nor waits for a device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_edit.sync.outer import nesterov_step_

SIZE = 257


def deltas_and_betas(steps: int) -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SIZE, generator=generator), torch.rand((), generator=generator).item())
        for _ in range(steps)
    ]


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
        nesterov_step_(
            anchor, momentum, delta.clone(), torch.tensor(beta) if beta_as_tensor else beta, 0.7, mu
        )
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


def test_an_empty_shard_is_fine() -> None:
    nesterov_step_(torch.zeros(0), torch.zeros(0), torch.zeros(0), 1.0, 0.7, 0.8)


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


def test_allocates_nothing_of_the_shards_size() -> None:
    anchor, momentum, delta = torch.ones(SIZE), torch.ones(SIZE), torch.ones(SIZE)
    with LargestAllocation(anchor, momentum, delta) as watch:
        nesterov_step_(anchor, momentum, delta, torch.tensor(0.5), 0.7, 0.8)
    assert watch.numel <= 1
    with LargestAllocation(anchor) as watch:  # the watch itself sees an allocation
        torch.add(anchor, anchor)
    assert watch.numel == SIZE


def test_does_not_read_the_device_back() -> None:
    """A meta tensor has no value: reading one back to the host would raise."""
    anchor, momentum, delta = (torch.empty(SIZE, device="meta") for _ in range(3))
    nesterov_step_(anchor, momentum, delta, torch.empty((), device="meta"), 0.7, 0.8)


def test_shards_of_different_sizes_are_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="different sizes"):
        nesterov_step_(torch.zeros(3), torch.zeros(3), torch.zeros(1), 1.0, 0.7, 0.8)
