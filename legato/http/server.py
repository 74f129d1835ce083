"""uvicorn as an HTTP worker needs it: stopped by the scheduler's process alone, quick to accept, with connections that
can be aborted and that close without losing an answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from legato.http.exchange import ABORT
from legato.http.lingering_close import LingeringConnections, LingeringTransport

# Connections to accept in one turn of the event loop. uvloop accepts one: when thousands connect at once and each turn
# has a step's tokens to write, the last of them, a health check perhaps, would wait for seconds.
ACCEPTED_PER_TURN = 128
# Bytes to read from a connection at once, and of a body to keep for an application that is busy.
READ_SIZE = 16 * 1024
# Bytes to discard of a body that is not read, besides as many as the application takes: what was under way when the
# answer was written.
SLACK = 2 * READ_SIZE


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


class HttpProtocol(HttpToolsProtocol):
    """A connection that the application can abort, for clients that do not read, and that lingers after its last
    answer, for clients that are still sending."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._http_server = server
        # Bytes of the body of the current request that were read.
        self._num_read = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self._allowance, self._http_server.lingering))

    def _allowance(self) -> int:
        return self._http_server.payload_limit + SLACK - self._num_read

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]  # scopes may have more keys
        self._num_read = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = CloseDelimitedCycle

    def on_body(self, body: bytes) -> None:
        """Reads on when the application has taken what is here. Once it has answered it takes nothing more."""
        super().on_body(body)
        self._num_read += len(body)
        if len(self.cycle.body) > READ_SIZE and not self.cycle.response_complete:
            self.flow.pause_reading()


class SmallReads(asyncio.BufferedProtocol):
    """Feeds a protocol in small pieces. The event loop would read 256 KB at once, even of a body that the application
    refuses after the first kilobyte."""

    # Filled and emptied without a pause in between, so that all connections can share it.
    _buffer = bytearray(READ_SIZE)

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))


class HttpServer(uvicorn.Server):
    """Ignores signals: the scheduler's process says when to stop."""

    def __init__(self, app: ASGIApp, grace: float, payload_limit: int = 0) -> None:
        """A body of up to `payload_limit` bytes is read whole, even if the application answers before: some clients
        read the answer only when they have sent everything."""
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                # Typed as whole seconds, used as a number. After the grace period the scheduler ends the requests that
                # are left with an error, which this must outlast.
                timeout_graceful_shutdown=grace + 1.0,  # type: ignore[arg-type]
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        self.payload_limit = payload_limit
        self.lingering = LingeringConnections()
        self._listeners: list[socket.socket] = []
        self._arriving: set[asyncio.Task[object]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes the connections itself. The sockets listen already."""
        await super().startup(sockets=[])
        self._listeners = sockets or []
        for listener in self._listeners:
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            connection.setblocking(False)
            arriving = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)

    def _protocol(self) -> SmallReads:
        return SmallReads(HttpProtocol(self))
