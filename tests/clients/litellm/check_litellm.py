"""LiteLLM, through which many programs speak to servers: each of the three APIs."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.served import ABOUT_WEATHER, MESSAGES, SCRIPTED_URL, TOO_LONG, URL, WEATHER, said_in_chat

OPENAI: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "-"}
SCRIPTED: dict[str, Any] = {"api_base": f"{SCRIPTED_URL}/v1", "api_key": "-"}
ANTHROPIC: dict[str, Any] = {"api_base": SCRIPTED_URL, "api_key": "-"}
litellm.num_retries = 0
litellm.telemetry = False


def test_chat_completions_with_reasoning() -> None:
    answer = litellm.completion("hosted_vllm/any", messages=MESSAGES, **SCRIPTED)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Two and two.")
    plain = litellm.completion("hosted_vllm/any", messages=MESSAGES, temperature=0, max_tokens=30, **OPENAI)
    assert plain.choices[0].message.content == said_in_chat()[0]


def test_chat_completions_streamed() -> None:
    chunks = list(litellm.completion("hosted_vllm/any", messages=MESSAGES, stream=True, **SCRIPTED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Four."
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert reasoning == "Two and two."


def test_tools() -> None:
    answer = litellm.completion("hosted_vllm/any", messages=ABOUT_WEATHER, tools=[WEATHER], **SCRIPTED)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "Paris", "unit": "celsius"}'


def test_responses() -> None:
    response: Any = litellm.responses(model="openai/any", input="What is two and two?", **SCRIPTED)
    assert response.output[-1].content[0].text == "Four."


def test_messages() -> None:
    answer = litellm.completion(
        "anthropic/claude-sonnet-4-5",
        messages=MESSAGES,
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
        **ANTHROPIC,
    )
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Two and two.")


def test_errors_are_its_own() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("hosted_vllm/any", messages=[{"role": "user", "content": TOO_LONG}], **OPENAI)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion("hosted_vllm/any", messages=MESSAGES, temperature=-1, **OPENAI)
