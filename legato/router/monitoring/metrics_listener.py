"""`--prometheus-port`: serves metrics on a separate port, so that Prometheus needs no access to the API's port.

Served by the scheduler's process, which collects them anyway. Where the API needs a key, this port needs it, too; where
the API is encrypted, so is this port: a key must not be sent in clear text.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from legato.router.listening import new_socket
from legato.router.small_server import SmallServer
from legato.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
SECONDS = 5.0
BACKLOG = 128
PATHS = ("/metrics", "/")


@asynccontextmanager
async def metrics_listener(
    host: str,
    port: int,
    scrape: Callable[[], Awaitable[bytes]],
    keys: tuple[str, ...] = (),
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[SmallServer | None]:
    """Port 0 means none. A port in use is not worth failing for: the metrics are on the main port as well, and two
    servers on one machine have the same default here."""
    try:
        server = _listen(host, port, MetricsHandler(scrape, keys), tls) if port else None
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


def _listen(host: str, port: int, handler: MetricsHandler, tls: ssl.SSLContext | None) -> SmallServer:
    listener = new_socket(host)  # as the main port does: `::` is IPv4, too
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return SmallServer(
        listener, handler.answer, most=MAX_CONNECTIONS, max_head=MAX_HEAD_BYTES, seconds=SECONDS, tls=tls
    )


class MetricsHandler:
    def __init__(self, scrape: Callable[[], Awaitable[bytes]], keys: tuple[str, ...]) -> None:
        self._scrape = scrape
        self._keys = [key.encode() for key in keys]

    async def answer(self, head: bytes) -> bytes:
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
