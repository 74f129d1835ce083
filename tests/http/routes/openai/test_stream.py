from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.openai.responses import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from legato.http.routes.openai.chunks import ChatChunks, CompletionChunks, Envelope, Identity
from legato.scheduling.state import FinishReason, Output
from tests.http.asgi import Call, FakeBackend, get, outputs_of, post, token_ids, until
from tests.http.routes.openai.fakes import CHAT, COMPLETIONS, HI, Server, chat, chunks, complete

# ---- bytes -----------------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=10)
USAGE = st.builds(
    lambda a, b, c, d: Usage(
        prompt_tokens=a,
        completion_tokens=b,
        total_tokens=a + b,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=c),
        completion_tokens_details=CompletionTokensDetails(accepted_prediction_tokens=d),
    ),
    *[st.integers(0, 2**32)] * 4,
)
IDENTITY = st.builds(Identity, TEXT, st.integers(0, 2**40), TEXT, TEXT)
TOP = st.builds(TopLogprob, token=TEXT, logprob=st.floats(), bytes=st.lists(st.integers(0, 255)))
TOKEN = st.builds(
    TokenLogprob,
    token=TEXT,
    logprob=st.floats(),
    bytes=st.lists(st.integers(0, 255)),
    top_logprobs=st.lists(TOP, max_size=2),
)
CHAT_LOGPROBS = st.none() | st.builds(ChatLogprobs, content=st.lists(TOKEN, max_size=2))
COMPLETION_LOGPROBS = st.none() | st.builds(
    CompletionLogprobs,
    tokens=st.lists(TEXT),
    token_logprobs=st.lists(st.none() | st.floats()),
    top_logprobs=st.lists(st.dictionaries(TEXT, st.floats()), max_size=2),
    text_offset=st.lists(st.integers()),
)
REASON = st.sampled_from(["stop", "length", "tool_calls"])


def event(chunk: Any, identity: Identity, **more: Any) -> bytes:
    fields = {name: getattr(identity, name) for name in Identity.__slots__}
    return b"data: " + msgspec.json.encode(chunk(**fields, **more)) + b"\n\n"


@given(IDENTITY, st.integers(0, 100), TEXT, CHAT_LOGPROBS, REASON, st.none() | USAGE)
def test_chat_chunks_are_what_the_encoder_writes(
    identity: Identity, index: int, text: str, logprobs: ChatLogprobs | None, reason: Any, usage: Usage | None
) -> None:
    envelope = Envelope(identity, "chat.completion.chunk", with_usage=False)
    more = {}
    if usage is not None:
        envelope.show(usage)
        more = {"usage": usage}
    written = ChatChunks(envelope, index)

    def expected(delta: ChatDelta, **end: Any) -> bytes:
        choice = ChatChunkChoice(index=index, delta=delta, **end)
        return event(ChatCompletionChunk, identity, choices=[choice], **more)

    assert written.role() == expected(ChatDelta(role="assistant", content=""))
    assert written.content(text) == expected(ChatDelta(content=text))
    assert written.content(text, logprobs) == expected(ChatDelta(content=text), logprobs=logprobs)
    last = ChatDelta() if reason == "tool_calls" else ChatDelta(content="")
    assert written.finish(reason) == expected(last, finish_reason=reason)


@given(IDENTITY, st.integers(0, 100), TEXT, COMPLETION_LOGPROBS, REASON, USAGE)
def test_completion_chunks_are_what_the_encoder_writes(
    identity: Identity, index: int, text: str, logprobs: CompletionLogprobs | None, reason: Any, usage: Usage
) -> None:
    envelope = Envelope(identity, "text_completion", with_usage=True)
    written = CompletionChunks(envelope, index)

    def expected(finish_reason: Any) -> bytes:
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        return event(CompletionChunk, identity, choices=[choice], usage=None)

    assert written.text(text, logprobs) == expected(None)
    assert written.finish(text, logprobs, reason) == expected(reason)
    assert envelope.usage(usage) == event(CompletionChunk, identity, choices=[], usage=usage)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    answer = chat(stream=True, model="m")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-accel-buffering"] == "no"
    events = chunks(answer)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "he"}, None),
            ({"content": "llo"}, None),
            ({"content": " world"}, None),
            ({"content": ""}, "stop"),
        ]
    ]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" and event["model"] == "m" for event in events)
    assert not any("usage" in event for event in events)


def test_a_completion_stream() -> None:
    events = chunks(complete(stream=True))
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("he", None), ("llo", None), (" world", None), ("", "stop")]
    ]
    assert all(event["object"] == "text_completion" for event in events)


def test_the_last_chunk_of_each_prompt_has_its_usage_as_in_tgi() -> None:
    events = chunks(complete(stream=True, prompt=["hello", "hello world"]))
    ends = [event for event in events if event["choices"][0]["finish_reason"]]
    assert [event for event in events if "usage" in event] == ends
    for event in ends:
        usage = event["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert len({event["usage"]["prompt_tokens"] for event in ends}) == 2


@pytest.mark.parametrize("ask", [chat, complete])
def test_usage_comes_last_in_a_chunk_without_choices(ask: Any) -> None:
    *events, last = chunks(ask(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4


def test_usage_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(complete(stream=True, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "continuous_usage_stats": True}])
def test_no_usage_unless_asked_for(options: Any) -> None:
    assert not any("usage" in event for event in chunks(chat(stream=True, stream_options=options)))


def texts_of(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def test_several_choices_share_a_stream() -> None:
    backend = FakeBackend(lambda request: outputs_of("so " * request.id + "far"))
    events = chunks(complete(backend, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}))
    assert texts_of(events) == {0: "so far", 1: "so so far", 2: "so so so far", 3: "so so so so far"}
    reasons = [(c["index"], c["finish_reason"]) for event in events for c in event["choices"] if c["finish_reason"]]
    assert sorted(reasons) == [(index, "stop") for index in range(4)]
    assert events[-1]["usage"]["completion_tokens"] == sum(
        len(token_ids("so " * number + "far")) + 1 for number in (1, 2, 3, 4)
    )


def test_the_same_text_streamed_and_not() -> None:
    backend = FakeBackend(lambda request: outputs_of("héllo wörld 😀 and so on"))
    for stop in (None, "so", "😀"):
        streamed = texts_of(chunks(chat(backend, stop=stop, stream=True)))
        whole = chat(backend, stop=stop).json()["choices"][0]["message"]["content"]
        assert streamed == {0: whole}


def test_echo_comes_first_in_a_stream() -> None:
    first, *rest = chunks(complete(prompt="hi, ", echo=True, stream=True))
    assert first["choices"][0]["text"] == "hi, "
    assert texts_of(rest) == {0: "hello world"}


def test_logprobs_in_a_chat_stream_are_those_of_the_whole() -> None:
    backend = FakeBackend(lambda request: outputs_of("é, héllo wörld"))
    request = {"logprobs": True, "stop": "rld"}
    streamed = [
        token
        for event in chunks(chat(backend, stream=True, **request))
        for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == chat(backend, **request).json()["choices"][0]["logprobs"]["content"]


def test_logprobs_in_a_completion_stream_are_those_of_the_whole() -> None:
    backend = FakeBackend(lambda request: outputs_of("é, héllo wörld"))
    events = chunks(complete(backend, stream=True, logprobs=0))
    whole = complete(backend, logprobs=0).json()["choices"][0]["logprobs"]
    for name, expected in whole.items():
        assert [item for event in events for item in event["choices"][0]["logprobs"][name]] == expected


# ---- time ------------------------------------------------------------------------------------------------------------


def test_each_token_is_sent_when_it_is_there() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=2)
        stream = Call(Server(backend).app, "POST", COMPLETIONS, [b'{"prompt": "hi", "stream": true}'])
        await stream.wait_for(1 + 2)
        assert not stream.task.done()
        backend.go_on.set()
        assert len(chunks(await stream.answer())) == 4

    asyncio.run(main())


def test_a_silent_stream_sends_comments() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=0)
        app = Server(backend, settings={"keep_alive": 0.01}).app
        stream = Call(app, "POST", COMPLETIONS, [b'{"prompt": "hi", "stream": true, "n": 2}'])
        await stream.wait_for(1 + 2)
        assert [message["body"] for message in stream.sent[1:3]] == [b":\n\n", b":\n\n"]
        backend.go_on.set()
        assert b"[DONE]" in (await stream.answer()).body

    asyncio.run(main())


def test_a_token_that_says_nothing_is_not_sent() -> None:
    backend = FakeBackend(lambda request: [Output(0), *outputs_of("x", FinishReason.LENGTH)])
    assert len(chunks(complete(backend, stream=True))) == 1


@pytest.mark.parametrize("ask", [chat, complete])
def test_an_error_during_a_stream_is_its_last_event(ask: Any) -> None:
    answer = ask(FakeBackend(lambda request: [Output(5), Output(error="shard 0 is gone")]), stream=True)
    assert answer.status == 200
    last = answer.events()[-1]
    assert last["error"]["message"] == "Request failed during generation: shard 0 is gone"
    assert last["error"]["type"] == "server_error"
    assert b"[DONE]" not in answer.body


def test_a_bug_during_a_stream_is_an_event_without_details(caplog: pytest.LogCaptureFixture) -> None:
    nonsense: Any = "secret"
    answer = complete(FakeBackend(lambda request: [Output(5), Output(nonsense)]), stream=True)
    assert answer.events()[-1]["error"]["message"] == "Internal server error"
    assert "secret" not in answer.body.decode()
    assert "A stream failed" in caplog.text


def endless(request: Any) -> Any:
    return itertools.repeat(Output(5))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_hanging_up_cancels_every_choice(path: str, stream: str) -> None:
    async def main() -> None:
        backend = FakeBackend(endless, pause_after=1)
        app = Server(backend, settings={"max_concurrent_requests": 2}).app
        body = f'{{"prompt": "hi", "messages": [{{"role": "user", "content": "hi"}}], "n": 2, "stream": {stream}}}'
        connection = Call(app, "POST", path, [body.encode()])
        await until(lambda: len(backend.requests) == 2)
        connection.hang_up()
        await until(lambda: len(backend.cancelled) == 2)
        await asyncio.wait_for(connection.task, 5)
        assert 'tgi_request_failure{err="dropped"} 1.0' in (await get(app, "/metrics")).body.decode()
        backend.script, backend.pause_after = lambda request: outputs_of("x"), None
        assert (await post(app, COMPLETIONS, {"prompt": "hi", "n": 2})).status == 200, "its permits are free again"

    asyncio.run(main())


def test_one_failing_choice_ends_the_others() -> None:
    backend = FakeBackend(lambda request: [Output(5), Output(error="boom")] if request.id == 2 else endless(request))
    assert complete(backend, n=2).status == 500
    assert backend.cancelled == [1]
    answer = chat(FakeBackend(backend.script), n=2, stream=True)
    assert answer.events()[-1]["error"]["type"] == "server_error"


def test_many_random_hang_ups_leave_nothing_behind() -> None:
    async def main() -> None:
        backend = FakeBackend(endless)
        app = Server(backend, settings={"max_concurrent_requests": 200}).app
        body = b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 2}'
        calls = [Call(app, "POST", path, [body]) for path in [CHAT, COMPLETIONS] * 25]
        for i, connection in enumerate(calls):
            await asyncio.sleep(0)
            if i % 3:
                connection.hang_up()
        for connection in calls:
            connection.hang_up()
            await asyncio.wait_for(connection.task, 10)
        await until(lambda: len(asyncio.all_tasks()) == 1)
        assert len(backend.cancelled) == len(backend.requests)

    asyncio.run(main())


def test_a_null_stream_is_no_stream() -> None:
    assert Server().ask(CHAT, {"messages": HI, "stream": None}).headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", COMPLETIONS, CHAT])
def test_a_request_that_the_scheduler_refuses_has_status_429(path: str) -> None:
    backend = FakeBackend(lambda request: [Output(error="Model is overloaded", retry_after=7)])
    body = {"inputs": "hi", "prompt": "hi", "messages": HI, "stream": path.startswith("/v1")}
    answer = Server(backend).ask(path, body)
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
