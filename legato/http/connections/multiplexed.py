"""The server's end of a connection on which a balancer sends many requests (`ipc/multiplexing.py`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from legato.common.sockets import watch_peer
from legato.http.connections.pacing import Pacing
from legato.http.exchange import ABORT, PACE, WATCH, WRITE
from legato.ipc.multiplexing import (
    BROKEN,
    CANCEL,
    CONNECTION,
    DATA,
    END,
    LONGEST_REQUEST,
    REQUEST,
    SILENCE_SECONDS,
    TAKEN,
    UPGRADE,
    WINDOW,
    WORKER_HEADER,
    BrokenFrames,
    FrameReader,
    LinkedRequest,
    frame_header,
    head_frame,
    read_request,
    read_taken,
)

logger = logging.getLogger(__name__)

ACCEPTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: %b\r\n" + WORKER_HEADER + b": %d\r\n\r\n"
)
# As uvicorn answers for an application that did not.
FAILED = b"Internal Server Error"
# Bytes of one frame of an answer that is whole. Of a stream, each write is one frame: it begins with its mark.
LONGEST_PART = 64 << 10
# Bytes of all answers that wait for the balancer to read; then every write waits.
HIGH_WATER = 1 << 20


class LinkedExchange:
    """One request: what its application reads and writes."""

    def __init__(self, number: int, body: bytes, connection: MultiplexedRequests) -> None:
        self._number = number
        self._body: bytes | None = body
        self._connection = connection
        # Set when somebody waits; woken by whatever changes.
        self._waiters: list[asyncio.Future[None]] = []
        # Bytes that were sent and that the client has not got.
        self._num_sent = 0
        # Where the last piece ends, of what is sent on the connection.
        self._position = 0
        self._is_gone = False
        self._on_gone: Callable[[], None] | None = None
        self._has_started = False
        # Whether the balancer waits for all of the answer: then its length is known.
        self._is_whole = False
        self.is_complete = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while not (self._is_gone or self.is_complete):
            await self._wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self._wait_for_room()
        if message["type"] == "http.response.start":
            self._start(message["status"], list(message.get("headers", ())))
            return
        data = message.get("body", b"")
        if self._is_whole and len(data) > LONGEST_PART:
            await self._write_in_parts(memoryview(data))
        elif data:
            self._write(data)
        if not message.get("more_body", False) and not self._is_gone:
            self._connection.write(frame_header(self._number, END, 0))
            self.is_complete = True
            self.wake()

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        self._is_whole = any(name.lower() == b"content-length" for name, _ in headers)
        if not self._is_gone:
            self._connection.write(head_frame(self._number, status, headers))

    async def _write_in_parts(self, data: memoryview) -> None:
        """A long frame would delay those of all other requests."""
        for start in range(0, len(data), LONGEST_PART):
            await self._wait_for_room()
            self._write(bytes(data[start : start + LONGEST_PART]))

    def _write(self, data: bytes) -> None:
        if not self._is_gone:
            connection = self._connection
            connection.write(frame_header(self._number, DATA, len(data)) + data)
            self._position = connection.pacing.position
            self._num_sent += len(data)

    async def _wait_for_room(self) -> None:
        """Until more may be sent, or nobody waits for it."""
        while (self._num_sent > WINDOW or self._connection.is_paused) and not self._is_gone:
            await self._wait()

    def write_at_once(self, data: bytes) -> bool:
        """Writes more of an answer that has begun, without a coroutine. False if that has to wait: `send` does."""
        connection = self._connection
        if self._num_sent > WINDOW or connection.is_paused or self._is_gone or not self._has_started:
            return False
        self._write(data)
        return True

    def waits(self, go_on: Callable[[], None]) -> bool:
        """Whether what comes now should wait for the balancer. Then `go_on` is called, within a few milliseconds."""
        return self._connection.pacing.waits(self._position, go_on)

    async def fail(self) -> None:
        """The application has ended. Without an answer: then other servers would have none either."""
        if not (self._is_gone or self._has_started):
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(FAILED))]
            await self.send({"type": "http.response.start", "status": 500, "headers": headers})
            await self.send({"type": "http.response.body", "body": FAILED})

    def abort(self) -> None:
        """Called by the application, for a client that does not read."""
        if not (self._is_gone or self.is_complete):
            self._connection.write(frame_header(self._number, BROKEN, 0))
        self.hang_up()

    def hang_up(self) -> None:
        self._is_gone = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()
        self.wake()

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Called by the application with what to call when the client hangs up. Returns what ends that."""
        if self._is_gone:
            on_gone()
        else:
            self._on_gone = on_gone
        return self._unwatch

    def _unwatch(self) -> None:
        self._on_gone = None

    def taken(self, num_bytes: int) -> None:
        self._num_sent -= num_bytes
        self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class MultiplexedRequests(asyncio.Protocol):
    """Takes over a connection from its protocol, after a balancer has requested it with the route key."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        transport: asyncio.Transport,
        tasks: set[asyncio.Task[None]],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        """`scope` is that of the request to take over; `tasks` are those that a server which stops waits for."""
        self._app = app
        self._scope = {key: scope[key] for key in ("type", "asgi", "http_version", "server", "client", "scheme")}
        self._transport = transport
        self._tasks = tasks
        self._on_lost = on_lost
        self._reader = FrameReader(LONGEST_REQUEST)
        self._exchanges: dict[int, LinkedExchange] = {}
        self._is_finishing = False
        self.is_paused = False
        # Frames of this turn of the event loop, which are written together.
        self._frames: list[bytes] = []
        self.pacing = Pacing()
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        transport = self._transport
        transport.pause_reading()  # event loops choose how they read when reading starts
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        watch_peer(transport.get_extra_info("socket"), SILENCE_SECONDS)
        transport.write(ACCEPTED % (UPGRADE, os.getpid()))
        transport.resume_reading()

    def finish(self) -> None:
        """Closes the connection when the last request is answered."""
        self._is_finishing = True
        if not self._exchanges:
            self._close()

    def _close(self) -> None:
        self._flush()
        self._transport.close()

    def write(self, frame: bytes) -> None:
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)
        self.pacing.position += len(frame)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, payload in self._reader.feed(data):
                if kind == REQUEST:
                    self._start(number, *read_request(payload))
                elif number == CONNECTION and kind == TAKEN:
                    self.pacing.has_read(read_taken(payload))
                elif (exchange := self._exchanges.get(number)) is None:
                    continue  # it was answered meanwhile
                elif kind == TAKEN:
                    exchange.taken(read_taken(payload))
                elif kind == CANCEL:
                    exchange.hang_up()
        except BrokenFrames as error:
            logger.warning("A balancer's connection is closed: %s", error)
            self._transport.abort()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        for exchange in self._exchanges.values():
            exchange.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pacing.close()
        for exchange in self._exchanges.values():
            exchange.hang_up()
        self._on_lost(exc)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _start(self, number: int, request: LinkedRequest, body: bytes) -> None:
        if number in self._exchanges:
            raise BrokenFrames(f"request {number} is there twice")
        exchange = self._exchanges[number] = LinkedExchange(number, body, self)
        path, _, query = request.target.partition(b"?")
        scope: dict[str, Any] = {
            **self._scope,
            "method": request.method,
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": request.headers,
            "state": {},
            ABORT: exchange.abort,
            WRITE: exchange.write_at_once,
            WATCH: exchange.watch,
            PACE: exchange.waits,
        }
        task = self._loop.create_task(self._run(number, exchange, scope))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, exchange: LinkedExchange, scope: Scope) -> None:
        try:
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception:
                logger.exception("A request failed")
            await exchange.fail()
        finally:
            exchange.abort()  # if the answer is not complete
            del self._exchanges[number]
            if self._is_finishing and not self._exchanges:
                self._close()
