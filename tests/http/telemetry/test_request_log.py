"""One log line for each request, in TGI's form, without anything that the client wrote."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from legato.http.telemetry.request_log import duration_text
from legato.scheduling.state import Output
from tests.http.asgi import Call, FakeBackend, app_for, ask, get, post, until

REFUSED = ("validation", 422, "InvalidRequest")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == "legato.router"]


def failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record for record in records(caplog) if record["levelno"] == logging.ERROR]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.5s"), (2.0, "2s"), (0.0124, "12.4ms"), (0.0004021, "402.1µs"), (3e-8, "30ns"), (-1.0, "0ns")],
)
def test_durations_are_written_as_rust_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("path", "name"),
    [("/generate", "generate"), ("/generate_stream", "generate_stream"), ("/", "compat_generate")],
)
def test_a_success_is_logged_with_its_parameters_and_times(
    path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "legato.router")
    ask(path, {"inputs": "hi", "parameters": {"seed": 3, "temperature": 0.5, "max_new_tokens": 9, "stop": ["canary"]}})
    (record,) = records(caplog)
    assert (record["message"], record["target"]) == ("Success", "text_generation_router::server")
    span = record["span"]
    assert span["name"] == name and span["seed"] == "Some(3)"
    duration = re.compile(r"[\d.]+(s|ms|µs|ns)")
    for field in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert duration.fullmatch(span[field])
    assert span["parameters"].startswith("GenerateParameters { best_of: None, temperature: Some(0.5), ")
    assert "max_new_tokens: Some(9), stop: [_; 1], " in span["parameters"] and "canary" not in str(record)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", b"{", ("validation", 400, "MalformedBody", None)),
        ("/generate", {"inputs": 1}, (*REFUSED, None)),
        ("/generate", {"inputs": ""}, (*REFUSED, "inputs")),
        ("/generate", {"inputs": "hi", "parameters": {"temperature": -1}}, (*REFUSED, "temperature")),
        ("/generate_stream", {"inputs": "hi", "parameters": {"top_p": 7}}, (*REFUSED, "top_p")),
        ("/v1/completions", {"prompt": "hi", "n": 99}, ("validation", 400, "InvalidRequest", "n")),
        ("/v1/chat/completions", CHAT, ("template_error", 422, "TemplateError", None)),
        ("/generate", {"inputs": "hi " * 500}, ("validation", 422, "TooLong", "inputs")),
        ("/tokenize", {}, (*REFUSED, "inputs")),
        ("/nowhere", {}, ("not_found", 404, "NotFound", None)),
    ],
)  # fmt: skip
def test_every_refused_request_leaves_one_error_line(
    path: str, body: Any, expected: tuple[str, int, str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    ask(path, body)
    (record,) = failures(caplog)
    fields = record["fields"]
    assert record["message"] == "Request refused"
    assert (fields["error_type"], fields["status"], fields["error"], fields.get("param")) == expected


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_request_that_fails_leaves_one_error_line(path: str, caplog: pytest.LogCaptureFixture) -> None:
    ask(path, {"inputs": "hi"}, FakeBackend(lambda request: [Output(error="canary")]))
    (record,) = failures(caplog)
    assert record["message"] == "Request failed" and record["span"]["name"] == path[1:]
    assert record["fields"] == {"error_type": "generation", "status": 424, "error": "GenerationFailed"}


def test_an_overloaded_server_and_a_wrong_key_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ask("/generate", {"inputs": "hi"}, FakeBackend(lambda request: [Output(error="full", retry_after=3)]))
    ask("/generate", {"inputs": "hi"}, api_keys=("secret-key",))
    assert [record["fields"]["status"] for record in failures(caplog)] == [429, 401]
    assert "secret-key" not in caplog.text


def test_a_client_that_hangs_up_is_logged_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "legato.router")

    async def main() -> None:
        backend = FakeBackend(pause_after=1)
        call = Call(app_for(backend), "POST", "/generate_stream", body=[b'{"inputs": "hi"}'])
        await until(lambda: backend.requests)
        call.hang_up()
        await asyncio.wait_for(call.task, 5)

    asyncio.run(main())
    (record,) = records(caplog)
    assert (record["message"], record["levelno"]) == ("Client disconnected", logging.INFO)


def test_no_line_repeats_what_a_client_wrote(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1, "legato")
    word = "canary91ab"

    async def main() -> None:
        app = app_for()
        for body in (
            {"inputs": word, "parameters": {"adapter_id": word}},
            {"inputs": word, "parameters": {"grammar": {"type": word, "value": word}}},
            {"inputs": word, "parameters": {"stop": [word], "max_new_tokens": 1}},
            {"inputs": {word: word}},
        ):
            await post(app, "/generate", body)
        await post(app, "/v1/completions", {"model": word, "prompt": word, "user": word, "suffix": word})
        await get(app, f"/v1/models/{word}")
        await get(app, f"/{word}")

    asyncio.run(main())
    assert len(records(caplog)) >= 7
    assert not [record for record in records(caplog) if word in str(record)]
