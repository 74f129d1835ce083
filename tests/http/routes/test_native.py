from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest

from legato.scheduling.state import FinishReason, GenerationRequest, Output
from tests.generation import parameters_of
from tests.http.asgi import EOS, Call, FakeBackend, app_for, ask, get, outputs_of, post, token_ids, until

HELLO = [*token_ids("hello world"), EOS]


# ---- POST /generate --------------------------------------------------------------------------------------------------


def test_generate_answers_with_the_text() -> None:
    answer = ask("/generate", {"inputs": "hi"})
    assert (answer.status, answer.json()) == (200, {"generated_text": "hello world"})
    assert answer.headers["content-type"] == "application/json"


def test_details() -> None:
    details = ask("/generate", {"inputs": "hi", "parameters": {"details": True}}).json()["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(HELLO)
    assert details["seed"] is None
    assert details["prefill"] == []
    assert [token["id"] for token in details["tokens"]] == HELLO
    assert details["tokens"][-1] == {"id": EOS, "text": "</s>", "logprob": -0.5, "special": True}
    assert "best_of_sequences" not in details and "top_tokens" not in details


def test_the_seed_is_reported_when_something_was_random() -> None:
    parameters = {"details": True, "do_sample": True, "seed": 2**64 - 1}
    assert ask("/generate", {"inputs": "hi", "parameters": parameters}).json()["details"]["seed"] == 2**64 - 1


def test_top_tokens() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return [Output(5, -1.0, top_tokens=[(5, -1.0), (6, -2.0)], finish_reason=FinishReason.LENGTH)]

    body = {"inputs": "hi", "parameters": {"details": True, "top_n_tokens": 2}}
    (top,) = ask("/generate", body, FakeBackend(script)).json()["details"]["top_tokens"]
    assert [(token["id"], token["logprob"]) for token in top] == [(5, -1.0), (6, -2.0)]


def test_decoder_input_details_gives_the_prompt_and_implies_details() -> None:
    def script(request: GenerationRequest) -> list[Output]:
        assert request.prompt_logprobs
        first, *rest = outputs_of("x")
        first.prompt_logprobs = [None, -1.25]
        return [first, *rest]

    answer = ask("/generate", {"inputs": "0", "parameters": {"decoder_input_details": True}}, FakeBackend(script))
    assert answer.json()["details"]["prefill"] == [
        {"id": 0, "text": "<s>", "logprob": None},
        {"id": token_ids("0")[0], "text": "0", "logprob": -1.25},
    ]


def test_return_full_text_puts_the_inputs_first() -> None:
    answer = ask("/generate", {"inputs": "hi, ", "parameters": {"return_full_text": True}})
    assert answer.json()["generated_text"] == "hi, hello world"


def test_timing_headers_are_tgis() -> None:
    headers = ask("/generate", {"inputs": "hé"}, compute_type="1-abacus").headers
    assert headers["x-compute-type"] == "1-abacus"
    assert headers["x-compute-characters"] == "2"
    assert headers["x-prompt-tokens"] == str(1 + len(token_ids("hé")))
    assert headers["x-generated-tokens"] == str(len(HELLO))
    assert float(headers["x-compute-time"]) > 0
    times = ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token")
    assert all(headers[name].isdigit() for name in times)


def test_best_of_returns_the_sequence_with_the_best_mean_logprob() -> None:
    seeds = []

    def script(request: GenerationRequest) -> list[Output]:
        seeds.append(parameters_of(request).seed)
        return outputs_of("good", logprob=-0.1) if request.id == 2 else outputs_of("a bad one", logprob=-0.2)

    body = {"inputs": "hi", "parameters": {"best_of": 2, "do_sample": True, "details": True}}
    answer = ask("/generate", body, FakeBackend(script)).json()
    assert answer["generated_text"] == "good"
    (other,) = answer["details"]["best_of_sequences"]
    assert other["generated_text"] == "a bad one"
    assert {answer["details"]["seed"], other["seed"]} == set(seeds)
    assert len(set(seeds)) == 2


def test_one_failing_sequence_fails_best_of_and_ends_the_others() -> None:
    backend = FakeBackend(lambda request: [Output(error="boom")] if request.id == 1 else endless())
    answer = ask("/generate", {"inputs": "hi", "parameters": {"best_of": 2, "do_sample": True}}, backend)
    assert answer.status == 424
    assert backend.cancelled == [2]


def endless() -> Iterable[Output]:
    return itertools.repeat(Output(5))


def test_stop_strings_end_the_text_and_the_request() -> None:
    backend = FakeBackend(lambda request: outputs_of("hello world and so on"))
    answer = ask("/generate", {"inputs": "hi", "parameters": {"stop": ["wor"], "details": True}}, backend)
    assert answer.json()["generated_text"] == "hello wor"
    assert answer.json()["details"]["finish_reason"] == "stop_sequence"
    assert backend.cancelled == [1]


# ---- POST /generate_stream -------------------------------------------------------------------------------------------


def test_a_stream_byte_for_byte() -> None:
    answer = ask("/generate_stream", {"inputs": "hi", "parameters": {"details": True}})
    first, second, third = token_ids("hello world")
    assert answer.body.decode() == (
        f'data: {{"index":1,"token":{{"id":{first},"text":"he","logprob":-0.5,"special":false}},'
        '"generated_text":null,"details":null}\n\n'
        f'data: {{"index":2,"token":{{"id":{second},"text":"llo","logprob":-0.5,"special":false}},'
        '"generated_text":null,"details":null}\n\n'
        f'data: {{"index":3,"token":{{"id":{third},"text":" world","logprob":-0.5,"special":false}},'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":4,"token":{"id":1,"text":"</s>","logprob":-0.5,"special":true},"generated_text":"hello world",'
        '"details":{"finish_reason":"eos_token","generated_tokens":4,"seed":null,"input_length":3}}\n\n'
    )


def test_stream_headers() -> None:
    headers = ask("/generate_stream", {"inputs": "hé"}, compute_type="1-abacus").headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-type"] == "1-abacus"
    assert headers["x-compute-characters"] == "2"
    assert "x-total-time" not in headers


def test_each_token_is_sent_when_it_is_there() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=2)
        stream = Call(app_for(backend), "POST", "/generate_stream", [b'{"inputs": "hi"}'])
        await stream.wait_for(1 + 2)
        assert not stream.task.done()
        backend.go_on.set()
        assert len((await stream.answer()).events()) == len(HELLO)

    asyncio.run(main())


def test_details_only_if_asked_for() -> None:
    last = ask("/generate_stream", {"inputs": "hi"}).events()[-1]
    assert last["generated_text"] == "hello world"
    assert last["details"] is None


def test_a_stop_string_ends_the_stream() -> None:
    backend = FakeBackend(lambda request: outputs_of("hello world and so on"))
    body = {"inputs": "hi", "parameters": {"stop": ["o w"], "details": True}}
    events = ask("/generate_stream", body, backend).events()
    assert "".join(event["token"]["text"] for event in events) == "hello w"
    assert events[-1]["generated_text"] == "hello w"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert backend.cancelled == [1]


def test_top_tokens_in_a_stream() -> None:
    outputs = [Output(5, -1.0, top_tokens=[(5, -1.0)]), *outputs_of("x")]
    events = ask("/generate_stream", {"inputs": "hi"}, FakeBackend(lambda request: outputs)).events()
    assert events[0]["top_tokens"][0]["id"] == 5
    assert "top_tokens" not in events[1]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_a_refused_stream_says_so_in_an_event(parameters: dict[str, Any], message: str) -> None:
    backend = FakeBackend()
    answer = ask("/generate_stream", {"inputs": "hi", "parameters": parameters}, backend)
    assert answer.status == 200
    assert answer.events() == [{"error": f"Input validation error: {message}", "error_type": "validation"}]
    assert backend.requests == []


def test_an_error_during_a_stream_is_its_last_event() -> None:
    backend = FakeBackend(lambda request: [Output(5), Output(error="shard 0 is gone")])
    events = ask("/generate_stream", {"inputs": "hi"}, backend).events()
    assert events[1:] == [{"error": "Request failed during generation: shard 0 is gone", "error_type": "generation"}]


def test_a_bug_during_a_stream_is_an_event_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(FakeBackend):
        def submit(self, request: Any, sink: Any) -> None:
            raise RuntimeError("secret")

    assert ask("/generate_stream", {"inputs": "hi"}, Buggy()).events() == [
        {"error": "Internal server error", "error_type": "internal"}
    ]
    assert "secret" in caplog.text


def test_a_silent_stream_sends_comments() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=1)
        stream = Call(app_for(backend, keep_alive=0.01), "POST", "/generate_stream", [b'{"inputs": "hi"}'])
        await stream.wait_for(1 + 1 + 2)
        assert [message["body"] for message in stream.sent[2:4]] == [b":\n\n", b":\n\n"]
        backend.go_on.set()
        assert len((await stream.answer()).events()) == len(HELLO)

    asyncio.run(main())


# ---- clients that hang up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_hanging_up_cancels_the_request_at_once(path: str) -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=1)
        app = app_for(backend, max_concurrent_requests=1)
        connection = Call(app, "POST", path, [b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        connection.hang_up()
        await until(lambda: backend.cancelled)
        await asyncio.wait_for(connection.task, 5)
        assert backend.cancelled == [1]
        assert 'tgi_request_failure{err="dropped"} 1.0' in (await get(app, "/metrics")).body.decode()
        backend.go_on.set()
        assert (await post(app, "/generate", {"inputs": "hi"})).status == 200, "its permit is free again"

    asyncio.run(main())


def test_hanging_up_before_the_body_is_complete() -> None:
    async def main() -> None:
        backend = FakeBackend()
        connection = Call(app_for(backend), "POST", "/generate", [b'{"inputs":', b""])
        connection._inbox._queue.pop()  # type: ignore[attr-defined]
        connection.hang_up()
        await asyncio.wait_for(connection.task, 5)
        assert connection.sent == [] and backend.requests == []

    asyncio.run(main())


def test_hanging_up_during_validation_computes_nothing() -> None:
    async def main() -> None:
        backend = FakeBackend()
        long_text = json.dumps({"inputs": "hello " * 2000, "parameters": {"truncate": 5}}).encode()
        connection = Call(app_for(backend), "POST", "/generate", [long_text])
        connection.hang_up()
        await asyncio.wait_for(connection.task, 5)
        assert backend.requests == []

    asyncio.run(main())


def test_many_random_hang_ups_leave_nothing_behind() -> None:
    async def main() -> None:
        backend = FakeBackend(lambda request: endless())
        app = app_for(backend, max_concurrent_requests=200)
        calls = [Call(app, "POST", "/generate_stream", [b'{"inputs": "hi"}']) for _ in range(200)]
        for i, connection in enumerate(calls):
            await asyncio.sleep(0)
            if i % 3:
                connection.hang_up()
        for connection in calls:
            connection.hang_up()
            await asyncio.wait_for(connection.task, 10)
        await until(lambda: len(asyncio.all_tasks()) == 1)
        assert len(backend.cancelled) == len(backend.requests)
        metrics = (await get(app, "/metrics")).body.decode()
        assert 'tgi_request_failure{err="dropped"} 200.0' in metrics

    asyncio.run(main())
