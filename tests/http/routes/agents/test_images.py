"""Images in Messages and Responses reach a shard as those of a chat do, also in the results of tools."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from legato.pb import unpack_token_ids
from tests.vision.test_prompts import BEGIN, IMAGE, WIDE, Server, uri

DATA = base64.b64encode(WIDE).decode()
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PART = {"type": "input_image", "image_url": uri(WIDE), "detail": "auto"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def message(*messages: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 4, "messages": list(messages)}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": ("/v1/messages", message({"role": "user", "content": [BLOCK, {"type": "text", "text": "see"}]})),
    "the result of a tool in a message": (
        "/v1/messages",
        message(
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]}]},
        ),
    ),
    "a response": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [PART, {"type": "input_text", "text": "see"}]}]},
    ),
    "the result of a tool in a response": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t", "output": [PART]},
            ]
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_image_is_a_part_of_the_prompt(name: str) -> None:
    path, body = BODIES[name]
    server = Server()
    answer = server.ask(path, body)
    assert answer.status == 200, answer.body
    sent = server.sent()
    ids = unpack_token_ids(sent.input_ids).tolist()
    assert (ids.count(IMAGE), ids.count(BEGIN)) == (8, 1)
    assert [span.image.data for span in sent.images] == [WIDE]
    count = {"/v1/messages": "/v1/messages/count_tokens", "/v1/responses": "/v1/responses/input_tokens"}[path]
    assert server.ask(count, body).json()["input_tokens"] == len(ids)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_image_that_is_none_is_refused(path: str) -> None:
    body = dict(BODIES.values())[path]
    broken = Server().ask(path, json.loads(json.dumps(body).replace(DATA, "AAAA")))
    assert broken.status in (400, 422) and "image" in broken.json()["error"]["message"]
