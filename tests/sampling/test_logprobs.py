"""Log probabilities: of the model, finite, and in a fixed order."""

from __future__ import annotations

import pytest
import torch

from legato.sampling.logprobs import finite, prompt_logprobs, top_tokens

NAN, INF = float("nan"), float("inf")


def test_ordinary_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 50)
    assert torch.equal(finite(logits), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_become_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50).to(dtype)
    assert torch.equal(finite(logits), logits.float())


def test_the_given_logits_are_not_changed() -> None:
    logits = torch.tensor([[NAN, INF, -INF, 1.0]])
    finite(logits)
    assert logits[0, 0].isnan() and logits[0, 1] == INF


def test_broken_logits_have_no_probability() -> None:
    probabilities = finite(torch.tensor([[NAN, 1.0, -INF, 2.0, NAN]])).softmax(-1)[0]
    torch.testing.assert_close(probabilities[[1, 3]], torch.tensor([1.0, 2.0]).softmax(-1))
    assert probabilities[[0, 2, 4]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("broken", [NAN, -INF])
def test_a_row_with_nothing_left_has_token_0(broken: float) -> None:
    assert finite(torch.full((1, 5), broken)).softmax(-1).tolist() == [[1, 0, 0, 0, 0]]


def test_top_tokens_are_ordered_by_probability_then_by_id() -> None:
    logprobs = torch.tensor([[-3.0, -1.0, -2.0, -1.0, -2.0, -2.0], [0.0, -9.0, -9.0, -9.0, -9.0, -9.0]])
    top = top_tokens(logprobs, [4, 7], [4, 2])
    assert top.indices == [4, 7] and top.lengths == [4, 2]
    assert top.token_ids.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]
    assert top.logprobs.tolist() == [[-1, -1, -2, -2], [0, -9, -9, -9]]


def test_top_tokens_are_those_of_a_stable_sort() -> None:
    logprobs = torch.randint(-20, 5, (8, 1000)).float()
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    top = top_tokens(logprobs, list(range(8)), [20] * 8)
    assert torch.equal(top.token_ids, ids[:, :20])
    assert torch.equal(top.logprobs, values[:, :20])


def test_no_more_top_tokens_than_tokens() -> None:
    assert top_tokens(torch.zeros(1, 3), [0], [10]).token_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("positions", [0, 1, 255, 256, 700])
def test_prompt_logprobs_are_those_of_the_successors(positions: int) -> None:
    logits, successors = torch.randn(positions, 30), torch.randint(0, 30, (positions,))
    expected = logits.log_softmax(-1)[torch.arange(positions), successors]
    torch.testing.assert_close(prompt_logprobs(logits, successors), expected)
