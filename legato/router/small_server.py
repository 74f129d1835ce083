"""One answer for each connection, with limits on time, size and number: for the ports that the scheduler's process
serves itself. It has steps to plan, and nobody is known to be friendly here."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

# Seconds without accepting when there is no file descriptor for a connection: the listener stays readable.
BACK_OFF = 0.2
# Connections to accept in one turn of the event loop.
ACCEPTED_PER_TURN = 16


class SmallServer:
    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[bytes], Awaitable[bytes]],
        *,
        most: int,
        max_head: int,
        seconds: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`answer` is given the request up to its empty line. Connections beyond `most` are closed at once, those in a
        TLS handshake included. The listener, which listens, is ours from here on."""
        self._listener = listener
        self._answer = answer
        self._most = most
        self._max_head = max_head
        self._seconds = seconds
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._serving: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Accepts nothing more. What is not accepted waits for whoever else listens on the port."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()

    def _begin(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.debug("A connection cannot be accepted: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(BACK_OFF, self._begin)
                return
            if len(self._serving) >= self._most:
                connection.close()
                continue
            serving = self._loop.create_task(self._serve(connection))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader = asyncio.StreamReader(limit=self._max_head)
        protocol = asyncio.StreamReaderProtocol(reader)
        names = () if self._tls is None else ("ssl_handshake_timeout", "ssl_shutdown_timeout")
        try:
            async with asyncio.timeout(self._seconds):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._tls, **dict.fromkeys(names, self._seconds)
                )
        except (OSError, TimeoutError) as error:  # possibly in its TLS handshake
            logger.debug("A client disconnected before its connection was established: %s", error)
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            async with asyncio.timeout(self._seconds):
                writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("A client was too slow, sent too much or disconnected: %s", error)
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await writer.wait_closed()
