"""uvicorn as an HTTP worker needs it: stopped by the scheduler's process alone, quick to accept, with connections that
are limited in what they take (`connections/`)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from legato.http.connections.accepting import Acceptor
from legato.http.connections.limits import ConnectionLimits
from legato.http.connections.lingering_close import SILENCE
from legato.http.connections.protocol import ConnectionContext, HttpProtocol, SmallReads


class HttpServer(uvicorn.Server):
    """Ignores signals: the scheduler's process says when to stop."""

    def __init__(
        self,
        app: ASGIApp,
        grace: float,
        payload_limit: int = 0,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """A body of up to `payload_limit` bytes is read whole, even if the application answers before: some clients
        read the answer only when they have sent everything."""
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
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
        self._limits = ConnectionLimits.of_process() if limits is None else limits
        self.context = ConnectionContext(self.config, self.server_state, self._limits, payload_limit)
        self._tls = tls
        self._acceptors: list[Acceptor] = []
        self._arriving: set[asyncio.Task[Any]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes the connections itself. The sockets listen already."""
        await super().startup(sockets=[])
        idle = self.context.idle
        self._acceptors = [
            Acceptor(listener, self._take, self._has_room, idle.close_oldest) for listener in sockets or []
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.stop()
        await super().shutdown(sockets)

    def _has_room(self) -> bool:
        return len(self.context.open) < self._limits.max_connections or len(self.context.idle) > 0

    def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        timeouts: dict[str, float] = {}
        if self._tls is not None:
            timeouts = {"ssl_handshake_timeout": self._limits.header_seconds, "ssl_shutdown_timeout": SILENCE}
        if len(self.context.open) >= self._limits.max_connections:
            self.context.idle.close_oldest()
        protocol = HttpProtocol(self.context)
        self.context.open.add(protocol)
        arriving = loop.create_task(
            loop.connect_accepted_socket(lambda: SmallReads(protocol), connection, ssl=self._tls, **timeouts)
        )
        self._arriving.add(arriving)
        arriving.add_done_callback(lambda _: self._arrived(arriving, protocol, connection))
        if self._tls is not None:  # a handshake may take long: whoever does not get on with it makes room for others
            protocol.arriving = arriving
            self.context.idle.add(protocol)

    def _arrived(self, arriving: asyncio.Task[Any], protocol: HttpProtocol, connection: socket.socket) -> None:
        protocol.arriving = None
        if arriving.cancelled() or arriving.exception() is not None:
            connection.close()
            self.context.open.discard(protocol)
            self.context.idle.discard(protocol)
            self.context.log.warning("A connection ended before it was established, possibly in its TLS handshake")
        self._arriving.discard(arriving)
