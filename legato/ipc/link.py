"""A socket pair between two of our processes: messages go out together at the end of each turn of the event loop.

A frame is the length of what follows (four bytes, big-endian) and a MessagePack list of messages.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

M = TypeVar("M")

_HEAD = 4
# Seconds to spend on messages in one turn of the event loop.
TURN_SECONDS = 0.002
_encode = msgspec.msgpack.Encoder().encode


class Link(asyncio.Protocol, Generic[M]):
    """One end. `on_message` is called for what arrives, in order, and must not raise; `on_lost` once, at the end."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[list[M]],
        on_message: Callable[[M], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outbox: list[msgspec.Struct] = []
        self._received = bytearray()
        self._handled = 0  # bytes of it
        self._resting = False

    async def open(self, connection: socket.socket) -> None:
        """The connection is ours from here on."""
        connection.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=connection)

    def send(self, message: msgspec.Struct) -> None:
        """Never waits, and never fails: messages to a peer that is gone are lost."""
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(message)

    def flush(self) -> None:
        """Send now what was sent in this turn."""
        messages, self._outbox = self._outbox, []
        if messages and self._transport is not None:
            body = _encode(messages)
            self._transport.write(len(body).to_bytes(_HEAD) + body)

    @property
    def num_buffered(self) -> int:
        """Bytes that the other end has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._resting:
            self._work(TURN_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._work(float("inf"))
        self._on_lost()

    def _work(self, seconds: float) -> None:
        """Handle what has arrived for up to `seconds`; the rest in a later turn of the event loop.

        A socket's buffer holds dozens of steps: a health check would wait for the tokens of all of them.
        """
        self._resting = False
        deadline = time.perf_counter() + seconds
        while (frame := self._next_frame()) is not None:
            for message in self._decoder.decode(frame):
                self._on_message(message)
            if time.perf_counter() > deadline:
                self._resting = True
                self._loop.call_soon(self._work, seconds)
                return

    def _next_frame(self) -> bytes | None:
        received, begin = self._received, self._handled + _HEAD
        if len(received) >= begin:
            end = begin + int.from_bytes(received[self._handled : begin])
            if end <= len(received):
                self._handled = end
                return bytes(received[begin:end])
        del received[: self._handled]
        self._handled = 0
        return None


def decoder_for(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """For frames of these messages."""
    return msgspec.msgpack.Decoder(list[kind])
