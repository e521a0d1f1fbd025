"""The next token from logits, against its definition."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.inference.sampling import Sampling, filtered_probabilities, next_tokens

LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def test_greedy_takes_the_most_likely() -> None:
    assert next_tokens(LOGITS, Sampling(), []).tolist() == [0, 2]


def test_temperature_top_k_and_top_p() -> None:
    plain = (LOGITS / 0.5).softmax(-1)
    assert torch.allclose(filtered_probabilities(LOGITS, Sampling(temperature=0.5)), plain)
    two = filtered_probabilities(LOGITS, Sampling(temperature=1.0, top_k=2))[0]
    assert two[1] == two[3] == 0 and two[0] / two[2] == pytest.approx(float(torch.e), rel=1e-5)
    # probabilities 0.64, 0.24, 0.09, 0.03: the first alone has 0.6, the first two have 0.8
    one = filtered_probabilities(LOGITS, Sampling(temperature=1.0, top_p=0.6))[0]
    assert one.tolist() == [1, 0, 0, 0]
    more = filtered_probabilities(LOGITS, Sampling(temperature=1.0, top_p=0.8))[0]
    assert (more > 0).tolist() == [True, False, True, False] and more.sum() == pytest.approx(1)


def test_samples_have_the_probabilities_and_follow_from_the_seed() -> None:
    sampling = Sampling(temperature=1.0, top_k=3, seed=3)
    generators = [sampling.generator(i) for i in range(4000)]
    rows = LOGITS[:1].expand(4000, -1)
    drawn = next_tokens(rows, sampling, generators)
    expected = filtered_probabilities(LOGITS[:1], sampling)[0]
    assert (drawn == 3).sum() == 0
    for token in range(3):
        assert (drawn == token).float().mean() == pytest.approx(expected[token].item(), abs=0.03)
    again = next_tokens(rows[7:9], sampling, [sampling.generator(7), sampling.generator(8)])
    assert torch.equal(again, drawn[7:9])


def test_values_that_mean_nothing_are_named() -> None:
    problems = Sampling(temperature=-1, top_k=-2, top_p=0).problems()
    assert [problem.split()[0] for problem in problems] == ["--temperature", "--top-k", "--top-p"]
    assert Sampling().problems() == []
