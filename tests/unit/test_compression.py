"""Codecs: bounds, sizes, edges. The compressed sum: equal on all replicas, within its bound, nothing lost for good."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.sync.compression import CODECS, CompressedSum, chunk_bounds, chunk_stride, codec_of

NAMES = list(CODECS)
SIZES = [0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 1000]
ANY_CODEC = pytest.mark.parametrize("name", NAMES)


def gaussian(n: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def round_trip(name: str, x: Tensor) -> Tensor:
    codec = codec_of(name)
    payload = torch.full((codec.payload_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode_(x, payload)
    out = torch.full_like(x, math.nan)
    codec.decode(payload, out)
    return out


vectors = st.builds(
    lambda n, seed, exponents: gaussian(n, seed) * torch.tensor(exponents).exp2().repeat(n)[:n],
    st.integers(0, 700),
    st.integers(0, 10**6),
    st.lists(st.integers(-149, 120), min_size=1, max_size=700),
)


@settings(max_examples=150, deadline=None)
@given(vectors, st.sampled_from(NAMES))
def test_every_element_is_within_its_bound(x: Tensor, name: str) -> None:
    error = (round_trip(name, x).double() - x.double()).abs()
    assert (error <= codec_of(name).error_bound(x)).all()


@ANY_CODEC
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1.0, 1e30, 1e37])
def test_values_of_all_sizes_are_within_the_bound(name: str, scale: float) -> None:
    x = gaussian(1000, 1).mul(scale)
    assert ((round_trip(name, x).double() - x.double()).abs() <= codec_of(name).error_bound(x)).all()


@ANY_CODEC
@pytest.mark.parametrize("largest", [3.3e38, -3.3e38])
def test_the_largest_values_stay_finite(name: str, largest: float) -> None:
    x = torch.tensor([largest, 0.0, -largest])
    assert round_trip(name, x).isfinite().all()


def test_the_bound_is_half_a_step_of_the_block() -> None:
    x = torch.zeros(300)
    x[0], x[256], x[128] = 127.0, 254.0, 127.0
    assert codec_of("int8").error_bound(x)[[0, 255, 256, 299]].tolist() == pytest.approx([0.5, 0.5, 1, 1], rel=1e-4)
    assert codec_of("int4").error_bound(x)[[0, 128, 256]].tolist() == pytest.approx(
        [127 / 14, 127 / 14, 254 / 14], 1e-4
    )
    assert codec_of("bf16").error_bound(x)[0] == 127 / 256


@ANY_CODEC
def test_the_bound_is_not_loose(name: str) -> None:
    x = gaussian(10000, 2)
    error, bound = (round_trip(name, x) - x).abs(), codec_of(name).error_bound(x)
    assert (error / bound).max() > 0.9


def test_a_quantiser_written_out() -> None:
    for name, block, levels in (("int8", 256, 127), ("int4", 128, 7)):
        x = gaussian(700, 3)
        expected = []
        for start in range(0, 700, block):
            part = x[start : start + block].tolist()
            scale = max(map(abs, part)) / levels
            expected += [round(value / scale) * scale for value in part]
        torch.testing.assert_close(round_trip(name, x), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_bf16_is_torchs() -> None:
    x = gaussian(257, 4)
    assert torch.equal(round_trip("bf16", x), x.bfloat16().float())


@ANY_CODEC
@pytest.mark.parametrize("n", SIZES)
def test_sizes_and_zeros(name: str, n: int) -> None:
    blocks = {"bf16": 0, "int8": -(-n // 256), "int4": -(-n // 128)}[name]
    assert codec_of(name).payload_bytes(n) == {"bf16": 2 * n, "int8": n, "int4": (n + 1) // 2}[name] + 4 * blocks
    assert torch.equal(round_trip(name, torch.zeros(n)), torch.zeros(n))
    x = gaussian(n, n)
    assert torch.equal(round_trip(name, x), round_trip(name, x.clone()))


@ANY_CODEC
def test_codes_of_codes_are_exact(name: str) -> None:
    """What a codec gives it can represent, up to the rounding of the scale."""
    once = round_trip(name, gaussian(1000, 5))
    torch.testing.assert_close(round_trip(name, once), once, rtol=1e-6, atol=0)


@ANY_CODEC
def test_a_payload_may_be_longer_and_nothing_beside_it_changes(name: str) -> None:
    codec, x = codec_of(name), gaussian(301, 6)
    payload = torch.full((4 + codec.payload_bytes(301) + 9,), 0xA5, dtype=torch.uint8)
    buffer = torch.full((303,), -1.0)
    codec.encode_(x, payload[4:])
    codec.decode(payload[4:], buffer[1:302])
    assert torch.equal(buffer[1:302], round_trip(name, x)) and buffer[0] == buffer[302] == -1
    assert (payload[:4] == 0xA5).all() and (payload[-9:] == 0xA5).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@ANY_CODEC
def test_a_non_finite_element_does_not_come_back_finite(name: str, value: float) -> None:
    x = torch.ones(300)
    x[5] = value
    out = round_trip(name, x)
    assert not out[5].isfinite() and torch.equal(out[256:], torch.ones(44))


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="known: bf16, int8, int4"):
        codec_of("fp8")


@given(st.integers(0, 1000), st.integers(1, 9))
def test_chunks_tile_the_vector_evenly(n: int, num_replicas: int) -> None:
    bounds = chunk_bounds(n, num_replicas)
    assert [start for start, _ in bounds] == [0, *[end for _, end in bounds[:-1]]] and bounds[-1][1] == n
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    for codec in CODECS.values():
        stride = chunk_stride(codec, n, num_replicas)
        assert stride % 16 == 0 and 0 <= stride - max(map(codec.payload_bytes, sizes)) <= 16


def compressed_sum(
    name: str, contributions: list[Tensor], errors: list[Tensor], sends: list[bool] | None = None
) -> list[Tensor]:
    """The result of each replica; `errors` are changed."""
    codec, size = codec_of(name), len(contributions)
    flats = [contribution.clone() for contribution in contributions]
    messages = [
        CompressedSum(codec, flats[i], errors[i], size, i, sends=sends is None or sends[i]) for i in range(size)
    ]
    parts = [message.to_owners.chunk(size) for message in messages]
    owned = [message.sum_of_own_chunk(torch.cat([p[i] for p in parts])) for i, message in enumerate(messages)]
    for message in messages:
        message.write_result(owned)
    return flats


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 600), st.integers(1, 5), st.integers(0, 10**6))
def test_the_sum_is_equal_everywhere_within_its_bound_and_owes_the_rest(
    name: str, n: int, num_replicas: int, seed: int
) -> None:
    codec = codec_of(name)
    contributions = [gaussian(n, seed + i, scale=10.0 ** (i - 2)) for i in range(num_replicas)]
    errors = [gaussian(n, seed + 100 + i, scale=0.01) for i in range(num_replicas)]
    x = [c + e for c, e in zip(contributions, errors, strict=True)]
    exact = torch.stack([each.double() for each in x]).sum(0)
    results = compressed_sum(name, contributions, errors)
    assert all(torch.equal(result, results[0]) for result in results)

    bound = torch.zeros(n)
    for start, end in chunk_bounds(n, num_replicas):
        parts = [each[start:end] for each in x]
        bound[start:end] = sum(codec.error_bound(part) for part in parts)
        total = sum(round_trip(name, part) for part in parts)
        bound[start:end] += codec.error_bound(total)
    error = (results[0].double() - exact).abs()
    assert (error <= bound * (1 + 1e-5) + 1e-12).all()

    owed = torch.stack([e.double() for e in errors]).sum(0)
    torch.testing.assert_close(results[0].double() + owed, exact, rtol=0, atol=1e-4 * 10.0 ** (num_replicas - 3))


@ANY_CODEC
def test_error_feedback_loses_nothing_over_many_sums(name: str) -> None:
    """The mean of the results nears the mean of the contributions as 1/T; without feedback a constant error stays."""
    n, replicas, rounds = 301, 3, 50
    contributions = [gaussian(n, 10 + i) for i in range(replicas)]
    errors = [torch.zeros(n) for _ in range(replicas)]
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(rounds):
        total += compressed_sum(name, contributions, errors)[0].double()
    exact = torch.stack(contributions).double().sum(0)
    with_feedback = (total / rounds - exact).abs().max()
    without = (compressed_sum(name, contributions, [torch.zeros(n) for _ in range(3)])[0] - exact).abs().max()
    assert with_feedback < 0.1 * without
    once = sum(codec_of(name).error_bound(c).max() for c in contributions)
    assert all(error.abs().max() < 3 * once for error in errors)


@ANY_CODEC
def test_a_replica_that_sends_nothing_counts_for_nothing_and_owes_what_it_owed(name: str) -> None:
    contributions = [gaussian(300, 1), torch.full((300,), math.nan), gaussian(300, 2)]
    errors = [torch.zeros(300), gaussian(300, 3, scale=0.01), torch.zeros(300)]
    owed = errors[1].clone()
    results = compressed_sum(name, contributions, errors, sends=[True, False, True])
    zeros = [contributions[0], torch.zeros(300), contributions[2]]
    fresh = [torch.zeros(300) for _ in range(3)]
    assert torch.equal(results[1], compressed_sum(name, zeros, fresh)[0])
    torch.testing.assert_close(errors[1], owed + fresh[1])  # and what its own chunk's sum lost
    start, end = chunk_bounds(300, 3)[1]
    assert torch.equal(errors[1][:start], owed[:start]) and torch.equal(errors[1][end:], owed[end:])


@ANY_CODEC
def test_messages_do_not_depend_on_what_memory_held(name: str) -> None:
    messages = []
    for _ in range(2):
        junk = torch.full((10000,), 0x5A, dtype=torch.uint8)
        del junk
        message = CompressedSum(codec_of(name), gaussian(31, 7), torch.zeros(31), 3, 0)
        messages.append((message.to_owners, message.sum_of_own_chunk(message.to_owners)))
    assert all(torch.equal(first, second) for first, second in zip(*messages, strict=True))
