"""Serves the port during start-up: every request gets 503 with the progress.

Orchestrators ask `GET /startupz` while a model loads, which may take minutes. A client that comes too early learns that
it should try again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from contextlib import suppress

from legato.router.listening import Listeners

logger = logging.getLogger(__name__)

# Of the request: it is read so that closing the connection does not lose the answer, and not looked at.
MAX_REQUEST = 65536
REQUEST_SECONDS = 5.0
MAX_CONNECTIONS = 256


class StartupResponder:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls` where the workers will speak it."""
        self._tls = tls
        self._stage, self._progress = "starting", 0.0
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    def enter(self, stage: str, progress: float = 0.0) -> None:
        """What the server does now, and how much of it is done, from 0 to 1."""
        self._stage, self._progress = stage, progress

    async def open(self, listeners: Listeners) -> None:
        handshake = None if self._tls is None else REQUEST_SECONDS
        self._server = await asyncio.start_server(
            self._respond,
            sock=listeners.listen_first(),
            limit=MAX_REQUEST,
            ssl=self._tls,
            ssl_handshake_timeout=handshake,
            ssl_shutdown_timeout=handshake,
        )

    def close(self) -> None:
        """From now on connections wait for the workers."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_SECONDS):
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer())
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("A client disconnected during start-up: %s", error)
        finally:
            self._num_connections -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _answer(self) -> bytes:
        message = f"the server is starting: {self._stage}"
        fields = {"stage": self._stage, "progress": round(self._progress, 3)}
        body = json.dumps({"error": message, "error_type": "healthcheck", **fields}).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
