"""`--prometheus-port`: serves metrics on a separate port, so that Prometheus needs no access to the API's port.

Served by the scheduler's process, which collects them anyway: one answer for each connection, with limits on time, size
and number, because nobody is known to be friendly here either. Where the API needs a key, this port needs it, too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from legato.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
SECONDS = 5.0
PATHS = ("/metrics", "/")


@asynccontextmanager
async def metrics_listener(
    host: str, port: int, scrape: Callable[[], Awaitable[bytes]], keys: tuple[str, ...] = ()
) -> AsyncIterator[asyncio.Server | None]:
    """Port 0 means none. A port in use is not worth failing for: the metrics are on the main port as well, and two
    servers on one machine have the same default here."""
    try:
        handler = MetricsHandler(scrape, keys)
        server = await asyncio.start_server(handler.answer, host, port, limit=MAX_HEAD_BYTES) if port else None
    except OSError as error:
        logger.warning(
            "Cannot listen on %s:%d (--prometheus-port): %s; /metrics is on the main port only",
            host,
            port,
            error.strerror or "the address is not available",
        )
        server = None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


class MetricsHandler:
    def __init__(self, scrape: Callable[[], Awaitable[bytes]], keys: tuple[str, ...]) -> None:
        self._scrape = scrape
        self._keys = [key.encode() for key in keys]
        self._num_connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(SECONDS):
                    writer.write(await self._response(reader))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # too slow, too long or gone
        finally:
            self._num_connections -= 1
            with suppress(OSError):
                writer.close()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.split(b"\r\n")
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if self._keys and not self._is_authorized(lines):
            return _message("401 Unauthorized", b"An API key is needed\n", "www-authenticate: Bearer\r\n")
        if method != b"GET" or path not in PATHS:
            return _message("404 Not Found", b"There is GET /metrics\n")
        return _message("200 OK", await self._scrape(), content_type=CONTENT_TYPE)

    def _is_authorized(self, lines: list[bytes]) -> bool:
        headers = [line.partition(b":") for line in lines]
        given = [value.strip() for name, _, value in headers if name.lower() == b"authorization"]
        bearers = [value[7:].strip() for value in given if value[:7].lower() == b"bearer "]
        # All of them, so that time says nothing about any.
        return sum(hmac.compare_digest(key, bearer) for bearer in bearers for key in self._keys) > 0


def _message(status: str, body: bytes, headers: str = "", content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{headers}"
    return f"{head}connection: close\r\n\r\n".encode() + body
