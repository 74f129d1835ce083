"""What both clients know of HTTP: whom to ask, what an answer is, and how the bytes of a stream become its items.

No I/O: one client reads with http.client, the other with asyncio.
"""

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

from legato.client.errors import ConnectionFailed, IncompleteGenerationError, TimedOut, UnknownError, error_from
from legato.client.types import ChatCompletionChunk, Completion, StreamResponse

T = TypeVar("T")

# Longer than the 15 seconds after which a server with nothing to say says so.
TIMEOUT = 60.0
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Server:
    """Where requests go, and what they all carry."""

    url: str
    # None: plain HTTP.
    tls: ssl.SSLContext | None
    host: str
    port: int
    prefix: str
    headers: dict[str, str]
    timeout: float

    @staticmethod
    def at(
        base_url: str, headers: Mapping[str, str] | None, cookies: Mapping[str, str] | None, timeout: float
    ) -> Server:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no URL of a server: it must look like http://host:port")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        carried = {"content-type": "application/json"}
        carried |= {name.lower(): value for name, value in (headers or {}).items()}
        if cookies:
            carried["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        for name, value in carried.items():
            if any(character in "\r\n" for character in name + value):
                raise ValueError(f"the header {name!r} must not contain a line break")
        # A connection for each request: streams may be left at any point, and threads share nothing.
        carried |= {"host": parts.netloc.rpartition("@")[2], "connection": "close"}
        port = parts.port or (443 if tls else 80)
        return Server(base_url, tls, parts.hostname, port, parts.path.rstrip("/"), carried, timeout)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Around everything that waits for the network."""
        try:
            yield
        except TimeoutError:
            raise TimedOut(f"{self.url} was silent for {self.timeout} s") from None
        except (EOFError, http.client.HTTPException, asyncio.LimitOverrunError) as error:
            raise ConnectionFailed(f"{self.url} ended its answer too early: {error}") from None
        except OSError as error:
            raise ConnectionFailed(f"{self.url} cannot be reached: {error}") from None


def result(status: int, headers: Mapping[str, str], body: bytes, kind: type[T]) -> T:
    """A complete answer, or the error that it is."""
    if status != 200:
        raise error_from(status, body, headers)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnknownError(f"the answer is not what was asked for: {error}", status) from None


class Events:
    """Cuts bytes into server-sent events. Comments, which keep connections alive, and event names are dropped."""

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
    """The items of a stream: `feed` it what arrives until it is `done`; call `end` where nothing more arrives."""

    def __init__(self, kind: type[T], is_last: Callable[[T], bool] = lambda item: False) -> None:
        self._events = Events()
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
            raise IncompleteGenerationError("the stream ended before its text did", 200)

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
