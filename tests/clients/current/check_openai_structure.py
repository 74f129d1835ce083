"""OpenAI's own client: texts of a given shape, and calls of tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.current.openai_client import CLIENT, chat, said
from tests.clients.served import (
    ABOUT_ADA,
    ABOUT_WEATHER,
    ANSWER,
    MODEL,
    PERSON,
    WEATHER,
    is_person,
)

# ---- structured output ---------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(stream: bool) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = chat(ABOUT_ADA, response_format=shape, max_tokens=80, stream=stream)
    text = said(answer) if stream else answer.choices[0].message.content
    assert is_person(json.loads(text))


def test_a_json_object_is_one() -> None:
    messages = [{"role": "user", "content": 'Repeat this JSON object: {"ok": true}'}]
    answer = chat(messages, response_format={"type": "json_object"}, max_tokens=200)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        ({"type": "regex", "value": "(yes|no), (sir|madam)"}, {"yes, sir", "no, sir", "yes, madam", "no, madam"}),
        ({"type": "choice", "value": ["red", "green", "blue"]}, {"red", "green", "blue"}),
        ({"type": "lark", "value": 'start: "a" ("b" | "c") "d"'}, {"abd", "acd"}),
        ({"type": "json", "value": {"enum": [1, "two", None]}}, {"1", '"two"', "null"}),
        ({"type": "json_object", "schema": {"enum": [True]}}, {"true"}),
    ],
)  # fmt: skip
def test_the_shapes_of_other_clients_are_followed(shape: Any, answers: set[str]) -> None:
    assert chat(response_format=shape).choices[0].message.content in answers


def test_a_pydantic_model_comes_back_as_one() -> None:
    answer = CLIENT.chat.completions.parse(
        model=MODEL, messages=ABOUT_ADA, response_format=Person, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_name_of_its_keyword() -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        chat(response_format={"type": "json_schema", "json_schema": {"name": "list", "schema": schema}})
    assert refused.value.param == "response_format"


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is(choice: Any) -> None:
    (answer,) = chat(ABOUT_WEATHER, tools=[WEATHER], tool_choice=choice, max_tokens=100).choices
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    assert answer.message.content is None


def test_a_streamed_call_adds_up_to_the_same() -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    (whole,) = chat(ABOUT_WEATHER, **fields).choices[0].message.tool_calls
    chunks = list(chat(ABOUT_WEATHER, stream=True, **fields))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert (deltas[0].function.name, bool(deltas[0].id)) == ("get_weather", True)
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_clients_own_view_of_a_streamed_call_adds_up() -> None:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=ABOUT_WEATHER, tools=[WEATHER], tool_choice="required", max_tokens=100, temperature=0
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}


def test_the_result_of_a_call_goes_back_to_the_model() -> None:
    (choice,) = chat(ABOUT_WEATHER, tools=[WEATHER], tool_choice="required", max_tokens=100).choices
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    answer = chat([*ABOUT_WEATHER, choice.message, result], tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_tool_choice_none_calls_none() -> None:
    (answer,) = chat(ABOUT_WEATHER, tools=[WEATHER], tool_choice="none").choices
    assert answer.message.tool_calls is None and answer.message.content


def test_no_tools_are_no_tools() -> None:
    assert chat(tools=[]).choices[0].message.content == ANSWER


def test_with_tools_and_a_response_format_an_answer_is_either() -> None:
    (answer,) = chat(ABOUT_WEATHER, tools=[WEATHER], response_format={"type": "json_object"}, max_tokens=100).choices
    assert answer.message.tool_calls or isinstance(json.loads(answer.message.content), dict)
    with pytest.raises(openai.UnprocessableEntityError, match="mutually exclusive"):
        chat(tools=[WEATHER], response_format={"type": "regex", "value": "a"})


def test_tools_that_the_model_may_call_never_fail_the_chat() -> None:
    (answer,) = chat(ABOUT_WEATHER, tools=[WEATHER], max_tokens=60).choices
    assert answer.message.content or answer.message.tool_calls
