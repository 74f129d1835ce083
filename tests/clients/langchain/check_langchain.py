"""LangChain on the Hub's client: an endpoint that completes texts, and the chat model on top of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

from tests.clients.served import (
    ABOUT_ADA,
    ABOUT_WEATHER,
    ANSWER,
    GUARDED_URL,
    MESSAGES,
    MODEL,
    PERSON,
    PROMPT,
    TOO_LONG,
    URL,
    is_person,
)

# Its own defaults sample, because they come with a temperature.
GREEDY: Any = {"temperature": None, "top_p": None, "typical_p": None}


def endpoint(url: str = URL, **fields: Any) -> HuggingFaceEndpoint:
    return HuggingFaceEndpoint(endpoint_url=url, **{"max_new_tokens": 8, **GREEDY, **fields})


def chat_model(**fields: Any) -> Any:
    return ChatHuggingFace(llm=endpoint(), model_id=MODEL, **{"temperature": 0, "max_tokens": 100, **fields})


@tool
def get_weather(city: str, unit: str) -> str:
    """The weather in a city, in celsius or fahrenheit"""
    return f"18 degrees {unit} in {city}"


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_is_the_same_in_one_piece_and_streamed() -> None:
    text = endpoint().invoke(PROMPT)
    assert text.startswith(" Paris")
    assert "".join(endpoint().stream(PROMPT)) == text


def test_asynchronous_texts_and_streams_say_the_same() -> None:
    async def main() -> list[str]:
        model = endpoint()
        return [await model.ainvoke(PROMPT), "".join([piece async for piece in model.astream(PROMPT)])]

    assert asyncio.run(main()) == [endpoint().invoke(PROMPT)] * 2


def test_the_defaults_of_the_endpoint_are_taken() -> None:
    model = HuggingFaceEndpoint(endpoint_url=URL, max_new_tokens=8, seed=3, do_sample=True)
    assert model.invoke(PROMPT) == model.invoke(PROMPT)


def test_the_text_ends_before_a_stop_string() -> None:
    assert endpoint(max_new_tokens=30).invoke(PROMPT, stop=["ris"]) == " Pa"
    assert endpoint(max_new_tokens=30, stop_sequences=["ris"]).invoke(PROMPT) == " Pa"


def test_several_prompts_at_once() -> None:
    model = endpoint()
    assert model.batch([PROMPT] * 3) == [model.invoke(PROMPT)] * 3


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_same_in_one_piece_and_streamed() -> None:
    message = chat_model().invoke(MESSAGES)
    assert message.content == ANSWER
    assert message.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat_model().stream(MESSAGES)) == ANSWER


def test_asynchronous_chats_and_streams_say_the_same() -> None:
    async def main() -> list[str]:
        model = chat_model()
        streamed = "".join([chunk.content async for chunk in model.astream(MESSAGES)])
        return [(await model.ainvoke(MESSAGES)).content, streamed]

    assert asyncio.run(main()) == [ANSWER] * 2


def test_the_usage_comes_along() -> None:
    usage = chat_model().invoke(MESSAGES).usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    streamed = [chunk.usage_metadata for chunk in chat_model(stream_usage=True).stream(MESSAGES)]
    assert [found["output_tokens"] for found in streamed if found] == [usage["output_tokens"]]


def test_the_text_of_a_chat_ends_before_a_stop_string() -> None:
    assert chat_model().invoke(MESSAGES, stop=[" is"]).content == "The capital of France"


def test_logprobs_of_a_chat() -> None:
    metadata = chat_model().invoke(MESSAGES, logprobs=True, top_logprobs=2).response_metadata
    assert "".join(token["token"] for token in metadata["logprobs"]["content"]) == ANSWER


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_bound_tool_is_called_and_hears_of_its_result(choice: str) -> None:
    model = chat_model().bind_tools([get_weather], tool_choice=choice)
    message = model.invoke(ABOUT_WEATHER)
    (call,) = message.tool_calls
    assert (call["name"], call["args"].keys()) == ("get_weather", {"city", "unit"})
    assert message.response_metadata["finish_reason"] == "tool_calls"
    told = [HumanMessage(ABOUT_WEATHER[0]["content"]), message, ToolMessage("18 degrees", tool_call_id=call["id"])]
    assert isinstance(chat_model().invoke(told), AIMessage)


def test_a_streamed_call_adds_up() -> None:
    model = chat_model().bind_tools([get_weather], tool_choice="required")
    chunks = list(model.stream(ABOUT_WEATHER))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    assert (call["name"], call["args"].keys()) == ("get_weather", {"city", "unit"})


def test_structured_output_follows_its_schema() -> None:
    schema = {"title": "person", "description": "a person", **PERSON}
    assert is_person(chat_model().with_structured_output(schema, method="json_schema").invoke(ABOUT_ADA))
    called = chat_model().with_structured_output(schema, method="function_calling").invoke(ABOUT_ADA)
    assert is_person(called)


def test_a_response_format_of_tgi_is_followed() -> None:
    shape = {"type": "json", "value": PERSON}
    assert is_person(json.loads(chat_model().invoke(ABOUT_ADA, response_format=shape).content))


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_a_validation_error() -> None:
    with pytest.raises(ValidationError, match="inputs"):
        endpoint().invoke(TOO_LONG)
    with pytest.raises(HfHubHTTPError, match="maximum context length") as refused:
        chat_model().invoke(TOO_LONG)
    assert refused.value.response.status_code == 400


def test_a_bad_value_is_a_validation_error() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        endpoint(temperature=-1.0).invoke(PROMPT)


def test_without_its_key_a_server_is_closed() -> None:
    model = ChatHuggingFace(llm=endpoint(GUARDED_URL), model_id=MODEL)
    with pytest.raises(HfHubHTTPError) as refused:
        model.invoke(MESSAGES)
    assert refused.value.response.status_code == 401
