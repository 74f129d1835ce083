"""HTTP/1.1 connections to one replica: opened when needed, kept for the next request, one request at a time on each.

An answer is read in the pieces in which the replica wrote it: of a chunked body, whole chunks only (`ipc/routed.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import cast

import httptools

# Seconds to connect; a replica in the same network takes milliseconds.
CONNECT_SECONDS = 3.0
# Seconds that an unused connection is kept: less than servers keep theirs (75).
IDLE_SECONDS = 30.0
# Bytes of an answer that wait for a client who reads slowly; then the replica waits, too.
HIGH_WATER, LOW_WATER = 256 << 10, 64 << 10

Headers = list[tuple[bytes, bytes]]


class ReplicaLost(Exception):
    """The connection broke, or could not be made. `is_stale`: it had been idle, and nothing of an answer came."""

    def __init__(self, cause: str, *, is_stale: bool = False) -> None:
        super().__init__(cause)
        self.is_stale = is_stale


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: str | None = None
        self.idle_since = 0.0
        self.num_requests = 0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.headers: Headers = []
        self.status = 0
        self._has_headers = False
        self._is_chunked = False
        self._partial: list[bytes] = []
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_paused = False
        self._keeps_alive = False
        self.is_complete = False
        # The answer to HEAD has the headers of a body, and no body.
        self._has_no_body = False

    # ---- one request -----------------------------------------------------------------------------------------------

    async def send(self, head: bytes, body: bytes) -> None:
        """Returns when status and headers are here. ReplicaLost."""
        self._reset()
        self._has_no_body = head.startswith(b"HEAD ")
        self.num_requests += 1
        if self._transport is None:
            raise ReplicaLost(self._error or "the connection was closed", is_stale=self.num_requests > 1)
        self._transport.write(head + body if len(body) < 1 << 16 else head)
        if len(body) >= 1 << 16:
            self._transport.write(body)
        while not self._has_headers:
            await self._wait()

    async def read(self) -> list[bytes]:
        """What has come since the last call; waits if nothing has. Empty at the end. ReplicaLost."""
        while not self._pieces:
            if self.is_complete:
                return []
            await self._wait()
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces

    async def read_all(self) -> bytes:
        pieces: list[bytes] = []
        while more := await self.read():
            pieces += more
        return b"".join(pieces)

    async def _wait(self) -> None:
        if self._error is not None:
            raise ReplicaLost(self._error, is_stale=self.num_requests > 1 and not self._has_headers)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def header(self, name: bytes) -> bytes | None:
        return next((value for each, value in self.headers if each == name), None)

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

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"the replica does not speak HTTP/1.1: {error}")
            return
        if self._num_bytes > HIGH_WATER and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._error is None:
            self._error = "the replica closed the connection" if exc is None else f"the connection broke: {exc}"
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
            self._add(body)

    def on_chunk_complete(self) -> None:
        if self._partial:
            self._add(self._partial[0] if len(self._partial) == 1 else b"".join(self._partial))
            self._partial.clear()

    def on_message_complete(self) -> None:
        self.is_complete = self._has_headers
        self._keeps_alive = self._parser.should_keep_alive()  # the parser forgets it with the message

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._num_bytes += len(piece)


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
                    Upstream, host, port, ssl=self._tls, server_hostname=host if self._tls else None
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
