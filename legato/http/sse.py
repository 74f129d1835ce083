"""Server-sent events, byte for byte as TGI frames them: `data: {json}` and an empty line, no event names, no [DONE].

Those of the APIs of agents have names.
"""

from __future__ import annotations

import asyncio

import msgspec

from legato.api.errors import RequestError
from legato.api.native import StreamResponse, Token
from legato.http.streams import Stream

HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    # nginx would collect the events otherwise.
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b":\n\n"

_encode = msgspec.json.Encoder().encode


def token_event(index: int, token: Token) -> bytes:
    """The event of every token but the last: `event(StreamResponse(index=index, token=token))`, put together from
    parts, because this is the one thing that happens once per token."""
    return (
        b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}'
        b"\n\n" % (index, token.id, _encode(token.text), _encode(token.logprob), b"true" if token.special else b"false")
    )


def event(response: StreamResponse) -> bytes:
    return b"data: %b\n\n" % _encode(response)


def named_event(event: msgspec.Struct) -> bytes:
    """Clients go by the name, which is also the type."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str), "every event has a type"
    return b"event: %b\ndata: %b\n\n" % (tag.encode(), _encode(event))


def error_event(error: RequestError) -> bytes:
    return b"data: %b\n\n" % error.body


class KeepAlive:
    """Wakes the reader of a stream that has been silent for too long, so that it can say so."""

    def __init__(self, stream: Stream, interval: float) -> None:
        self._stream = stream
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(interval, self._check)

    def sent(self) -> None:
        self._last = self._loop.time()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        # One timer that looks now and then is cheaper than one that every token moves.
        remaining = self._last + self._interval - self._loop.time()
        if remaining <= 0:
            self._stream.wake()
            remaining = self._interval
        self._timer = self._loop.call_later(remaining, self._check)
