"""A chat template to write chats with, and shorthands for asking."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from legato.chat.template import TemplateError
from legato.http.app import create_app
from tests.http.asgi import SETTINGS, Answer, FakeBackend, post, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass
class FakeTemplate:
    """Writes `role:content;` and remembers how it was asked."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    fails: bool = False
    text: str = ""
    mentions_tools: bool = True
    tool_arguments: Literal["object", "string"] = "object"

    def render(self, messages: list[dict[str, Any]], **how: Any) -> str:
        self.asked.append({"messages": messages, **how})
        if self.fails:
            raise TemplateError("roles must alternate")
        texts = [f"{message['role']}:{message.get('content')};" for message in messages]
        if how["continue_final_message"]:
            texts[-1] = texts[-1].removesuffix(";")
        return "".join(texts) + ("assistant:" if how["add_generation_prompt"] else "")


@dataclass
class Server:
    """An application with everything that a test may want to look at afterwards."""

    backend: FakeBackend = field(default_factory=FakeBackend)
    template: FakeTemplate | None = field(default_factory=FakeTemplate)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.app = create_app(
            self.backend, tokenizer(), replace(SETTINGS, **self.settings), chat_template=self.template
        )

    def ask(self, path: str, body: Any) -> Answer:
        return asyncio.run(post(self.app, path, body))


def chat(backend: FakeBackend | None = None, **request: Any) -> Answer:
    return Server(backend or FakeBackend()).ask(CHAT, {"messages": HI, **request})


def complete(backend: FakeBackend | None = None, **request: Any) -> Answer:
    return Server(backend or FakeBackend()).ask(COMPLETIONS, {"prompt": "hi", **request})


def chunks(answer: Answer) -> list[Any]:
    """The events of a stream that came to its end."""
    *events, done, rest = answer.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def problem(answer: Answer) -> tuple[int, str | None, str]:
    """Status, parameter and message of an error."""
    error = answer.json()["error"]
    return answer.status, error["param"], error["message"]
