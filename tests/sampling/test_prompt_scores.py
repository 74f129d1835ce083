"""What the model thought of a prompt, and what it would have said instead."""

from __future__ import annotations

import pytest
import torch

from legato.sampling.logprobs import prompt_scores

VOCAB = 50


@pytest.mark.parametrize("positions", [1, 256, 700])
def test_the_likeliest_tokens_of_every_position(positions: int) -> None:
    logits, successors = torch.randn(positions, VOCAB), torch.randint(0, VOCAB, (positions,))
    scores = prompt_scores(logits, successors, 3)
    values, places = logits.log_softmax(-1).sort(dim=-1, descending=True)
    assert torch.equal(scores.top_ids, places[:, :3])
    torch.testing.assert_close(scores.top_logprobs, values[:, :3])
    torch.testing.assert_close(scores.logprobs, logits.log_softmax(-1)[torch.arange(positions), successors])


def test_a_likeliest_token_has_one_number_however_one_asks() -> None:
    """Whoever asks whether a prompt is what the model would have said compares the two for equality."""
    logits = torch.randn(300, VOCAB)
    scores = prompt_scores(logits, logits.argmax(-1), 1)
    assert torch.equal(scores.top_logprobs.squeeze(1), scores.logprobs)


def test_no_top_tokens_unless_asked_for() -> None:
    scores = prompt_scores(torch.randn(4, VOCAB), torch.zeros(4, dtype=torch.int64))
    assert scores.top_ids.shape == scores.top_logprobs.shape == (4, 0)
