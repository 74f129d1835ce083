"""One request on a connection, where our way is not uvicorn's: HTTP/1.0, writes at once, the order of reading."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import ReferenceType

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class CloseDelimitedCycle(RequestResponseCycle):
    """HTTP/1.0 has no chunks: a body of unknown length ends with its connection."""

    _is_open_ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._is_open_ended:
                self.chunked_encoding = False
        elif self._is_open_ended:
            self.expected_content_length = len(message.get("body", b""))  # uvicorn compares, piece by piece
        await super().send(message)


def write_chunk(reference: ReferenceType[RequestResponseCycle], data: bytes) -> bool:
    """Writes a chunk of an answer that has begun, without a coroutine. False if that has to wait, or if the
    answer has no chunks: `send` knows what to do."""
    cycle = reference()
    if (
        cycle is None
        or cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.chunked_encoding
    ):
        return False
    if data:  # an empty chunk would be the last
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class OrderedReading(FlowControl):
    """Whoever waits for a request's body, or for its client to hang up, resumes reading. What waits to be parsed comes
    first: bytes in another order would be other requests."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        # What came behind requests that wait for the answers to others.
        self.unparsed = b""

    def resume_reading(self) -> None:
        if not self.unparsed:
            super().resume_reading()
