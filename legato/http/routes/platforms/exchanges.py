"""Requests nested in requests: bodies that another route parses, and responses combined into one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from legato.api.errors import InvalidRequest
from legato.http.exchange import ClientConnection, Exchange, decode

Handler = Callable[[Exchange], Awaitable[None]]

_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_raw(exchange: Exchange, limit: int) -> bytes:
    """The body, of which nothing is known but that it is JSON."""
    body = await exchange.json(_raw_decoder, limit)
    return bytes(body)


def handler_for(body: bytes, handlers: Mapping[str, Handler]) -> Handler:
    """The first whose field the body has. By the fields and not by what parses: then a request with one wrong value is
    told which, instead of being taken for something else."""
    fields = decode(body, _fields_decoder)
    for name, handler in handlers.items():
        if bytes(fields.get(name, b"null")) != b"null":
            return handler
    raise InvalidRequest(f"one of these fields is required: {', '.join(f'`{name}`' for name in handlers)}")


class Reread(Exchange):
    """An exchange whose body was read to see what it is."""

    def __init__(self, outer: Exchange, body: bytes) -> None:
        super().__init__(outer._scope, outer._receive, outer._send)
        self._kept = body
        self.body_size = len(body)

    async def body(self, limit: int) -> bytes:
        return self._kept


class Part(Reread):
    """A part of a body as a request of its own. Its answer stays here, for the answer to the whole."""

    def __init__(self, outer: Exchange, body: bytes) -> None:
        super().__init__(outer, body)
        self.asker = ClientConnection(outer.tenant)
        self.answer = b""

    @contextmanager
    def client(self) -> Iterator[ClientConnection]:
        yield self.asker

    async def respond(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> None:
        self.answer = body

    async def start(self, headers: Mapping[str, str], *, status: int = 200) -> None:
        raise InvalidRequest("`stream` is not supported on this route", "stream")


@dataclass(frozen=True)
class Ask:
    """One part to be answered: by whom, and what the whole calls it."""

    place: str
    body: bytes
    handler: Handler


async def answer_all(exchange: Exchange, asks: Sequence[Ask], max_parts: int) -> list[bytes]:
    """All parts at once. The first failure fails the whole and cancels the others."""
    if len(asks) > max_parts:  # coming back later would not help
        raise InvalidRequest(f"{len(asks)} sequences in one request exceed the limit of this server: {max_parts}")
    parts = [Part(exchange, ask.body) for ask in asks]

    def hang_up() -> None:
        for part in parts:
            part.asker.hang_up()

    with exchange.client() as client:
        client.when_gone(hang_up)
        tasks = [asyncio.create_task(_answer(ask, part)) for ask, part in zip(asks, parts, strict=True)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return [part.answer for part in parts]


async def _answer(ask: Ask, part: Part) -> None:
    try:
        await ask.handler(part)
    except InvalidRequest as error:
        raise InvalidRequest(f"{ask.place}: {error.problem}", error.param, error.code) from None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    """What answers of the native and of OpenAI's routes have of a text."""

    generated_text: str | None = None
    choices: list[_Choice] = []


def text_of(answer: bytes) -> str:
    """The text of an answer; of one that calls tools instead, the calls."""
    found = msgspec.json.decode(answer, type=_Answer)
    if found.generated_text is not None:
        return found.generated_text
    message = found.choices[0].message
    return bytes(message.tool_calls).decode() if message.content is None else message.content
