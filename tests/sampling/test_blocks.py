"""Searching in blocks finds what searching one by one finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from legato.sampling.blocks import argmax, inverse_cdf, num_blocks

VOCABULARIES = [1, 2, 7, 12, 97, 1000, 50257]
ALMOST_ONE = 1 - 2.0**-53


def one_by_one(weights: Tensor, u: Tensor) -> Tensor:
    cumulated = weights.double().cumsum(-1)
    return torch.searchsorted(cumulated, (u * cumulated[:, -1])[:, None], right=True)[:, 0]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_blocks_divide_the_vocabulary(vocab_size: int) -> None:
    assert vocab_size % num_blocks(vocab_size) == 0


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("n", [1, 5])
def test_argmax_is_the_highest(vocab_size: int, n: int) -> None:
    scores = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert torch.equal(argmax(scores), scores.argmax(-1))


def test_argmax_of_equal_scores_is_the_lowest_id() -> None:
    scores = torch.zeros(3, 12)
    scores[1, [5, 11]] = 2.0  # in different blocks
    scores[2, [4, 5]] = 2.0  # in the same block
    assert argmax(scores).tolist() == [0, 5, 4]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_inverse_cdf_is_the_one_of_the_whole_row(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.randn(4, vocab_size, generator=generator).mul_(2).softmax(-1).repeat(100, 1)
    u = torch.rand(400, generator=generator, dtype=torch.float64)
    chosen = inverse_cdf(weights, u)
    # A point within rounding of a token's edge may fall on either side of it.
    assert (chosen == one_by_one(weights, u)).sum().item() >= 399
    assert bool((weights.gather(1, chosen[:, None]) > 0).all())


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=1, max_size=60), st.floats(0, ALMOST_ONE))
@settings(max_examples=300, deadline=None)
def test_a_weight_of_zero_is_never_chosen(weights: list[float], u: float) -> None:
    if not any(weights):
        weights[-1] = 1e-30
    chosen = inverse_cdf(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)).item()
    assert weights[int(chosen)] > 0


def test_the_ends_of_the_interval_choose_the_first_and_the_last_weight() -> None:
    weights = torch.zeros(2, 1000)
    weights[:, 123:877] = 0.01
    ends = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    assert inverse_cdf(weights, ends).tolist() == [123, 876]


def test_numbers_that_are_no_weights_still_give_an_id() -> None:
    weights = torch.tensor([[float("nan")] * 12, [float("inf")] * 12, [0.0] * 12])
    chosen = inverse_cdf(weights, torch.full((3,), 0.5, dtype=torch.float64))
    assert bool(((chosen >= 0) & (chosen < 12)).all())
