"""2,000 requests made from the OpenAPI document: no answer is an error of ours, and none breaks what is documented."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
import requests
from schemathesis import Case, GenerationMode, Response
from starlette.types import ASGIApp

from legato.http.app import create_app
from legato.http.openapi import document
from tests.chat.cases import make
from tests.fuzz.backend import obliging
from tests.fuzz.documented import BOTH, CASES, Operation, Send, fuzz, operations, read, sendings
from tests.http.asgi import SETTINGS, Call, tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPERATIONS = operations(read(json.loads(msgspec.json.encode(document(SETTINGS)))))
SENDINGS = sendings(OPERATIONS)
# Requests without body or parameters are all the same.
SHARE = -(-CASES // sum(bool(operation.body) for operation, _ in SENDINGS))


async def answer(app: ASGIApp, request: requests.PreparedRequest) -> Response:
    assert request.method is not None and isinstance(request.url, str)
    body = request.body.encode() if isinstance(request.body, str) else request.body or b""
    path = unquote(urlsplit(request.url).path)
    answered = await Call(app, request.method, path, [body], dict(request.headers)).answer()
    headers = {name: [value] for name, value in answered.headers.items()}
    return Response(answered.status, headers, answered.body, request, elapsed=0.0, verify=False)


@pytest.fixture(scope="module")
def send() -> Iterator[Send]:
    """To one application that lives through all of it, as a server does."""
    template = make(CHATML)
    app = create_app(obliging(), tokenizer(), SETTINGS, chat_template=template)
    with asyncio.Runner() as runner:

        def send(case: Case) -> Response:
            parts: dict[str, Any] = case.as_transport_kwargs(base_url="http://test")
            return runner.run(answer(app, requests.Request(**parts).prepare()))

        yield send
    template.close()


@pytest.mark.parametrize(
    ("operation", "mode"), SENDINGS, ids=[f"{operation.label}, {mode.value}" for operation, mode in SENDINGS]
)
def test_answers_are_as_documented(operation: Operation, mode: GenerationMode, send: Send) -> None:
    num_sent = fuzz(operation, mode, SHARE, send)
    assert num_sent >= (SHARE if operation.body else 1)


def test_every_body_is_tried_right_and_wrong() -> None:
    with_body = [operation for operation in OPERATIONS if operation.body]
    assert len(with_body) >= 10
    assert [(operation, mode) for operation in with_body for mode in BOTH] == [
        each for each in SENDINGS if each[0].body
    ]


# ---- would it be noticed? --------------------------------------------------------------------------------------------

GOOD = b'{"generated_text": "x"}'
BAD = b'{"error": "x", "error_type": "y"}'
JSON, EVENTS = "application/json", "text/event-stream"


@pytest.mark.parametrize(
    ("label", "mode", "status", "content_type", "body"),
    [
        ("POST /generate", "positive", 500, JSON, BAD),
        ("POST /generate", "positive", 418, JSON, BAD),
        ("POST /generate", "positive", 200, "text/plain", GOOD),
        ("POST /generate", "positive", 200, JSON, b'{"generated_text": 1}'),
        ("POST /generate", "positive", 422, JSON, b'{"error": "x"}'),
        ("POST /generate", "negative", 200, JSON, GOOD),
        ("POST /generate_stream", "positive", 200, EVENTS, b'data: {"index": 1}\n\n'),
        ("POST /generate_stream", "positive", 200, EVENTS, b"event: x\ndata: %b\n\n" % BAD),
        ("POST /v1/completions", "positive", 200, EVENTS, b"data: [END]\n\n"),
    ],
)
def test_a_broken_promise_is_noticed(label: str, mode: str, status: int, content_type: str, body: bytes) -> None:
    operation = next(operation for operation in OPERATIONS if operation.label == label)
    request = requests.Request("POST", "http://test" + operation.path).prepare()

    def broken(case: Case) -> Response:
        return Response(status, {"content-type": [content_type]}, body, request, elapsed=0.0, verify=False)

    with pytest.raises(BaseExceptionGroup):
        fuzz(operation, GenerationMode(mode), 5, broken)
