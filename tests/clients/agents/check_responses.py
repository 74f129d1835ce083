"""OpenAI's own client: responses, streams, tools, structured outputs, the store and errors."""

from __future__ import annotations

import time
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.served import GUARDED_URL, KEY, MESSAGES, SCRIPTED_URL, TOO_LONG, URL, WEATHER, said_in_chat

TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}
QUESTION = "What is the weather in Paris?"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def client_of(url: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


MODEL, SCRIPTED = client_of(URL), client_of(SCRIPTED_URL)


def ask(client: openai.OpenAI = MODEL, given: Any = MESSAGES[0]["content"], **fields: Any) -> Any:
    return client.responses.create(model="any", input=given, **fields)


def test_a_response_of_a_real_model() -> None:
    text, complete = said_in_chat()
    response = ask(temperature=0, max_output_tokens=30)
    assert (response.status, response.output_text) == ("completed" if complete else "incomplete", text)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.store is True


def test_a_stream_is_put_together_to_the_same_response() -> None:
    with MODEL.responses.stream(model="any", input=MESSAGES, temperature=0, max_output_tokens=200) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert text.startswith(said_in_chat()[0])


def test_a_text_that_is_cut_off_is_incomplete() -> None:
    response = ask(max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_structure_is_followed_and_parsed() -> None:
    response = MODEL.responses.parse(
        model="any", input="Ada is 36 years old. Describe her as JSON.", text_format=Person, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Person)


def test_logprobs_of_the_text() -> None:
    response = ask(temperature=0, max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == 5 and len(logprobs[0].top_logprobs) == 2


def test_reasoning_is_an_item() -> None:
    response = ask(SCRIPTED, reasoning={"effort": "high"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Two and two."
    assert response.output_text == "Four."
    assert response.usage.output_tokens_details.reasoning_tokens > 10
    summed_up = ask(SCRIPTED, reasoning={"summary": "auto"})
    assert summed_up.output[0].summary[0].text == "Two and two."
    assert [item.type for item in ask(SCRIPTED, reasoning={"effort": "none"}).output] == ["message"]


def test_reasoning_goes_back_and_forth_without_a_store() -> None:
    first = ask(SCRIPTED, store=False, include=["reasoning.encrypted_content"])
    hidden = first.output[0].encrypted_content
    assert hidden and "Two" not in hidden
    items: Any = [{"role": "user", "content": "?"}, *first.output, {"role": "user", "content": "Sure?"}]
    assert ask(SCRIPTED, items, store=False).output_text == "Four."


def test_a_tool_is_called_and_its_result_used() -> None:
    first = ask(SCRIPTED, QUESTION, tools=[TOOL])
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris", "unit": "celsius"}')
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = ask(SCRIPTED, result, tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "It is sunny in Paris."
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_call_is_streamed() -> None:
    with SCRIPTED.responses.stream(model="any", input=QUESTION, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert response.output[-1].arguments == '{"city": "Paris", "unit": "celsius"}'


def test_a_custom_tool_gets_its_text() -> None:
    tool: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
    hosted: Any = {"type": "web_search"}
    response = ask(SCRIPTED, "Please patch it to goodbye", tools=[tool, hosted])
    assert (response.output[-1].type, response.output[-1].input) == ("custom_tool_call", "*** Begin Patch")


def test_a_call_that_is_asked_for_follows_its_schema() -> None:
    response = ask(
        given=QUESTION, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=100
    )
    assert response.output[-1].name == "get_weather"


def test_tokens_are_counted_as_they_are_billed() -> None:
    counted = SCRIPTED.responses.input_tokens.count(model="any", input=QUESTION, tools=[TOOL])
    assert counted.input_tokens == ask(SCRIPTED, QUESTION, tools=[TOOL]).usage.input_tokens


def test_tools_and_a_structure_go_together() -> None:
    """An answer calls a tool, or follows the schema."""
    shape: Any = {"format": {"type": "json_schema", "name": "person", "schema": Person.model_json_schema()}}
    first = ask(SCRIPTED, QUESTION, tools=[TOOL], text=shape)
    assert first.output[-1].type == "function_call"
    second = ask(given="Ada is 36 years old. Describe her as JSON.", tools=[TOOL], text=shape, max_output_tokens=100)
    assert second.output[-1].type == "function_call" or Person.model_validate_json(second.output_text)


def test_responses_are_stored_until_they_are_deleted() -> None:
    response = ask(SCRIPTED, metadata={"of": "a test"})
    for _ in range(4):  # whichever worker is asked
        assert client_of(SCRIPTED_URL).responses.retrieve(response.id).output_text == "Four."
    assert [item.role for item in SCRIPTED.responses.input_items.list(response.id)] == ["user"]  # type: ignore[union-attr]
    SCRIPTED.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        SCRIPTED.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(SCRIPTED, previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_response_in_the_background_completes_by_itself() -> None:
    response = ask(SCRIPTED, background=True)
    assert response.status in ("queued", "in_progress")
    deadline = time.monotonic() + 30
    while response.status not in ("completed", "failed") and time.monotonic() < deadline:
        response = client_of(SCRIPTED_URL).responses.retrieve(response.id)
    assert response.output_text == "Four."
    assert SCRIPTED.responses.cancel(response.id).status == "completed"  # too late


def test_a_response_in_the_background_is_cancelled() -> None:
    response = ask(SCRIPTED, "Count to a thousand", background=True)
    cancelled = client_of(SCRIPTED_URL).responses.cancel(response.id)
    assert cancelled.status in ("cancelled", "completed")
    assert SCRIPTED.responses.retrieve(response.id).status == cancelled.status


def test_a_stream_in_the_background_is_picked_up_again() -> None:
    events = list(ask(SCRIPTED, background=True, stream=True))
    assert events[-1].type == "response.completed"
    later = SCRIPTED.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
    assert [event.sequence_number for event in later] == [event.sequence_number for event in events[4:]]


def test_errors_are_the_clients_own() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        ask(given=TOO_LONG)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(given=[{"type": "message", "role": "nobody", "content": "x"}])
    assert refused.value.param == "input[0].role"
    with pytest.raises(openai.AuthenticationError):
        ask(client_of(GUARDED_URL, "wrong"))
    stored = ask(client_of(GUARDED_URL, KEY), max_output_tokens=1)
    assert client_of(GUARDED_URL, KEY).responses.retrieve(stored.id).id == stored.id
