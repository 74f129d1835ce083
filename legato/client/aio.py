"""`AsyncClient`: built on asyncio streams, with the part of HTTP/1.1 that servers use in their responses."""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack, overload

from legato.client import wire
from legato.client.errors import ConnectionFailed, error_from
from legato.client.requests import (
    ChatParameters,
    CompletionParameters,
    Messages,
    Parameters,
    Prompt,
    chat_body,
    completion_body,
    generate_body,
)
from legato.client.types import ChatComplete, ChatCompletionChunk, Completion, Info, Response, StreamResponse

T = TypeVar("T")


class AsyncClient:
    """A client of one server. `timeout` in seconds limits the time between two events of a stream, and until the answer
    of any other request. A stream that is closed or garbage-collected is cancelled at the server."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float = wire.TIMEOUT,
    ) -> None:
        self._server = wire.ServerAddress.at(base_url, headers, cookies, timeout)

    async def generate(self, prompt: str, **parameters: Unpack[Parameters]) -> Response:
        return await self._ask("POST", "/generate", Response, generate_body(prompt, parameters))

    def generate_stream(self, prompt: str, **parameters: Unpack[Parameters]) -> AsyncIterator[StreamResponse]:
        return self._stream("/generate_stream", wire.native_items(), generate_body(prompt, parameters))

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **parameters: Unpack[ChatParameters]
    ) -> ChatComplete: ...

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **parameters: Unpack[ChatParameters]
    ) -> AsyncIterator[ChatCompletionChunk]: ...

    async def chat(
        self, messages: Messages, *, stream: bool = False, **parameters: Unpack[ChatParameters]
    ) -> ChatComplete | AsyncIterator[ChatCompletionChunk]:
        path, body = "/v1/chat/completions", chat_body(messages, parameters, stream)
        if stream:
            return self._stream(path, wire.chat_items(), body)
        return await self._ask("POST", path, ChatComplete, body)

    @overload
    async def completion(
        self, prompt: Prompt, *, stream: Literal[False] = False, **parameters: Unpack[CompletionParameters]
    ) -> Completion: ...

    @overload
    async def completion(
        self, prompt: Prompt, *, stream: Literal[True], **parameters: Unpack[CompletionParameters]
    ) -> AsyncIterator[Completion]: ...

    async def completion(
        self, prompt: Prompt, *, stream: bool = False, **parameters: Unpack[CompletionParameters]
    ) -> Completion | AsyncIterator[Completion]:
        path, body = "/v1/completions", completion_body(prompt, parameters, stream)
        if stream:
            return self._stream(path, wire.completion_items(), body)
        return await self._ask("POST", path, Completion, body)

    async def info(self) -> Info:
        return await self._ask("GET", "/info", Info)

    async def health(self) -> bool:
        """Whether the server can be reached and is healthy."""
        try:
            async with self._open("GET", "/health") as answer:
                return answer.status == 200
        except ConnectionFailed:
            return False

    # ---- HTTP ------------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, kind: type[T], body: bytes = b"") -> T:
        async with self._open(method, path, body) as answer:
            return wire.result(answer.status, answer.headers, await answer.read(), kind)

    async def _stream(self, path: str, items: wire.Items[T], body: bytes) -> AsyncIterator[T]:
        async with self._open("POST", path, body) as answer:
            if answer.status != 200:
                raise error_from(answer.status, await answer.read(), answer.headers)
            async for data in answer.pieces():
                for item in items.feed(data):
                    yield item
                if items.done:
                    break
            items.end()

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[_Answer]:
        server = self._server
        with server.errors():
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(server.host, server.port, ssl=server.tls), server.timeout
            )
        try:
            headers = {**server.headers, "content-length": str(len(body))}
            lines = [f"{method} {server.prefix}{path} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
            with server.errors():
                writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
                await asyncio.wait_for(writer.drain(), server.timeout)
            yield await _Answer.begin(reader, server)
        finally:
            # Aborted, not closed: closing would wait until everything is sent.
            writer.transport.abort()


@dataclass(frozen=True)
class _Answer:
    """An answer after its head was read."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _server: wire.ServerAddress

    @staticmethod
    async def begin(reader: asyncio.StreamReader, server: wire.ServerAddress) -> _Answer:
        with server.errors():
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), server.timeout)
            line, _, rest = head.partition(b"\r\n")
            version, _, status = line.partition(b" ")
            if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
                raise http.client.BadStatusLine(line.decode("latin-1"))
            headers = http.client.parse_headers(io.BytesIO(rest))
        return _Answer(int(status[:3]), {name.lower(): value for name, value in headers.items()}, reader, server)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives: chunked, of a given length, or until the connection is closed."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := await self._chunk_size():
                yield (await self._wait(self._reader.readexactly(size + 2)))[:-2]
        elif (length := self.headers.get("content-length", "")).isdecimal():
            yield await self._wait(self._reader.readexactly(int(length)))
        else:
            while data := await self._wait(self._reader.read(64 * 1024)):
                yield data

    async def _chunk_size(self) -> int:
        line = await self._wait(self._reader.readuntil(b"\r\n"))
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise ConnectionFailed(f"{self._server.url} sent a chunk without a size") from None

    async def _wait(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        with self._server.errors():
            return await asyncio.wait_for(reading, self._server.timeout)
