"""The end of a connection, such that the last answer arrives although its client was still sending.

Closing a socket that holds bytes nobody read makes the kernel send a reset, and a reset may destroy at the client's
end what it had not read yet: the answer that says why. So we say that there is nothing more to come (a half-close),
throw away what the client is still sending, and close when it has closed (RFC 9112, section 9.6):

    answer sent, half-closed ─┬─► the client closes ──────────────────────────────────┬─► close
                              ├─► SILENCE ────────────────────────────────────────────┤
                              ├─► LONGEST, or too many others linger ─────────────────┤
                              └─► enough was thrown away, no more is read ─► SILENCE ─┘

Every connection that we close ends like this: after a request that was read to its end there may be another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# Seconds without a byte after which a client is taken to have its answer. TCP sends a lost packet again within one, so
# this has room for a loss and for the way there and back.
SILENCE = 2.0
# Seconds after which even a client who never stops sending is left. A slow line needs some for what we throw away.
LONGEST = 30.0
# Connections of one process that may linger. Each holds a file descriptor and what the kernel received for it.
MOST_AT_ONCE = 256


class Departures:
    """The connections that linger, oldest first."""

    def __init__(self, most: int = MOST_AT_ONCE) -> None:
        self._most = most
        self._waiting: dict[Farewell, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, farewell: Farewell) -> None:
        if len(self._waiting) == self._most:
            next(iter(self._waiting)).close()
        self._waiting[farewell] = None

    def discard(self, farewell: Farewell) -> None:
        self._waiting.pop(farewell, None)


class Farewell(asyncio.BufferedProtocol):
    """Takes a connection over from its protocol, which hears that it is lost as soon as all it wrote is sent: nobody,
    a server that ends least of all, waits for a client's good-bye."""

    # Whatever comes is written over what came before.
    _bin = memoryview(bytearray(16 * 1024))

    def __init__(self, transport: asyncio.Transport, allowance: int, departures: Departures) -> None:
        self._transport = transport
        self._predecessor: asyncio.BaseProtocol | None = transport.get_protocol()
        # Bytes that may still be read.
        self._allowance = max(0, allowance)
        self._departures = departures
        self._loop = asyncio.get_running_loop()
        self._began = self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._transport.set_protocol(self)
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
        """Nobody writes any more."""

    def resume_writing(self) -> None:
        self._dismiss_predecessor(None)
        self._began = self._heard = self._loop.time()
        self._departures.add(self)
        self._timer = self._loop.call_later(SILENCE, self._look)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._bin[: self._allowance]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        self._allowance -= nbytes
        if not self._allowance:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The client has closed its side, too, and the event loop closes ours."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._dismiss_predecessor(exc)

    def close(self) -> None:
        self._forget()
        self._transport.close()

    def _look(self) -> None:
        now = self._loop.time()
        rest = min(self._heard + SILENCE, self._began + LONGEST) - now
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._look)
        else:
            self.close()

    def _forget(self) -> None:
        self._departures.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _dismiss_predecessor(self, exc: Exception | None) -> None:
        if self._predecessor is not None:
            predecessor, self._predecessor = self._predecessor, None
            predecessor.connection_lost(exc)


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` is a farewell. `allowance` says how much may be read until then, at that time."""

    def __init__(self, transport: asyncio.Transport, allowance: Callable[[], int], departures: Departures) -> None:
        super().__init__()
        self._transport = transport
        self._allowance = allowance
        self._departures = departures
        self._has_left = False
        # Tokens go this way: while the connection is open, we are not in it.
        self.write = transport.write  # type: ignore[method-assign]
        self.abort = transport.abort  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """After the farewell. Whoever still has something to say learns from its protocol that the client is gone."""

    def close(self) -> None:
        if self.is_closing():
            return
        self._has_left = True
        del self.write
        Farewell(self._transport, self._allowance(), self._departures).begin()

    def is_closing(self) -> bool:
        return self._has_left or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._has_left:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._has_left:
            self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
