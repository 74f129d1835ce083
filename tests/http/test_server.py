"""Connections over real sockets: how they end, and what becomes of bodies that nobody read."""

from __future__ import annotations

import asyncio
import http.client
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.common.exposure import tls_context
from legato.http.connections import lingering_close as lingering
from legato.http.connections.limits import ConnectionLimits
from legato.http.connections.lingering_close import LingeringConnections
from legato.http.connections.protocol import SLACK
from legato.http.exchange import ABORT, Exchange
from legato.http.server import HttpServer
from tests.http.asgi import app_for
from tests.stopwatch import Stopwatch

KEY = "key"
LIMIT = 1_000_000
HOST = b"Host: localhost\r\n"
CLOSE = HOST + b"Connection: close\r\n"
AUTHORIZED = CLOSE + b"Authorization: Bearer key\r\n"
TIMEOUT = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"it never happened: {what}"
        time.sleep(0.005)


class Running:
    """A server on a thread of its own."""

    def __init__(
        self,
        app: ASGIApp,
        payload_limit: int,
        most: int,
        limits: ConnectionLimits | None = None,
        tls: tuple[str, str] | None = None,
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = self._listener.getsockname()[1]
        context = None if tls is None else tls_context(*tls)
        self.server = HttpServer(app, grace=10, payload_limit=payload_limit, limits=limits, tls=context)
        self.server.context.lingering = LingeringConnections(most)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: self.server.started, "the server starts")

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self._listener])

        uvloop.run(serve())

    def connect(self, send_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if send_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        connection.settimeout(TIMEOUT)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def seconds_to_stop(self) -> float:
        stopwatch = Stopwatch()
        self.server.should_exit = True
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return stopwatch.seconds


@contextmanager
def running(
    app: ASGIApp | None = None,
    *,
    payload_limit: int = LIMIT,
    most: int = 100,
    limits: ConnectionLimits | None = None,
    tls: tuple[str, str] | None = None,
) -> Iterator[Running]:
    server = Running(app or app_for(api_keys=(KEY,), payload_limit=payload_limit), payload_limit, most, limits, tls)
    try:
        yield server
    finally:
        server.seconds_to_stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def whole(connection: socket.socket) -> bytes:
    """All that comes until a clean end. A reset is an error here, although some kernels show the answer first."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def status_of(answer: bytes) -> int:
    """Of one whole answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.split(b"\r\n"), answer
    return int(head.split()[1])


def chunked(num: int, size: int = 10_000) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (size, b"x" * size)] * num


# ---- the last answer -------------------------------------------------------------------------------------------------

LENGTH = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n"
CHUNKED = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
WRONG = b'{"inputs": ""}'
CASES: dict[str, tuple[int, bytes, list[bytes]]] = {
    "401": (401, LENGTH % 5_000_000 + CLOSE, [b"x" * 10_000] * 500),
    "401 in chunks": (401, CHUNKED + CLOSE, chunked(500)),
    "404": (404, b"POST /nowhere HTTP/1.1\r\nContent-Length: 5000000\r\n" + AUTHORIZED, [b"x" * 10_000] * 500),
    "413": (413, LENGTH % 5_000_000 + AUTHORIZED, [b"x" * 10_000] * 500),
    "413 in chunks": (413, CHUNKED + AUTHORIZED, chunked(500)),
    "415": (415, LENGTH % 900_000 + AUTHORIZED + b"Content-Encoding: gzip\r\n", [b"x" * 10_000] * 90),
    "422 and more behind": (422, LENGTH % len(WRONG) + AUTHORIZED, [WRONG, *[b"GET / HTTP/1.1\r\n\r\n" * 500] * 500]),
    "400, not HTTP": (400, b"POST / HTTP/1.1\r\nnonsense\r\n", [b"x" * 10_000] * 500),
}


class Sender(threading.Thread):
    """Sends until it is done or the connection is closed, by whichever side."""

    def __init__(self, connection: socket.socket, pieces: list[bytes], pauses: list[float]) -> None:
        super().__init__()
        self._connection = connection
        self._pieces = list(zip(pieces, pauses, strict=True))
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            for piece, pause in self._pieces:
                self._connection.sendall(piece)
                if pause:
                    time.sleep(pause)
        except OSError as error:
            self.error = error


@pytest.mark.parametrize("case", CASES)
def test_whoever_is_still_sending_gets_the_whole_answer_and_a_clean_end(server: Running, case: str) -> None:
    status, head, pieces = CASES[case]
    rng = random.Random(case)
    for _ in range(60):
        with server.connect() as connection:
            # Sometimes the refusal is written before the first byte of the body, sometimes after many.
            num_early = rng.choice([0, 0, 1, 5])
            connection.sendall(head + b"\r\n" + b"".join(pieces[:num_early]))
            pauses = rng.choices([0, 0, 0, 0.0002, 0.002], k=len(pieces) - num_early)
            sender = Sender(connection, pieces[num_early:], pauses)
            time.sleep(rng.choice([0, 0, 0.001, 0.01]))
            assert status_of(whole(connection)) == status
            assert sender.error is None, "the connection was reset"
            connection.shutdown(socket.SHUT_RDWR)
            sender.join(TIMEOUT)


@pytest.mark.parametrize("size", [1000, SLACK, LIMIT])
def test_whoever_looks_for_the_answer_after_sending_everything_finds_it(server: Running, size: int) -> None:
    """As Python's own client does, for which an error while it sends is the end."""
    for _ in range(20):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
        connection.request("POST", "/generate", b"x" * size, {"Connection": "close"})
        response = connection.getresponse()
        assert response.status == 401 and b"API key" in response.read()
        connection.close()


def test_whoever_has_closed_its_side_after_the_body_gets_the_refusal_too(server: Running) -> None:
    for size in [0, 1000, 10_000, 100_000]:
        with server.connect() as connection:
            connection.sendall(LENGTH % size + HOST + b"\r\n" + b"x" * size)
            connection.shutdown(socket.SHUT_WR)
            assert status_of(whole(connection)) == 401


def test_a_refusal_comes_instead_of_an_invitation_to_send_the_body(server: Running) -> None:
    for head, status in [(CLOSE, 401), (AUTHORIZED, 413)]:
        with server.connect() as connection:
            connection.sendall(LENGTH % 5_000_000 + head + b"Expect: 100-continue\r\n\r\n")
            assert status_of(whole(connection)) == status


def test_an_invitation_comes_before_the_body_is_read(server: Running) -> None:
    body = b'{"inputs": "hi"}'
    with server.connect() as connection:
        connection.sendall(LENGTH % len(body) + AUTHORIZED + b"Expect: 100-continue\r\n\r\n")
        invitation = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.recv(len(invitation)) == invitation
        connection.sendall(body)
        assert status_of(whole(connection)) == 200


async def long_answer(scope: Scope, receive: Receive, send: Send) -> None:
    """More than sockets hold, written all at once."""
    body = b"x" * 20_000_000
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def test_a_client_who_reads_slowly_has_all_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENCE", 0.05)
    with running(long_answer) as server, server.connect() as connection:
        connection.sendall(LENGTH % 5_000_000 + HOST + b"\r\n" + b"x" * 1000)
        time.sleep(0.5)
        assert status_of(whole(connection)) == 200


def test_a_server_that_ends_waits_for_an_answer_that_is_not_sent() -> None:
    with running(long_answer) as server, server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        connection.recv(1)
        stopping = threading.Thread(target=server.seconds_to_stop)
        stopping.start()
        time.sleep(0.5)
        assert len(whole(connection)) > 20_000_000
        stopping.join(TIMEOUT)


def test_what_the_application_says_after_the_end_is_dropped_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A client who talks nonsense while its answer is made is told so, and the rest of the answer has no place."""
    has_ended = threading.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
            await asyncio.sleep(0.001)
        has_ended.set()

    with running(stream) as server, server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        connection.recv(1)
        connection.sendall(b"nonsense\r\n\r\n")
        assert whole(connection).endswith(b"Invalid HTTP request received.")
        assert has_ended.wait(TIMEOUT)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_answer_that_begins_when_the_connection_is_broken_off_is_dropped_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its head waits for the body, and there is nothing left to write it to."""

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ABORT]()
        await Exchange(scope, receive, send).start({})

    with running(late) as server, server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        with suppress(ConnectionResetError):
            assert whole(connection) == b""
        until(lambda: not server.server.server_state.tasks, "its task is over")
    assert "Exception in callback" not in caplog.text


# ---- what lingering may cost -----------------------------------------------------------------------------------------


async def refusal(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body"})


def refused(server: Running, send_buffer: int | None = None) -> socket.socket:
    """A connection that lingers: its client has read the answer, and neither sends nor closes."""
    connection = server.connect(send_buffer)
    lingering_now = server.server.context.lingering
    before = len(lingering_now)
    connection.sendall(LENGTH % 10**12 + HOST + b"\r\n")
    assert status_of(whole(connection)) == 401
    until(
        lambda: len(server.server.context.lingering) > min(before, server.server.context.lingering._most - 1),
        "it lingers",
    )
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has more than half-closed it: what it is sent then is answered with a reset."""
    with suppress(OSError):
        connection.send(b"x")
        time.sleep(0.01)
        connection.send(b"x")
        return False
    return True


def test_of_a_body_no_more_than_the_allowance_is_read() -> None:
    """Then the kernel's buffers fill, and the client cannot send."""
    with running(refusal, payload_limit=100_000) as server, refused(server, send_buffer=10_000) as connection:
        num_sent = 0
        with suppress(OSError):
            while num_sent < 10_000_000:
                num_sent += connection.send(b"x" * 1000)
        # A socket holds some 64 KB that nobody read; where somebody did read, more.
        assert 100_000 + SLACK <= num_sent < 1_000_000


def test_a_silent_client_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENCE", 1.0)
    with running(refusal) as server:
        began = time.monotonic()  # not later, because the server begins to linger before we hear of it
        with refused(server) as connection:
            until(lambda: not len(server.server.context.lingering), "it is left")
            assert time.monotonic() - began > 0.9
            assert is_closed(connection)


def test_a_client_who_goes_on_sending_is_left_after_a_longer_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENCE", 1.0)
    monkeypatch.setattr(lingering, "LONGEST", 1.5)
    with running(refusal) as server:
        began = time.monotonic()
        with refused(server) as connection, suppress(OSError):
            while time.monotonic() - began < TIMEOUT:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert 1.4 < time.monotonic() - began < TIMEOUT


def test_a_client_who_closes_is_forgotten_at_once() -> None:
    with running(refusal) as server:
        refused(server).close()
        stopwatch = Stopwatch()
        until(lambda: not len(server.server.context.lingering), "it is forgotten")
        assert stopwatch.seconds < lingering.SILENCE / 2


def test_no_more_than_so_many_linger_and_the_oldest_are_left_first() -> None:
    with running(refusal, most=5) as server:
        refused(server).close()  # with the first connection the event loop opens a file of its own
        until(lambda: not len(server.server.context.lingering), "the first is gone")
        before = psutil.Process().num_fds()
        connections = [refused(server) for _ in range(30)]
        assert len(server.server.context.lingering) == 5
        until(lambda: psutil.Process().num_fds() <= before + len(connections) + 5, "descriptors are given back")
        assert [is_closed(connection) for connection in connections] == [True] * 25 + [False] * 5
        for connection in connections:
            connection.close()


def test_those_who_linger_do_not_hold_up_the_end() -> None:
    with running(refusal) as server:
        connections = [refused(server) for _ in range(5)]
        assert server.seconds_to_stop() < lingering.SILENCE / 2
        for connection in connections:
            connection.close()


def test_tokens_go_straight_to_the_event_loops_transport() -> None:
    class Recorder(asyncio.Transport):
        def write(self, data: object) -> None: ...

    transport = Recorder()
    assert lingering.LingeringTransport(transport, lambda: 0, LingeringConnections()).write == transport.write


# ---- connections that are kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000, 20_000, 60_000, 200_000, 2_000_000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_the_request_after_a_body_that_nobody_read_is_answered(server: Running, size: int, framing: str) -> None:
    """All of it at once, so that much has arrived before the refusal is written."""
    smuggled = b"GET /info HTTP/1.1\r\n\r\n"
    body = smuggled * (size // len(smuggled))
    length, pieces = LENGTH % len(body), body
    if framing == "chunks":
        length, pieces = CHUNKED, (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(length + HOST + b"\r\n" + pieces + b"GET /health HTTP/1.1\r\n" + CLOSE + b"\r\n")
        answers = whole(connection).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [401, 200]


@pytest.mark.parametrize("path", ["/generate_stream", "/v1/completions"])
def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(path: str) -> None:
    with running(app_for()) as server, server.connect() as connection:
        body = b'{"inputs": "hi", "prompt": "hi", "stream": true}'
        head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        headers, _, events = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in headers.lower() and b"connection: close" in headers.lower()
        assert events.startswith(b"data: {") and events.endswith(b"\n\n")
