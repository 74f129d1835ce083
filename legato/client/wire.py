"""HTTP of both clients without I/O: the address, decoding of answers, and server-sent events. One client reads with
http.client, the other with asyncio."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from legato.client.errors import ConnectionFailed, IncompleteGenerationError, RequestTimeout, UnknownError, error_from
from legato.client.types import ChatCompletionChunk, Completion, StreamResponse

T = TypeVar("T")

# Longer than the 15 seconds after which servers send a keep-alive comment.
TIMEOUT = 60.0
_DONE = b"[DONE]"


@dataclass(frozen=True)
class ServerAddress:
    """Where requests go, and the headers of all of them."""

    url: str
    tls: ssl.SSLContext | None  # None for plain HTTP
    host: str
    port: int
    prefix: str
    headers: dict[str, str]
    timeout: float

    @staticmethod
    def at(
        base_url: str, headers: Mapping[str, str] | None, cookies: Mapping[str, str] | None, timeout: float
    ) -> ServerAddress:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not a server URL: it must look like http://host:port")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        all_headers = {"content-type": "application/json"}
        all_headers |= {name.lower(): value for name, value in (headers or {}).items()}
        if cookies:
            all_headers["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        for name, value in all_headers.items():
            if any(character in "\r\n" for character in name + value):
                raise ValueError(f"the header {name!r} must not contain a line break")
        # A connection for each request: streams may be abandoned at any point, and threads share nothing.
        all_headers |= {"host": parts.netloc.rpartition("@")[2], "connection": "close"}
        port = parts.port or (443 if tls else 80)
        return ServerAddress(base_url, tls, parts.hostname, port, parts.path.rstrip("/"), all_headers, timeout)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Around everything that waits for the network."""
        try:
            yield
        except TimeoutError:
            raise RequestTimeout(f"{self.url} sent nothing for {self.timeout} s") from None
        except (EOFError, http.client.HTTPException, asyncio.LimitOverrunError) as error:
            raise ConnectionFailed(f"{self.url} closed the connection too early: {error}") from None
        except OSError as error:
            raise ConnectionFailed(f"{self.url} cannot be reached: {error}") from None


def result(status: int, headers: Mapping[str, str], body: bytes, kind: type[T]) -> T:
    """Decode a complete answer, or raise the error that it is."""
    if status != 200:
        raise error_from(status, body, headers)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnknownError(f"the response cannot be decoded: {error}", status) from None


class EventParser:
    """Splits bytes into server-sent events. Comments, which keep connections alive, and event names are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event


class Items(Generic[T]):
    """Decodes a stream: `feed` it bytes until it is `done`; call `end` at the end of the body."""

    def __init__(self, kind: type[T], is_last: Callable[[T], bool] = lambda item: False) -> None:
        self._events = EventParser()
        self._decoder = msgspec.json.Decoder(kind)
        self._is_last = is_last
        self.done = False

    def feed(self, data: bytes) -> Iterator[T]:
        for event in self._events.feed(data):
            if event == _DONE:
                self.done = True
                return
            item = self._item(event)
            self.done = self._is_last(item)
            yield item

    def end(self) -> None:
        if not self.done:
            raise IncompleteGenerationError("the stream ended before its last event", 200)

    def _item(self, event: bytes) -> T:
        try:
            return self._decoder.decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise error_from(200, event) from None


def native_items() -> Items[StreamResponse]:
    """The last event is the one with the whole text."""
    return Items(StreamResponse, lambda item: item.generated_text is not None)


def chat_items() -> Items[ChatCompletionChunk]:
    return Items(ChatCompletionChunk)


def completion_items() -> Items[Completion]:
    return Items(Completion)
