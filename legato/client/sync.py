"""`Client`: blocking, on the standard library's http.client. May be shared by threads."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar, Unpack, overload

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

_PIECE = 64 * 1024


class Client:
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

    def generate(self, prompt: str, **parameters: Unpack[Parameters]) -> Response:
        return self._ask("POST", "/generate", Response, generate_body(prompt, parameters))

    def generate_stream(self, prompt: str, **parameters: Unpack[Parameters]) -> Iterator[StreamResponse]:
        return self._stream("/generate_stream", wire.native_items(), generate_body(prompt, parameters))

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **parameters: Unpack[ChatParameters]
    ) -> ChatComplete: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **parameters: Unpack[ChatParameters]
    ) -> Iterator[ChatCompletionChunk]: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, **parameters: Unpack[ChatParameters]
    ) -> ChatComplete | Iterator[ChatCompletionChunk]:
        path, body = "/v1/chat/completions", chat_body(messages, parameters, stream)
        if stream:
            return self._stream(path, wire.chat_items(), body)
        return self._ask("POST", path, ChatComplete, body)

    @overload
    def completion(
        self, prompt: Prompt, *, stream: Literal[False] = False, **parameters: Unpack[CompletionParameters]
    ) -> Completion: ...

    @overload
    def completion(
        self, prompt: Prompt, *, stream: Literal[True], **parameters: Unpack[CompletionParameters]
    ) -> Iterator[Completion]: ...

    def completion(
        self, prompt: Prompt, *, stream: bool = False, **parameters: Unpack[CompletionParameters]
    ) -> Completion | Iterator[Completion]:
        path, body = "/v1/completions", completion_body(prompt, parameters, stream)
        if stream:
            return self._stream(path, wire.completion_items(), body)
        return self._ask("POST", path, Completion, body)

    def info(self) -> Info:
        return self._ask("GET", "/info", Info)

    def health(self) -> bool:
        """Whether the server can be reached and is healthy."""
        try:
            connection, response = self._open("GET", "/health")
            connection.close()
        except ConnectionFailed:
            return False
        return response.status == 200

    # ---- HTTP ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, kind: type[T], body: bytes | None = None) -> T:
        connection, response = self._open(method, path, body)
        try:
            with self._server.errors():
                answer = response.read()
        finally:
            connection.close()
        return wire.result(response.status, _headers(response), answer, kind)

    def _stream(self, path: str, items: wire.Items[T], body: bytes) -> Iterator[T]:
        connection, response = self._open("POST", path, body)
        try:
            if response.status != 200:
                with self._server.errors():
                    raise error_from(response.status, response.read(), _headers(response))
            while not items.done:
                with self._server.errors():
                    data = response.read1(_PIECE)
                if not data:
                    break
                yield from items.feed(data)
            items.end()
        finally:
            # The response first: it holds the socket that the server watches.
            response.close()
            connection.close()

    def _open(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        server = self._server
        connection = (
            http.client.HTTPConnection(server.host, server.port, timeout=server.timeout)
            if server.tls is None
            else http.client.HTTPSConnection(server.host, server.port, timeout=server.timeout, context=server.tls)
        )
        try:
            with server.errors():
                connection.request(method, server.prefix + path, body, server.headers)
                return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}
