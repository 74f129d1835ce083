"""The Hub's InferenceClient. Given a URL it takes the server for TGI: it posts to the root, reads TGI's events and
raises TGI's errors by their `error_type`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, UnknownError, ValidationError

from tests.clients.served import (
    ABOUT_ADA,
    ABOUT_WEATHER,
    ANSWER,
    GUARDED_URL,
    KEY,
    MESSAGES,
    MODEL,
    PERSON,
    PROMPT,
    TOO_LONG,
    URL,
    WEATHER,
    is_person,
)

CLIENT = InferenceClient(URL)
# The other way to name a server, as OpenAI's clients do.
BY_BASE_URL = InferenceClient(base_url=URL)


def generate(prompt: str = PROMPT, **parameters: Any) -> Any:
    return CLIENT.text_generation(prompt, **{"max_new_tokens": 8, "return_full_text": False, **parameters})


def chat(messages: Any = MESSAGES, **fields: Any) -> Any:
    return CLIENT.chat_completion(messages, **{"max_tokens": 30, "temperature": 0, **fields})


def said(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# ---- text generation -------------------------------------------------------------------------------------------------


def test_a_text_is_the_same_in_one_piece_and_streamed() -> None:
    text = generate()
    assert text.startswith(" Paris")
    assert "".join(generate(stream=True)) == text


def test_details_tell_of_every_token() -> None:
    answer = generate(details=True, decoder_input_details=True, top_n_tokens=3)
    details = answer.details
    assert (details.finish_reason, details.generated_tokens) == ("length", 8)
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert all(top[0]["id"] == token.id for token, top in zip(details.tokens, details.top_tokens, strict=True))


def test_a_stream_with_details_ends_with_the_whole_text() -> None:
    *_, last = generate(details=True, stream=True)
    assert last.generated_text == generate()
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 8)


def test_a_stop_string_ends_the_text_and_stays_in_it() -> None:
    assert generate(stop=["ris"], max_new_tokens=30) == " Paris"
    assert "".join(generate(stop=["ris"], max_new_tokens=30, stream=True)) == " Paris"


@pytest.mark.parametrize("wish", [True, None])
def test_the_text_begins_with_the_prompt_unless_the_client_says_no(wish: bool | None) -> None:
    assert generate(return_full_text=wish) == PROMPT + generate()


def test_a_seed_repeats() -> None:
    sampled = [generate(do_sample=True, seed=7, temperature=1.5, top_k=50, top_p=0.9) for _ in range(2)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("grammar", [{"type": "json", "value": PERSON}, {"type": "regex", "value": "[a-z]{3}[0-9]"}])
def test_a_grammar_is_followed(grammar: Any) -> None:
    text = generate("Ada is 36. As JSON: ", grammar=grammar, max_new_tokens=80)
    assert is_person(json.loads(text)) if grammar["type"] == "json" else (len(text) == 4 and text[3].isdigit())


def test_asynchronous_texts_and_streams_at_once() -> None:
    async def main() -> list[str]:
        async with AsyncInferenceClient(URL) as client:

            async def streamed() -> str:
                stream = await client.text_generation(PROMPT, max_new_tokens=8, stream=True)
                return "".join([token async for token in stream])

            whole = [client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False) for _ in range(3)]
            return list(await asyncio.gather(*whole, *(streamed() for _ in range(3))))

    assert set(asyncio.run(main())) == {generate()}


# ---- chats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [CLIENT, BY_BASE_URL], ids=["model", "base_url"])
def test_a_chat_is_the_same_in_one_piece_and_streamed(client: InferenceClient) -> None:
    fields: Any = {"max_tokens": 30, "temperature": 0}
    answer = client.chat_completion(MESSAGES, **fields)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert said(client.chat_completion(MESSAGES, stream=True, **fields)) == ANSWER


def test_the_names_of_openais_client_work_too() -> None:
    answer = BY_BASE_URL.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0)
    assert answer.choices[0].message.content == ANSWER


def test_an_asynchronous_chat_streams() -> None:
    async def main() -> str:
        async with AsyncInferenceClient(URL) as client:
            stream = await client.chat_completion(MESSAGES, max_tokens=30, temperature=0, stream=True)
            return said([chunk async for chunk in stream])

    assert asyncio.run(main()) == ANSWER


def test_the_usage_of_a_stream_comes_last() -> None:
    *_, last = chat(stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == chat().usage.completion_tokens


def test_logprobs_of_a_chat() -> None:
    content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(token.token for token in content) == ANSWER
    assert all(len(token.top_logprobs) == 2 for token in content)


def test_n_and_stop() -> None:
    answer = chat(n=2, stop=[" is"])
    assert [choice.message.content for choice in answer.choices] == ["The capital of France"] * 2


def test_a_response_format_is_followed() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert is_person(json.loads(chat(ABOUT_ADA, response_format=shape, max_tokens=80).choices[0].message.content))


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "get_weather"}}])
def test_a_tool_is_called(choice: Any) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
    (answer,) = chat(ABOUT_WEATHER, **fields).choices
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    chunks = list(chat(ABOUT_WEATHER, stream=True, **fields))
    pieces = [delta.function.arguments for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


# ---- about the server ------------------------------------------------------------------------------------------------


def test_the_server_tells_about_itself() -> None:
    client = InferenceClient(URL, provider="hf-inference")
    info = client.get_endpoint_info()
    assert info["max_total_tokens"] > info["max_input_tokens"] > 0
    assert client.health_check()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "parameters", "words"),
    [
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"top_n_tokens": 1000, "details": True}, "top_n_tokens"),
        (TOO_LONG, {}, "inputs"),
        (PROMPT, {"grammar": {"type": "regex", "value": "("}}, "grammar"),
    ],
)
def test_a_bad_value_is_a_validation_error(stream: bool, prompt: str, parameters: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        list(generate(prompt, stream=stream, **parameters))


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"messages": [{"role": "user", "content": TOO_LONG}]}])
def test_a_bad_chat_is_an_error_with_its_status(fields: Any) -> None:
    with pytest.raises(HfHubHTTPError) as refused:
        chat(**fields)
    assert refused.value.response.status_code == 400


@pytest.mark.parametrize("key", [None, "not-a-key"])
def test_without_its_key_a_server_is_closed(key: str | None) -> None:
    client = InferenceClient(GUARDED_URL, token=key)
    with pytest.raises(UnknownError, match="API key"):
        client.text_generation(PROMPT)
    with pytest.raises(HfHubHTTPError) as refused:
        client.chat_completion(MESSAGES)
    assert refused.value.response.status_code == 401


def test_a_full_server_is_overloaded() -> None:
    client = InferenceClient(GUARDED_URL, token=KEY)
    held = client.text_generation(PROMPT, max_new_tokens=4000, stream=True)
    next(iter(held))
    for stream in (False, True):
        with pytest.raises(OverloadedError):
            list(client.text_generation(PROMPT, stream=stream))
    with pytest.raises(HfHubHTTPError) as refused:
        client.chat_completion(MESSAGES)
    assert refused.value.response.status_code == 429


def test_an_unknown_route_is_not_found() -> None:
    with pytest.raises(HfHubHTTPError) as refused:
        InferenceClient(f"{URL}/nowhere/v1").chat_completion(MESSAGES)
    assert refused.value.response.status_code == 404
