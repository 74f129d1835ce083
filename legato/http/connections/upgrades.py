"""Requests that ask for another protocol in passing, as Java's HTTP client does (`Upgrade: h2c`): served as if they had
not asked.

httptools ends such a request behind its head, and takes what follows for the other protocol. So their bodies, and the
requests after them, are read by another parser, which begins with a head of its own that nobody hears of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools


class ParserEvents(Protocol):
    """What a parser says of requests."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def head_of_body(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head with all that `headers` say of the length of the body; empty if there is none."""
    framing = [(name, value) for name, value in headers if name in (b"transfer-encoding", b"content-length")]
    if all(name == b"content-length" and not value.strip(b"0") for name, value in framing):
        return b""
    return b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % header for header in framing) + b"\r\n"


def parser_behind_head(events: ParserEvents) -> httptools.HttpRequestParser:
    """Does not tell of the head that it is given first."""
    parser = httptools.HttpRequestParser(_BehindHead(events))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
    return parser


class _BehindHead:
    def __init__(self, events: ParserEvents) -> None:
        self._events = events
        self._is_behind = False
        self.on_body = events.on_body
        self.on_message_complete = events.on_message_complete

    def on_message_begin(self) -> None:
        if self._is_behind:
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_behind:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_behind:
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_behind:
            self._events.on_headers_complete()
        self._is_behind = True
