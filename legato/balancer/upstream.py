"""HTTP/1.1 connections to one replica: opened when needed, kept for the next request, one request at a time on each.

An answer is read in the pieces in which the replica wrote it: of a chunked body, whole chunks only (`ipc/routed.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import cast

import httptools

from legato.balancer.answers import Headers, ReplicaAnswer, ReplicaLost

# Seconds to connect; a replica in the same network takes milliseconds.
CONNECT_SECONDS = 3.0
# Seconds that an unused connection is kept: less than servers keep theirs (75).
IDLE_SECONDS = 30.0
# Bytes of an answer that wait for a client who reads slowly; then the replica waits, too.
HIGH_WATER, LOW_WATER = 256 << 10, 64 << 10


class Upstream(ReplicaAnswer, asyncio.Protocol):
    """One connection."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.num_requests = 0
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._parser = httptools.HttpResponseParser(self)
        self._is_chunked = False
        self._partial: list[bytes] = []
        self._has_passed_head = False
        # Pieces of what is being parsed.
        self._parsed: list[bytes] = []
        self._num_bytes = 0
        self._is_paused = False
        self._keeps_alive = False
        # The answer to HEAD has the headers of a body, and no body.
        self._has_no_body = False

    # ---- one request -----------------------------------------------------------------------------------------------

    async def send(self, head: bytes, body: bytes) -> None:
        """Returns when status and headers of the answer are here. ReplicaLost."""
        self.reset()
        self._has_no_body = head.startswith(b"HEAD ")
        self.num_requests += 1
        if self._transport is None:
            raise ReplicaLost(self._error or "the connection was closed", is_stale=self._is_stale)
        self._transport.write(head + body if len(body) < 1 << 16 else head)
        if len(body) >= 1 << 16:
            self._transport.write(body)
        await self._wait_for_head()

    async def read(self) -> list[bytes]:
        pieces = await super().read()
        self._num_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces

    @property
    def _is_stale(self) -> bool:
        return self.num_requests > 1

    @property
    def is_reusable(self) -> bool:
        is_open = self._error is None and self._transport is not None
        return self.is_complete and is_open and not self._has_no_body and self._keeps_alive

    def abort(self, cause: str = "the connection was aborted") -> None:
        if self._error is None:
            self._error = cause
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def release(self) -> None:
        self._pool.give_back(self)

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"the replica does not speak HTTP/1.1: {error}")
            return
        if self._parsed:
            pieces, self._parsed = self._parsed, []
            if not self._add(pieces):
                self._num_bytes += sum(map(len, pieces))
        if self._num_bytes > HIGH_WATER and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self.is_complete or not self._has_passed_head:
            self._has_passed_head = self._has_headers
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._error is None:
            self._error = "the replica closed the connection" if exc is None else f"the connection broke: {exc}"
        self._wake()

    # ---- the parser's side -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue and its like
            self.headers = []
            return
        self._has_headers = True
        self._is_chunked = self.header(b"transfer-encoding") is not None
        if self._has_no_body:
            self.is_complete = True

    def on_body(self, body: bytes) -> None:
        if self._is_chunked:
            self._partial.append(body)
        else:
            self._parsed.append(body)

    def on_chunk_complete(self) -> None:
        if self._partial:
            self._parsed.append(self._partial[0] if len(self._partial) == 1 else b"".join(self._partial))
            self._partial.clear()

    def on_message_complete(self) -> None:
        self.is_complete = self._has_headers
        self._keeps_alive = self._parser.should_keep_alive()  # the parser forgets it with the message


class ConnectionPool:
    """Of one replica."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._address = (host, port)
        self._tls = tls
        self._idle: list[Upstream] = []
        self._in_use: set[Upstream] = set()

    async def take(self, *, fresh: bool = False) -> Upstream:
        """An idle connection, or another one. ReplicaLost."""
        now = asyncio.get_running_loop().time()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if now - connection.idle_since < IDLE_SECONDS and connection._error is None:
                self._in_use.add(connection)
                return connection
            connection.abort()
        loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Upstream(self), host, port, ssl=self._tls, server_hostname=host if self._tls else None
                )
        except TimeoutError:
            raise ReplicaLost(f"it did not accept a connection within {CONNECT_SECONDS:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ReplicaLost(f"cannot connect: {error}") from None
        self._in_use.add(connection)
        return connection

    async def exchange(self, head: bytes, body: bytes) -> tuple[int, Headers, bytes]:
        """Status, headers and body of an answer, on a connection of its own. ReplicaLost."""
        connection = await self.take(fresh=True)
        try:
            await connection.send(head, body)
            return connection.status, connection.headers, await connection.read_all()
        finally:
            self.give_back(connection)

    def give_back(self, connection: Upstream) -> None:
        self._in_use.discard(connection)
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def abort_all(self, cause: str) -> None:
        """Whoever waits for an answer learns that it will not come."""
        for connection in [*self._idle, *self._in_use]:
            connection.abort(cause)
        self._idle.clear()


def request_head(method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body_len: int) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target)]
    lines += [b"%b: %b" % header for header in headers]
    if body_len or method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d" % body_len)
    return b"\r\n".join(lines) + b"\r\n\r\n"
