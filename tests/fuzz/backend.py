"""A backend that gives whatever a request may ask a model for."""

from __future__ import annotations

from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.generation import admission_of
from tests.http.asgi import FakeBackend, token_ids


def answer(request: GenerationRequest) -> list[Output]:
    """A few words, no more than were asked for, with all the figures that were."""
    words = token_ids("hello world, here I am")[: request.max_new_tokens]
    top = [(token_id, -1.0 - token_id) for token_id in range(admission_of(request).top_n_tokens)] or None
    outputs = [Output(token_id=token_id, logprob=-0.5, top_tokens=top) for token_id in words]
    outputs[-1].finish_reason = FinishReason.LENGTH
    if request.prompt_logprobs:
        following = len(request.input_ids) - 1
        outputs[0].prompt_logprobs = [None, *[-0.25] * following]
        outputs[0].prompt_top_tokens = [None, *[top or []] * following]
    return outputs


def obliging() -> FakeBackend:
    return FakeBackend(answer)
