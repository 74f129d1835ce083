"""Anthropic's own client: messages, streams, tools, thinking, counts and errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.clients.served import (
    ABOUT_ADA,
    GUARDED_URL,
    KEY,
    MESSAGES,
    PERSON,
    SCRIPTED_URL,
    TOO_LONG,
    URL,
    WEATHER,
    is_person,
    said_in_chat,
)

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": WEATHER["function"]["parameters"],
}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
# Which this version of the client does not know any more.
GREEDY = {"temperature": 0}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def client_of(url: str, key: str = "-") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


MODEL, SCRIPTED = client_of(URL), client_of(SCRIPTED_URL)


def ask(client: anthropic.Anthropic = MODEL, messages: Any = MESSAGES, **fields: Any) -> Any:
    return client.messages.create(model="any", messages=messages, **{"max_tokens": 30, **fields})


def test_a_message_of_a_real_model() -> None:
    text, complete = said_in_chat()
    message = ask(extra_body=GREEDY)
    assert (message.type, message.role) == ("message", "assistant")
    assert message.stop_reason == ("end_turn" if complete else "max_tokens")
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == text
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10
    assert message.usage.output_tokens > 3


def test_a_stream_is_put_together_to_the_same_message() -> None:
    with MODEL.messages.stream(model="any", max_tokens=30, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == said_in_chat()[0]


def test_texts_end_at_their_limit_or_before_a_stop_sequence() -> None:
    assert ask(max_tokens=2).stop_reason == "max_tokens"
    text, _ = said_in_chat()
    stop = text[5:8]
    message = ask(extra_body=GREEDY, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text.partition(stop)[0]


def test_an_answer_that_was_begun_is_continued() -> None:
    text, _ = said_in_chat()
    begun: Any = [*MESSAGES, {"role": "assistant", "content": text[:9]}]
    assert ask(messages=begun, extra_body=GREEDY).content[0].text


def test_a_schema_is_followed() -> None:
    message = ask(
        messages=ABOUT_ADA, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": PERSON}}
    )
    assert is_person(json.loads(message.content[0].text))


def test_thinking_comes_in_blocks_of_its_own() -> None:
    message = ask(SCRIPTED, thinking=THINKING, max_tokens=2000)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Two and two.", "Four.")
    assert message.content[0].signature
    assert [block.type for block in ask(SCRIPTED).content] == ["text"]  # who does not ask for it gets none


def test_thinking_is_streamed_and_may_be_sent_back() -> None:
    with SCRIPTED.messages.stream(model="any", max_tokens=2000, messages=MESSAGES, thinking=THINKING) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "thinking" in kinds and "signature" in kinds and "text" in kinds
    again: Any = [*MESSAGES, {"role": "assistant", "content": message.content}, *MESSAGES]
    assert ask(SCRIPTED, again, thinking=THINKING, max_tokens=2000).content[-1].text == "Four."


def test_a_tool_is_called_and_its_result_used() -> None:
    first = ask(SCRIPTED, QUESTION, tools=[TOOL], thinking=THINKING, max_tokens=2000)
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris", "unit": "celsius"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages: Any = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(SCRIPTED, messages, tools=[TOOL], thinking=THINKING, max_tokens=2000)
    assert second.content[-1].text == "It is sunny in Paris."
    assert second.usage.cache_read_input_tokens >= 0.8 * second.usage.input_tokens


def test_the_clients_own_loop_of_tools_comes_to_its_end() -> None:
    """It would have the server keep the conversation, and goes on without."""

    @anthropic.beta_tool
    def get_weather(city: str, unit: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
            unit: Of the temperature.
        """
        return "sunny" if (city, unit) == ("Paris", "celsius") else "unknown"

    turns = list(
        SCRIPTED.beta.messages.tool_runner(
            model="any", max_tokens=2000, messages=QUESTION, tools=[get_weather], thinking=THINKING
        )
    )
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[-1].text == "It is sunny in Paris."


def test_a_call_is_streamed() -> None:
    with SCRIPTED.messages.stream(
        model="any", max_tokens=2000, messages=QUESTION, tools=[TOOL], thinking=THINKING
    ) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert "".join(deltas) == '{"city": "Paris", "unit": "celsius"}'
    assert message.content[-1].input == {"city": "Paris", "unit": "celsius"}


def test_a_call_that_is_asked_for_follows_its_schema() -> None:
    message = ask(messages=QUESTION, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=100)
    assert message.content[-1].input["unit"] in ("celsius", "fahrenheit")


def test_tokens_are_counted_as_they_are_billed() -> None:
    count = MODEL.messages.count_tokens(model="any", messages=MESSAGES, system="Be brief.", tools=[TOOL])
    usage = ask(system="Be brief.", tools=[TOOL], max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_clients_own() -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(messages=[{"role": "user", "content": TOO_LONG}])
    with pytest.raises(anthropic.BadRequestError, match="messages\\[0\\]"):
        ask(messages=[{"role": "user", "content": [{"type": "video"}]}])
    with pytest.raises(anthropic.AuthenticationError):
        ask(client_of(GUARDED_URL, "wrong"))
    assert ask(client_of(GUARDED_URL, KEY), max_tokens=1).stop_reason == "max_tokens"
    with pytest.raises(anthropic.NotFoundError):
        MODEL.messages.batches.retrieve("none")
