"""Lingering close: the client receives the last response although it is still sending (RFC 9112, section 9.6).

Closing a socket that holds unread bytes makes the kernel send a reset, and a reset may destroy what the client has not
read yet: the answer that says why. So the server half-closes, discards what the client is still sending, and closes
when the client has closed, is silent for `SILENCE` seconds, or has taken `LONGEST` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# TCP sends a lost packet again within a second: this has room for a loss and the round trip.
SILENCE = 2.0
# Even for a client that never stops sending. A slow line needs some time for what is discarded.
LONGEST = 30.0
# Connections of one process that may linger. Each holds a file descriptor and what the kernel received for it.
MAX_LINGERING = 256


class LingeringConnections:
    """Oldest first. When there are too many, the oldest is closed at once."""

    def __init__(self, most: int = MAX_LINGERING) -> None:
        self._most = most
        self._connections: dict[LingeringClose, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: LingeringClose) -> None:
        if len(self._connections) == self._most:
            next(iter(self._connections)).close()
        self._connections[connection] = None

    def discard(self, connection: LingeringClose) -> None:
        self._connections.pop(connection, None)


class LingeringClose(asyncio.BufferedProtocol):
    """Takes a connection over from its protocol, which sees it as lost once everything is sent: a server that shuts
    down does not wait for lingering clients."""

    # Whatever comes is written over what came before.
    _discarded = memoryview(bytearray(16 * 1024))

    def __init__(self, transport: asyncio.Transport, allowance: int, connections: LingeringConnections) -> None:
        self._transport = transport
        self._predecessor: asyncio.BaseProtocol | None = transport.get_protocol()
        # Bytes that may still be read.
        self._allowance = max(0, allowance)
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._began = self._last_read = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._transport.set_protocol(self)
        if self._transport.can_write_eof():  # TLS cannot half-close: its clients go by the length of the answer
            self._transport.write_eof()
        if self._allowance:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
        # From here on `resume_writing` means that nothing is left to be sent.
        self._transport.set_write_buffer_limits(high=0)
        if not self._transport.get_write_buffer_size():
            self.resume_writing()

    def pause_writing(self) -> None:
        """Nothing is written any more."""

    def resume_writing(self) -> None:
        self._dismiss_predecessor(None)
        self._began = self._last_read = self._loop.time()
        self._connections.add(self)
        self._timer = self._loop.call_later(SILENCE, self._check)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._discarded[: self._allowance]

    def buffer_updated(self, nbytes: int) -> None:
        self._last_read = self._loop.time()
        self._allowance -= nbytes
        if not self._allowance:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The client has closed its side, too; the event loop closes ours."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._dismiss_predecessor(exc)

    def close(self) -> None:
        self._forget()
        self._transport.close()

    def _check(self) -> None:
        rest = min(self._last_read + SILENCE, self._began + LONGEST) - self._loop.time()
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._check)
        else:
            self.close()

    def _forget(self) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _dismiss_predecessor(self, exc: Exception | None) -> None:
        if self._predecessor is not None:
            predecessor, self._predecessor = self._predecessor, None
            predecessor.connection_lost(exc)


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` lingers. `allowance` says, at that time, how much may still be read."""

    def __init__(
        self, transport: asyncio.Transport, allowance: Callable[[], int], connections: LingeringConnections
    ) -> None:
        super().__init__()
        self._transport = transport
        self._allowance = allowance
        self._connections = connections
        self._closed = False
        # What is held back until the next write, or until the next turn of the event loop.
        self._held = b""
        # Tokens bypass this class while the connection is open.
        self.write = transport.write  # type: ignore[method-assign]
        self.abort = transport.abort  # type: ignore[method-assign]

    def hold_next_write(self) -> None:
        """The next write is sent together with the one after it, if that comes in the same turn of the event loop."""
        if not self._closed:
            self.write = self._hold  # type: ignore[method-assign]

    def _hold(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._held = bytes(data)
        self.write = self._write_behind  # type: ignore[method-assign]
        asyncio.get_running_loop().call_soon(self._release)

    def _write_behind(self, data: bytes | bytearray | memoryview[Any]) -> None:
        held, self._held = self._held, b""
        self.write = self._transport.write  # type: ignore[method-assign]
        self.write(held + data)

    def _release(self) -> None:
        if self._held and not self._transport.is_closing():  # it may have been aborted in this turn
            self._write_behind(b"")

    def forget_protocol(self) -> None:
        """It knows this transport, too, and both are to be freed without a search for garbage."""
        self._allowance = int

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """After `close`: dropped. The protocol has been told that the connection is lost."""

    def close(self) -> None:
        if self.is_closing():
            return
        self._release()
        self._closed = True
        del self.write
        allowance = self._allowance()
        if allowance or self._transport.can_write_eof():
            LingeringClose(self._transport, allowance, self._connections).begin()
        else:
            self._transport.close()

    def close_at_once(self) -> None:
        """Without lingering. What the client has not taken yet is lost only if it did not even fit in its socket."""
        self._release()
        self._closed = True
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._closed:
            self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
