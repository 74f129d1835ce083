"""Penalties: repetition as transformers has it, frequency and presence as OpenAI describes them."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from legato.sampling.penalties import TokenHistory

CPU = torch.device("cpu")
ROW = torch.tensor([2])


@pytest.mark.parametrize("penalty", [1e-3, 0.5, 1.3, 100.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    history = TokenHistory(97, 4, CPU)
    said = [5, 9, 9, 96, 0]
    history.begin_seen(2, said)
    scores = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([said]), scores.clone())
    history.penalise_seen(scores, ROW, torch.tensor([[penalty]]))
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)


def test_frequency_counts_and_presence_does_not() -> None:
    history = TokenHistory(10, 4, CPU)
    history.begin_counts(2, [3, 3, 3, 7])
    scores = torch.zeros(1, 10)
    history.penalise_counts(scores, ROW, torch.tensor([[0.5]]), torch.tensor([[0.25]]))
    assert scores[0, 3].item() == -1.75
    assert scores[0, 7].item() == -0.75
    assert scores.count_nonzero().item() == 2


def test_recorded_tokens_are_penalised_in_their_own_row() -> None:
    history = TokenHistory(10, 4, CPU)
    for row in (1, 2):
        history.begin_seen(row, [])
        history.begin_counts(row, [])
    history.record_seen(torch.tensor([1, 2]), torch.tensor([4, 5]))
    history.record_counts(torch.tensor([1, 2]), torch.tensor([4, 5]))
    scores = torch.ones(2, 10)
    history.penalise_seen(scores, torch.tensor([2, 1]), torch.full((2, 1), 2.0))
    assert scores[0].nonzero().numel() == 10 and scores[0, 5].item() == 0.5 and scores[1, 4].item() == 0.5
    scores = torch.zeros(2, 10)
    history.penalise_counts(scores, torch.tensor([2, 1]), torch.ones(2, 1), torch.zeros(2, 1))
    assert scores[0, 5].item() == scores[1, 4].item() == -1
    assert scores.count_nonzero().item() == 2


def test_a_row_begins_without_its_former_tokens() -> None:
    history = TokenHistory(10, 4, CPU)
    history.begin_seen(2, [1, 2, 3])
    history.begin_counts(2, [1, 2, 3])
    history.begin_seen(2, [4])
    history.begin_counts(2, [])
    scores = torch.ones(1, 10)
    history.penalise_counts(scores, ROW, torch.ones(1, 1), torch.ones(1, 1))
    assert bool((scores == 1).all())
    history.penalise_seen(scores, ROW, torch.full((1, 1), 2.0))
    assert (scores != 1).nonzero().tolist() == [[0, 4]]


@pytest.mark.parametrize("token", [-1, 10])
def test_a_token_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="vocabulary of 10"):
        TokenHistory(10, 4, CPU).begin_counts(2, [token])
