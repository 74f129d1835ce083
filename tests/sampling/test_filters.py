"""The filters keep what the warpers of transformers keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from legato.sampling import filters

SHAPES = [(1, 1), (1, 2), (3, 7), (2, 97), (4, 1000), (2, 10007)]
SPREADS = [0.01, 1.0, 8.0]  # nearly uniform, ordinary, peaked


def random_scores(shape: tuple[int, int], spread: float) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * spread


def column(value: float, m: int) -> Tensor:
    return torch.full((m, 1), value)


def kept(weights: Tensor) -> Tensor:
    return weights > 0


def kept_by(warper: Callable[[None, Tensor], Tensor], scores: Tensor) -> Tensor:
    """In float64, lest we be compared with rounding errors. A probability of 0 in float32 cannot be drawn anyway."""
    return warper(None, scores.double()).isfinite() & (scores.softmax(-1) > 0)


def differing(ours: Tensor, theirs: Tensor) -> int:
    return int((ours != theirs).sum(-1).max().item())


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 3, 50, 100_000])
def test_top_k(shape: tuple[int, int], spread: float, k: int) -> None:
    scores = random_scores(shape, spread)
    weights = scores.softmax(-1)
    filters.top_k(scores, weights, torch.full((shape[0], 1), k), k)
    assert torch.equal(kept(weights), kept_by(TopKLogitsWarper(k), scores))


# Where the cumulated mass meets the limit to within rounding, one token more or less may be kept.


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p(shape: tuple[int, int], spread: float, p: float) -> None:
    scores = random_scores(shape, spread)
    weights = scores.softmax(-1)
    filters.top_p(weights, column(p, shape[0]))
    assert differing(kept(weights), kept_by(TopPLogitsWarper(p), scores)) <= 1


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_typical_p(shape: tuple[int, int], spread: float, p: float) -> None:
    scores = random_scores(shape, spread)
    weights = scores.softmax(-1)
    filters.typical_p(scores, weights, column(p, shape[0]))
    assert differing(kept(weights), kept_by(TypicalLogitsWarper(p), scores)) <= 1


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.001, 0.05, 1.0])
def test_min_p(shape: tuple[int, int], spread: float, p: float) -> None:
    scores = random_scores(shape, spread)
    weights = scores.softmax(-1)
    filters.min_p(weights, column(p, shape[0]))
    assert torch.equal(kept(weights), kept_by(MinPLogitsWarper(p), scores))


def test_the_filters_after_one_another() -> None:
    scores = random_scores((16, 500), 2.0)
    weights = scores.softmax(-1)
    filters.top_k(scores, weights, torch.full((16, 1), 60), 60)
    filters.top_p(weights, column(0.9, 16))
    filters.typical_p(scores, weights, column(0.8, 16))
    filters.min_p(weights, column(0.1, 16))
    theirs = scores
    for warper in (TopKLogitsWarper(60), TopPLogitsWarper(0.9), TypicalLogitsWarper(0.8), MinPLogitsWarper(0.1)):
        theirs = warper(None, theirs)
    assert torch.equal(kept(weights), theirs.isfinite())


def test_each_row_has_its_own_number() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3)
    weights = scores.softmax(-1)
    filters.top_k(scores, weights, torch.tensor([[1], [3], [9]]), 9)
    assert kept(weights).sum(-1).tolist() == [1, 3, 4]
    weights = scores.softmax(-1)  # 0.64, 0.24, 0.09, 0.03
    filters.top_p(weights, torch.tensor([[0.5], [0.7], [0.9]]))
    assert kept(weights).sum(-1).tolist() == [1, 2, 3]


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    weights = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    filters.top_p(weights, column(0.5, 1))
    assert kept(weights).tolist() == [[True] * 4]


@pytest.mark.parametrize("p", [0.0, 1e-12])
def test_no_filter_removes_everything(p: float) -> None:
    scores = random_scores((4, 1000), 3.0)
    for spread in (0.0, 1.0):
        weights = (scores * spread).softmax(-1)
        filters.top_p(weights, column(p, 4))
        filters.typical_p(scores * spread, weights, column(p, 4))
        filters.min_p(weights, column(1.0, 4))
        assert bool(kept(weights).any(-1).all())


def test_weights_that_are_out_stay_out() -> None:
    scores = random_scores((4, 100), 1.0)
    weights = scores.softmax(-1)
    weights[:, ::2] = 0
    filters.top_p(weights, column(0.8, 4))
    filters.typical_p(scores, weights, column(0.8, 4))
    assert not kept(weights)[:, ::2].any()


def test_numbers_that_are_no_weights_do_not_crash() -> None:
    scores = torch.full((2, 50), -float("nan"))
    filters.top_p(scores.clone(), column(0.5, 2))
    filters.typical_p(scores, scores.clone(), column(0.5, 2))
