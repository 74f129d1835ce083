"""OpenAI's own client: chats and completions, in one piece and streamed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from tests.clients.current.openai_client import CLIENT, chat, complete, said
from tests.clients.served import (
    ANSWER,
    MESSAGES,
    MODEL,
    PROMPT,
    URL,
)

# ---- chats ---------------------------------------------------------------------------------------------------------


def test_a_chat_has_a_message_a_reason_and_its_usage() -> None:
    answer = chat()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same() -> None:
    chunks = list(chat(stream=True))
    assert said(chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_last_chunk_has_the_usage_if_asked_for() -> None:
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == chat().usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})
    assert all(chunk.usage is None for chunk in chunks)


def test_the_clients_own_view_of_a_stream_adds_up() -> None:
    with CLIENT.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ANSWER


def test_many_streams_at_once_do_not_mix() -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0, stream=True
                )
                return said([chunk async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(8))))

    assert asyncio.run(main()) == [ANSWER] * 8


def test_an_asynchronous_chat_in_one_piece() -> None:
    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0) as client:
            return await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0)

    assert asyncio.run(main()).choices[0].message.content == ANSWER


def test_a_stream_that_is_left_early_leaves_the_server_as_it_was() -> None:
    with chat(stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) as stream:
        for _, _ in zip(range(5), stream, strict=False):
            pass
    assert chat().choices[0].message.content == ANSWER


def test_length_is_a_reason_of_its_own() -> None:
    answer = chat(max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", [" is", [" is", "Paris"]])
def test_the_text_ends_before_a_stop_string(stop: Any) -> None:
    for content, reason in (
        (chat(stop=stop).choices[0].message.content, chat(stop=stop).choices[0].finish_reason),
        (said(chunks := list(chat(stop=stop, stream=True))), chunks[-1].choices[0].finish_reason),
    ):
        assert (content, reason) == ("The capital of France", "stop")


def test_n_answers_are_the_same_streamed_and_not_and_repeat_with_their_seed() -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 6}
    whole = [choice.message.content for choice in chat(**fields).choices]
    streamed = [""] * 3
    for chunk in chat(stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole
    assert len(set(whole)) > 1


def test_logprobs_come_with_their_alternatives() -> None:
    answer = chat(logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == ANSWER
    assert b"".join(bytes(token.bytes) for token in content) == ANSWER.encode()
    for token in content:
        assert len(token.top_logprobs) == 5
        assert token.top_logprobs[0].logprob == max(top.logprob for top in token.top_logprobs)
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)  # greedy
    streamed = [
        token
        for chunk in chat(logprobs=True, top_logprobs=5, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in content], abs=1e-4)


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    assert chat([{"role": "user", "content": parts}]).choices[0].message.content == ANSWER


def test_a_logit_bias_forbids_a_token() -> None:
    (first, *_) = chat(logprobs=True).choices[0].logprobs.content
    (token_id,) = (
        number
        for number in range(500, 520)
        if complete([number], max_tokens=0, echo=True).choices[0].text == first.token
    )
    assert not chat(logit_bias={str(token_id): -100}).choices[0].message.content.startswith(first.token)


# ---- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_is_the_same_streamed_and_not() -> None:
    whole = complete()
    assert whole.choices[0].text.startswith(" Paris")
    assert whole.choices[0].finish_reason == "length"
    chunks = list(complete(stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_asynchronous_completion_streams() -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0) as client:
            stream = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(main()) == complete().choices[0].text


def test_an_echo_has_the_logprobs_of_the_prompt() -> None:
    answer = complete(echo=True, logprobs=2)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert text.startswith(PROMPT)
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 and math.isfinite(logprob) for logprob in logprobs.token_logprobs[1:])
    assert all(
        text[offset:].startswith(token)
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    )  # fmt: skip
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs[1:])  # the token itself, if it is not among them


def test_a_prompt_alone_can_be_scored() -> None:
    answer = complete(echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0


def test_several_prompts_and_answers_come_in_order() -> None:
    answer = complete(["Paris is in", "Rome is in"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    paris, same_paris, rome, _ = (choice.text for choice in answer.choices)
    assert (paris, same_paris) == (complete("Paris is in").choices[0].text,) * 2
    assert rome == complete("Rome is in").choices[0].text


def test_a_completion_follows_a_grammar() -> None:
    shape = {"response_format": {"type": "regex", "value": "[0-9]{4}-[0-9]{2}"}}
    (choice,) = complete("The date is ", max_tokens=20, extra_body=shape).choices
    assert (len(choice.text), choice.text[4]) == (7, "-")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_model_is_listed_and_found() -> None:
    (model,) = CLIENT.models.list().data
    assert CLIENT.models.retrieve(model.id).id == model.id
