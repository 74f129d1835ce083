"""OpenAI's own client: the exceptions that it raises, and what they say."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.current.openai_client import CLIENT, chat, client_of, complete
from tests.clients.served import (
    GUARDED_URL,
    KEY,
    MESSAGES,
    MODEL,
    PROMPT,
    TOO_LONG,
    WEATHER,
)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 99}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": -1, "stream": True}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_bad_value_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_its_code(stream: bool) -> None:
    for ask in (lambda: complete(TOO_LONG, stream=stream), lambda: chat([{"role": "user", "content": TOO_LONG}])):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"


def test_a_tool_that_there_is_not_is_unprocessable() -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="get_news"):
        chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_news"}})


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        CLIENT.models.retrieve("gpt-17")
    assert refused.value.code == "model_not_found"


def test_an_unknown_route_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError):
        CLIENT.embeddings.create(model=MODEL, input="text")


@pytest.mark.parametrize("key", ["not-a-key", KEY.upper(), KEY[:-1]])
def test_a_wrong_key_is_an_authentication_error(key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        client_of(GUARDED_URL, key).models.list()
    assert refused.value.code == "invalid_api_key"
    assert refused.value.type == "invalid_request_error"


def test_a_full_server_is_a_rate_limit_that_a_retry_gets_past() -> None:
    busy, patient = client_of(GUARDED_URL, KEY), client_of(GUARDED_URL, KEY).with_options(max_retries=5)
    held = busy.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(held))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            busy.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    held.close()
    assert patient.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices
