"""Connections to one replica that the streams of all clients share, one to each of its HTTP workers
(`ipc/multiplexing.py`)."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from contextlib import suppress
from typing import cast

from legato.balancer.answers import ReplicaAnswer
from legato.balancer.upstream import CONNECT_SECONDS, request_head
from legato.common.sockets import watch_peer
from legato.ipc.multiplexing import (
    CANCEL,
    CONNECTION,
    DATA,
    END,
    HEAD,
    LONGEST_ANSWER,
    SILENCE_SECONDS,
    STREAMS_PATH,
    TAKEN_STEP,
    UPGRADE,
    WINDOW,
    WORKER_HEADER,
    BrokenFrames,
    FrameReader,
    LinkedRequest,
    frame_header,
    read_head,
    request_frame,
    taken_frame,
)
from legato.ipc.routed import KEY_HEADER

logger = logging.getLogger(__name__)

ACCEPTED = b"HTTP/1.1 101 "
_WORKER = re.compile(rb"\r\n" + WORKER_HEADER + rb": (\d+)\r\n")
# Seconds between attempts to get the connections that are missing, where the last ones brought none.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# A head that is longer is no answer of ours.
LONGEST_HEAD = 1 << 14
# Streams of one read from which on the server is told a moment later what was read, and how many seconds that is: where
# steps are shorter, the next pieces have more tokens, and each piece costs a wake-up at the server and a write here.
MANY_STREAMS, MOMENT = 8, 0.0008


class LinkedAnswer(ReplicaAnswer):
    """To one request on a shared connection."""

    def __init__(self, number: int, connection: SharedConnection) -> None:
        super().__init__()
        self._number = number
        self._connection = connection
        # Bytes that the client has got and the server was not told of, and that wait to be taken by `read`.
        self._num_taken = 0
        self._num_read = 0
        self._was_closed = False

    async def send(self, request: LinkedRequest, body: bytes) -> None:
        """Returns when status and headers of the answer are here. ReplicaLost."""
        self._connection.write(request_frame(self._number, request, body))
        await self._wait_for_head()

    async def read(self) -> list[bytes]:
        if self._num_read:  # the last call's pieces have been passed on
            self._took(self._num_read)
        pieces = await super().read()
        self._num_read = sum(map(len, pieces))
        return pieces

    @property
    def _is_stale(self) -> bool:
        return self._was_closed

    def abort(self, cause: str = "the request was cancelled") -> None:
        if self._error is None:
            self._error = cause
        self._wake()

    def release(self) -> None:
        self._connection.release(self._number, is_complete=self.is_complete)

    # ---- the connection's side -------------------------------------------------------------------------------------

    def lost(self, cause: str) -> None:
        """The connection is gone, with nothing to say about the request: perhaps the replica never read it."""
        self._was_closed = self._error is None
        self.abort(cause)

    def pass_on(self, pieces: list[bytes]) -> None:
        if self._add(pieces):
            self._took(len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces)))

    def arrived(self, kind: int, payload: bytes) -> None:
        """Anything but pieces of the body."""
        if kind == HEAD:
            head = read_head(payload)
            self.status, self.headers = head.status, [(name.lower(), value) for name, value in head.headers]
            self._has_headers = True
        elif kind == END:
            self.is_complete = self._has_headers
        elif self._error is None:
            self._error, self._is_alive = "the replica broke the stream off", True
        self._wake()

    def _took(self, num_bytes: int) -> None:
        self._num_read = 0
        self._num_taken += num_bytes
        if self._num_taken >= TAKEN_STEP:
            self._connection.write(taken_frame(self._number, self._num_taken))
            self._num_taken = 0


class SharedConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._reader = FrameReader(LONGEST_ANSWER)
        self._answers: dict[int, LinkedAnswer] = {}
        self._num_requests = 0
        self._is_finishing = False
        # Frames of this turn of the event loop, which are written together.
        self._frames: list[bytes] = []
        # Bytes that were read and that the server was not told of.
        self._num_read = 0
        self._tells_later = False
        self._loop = asyncio.get_running_loop()
        # Which worker it is, once that is known; None if the replica wants no such connection.
        self.worker: asyncio.Future[bytes | None] = self._loop.create_future()

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._is_finishing

    @property
    def num_streams(self) -> int:
        return len(self._answers)

    def begin(self) -> LinkedAnswer:
        number = self._num_requests % 0xFFFFFFFF + 1  # 0 is `CONNECTION`
        self._num_requests += 1
        answer = self._answers[number] = LinkedAnswer(number, self)
        return answer

    def release(self, number: int, *, is_complete: bool) -> None:
        if self._answers.pop(number, None) is not None and not is_complete:
            self.write(frame_header(number, CANCEL, 0))
        if self._is_finishing:
            self.finish()

    def write(self, frame: bytes) -> None:
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def finish(self) -> None:
        """Closes it when the last answer is here."""
        self._is_finishing = True
        if not self._answers and self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self, cause: str) -> None:
        for answer in list(self._answers.values()):
            answer.abort(cause)
        self._is_finishing = True
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport.get_extra_info("socket"), SILENCE_SECONDS)

    def data_received(self, data: bytes) -> None:
        if not self.worker.done():
            data = self._read_head(data)
        self._num_read += len(data)
        # Pieces of each stream: what was read at once is written at once.
        pieces: dict[int, list[bytes]] = {}
        try:
            for number, kind, payload in self._reader.feed(data):
                if kind == DATA:
                    if number in pieces:
                        pieces[number].append(payload)
                    else:
                        pieces[number] = [payload]
                elif (answer := self._answers.get(number)) is not None:  # or it was cancelled
                    if before := pieces.pop(number, None):
                        answer.pass_on(before)
                    answer.arrived(kind, payload)
        except BrokenFrames as error:
            self.abort(f"the replica does not speak our protocol: {error}")
        answers = self._answers
        for number, arrived in pieces.items():
            if (answer := answers.get(number)) is not None:
                answer.pass_on(arrived)
        if len(pieces) >= MANY_STREAMS:
            if not self._tells_later:
                self._tells_later = True
                self._loop.call_later(MOMENT, self._tell)
        elif pieces or self._num_read >= WINDOW:  # streams that go on may wait for it
            self._tell()

    def _tell(self) -> None:
        """The server what was read."""
        self._tells_later = False
        if self._num_read:
            self.write(taken_frame(CONNECTION, self._num_read))
            self._num_read = 0

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows it."""
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found and len(self._head) < LONGEST_HEAD:
            return b""
        worker = _WORKER.search(head + b"\r\n")
        self.worker.set_result(worker[1] if head.startswith(ACCEPTED) and worker is not None else None)
        return rest if self.worker.result() is not None else b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.worker.done():
            self.worker.set_result(None)
        cause = "the replica closed the connection" if exc is None else f"the connection broke: {exc}"
        for answer in list(self._answers.values()):
            answer.lost(cause)


class SharedConnections:
    """The shared connections to one replica. Used once every worker has one, so that requests are spread evenly."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._address = (host, port)
        self._tls = tls
        self._by_worker: dict[bytes, SharedConnection] = {}
        self._num_workers = 0
        # After attempts in vain: seconds to wait for the next ones, and until when.
        self._pause = 0.0
        self._paused_until = 0.0

    def begin(self) -> LinkedAnswer | None:
        """On the connection with the fewest streams; None while there are too few of them."""
        usable = [connection for connection in self._by_worker.values() if connection.is_usable]
        if not self._num_workers or len(usable) < self._num_workers:
            return None
        return min(usable, key=lambda connection: connection.num_streams).begin()

    async def open(self, num_workers: int, key: str) -> None:
        """As many as are missing. Which worker gets a connection is up to its kernel, so some come in vain."""
        self._num_workers = num_workers
        self._by_worker = {name: each for name, each in self._by_worker.items() if each.is_usable}
        loop, before = asyncio.get_running_loop(), len(self._by_worker)
        if before >= num_workers or loop.time() < self._paused_until:
            return
        with suppress(TimeoutError, OSError, ssl.SSLError):
            async with asyncio.timeout(CONNECT_SECONDS):
                for _ in range(4 * num_workers):
                    if not await self._open_one(key) or len(self._by_worker) >= num_workers:
                        break
        # A proxy in front of the replica may send all of them to one worker, and an older version wants none.
        self._pause = 0.0 if len(self._by_worker) > before else min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._paused_until = loop.time() + self._pause

    async def _open_one(self, key: str) -> bool:
        """False if the replica does not want it, being an older version perhaps."""
        host, port = self._address
        headers = [
            (b"host", host.encode()),
            (b"connection", b"upgrade"),
            (b"upgrade", UPGRADE),
            (KEY_HEADER.encode(), key.encode()),
        ]
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            SharedConnection, host, port, ssl=self._tls, server_hostname=host if self._tls else None
        )
        try:
            transport.write(request_head("GET", STREAMS_PATH.encode(), headers, 0))
            worker = await connection.worker
        except BaseException:
            transport.abort()
            raise
        if worker is None or worker in self._by_worker:
            transport.abort()
        else:
            self._by_worker[worker] = connection
        return worker is not None

    def abort_all(self, cause: str) -> None:
        for connection in self._by_worker.values():
            connection.abort(cause)

    def finish(self) -> None:
        """The replica gets nothing new."""
        for connection in self._by_worker.values():
            connection.finish()
