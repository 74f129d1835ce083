from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.api.openai.requests import ChatRequest, CompletionRequest
from legato.scheduling.state import Output
from tests.http.asgi import Call, FakeBackend, get, post, until
from tests.http.routes.openai.fakes import CHAT, COMPLETIONS, HI, FakeTemplate, Server, chat, complete, problem

TEN_TOKENS = "0123456789"  # digits are never merged; <s> makes it eleven


def test_the_error_object() -> None:
    answer = complete(n=0)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "error": {
            "message": "`n` must be >= 1 and <= 8. Given: 0",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        },
        "error_type": "validation",
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("body", "code"), [(b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", None)])
def test_a_body_that_is_no_request(path: str, body: bytes, code: str | None) -> None:
    answer = Server().ask(path, body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, code)


def test_a_missing_field_is_named() -> None:
    assert problem(Server().ask(COMPLETIONS, {}))[:2] == (400, "prompt")
    assert problem(Server().ask(CHAT, {}))[:2] == (400, "messages")


def test_a_large_body() -> None:
    answer = Server(settings={"payload_limit": 100}).ask(COMPLETIONS, {"prompt": "x" * 100})
    assert answer.status == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [TEN_TOKENS * 10, [5] * 101])
def test_a_prompt_that_is_too_long(prompt: Any) -> None:
    error = complete(prompt=prompt).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 100 tokens")


def test_more_output_than_fits() -> None:
    error = complete(prompt=TEN_TOKENS, max_tokens=90).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("the request has 11 of input and asks for 90 of output")
    assert complete(prompt=TEN_TOKENS, max_tokens=89).status == 200


def test_a_full_server_says_when_to_come_back() -> None:
    async def main() -> None:
        backend = FakeBackend(pause_after=0)
        app = Server(backend, settings={"max_concurrent_requests": 1}).app
        waiting = Call(app, "POST", COMPLETIONS, [b'{"prompt": "hi"}'])
        await until(lambda: backend.requests)
        for stream in (False, True):
            refused = await post(app, CHAT, {"messages": HI, "stream": stream})
            assert refused.status == 429
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.json()["error_type"] == "overloaded"
        backend.go_on.set()
        assert (await waiting.answer()).status == 200

    asyncio.run(main())


def test_a_failed_generation_is_the_servers_fault() -> None:
    answer = complete(FakeBackend(lambda request: [Output(5), Output(error="shard 0 is gone")]))
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error_type"] == "generation"


def test_an_unknown_route_and_another_method() -> None:
    assert Server().ask("/v1/fine_tuning/jobs", {}).status == 404
    assert problem(Server().ask("/v1/fine_tuning/jobs", {}))[2] == "There is no route /v1/fine_tuning/jobs"
    answer = asyncio.run(get(Server().app, CHAT))
    assert answer.status == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_bug_is_answered_without_its_text() -> None:
    class Buggy(FakeBackend):
        def submit(self, request: Any, sink: Any) -> None:
            raise RuntimeError("secret")

    async def main() -> None:
        connection = Call(Server(Buggy()).app, "POST", COMPLETIONS, [b'{"prompt": "hi"}'])
        with pytest.raises(RuntimeError):  # goes on to the server, which logs it
            await connection.task
        start, body = connection.sent
        assert start["status"] == 500
        assert json.loads(body["body"])["error"]["message"] == "Internal server error"

    asyncio.run(main())


def test_failures_are_counted() -> None:
    async def main() -> None:
        app = Server(FakeBackend(lambda request: [Output(5), Output(error="x")])).app
        for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}, {"prompt": "hi", "n": 0}):
            await post(app, COMPLETIONS, body)
        metrics = (await get(app, "/metrics")).body.decode()
        assert "tgi_request_count 3.0" in metrics
        assert 'tgi_request_failure{err="generation"} 2.0' in metrics
        assert 'tgi_request_failure{err="validation"} 1.0' in metrics

    asyncio.run(main())


def test_a_template_that_fails_is_counted_as_such() -> None:
    async def main() -> None:
        app = Server(template=FakeTemplate(fails=True)).app
        answer = await post(app, CHAT, {"messages": HI})
        assert answer.status == 422
        metrics = (await get(app, "/metrics")).body.decode()
        assert 'tgi_request_failure{err="template"} 1.0' in metrics
        assert 'tgi_request_failure{err="validation"} 1.0' not in metrics

    asyncio.run(main())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}))


@settings(deadline=None, max_examples=150)
@given(
    fields=st.dictionaries(names, values, max_size=4), whole=st.booleans(), path=st.sampled_from([CHAT, COMPLETIONS])
)
def test_nothing_a_client_sends_is_our_fault(fields: dict[str, Any], whole: bool, path: str) -> None:
    body = {"prompt": "hi", "messages": HI, "max_tokens": 5} | fields if whole else fields
    answer = SERVER.ask(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"


SERVER = Server()


@pytest.mark.parametrize("name", ["messages", "prompt"])
@pytest.mark.parametrize("value", ['"\\ud800"', '[{"role": "user", "content": "\\ud800"}]', "1e999", "NaN"])
def test_strange_json(name: str, value: str) -> None:
    for path in (CHAT, COMPLETIONS):
        assert Server().ask(path, f'{{"{name}": {value}}}'.encode()).status == 400


def test_native_routes_keep_their_own_errors() -> None:
    answer = Server().ask("/generate", {"inputs": ""})
    assert answer.status == 422
    assert answer.json()["error"].startswith("Input validation error")
    assert chat(n=0).status == 400


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_a_missing_and_a_wrong_key_have_openais_code(headers: dict[str, str]) -> None:
    answer = asyncio.run(get(Server(settings={"api_keys": ("right",)}).app, "/v1/models", headers))
    assert answer.status == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error_type"] == "unauthorized"
