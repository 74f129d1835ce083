"""Both clients, each behaviour once for either."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from threading import Timer
from typing import Any

import pytest

import legato.client
from legato.client import AsyncClient, Client, errors, types
from legato.client.types import FinishReason, Message
from legato.scheduling.state import GenerationRequest, Output
from tests.client.served import canned, served, unused_url
from tests.generation import parameters_of
from tests.http.asgi import FakeBackend, outputs_of
from tests.http.routes.openai.fakes import HI


class Sync:
    def ask(self, url: str, method: str, *args: Any, client: dict[str, Any] | None = None, **options: Any) -> Any:
        return getattr(Client(url, **(client or {})), method)(*args, **options)

    def collect(self, url: str, method: str, *args: Any, first: int | None = None, **options: Any) -> list[Any]:
        """The items of a stream, or the first few and then leave."""
        stream = self.ask(url, method, *args, **options)
        items = []
        for item in stream:
            items.append(item)
            if len(items) == first:
                break
        stream.close()
        return items


class Async:
    def ask(self, url: str, method: str, *args: Any, client: dict[str, Any] | None = None, **options: Any) -> Any:
        return asyncio.run(getattr(AsyncClient(url, **(client or {})), method)(*args, **options))

    def collect(self, url: str, method: str, *args: Any, first: int | None = None, **options: Any) -> list[Any]:
        made = options.pop("client", None) or {}

        async def main() -> list[Any]:
            stream = getattr(AsyncClient(url, **made), method)(*args, **options)
            if asyncio.iscoroutine(stream):
                stream = await stream
            items = []
            async for item in stream:
                items.append(item)
                if len(items) == first:
                    break
            await stream.aclose()
            return items

        return asyncio.run(main())


Driver = Sync | Async


@pytest.fixture(params=[Sync, Async])
def driver(request: pytest.FixtureRequest) -> Driver:
    made: Driver = request.param()
    return made


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_generate(driver: Driver) -> None:
    with served() as server:
        response = driver.ask(server.url, "generate", "hi", seed=3, do_sample=True, decoder_input_details=True)
    assert response.generated_text == "hello world"
    details = response.details
    assert (details.finish_reason, details.seed) == (FinishReason.EOS_TOKEN, 3)
    assert details.generated_tokens == len(details.tokens)
    assert "".join(token.text for token in details.tokens if not token.special) == "hello world"
    assert details.prefill[0].text == "<s>"


def test_parameters_reach_the_server(driver: Driver) -> None:
    with served() as server:
        driver.ask(server.url, "generate", "hi", temperature=0.5, top_k=7, stop_sequences=["x"], seed=None)
        driver.ask(server.url, "generate", "hi", max_new_tokens=None)
        first, second = server.backend.requests
    assert (parameters_of(first).temperature, parameters_of(first).top_k, first.max_new_tokens) == (0.5, 7, 20)
    assert second.max_new_tokens > 20


def test_best_of_sequences(driver: Driver) -> None:
    with served() as server:
        response = driver.ask(server.url, "generate", "hi", best_of=2, do_sample=True)
    (other,) = response.details.best_of_sequences
    assert other.generated_text == "hello world"


def test_generate_stream(driver: Driver) -> None:
    with served() as server:
        items = driver.collect(server.url, "generate_stream", "hi")
    assert "".join(item.token.text for item in items if not item.token.special) == "hello world"
    assert [item.generated_text for item in items[:-1]] == [None] * (len(items) - 1)
    assert items[-1].generated_text == "hello world"
    assert items[-1].details.finish_reason is FinishReason.EOS_TOKEN
    assert [item.index for item in items] == list(range(1, len(items) + 1))


def test_chat(driver: Driver) -> None:
    with served() as server:
        answer = driver.ask(server.url, "chat", [Message(role="user", content="hi")], max_tokens=5)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream(driver: Driver) -> None:
    with served() as server:
        chunks = driver.collect(server.url, "chat", HI, stream=True, stream_options={"include_usage": True})
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "hello world"
    assert chunks[-1].usage.completion_tokens > 0


def test_completion(driver: Driver) -> None:
    with served() as server:
        answer = driver.ask(server.url, "completion", ["a", "b"], logprobs=1)
        chunks = driver.collect(server.url, "completion", "a", stream=True)
    assert [choice.text for choice in answer.choices] == ["hello world"] * 2
    assert answer.choices[0].logprobs is not None
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_info_and_health(driver: Driver) -> None:
    with served() as server:
        assert driver.ask(server.url, "info").model_id == "tiny"
        assert driver.ask(server.url, "health") is True
        server.backend.health = False
        assert driver.ask(server.url, "health") is False
    assert driver.ask(unused_url(), "health") is False


def test_a_long_answer_comes_whole(driver: Driver) -> None:
    with served() as server:
        text = "the quick brown fox " * 3000
        with pytest.raises(errors.ValidationError, match="tokens"):
            driver.ask(server.url, "generate", text)
        response = driver.ask(server.url, "generate", text, truncate=10, return_full_text=True)
    assert response.generated_text == text + "hello world"


# ---- whom and how ----------------------------------------------------------------------------------------------------


def test_headers_and_cookies_are_sent(driver: Driver) -> None:
    body = (
        b'{"model_id":"m","model_sha":null,"model_pipeline_tag":null,"max_concurrent_requests":1,"max_best_of":1,'
        b'"max_stop_sequences":4,"max_input_tokens":1,"max_total_tokens":2,"validation_workers":1,'
        b'"max_client_batch_size":1,"router":"r","version":"1","sha":null,"docker_label":null}'
    )
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with canned(answer) as (url, seen):
        client = {"headers": {"X-Team": "blue"}, "cookies": {"a": "1", "b": "2"}}
        assert driver.ask(url + "/under/here/", "info", client=client).model_id == "m"
    head = seen[0].lower()
    assert head.startswith(b"get /under/here/info http/1.1\r\n")
    assert b"\r\nx-team: blue\r\n" in head and b"\r\ncookie: a=1; b=2\r\n" in head
    assert head.count(b"\r\nhost: ") == 1


def test_an_api_key_opens_a_closed_server(driver: Driver) -> None:
    with served(api_keys=("secret",)) as server:
        with pytest.raises(errors.UnauthorizedError) as caught:
            driver.ask(server.url, "generate", "hi")
        assert caught.value.status == 401
        with pytest.raises(errors.UnauthorizedError):
            driver.collect(server.url, "chat", HI, stream=True)
        key = {"headers": {"Authorization": "Bearer secret"}}
        assert driver.ask(server.url, "generate", "hi", client=key).generated_text == "hello world"


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://host", "http://"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Client(url)


def test_headers_cannot_smuggle_others() -> None:
    with pytest.raises(ValueError, match="line break"):
        AsyncClient("http://host", headers={"x": "1\r\ny: 2"})


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_refused_request(driver: Driver) -> None:
    with served() as server:
        with pytest.raises(errors.ValidationError, match="`temperature` must be strictly positive") as caught:
            driver.ask(server.url, "generate", "hi", temperature=-1.0)
        assert caught.value.status == 422
        with pytest.raises(errors.ValidationError, match="strictly positive"):
            driver.collect(server.url, "generate_stream", "hi", temperature=-1.0)
        with pytest.raises(errors.ValidationError) as caught:
            driver.collect(server.url, "chat", [], stream=True)
        assert caught.value.status == 400


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_an_overloaded_server_says_when_to_come_back(driver: Driver, method: str) -> None:
    with served(FakeBackend(pause_after=1), max_concurrent_requests=1) as server:
        stream = Client(server.url).generate_stream("hi")
        next(stream)
        with pytest.raises(errors.OverloadedError) as caught:
            driver.ask(server.url, method, "hi" if method == "generate" else HI)
        assert (caught.value.status, caught.value.retry_after) == (429, 1.0)
        with pytest.raises(errors.OverloadedError):
            driver.collect(server.url, "generate_stream", "hi")
        server.go_on()
        assert [item.generated_text for item in stream][-1] == "hello world"


def test_a_generation_that_fails(driver: Driver) -> None:
    def script(request: GenerationRequest) -> list[Output]:
        return [*outputs_of("hello world")[:2], Output(error="out of memory")]

    with served(FakeBackend(script)) as server:
        with pytest.raises(errors.GenerationError, match="out of memory"):
            driver.ask(server.url, "generate", "hi")
        with pytest.raises(errors.GenerationError, match="out of memory"):
            driver.collect(server.url, "generate_stream", "hi")
        with pytest.raises(errors.GenerationError, match="out of memory"):
            driver.collect(server.url, "chat", HI, stream=True)


def test_a_path_that_is_not_there(driver: Driver) -> None:
    with served() as server, pytest.raises(errors.NotFoundError):
        driver.ask(server.url + "/elsewhere", "info")


def test_an_answer_of_a_proxy(driver: Driver) -> None:
    page = b"<html>Bad gateway</html>"
    with canned(b"HTTP/1.1 502 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page)) as (url, _):
        with pytest.raises(errors.UnknownError, match="Bad gateway") as caught:
            driver.ask(url, "generate", "hi")
        assert caught.value.status == 502


def test_a_response_of_another_shape(driver: Driver) -> None:
    with canned(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (url, _), pytest.raises(errors.UnknownError):
        driver.ask(url, "generate", "hi")


@pytest.mark.parametrize("answer", [b"", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}"])
def test_a_malformed_response(driver: Driver, answer: bytes) -> None:
    with canned(answer) as (url, _), pytest.raises(errors.ConnectionFailed):
        driver.ask(url, "generate", "hi")


def test_a_refused_connection(driver: Driver) -> None:
    with pytest.raises(errors.ConnectionFailed, match="cannot be reached"):
        driver.ask(unused_url(), "generate", "hi")


# ---- streams ---------------------------------------------------------------------------------------------------------

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"token":{"id":1,"text":"a","logprob":null,"special":false}}\n\n'
LAST = b'data:{"token":{"id":1,"text":"a","logprob":-1.0,"special":false},"generated_text":"aa","details":null}\r\n\r\n'


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    return STREAM + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


def test_leaving_a_stream_cancels_it_at_the_server(driver: Driver) -> None:
    with served(FakeBackend(pause_after=2)) as server:
        assert len(driver.collect(server.url, "generate_stream", "hi", first=1)) == 1
        server.wait_until(lambda: server.backend.cancelled)


def test_comments_keep_a_stream_alive(driver: Driver) -> None:
    with served(FakeBackend(pause_after=1), keep_alive=0.05) as server:
        Timer(0.5, server.go_on).start()
        items = driver.collect(server.url, "generate_stream", "hi", client={"timeout": 0.3})
    assert items[-1].generated_text == "hello world"


def test_a_stream_that_falls_silent(driver: Driver) -> None:
    with served(FakeBackend(pause_after=1)) as server, pytest.raises(errors.RequestTimeout):
        driver.collect(server.url, "generate_stream", "hi", client={"timeout": 0.2})


def test_silence_beyond_the_timeout(driver: Driver) -> None:
    with served(FakeBackend(pause_after=0)) as server:
        with pytest.raises(errors.RequestTimeout) as caught:
            driver.ask(server.url, "generate", "hi", client={"timeout": 0.2})
        assert isinstance(caught.value, TimeoutError)
        server.wait_until(lambda: server.backend.cancelled)


def test_events_are_found_wherever_the_chunks_are_cut(driver: Driver) -> None:
    whole = b": comment\n\nevent: x\nid: 1\n" + TOKEN + LAST
    for cut in (1, 7, len(whole)):
        pieces = [whole[at : at + cut] for at in range(0, len(whole), cut)]
        with canned(chunked(*pieces)) as (url, _):
            items = driver.collect(url, "generate_stream", "hi")
        assert [item.generated_text for item in items] == [None, "aa"]


def test_a_stream_without_length_ends_with_the_connection(driver: Driver) -> None:
    with canned(b"HTTP/1.1 200 OK\r\n\r\n" + TOKEN + LAST) as (url, _):
        assert len(driver.collect(url, "generate_stream", "hi")) == 2


def test_what_came_before_an_error_is_seen(driver: Driver) -> None:
    error = b'data: {"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'
    with canned(chunked(TOKEN + error)) as (url, _):
        assert len(driver.collect(url, "generate_stream", "hi", first=1)) == 1
    with canned(chunked(TOKEN + error)) as (url, _), pytest.raises(errors.IncompleteGenerationError):
        driver.collect(url, "generate_stream", "hi")


def test_the_error_of_a_chat_stream_of_tgi(driver: Driver) -> None:
    error = b'data: {"error":{"message":"no","http_status_code":422}}\n\ndata: [DONE]\n\n'
    with canned(chunked(error)) as (url, _), pytest.raises(errors.ValidationError, match=r"^no$"):
        driver.collect(url, "chat", HI, stream=True)


def test_a_stream_that_ends_too_early(driver: Driver) -> None:
    with canned(chunked(TOKEN)) as (url, _), pytest.raises(errors.IncompleteGenerationError):
        driver.collect(url, "generate_stream", "hi")


@pytest.mark.parametrize("answer", [chunked(TOKEN, end=False), chunked(TOKEN, end=False)[:-9], STREAM + b"xyz\r\n"])
def test_a_stream_that_breaks_off(driver: Driver, answer: bytes) -> None:
    with canned(answer) as (url, _), pytest.raises(errors.ConnectionFailed):
        driver.collect(url, "generate_stream", "hi")


def test_a_stream_ends_with_its_last_event_even_if_the_connection_does_not(driver: Driver) -> None:
    with canned(chunked(LAST, end=False), hold=True) as (url, _):
        assert len(driver.collect(url, "generate_stream", "hi", client={"timeout": 2.0})) == 1


# ---- imports ---------------------------------------------------------------------------------------------------------


def test_the_client_needs_nothing_but_msgspec() -> None:
    program = (
        "import sys, legato.client; heavy = {'torch', 'starlette', 'uvicorn', 'tokenizers', 'grpc', 'numpy', 'click'};"
        "ours = {m.split('.')[1] for m in sys.modules if m.startswith('legato.')};"
        "print(sorted(heavy & set(sys.modules)), ours <= {'client', 'api', 'scheduling', 'grammar'})"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[] True"


@pytest.mark.parametrize("name", types.__all__)
def test_the_names_of_tgis_client_are_there(name: str) -> None:
    assert getattr(legato.client, name) is getattr(types, name)
