"""Serves the port during start-up: every request gets 503 with the progress.

Orchestrators ask `GET /startupz` while a model loads, which may take minutes. A client that comes too early learns that
it should try again.
"""

from __future__ import annotations

import json
import ssl

from legato.router.listening import Listeners
from legato.router.small_server import SmallServer

# Of the request: it is read so that closing the connection does not lose the answer, and not looked at.
MAX_REQUEST = 65536
REQUEST_SECONDS = 5.0
MAX_CONNECTIONS = 256


class StartupResponder:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls` where the workers will speak it."""
        self._tls = tls
        self._stage, self._progress = "starting", 0.0
        self._server: SmallServer | None = None

    def enter(self, stage: str, progress: float = 0.0) -> None:
        """What the server does now, and how much of it is done, from 0 to 1."""
        self._stage, self._progress = stage, progress

    async def open(self, listeners: Listeners) -> None:
        self._server = SmallServer(
            listeners.listen_first(),
            self._respond,
            most=MAX_CONNECTIONS,
            max_head=MAX_REQUEST,
            seconds=REQUEST_SECONDS,
            tls=self._tls,
        )

    def close(self) -> None:
        """From now on connections wait for the workers."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _respond(self, request: bytes) -> bytes:
        message = f"the server is starting: {self._stage}"
        fields = {"stage": self._stage, "progress": round(self._progress, 3)}
        body = json.dumps({"error": message, "error_type": "healthcheck", **fields}).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
