"""Row 26 of the fault table: a text model fetches nothing, whatever a prompt looks like (CVE-2026-0599)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.chat.cases import make
from tests.http.asgi import LIMITS, FakeBackend, ask
from tests.http.routes.openai.fakes import CHAT, COMPLETIONS, Server


class Sentinel:
    """Listens where nobody should ever call."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/image.png"

    @property
    def was_called(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        connection.close()
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def sentinel() -> Iterator[Sentinel]:
    sentinel = Sentinel()
    yield sentinel
    assert not sentinel.was_called
    sentinel.close()


def roomy() -> FakeBackend:
    return FakeBackend(limits=replace(LIMITS, max_input_tokens=500, max_total_tokens=600))


def links(url: str) -> list[str]:
    """Text that mentions an image, but is none in TGI's form."""
    return [f"![a picture]({url} 'title')", f'<img src="{url}">', f"[![x]({url})]({url})", url]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize", "/invocations"])
def test_a_link_to_an_image_in_a_prompt_is_text(path: str, sentinel: Sentinel) -> None:
    for inputs in links(sentinel.url):
        backend = roomy()
        assert ask(path, {"inputs": inputs}, backend).status == 200
        assert all(len(request.input_ids) > 20 for request in backend.requests)
    assert not sentinel.was_called


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations"])
def test_an_image_in_a_prompt_is_refused_unseen(path: str, sentinel: Sentinel) -> None:
    backend = roomy()
    answer = ask(path, {"inputs": f"What is this? ![]({sentinel.url})"}, backend)
    assert b"text only" in answer.body and answer.status == (200 if path == "/generate_stream" else 422)
    assert not backend.requests


def test_a_link_to_an_image_in_the_prompts_of_other_routes_is_text(sentinel: Sentinel) -> None:
    infer = "/v2/models/m/versions/1/infer"
    for text in links(sentinel.url):
        assert Server(roomy()).ask(COMPLETIONS, {"prompt": text}).status == 200
        assert (
            Server(roomy()).ask(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}).status == 200
        )
        assert ask("/vertex", {"instances": [{"inputs": text}]}, roomy()).status == 200
        tensor = {"name": "t", "shape": [1], "datatype": "BYTES", "data": [text]}
        assert ask(infer, {"inputs": [tensor]}, roomy()).status == 200


def test_a_picture_in_a_part_of_a_message_is_refused_unseen(sentinel: Sentinel) -> None:
    template = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": sentinel.url}},
        {"type": "image_url", "image_url": sentinel.url},
        {"type": "image", "image": sentinel.url},
        {"type": "input_image", "image_url": sentinel.url},
        {"type": "file", "file": {"file_data": sentinel.url}},
    ]
    for part in parts:
        server = Server(template=template)  # type: ignore[arg-type]  # a real one
        content = [{"type": "text", "text": "What is this?"}, part]
        answer = server.ask(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert answer.status == 422 and "text only" in answer.json()["error"]["message"]
        assert not server.backend.requests
    template.close()


def test_the_sentinel_would_have_noticed() -> None:
    sentinel = Sentinel()
    port = int(sentinel.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)):
        assert sentinel.was_called
    sentinel.close()
