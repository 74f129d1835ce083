"""TGI's own client, in its last version.

Its chats cannot stream from any server: it reads the closing `[DONE]`, which TGI sends too, as JSON.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, UnknownError, ValidationError
from text_generation.types import FinishReason, Grammar, GrammarType, Message, Tool

from tests.clients.served import (
    ABOUT_WEATHER,
    ANSWER,
    GUARDED_URL,
    KEY,
    MESSAGES,
    PERSON,
    PROMPT,
    TOO_LONG,
    URL,
    WEATHER,
    is_person,
)

CLIENT = Client(URL, timeout=60)


def generate(prompt: str = PROMPT, **parameters: Any) -> Any:
    return CLIENT.generate(prompt, **{"max_new_tokens": 8, **parameters})


def messages_of(messages: Any) -> list[Message]:
    return [Message(**message) for message in messages]


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_with_its_details() -> None:
    answer = generate(decoder_input_details=True, top_n_tokens=2)
    details = answer.details
    assert answer.generated_text.startswith(" Paris")
    assert (details.finish_reason, details.generated_tokens) == (FinishReason.Length, 8)
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert all(len(top) == 2 for top in details.top_tokens)


def test_a_stream_says_the_same_and_ends_with_the_whole() -> None:
    events = list(CLIENT.generate_stream(PROMPT, max_new_tokens=8))
    assert "".join(event.token.text for event in events) == generate().generated_text
    assert events[-1].generated_text == generate().generated_text
    assert events[-1].details.finish_reason == FinishReason.Length


def test_an_end_of_its_own_is_told_from_a_stop_string() -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ended = generate(prompt, max_new_tokens=30)
    assert (ended.generated_text, ended.details.finish_reason) == (ANSWER, FinishReason.EndOfSequenceToken)
    stopped = generate(prompt, max_new_tokens=30, stop_sequences=["France"])
    assert stopped.generated_text == "The capital of France"
    assert stopped.details.finish_reason == FinishReason.StopSequence


def test_the_best_of_two_comes_with_the_other() -> None:
    # So cold that it is the likeliest text: nobody may choose a seed here, and a free sample ends by itself at times.
    answer = generate(best_of=2, do_sample=True, temperature=0.1)
    (other,) = answer.details.best_of_sequences
    assert other.generated_tokens == 8
    assert answer.details.seed is not None


@pytest.mark.parametrize(
    "parameters",
    [
        {"seed": 3, "do_sample": True, "temperature": 1.2, "top_k": 40, "top_p": 0.9, "typical_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "truncate": 3, "watermark": True},
    ],
)
def test_every_parameter_is_taken(parameters: dict[str, Any]) -> None:
    assert generate(**parameters).generated_text == generate(**parameters).generated_text


def test_grammars_are_followed() -> None:
    schema = Grammar(type=GrammarType.Json, value=PERSON)
    assert is_person(json.loads(generate("Ada is 36. ", grammar=schema, max_new_tokens=80).generated_text))
    regex = Grammar(type=GrammarType.Regex, value="[0-9]{3}")
    assert len(generate("The number is ", grammar=regex).generated_text) == 3


def test_asynchronous_texts_and_streams() -> None:
    async def main() -> list[str]:
        client = AsyncClient(URL, timeout=60)

        async def streamed() -> str:
            return "".join([event.token.text async for event in client.generate_stream(PROMPT, max_new_tokens=8)])

        async def whole() -> str:
            return (await client.generate(PROMPT, max_new_tokens=8)).generated_text

        return list(await asyncio.gather(whole(), streamed(), whole(), streamed()))

    assert set(asyncio.run(main())) == {generate().generated_text}


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat() -> None:
    answer = CLIENT.chat(messages_of(MESSAGES), max_tokens=30, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage["completion_tokens"] > 0


def test_an_asynchronous_chat() -> None:
    async def main() -> Any:
        return await AsyncClient(URL, timeout=60).chat(messages_of(MESSAGES), max_tokens=30, temperature=0)

    assert asyncio.run(main()).choices[0].message.content == ANSWER


def test_a_tool_that_is_named_is_called() -> None:
    answer = CLIENT.chat(
        messages_of(ABOUT_WEATHER), tools=[Tool(**WEATHER)], tool_choice="get_weather", max_tokens=100, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "unit"}


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "parameters", "words"),
    [
        (TOO_LONG, {}, "inputs"),
        (PROMPT, {"top_n_tokens": 1000}, "top_n_tokens"),
        (PROMPT, {"stop_sequences": ["x"] * 100}, "stop"),
        (PROMPT, {"grammar": Grammar(type=GrammarType.Regex, value="(")}, "grammar"),
    ],
)
def test_what_the_server_refuses_is_a_validation_error(prompt: str, parameters: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        generate(prompt, **parameters)
    with pytest.raises(ValidationError, match=words):
        list(CLIENT.generate_stream(prompt, **parameters))


def test_a_chat_that_the_server_refuses_is_a_validation_error() -> None:
    with pytest.raises(ValidationError):
        CLIENT.chat(messages_of(MESSAGES), n=99)


def test_without_its_key_a_server_is_closed() -> None:
    with pytest.raises(UnknownError, match="API key"):
        Client(GUARDED_URL).generate(PROMPT)


def test_a_full_server_is_overloaded() -> None:
    client = Client(GUARDED_URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    held = client.generate_stream(PROMPT, max_new_tokens=4000)
    next(held)
    with pytest.raises(OverloadedError):
        client.generate(PROMPT)
    with pytest.raises(OverloadedError):
        list(client.generate_stream(PROMPT))
    with pytest.raises(OverloadedError):
        client.chat(messages_of(MESSAGES))
