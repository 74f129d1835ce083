"""Requests through a balancer: marks in their streams, and streams that go on where another server has stopped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from legato.ipc.routed import HEAD_HEADER, KEY_HEADER, MARKED, STATE_PATH, SentTokens, add_marks, encode_sent
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.http.asgi import Answer, Call, FakeBackend, app_for, get, outputs_of
from tests.http.routes.openai.fakes import Server

KEY = "a key of sixteen characters".replace(" ", "-")
CALL = '<tool_call>{"name": "look", "arguments": {"at": "the quick brown fox"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def script(text: str) -> FakeBackend:
    """Goes on after the tokens that were emitted, like the scheduler."""

    def outputs(request: GenerationRequest) -> list[Output]:
        said = outputs_of(text, FinishReason.EOS_TOKEN)
        if request.prompt_logprobs:
            said[0].prompt_logprobs = [None] + [-1.0] * (len(request.input_ids) - 1)
        assert [output.token_id for output in said[: len(request.emitted_ids)]] == request.emitted_ids
        return said[len(request.emitted_ids) :]

    return FakeBackend(outputs)


def headers(resume: int = 0, key: str = KEY) -> dict[str, str]:
    return {KEY_HEADER: key, HEAD_HEADER: json.dumps({"id": "0123", "created": 7, "resume": resume})}


async def writes(server: Server, path: str, body: Any, sent: list[SentTokens] | None = None) -> list[bytes]:
    """What each write of a stream has, its mark in front."""
    data = b"" if sent is None else encode_sent(sent)
    call = Call(server.app, "POST", path, [data + json.dumps(body).encode()], headers(len(data)))
    answer = await call.answer()
    assert answer.status == 200, answer.body
    assert answer.headers[HEAD_HEADER] == MARKED
    return [message["body"] for message in call.sent[1:] if message["body"]]


def split(written: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The marks, and what a client sees."""
    parts = [each.split(b"\n", 1) for each in written]
    return [mark for mark, _ in parts], [rest for _, rest in parts]


MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "native": (
        "/generate_stream",
        "hello world, the quick brown fox",
        {"inputs": "hi", "parameters": {"details": True}},
    ),
    "sampled": (
        "/generate_stream",
        "hello world",
        {"inputs": "hi", "parameters": {"do_sample": True, "details": True}},
    ),
    "completion": ("/v1/completions", "the lazy dog", {"prompt": "hi", "stream": True, "logprobs": 0, "echo": True}),
    "stop": ("/v1/completions", "hello world over the fox", {"prompt": "hi", "stream": True, "stop": ["over the dog"]}),
    "several": ("/v1/completions", "hello", {"prompt": ["a", "b"], "stream": True, "n": 2, "seed": 5}),
    "chat": (
        "/v1/chat/completions",
        "the quick brown fox",
        MESSAGES | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "tools": ("/v1/chat/completions", f"well {CALL}", MESSAGES | {"stream": True, "tools": [TOOL]}),
    "messages": ("/v1/messages", "the quick brown fox", MESSAGES | {"model": "m", "max_tokens": 60, "stream": True}),
    "responses": ("/v1/responses", "the quick brown fox", {"input": "hi", "stream": True, "store": False}),
}


def gist(seen: bytes) -> tuple[str, Any]:
    """Of a response: its events are numbered, and there are as many as writes, which may be of more or fewer tokens."""
    events = [json.loads(event.split(b"data: ")[1]) for event in seen.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    return "".join(texts), events[-1]["response"] | {"completed_at": None}


@pytest.mark.parametrize("name", REQUESTS)
def test_another_server_goes_on_with_the_very_next_byte(name: str) -> None:
    path, text, body = REQUESTS[name]

    async def main() -> None:
        full = await writes(Server(script(text), settings={"route_key": KEY}), path, body)
        marks, shown = split(full)
        assert marks[-1].startswith(b":.") and all(mark.startswith(b":+") for mark in marks[:-1])
        assert len(full) > 2
        for cut in range(1, len(full)):
            sent = add_marks(marks[:cut])
            rest = await writes(Server(script(text), settings={"route_key": KEY}), path, body, sent)
            seen = b"".join(shown[:cut]) + b"".join(split(rest)[1])
            if name == "responses":
                assert gist(seen) == gist(b"".join(shown)), cut
            else:
                assert seen == b"".join(shown), cut

    asyncio.run(main())


def test_a_request_that_is_sent_twice_draws_the_same_seed() -> None:
    path, text, body = REQUESTS["sampled"]

    async def last_event() -> Any:
        _, shown = split(await writes(Server(script(text), settings={"route_key": KEY}), path, body))
        return json.loads(b"".join(shown).split(b"data:")[-1])

    first, second = asyncio.run(last_event()), asyncio.run(last_event())
    assert first["details"]["seed"] is not None and first == second


def ask(body: bytes, key: str | None = KEY, resume: int = 0, path: str = "/generate_stream") -> Answer:
    async def main() -> Answer:
        app = app_for(route_key=KEY)
        return await Call(app, "POST", path, [body], headers(resume, key) if key else {}).answer()

    return asyncio.run(main())


HI = b'{"inputs": "hi"}'


@pytest.mark.parametrize("key", [None, "another key, as long"])
def test_who_has_not_the_key_gets_no_marks_and_no_say(key: str | None) -> None:
    answer = ask(HI, key)
    assert answer.status == 200 and HEAD_HEADER not in answer.headers
    assert answer.body.startswith(b"data:") and b"\n:" not in answer.body


def test_without_a_key_of_its_own_a_server_takes_none() -> None:
    async def main() -> Answer:
        return await Call(app_for(), "POST", "/generate_stream", [HI], headers()).answer()

    assert HEAD_HEADER not in asyncio.run(main()).headers


@pytest.mark.parametrize(
    "sent",
    [
        [SentTokens([5], sizes=[2])],
        [SentTokens([999], sizes=[1])],  # no such token
        [SentTokens([-1], sizes=[1])],
        [SentTokens([5] * 1000, sizes=[1000])],  # more than were asked for
        [SentTokens([5], sizes=[1]), SentTokens([5], sizes=[1])],  # more choices than there are
    ],
)
def test_tokens_that_cannot_have_been_sent_are_refused(sent: list[SentTokens]) -> None:
    data = encode_sent(sent)
    answer = ask(data + HI, resume=len(data))
    assert b'"error_type":"validation"' in answer.body


def test_half_a_list_of_tokens_is_refused() -> None:
    assert ask(b"\xc1" + HI, resume=1).status == 400


def test_an_answer_in_one_piece_cannot_go_on() -> None:
    data = encode_sent([SentTokens([5])])
    assert ask(data + HI, resume=len(data), path="/generate").status == 422


def test_a_balancer_learns_the_load_with_its_own_key() -> None:
    async def main() -> None:
        app = app_for(api_keys=("secret",), route_key=KEY)
        assert (await get(app, STATE_PATH)).status == 401
        answer = await get(app, STATE_PATH, {KEY_HEADER: KEY})
        found = answer.json()
        assert answer.status == 200 and found["resumes"] and found["running"] == 2 and found["ready"]
        assert (await get(app, "/info", {KEY_HEADER: KEY})).status == 401

    asyncio.run(main())
