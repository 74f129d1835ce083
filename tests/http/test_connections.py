"""Attacks on the connections of a worker: headers and bodies without end, silence, too many at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest

from legato.common.throttled_log import ThrottledLog
from legato.http.connections import accepting, lingering_close
from legato.http.connections.accepting import Acceptor
from legato.http.connections.limits import MAX_CONNECTIONS, ConnectionLimits
from legato.http.connections.protocol import HEAD_PIECE
from legato.http.exchange import Exchange
from tests.clock import FakeClock
from tests.http.asgi import app_for
from tests.http.test_server import HOST, TIMEOUT, Running, running, until, whole
from tests.stopwatch import Stopwatch

KB, MB = 1 << 10, 1 << 20
LIMITS = ConnectionLimits()
# Short enough for a test, long enough for a busy machine to send a few bytes.
HASTY = ConnectionLimits(header_seconds=1.5, body_seconds=1.5, body_rate=4096)


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attackers do not close their connections."""
    monkeypatch.setattr(lingering_close, "SILENCE", 0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(app_for(api_keys=("key",))) as server:
        yield server


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def attacked(server: Running, head: bytes, piece: bytes, num_bytes: int) -> bytes:
    """Sends `piece` again and again, to the end or until the server stops reading. Returns what it answered."""
    with server.connect() as connection:
        connection.settimeout(5)
        with suppress(OSError):
            connection.sendall(head)
            for _ in range(num_bytes // len(piece)):
                connection.sendall(piece)
            if not head.startswith(b"POST"):
                connection.sendall(b"\r\n\r\n")
        data = b""
        with suppress(OSError):
            while chunk := connection.recv(65536):
                data += chunk
        return data


REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes, int]] = {
    "header lines": (REQUEST, b"X-Filler: " + b"x" * 990 + b"\r\n", 431),
    "short header lines": (REQUEST, b"a:b\r\n" * 200, 431),
    "one header": (REQUEST + b"X-Filler: ", b"x" * 1000, 431),
    "the name of a header": (REQUEST, b"x" * 1000, 431),
    "the request line": (b"GET /", b"x" * 1000, 414),
    "the query": (b"GET /health?", b"x" * 1000, 414),
}


@pytest.mark.parametrize("attack", ENDLESS)
def test_headers_without_end_are_refused_and_not_kept(server: Running, attack: str) -> None:
    head, piece, status = ENDLESS[attack]
    attacked(server, head, piece, 100 * KB)  # whatever is allocated once
    before = psutil.Process().memory_info().rss
    answer = attacked(server, head, piece, 32 * MB)
    assert statuses(answer) == [status] and b"connection: close" in answer
    assert psutil.Process().memory_info().rss - before < 5 * MB


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 200, b"X-Filler" + b"x" * 1000], ids=["lines", "one name"])
def test_trailers_without_end_are_not_kept(server: Running, piece: bytes) -> None:
    """They come after the last chunk of a body and are headers in all but their place."""
    attacked(server, CHUNKED + b"0\r\n", piece, 100 * KB)
    before = psutil.Process().memory_info().rss
    attacked(server, CHUNKED + b"0\r\n", piece, 32 * MB)
    assert psutil.Process().memory_info().rss - before < 5 * MB


@pytest.mark.parametrize(
    ("num_headers", "size", "status"),
    [(99, 100, 200), (100, 100, 431), (10, 6000, 200), (10, 7400, 431), (1, 60 * KB, 200), (1, 64 * KB, 431)],
)
def test_the_limits_are_100_headers_and_64_kb_in_total(
    server: Running, num_headers: int, size: int, status: int
) -> None:
    """`Host` is one of them."""
    with server.connect() as connection:
        lines = [b"X-%d: " % number + b"x" * (size - 8) + b"\r\n" for number in range(num_headers - 1)]
        last = b"Connection: close\r\n" if num_headers > 1 else b""
        filler = b"X: " + b"x" * (size - 20) + b"\r\n" if num_headers == 1 else b""
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(lines) + filler + last)
        connection.sendall(b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert statuses(whole(connection)) == [status]


def test_all_requests_that_were_sent_in_advance_are_answered_in_order() -> None:
    """Without bodies, with bodies, and in pieces of any size."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body = scope["path"].encode() + b" " + str(len(body + message["body"])).encode() + b";"
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
        )
        await send({"type": "http.response.body", "body": body})

    rng = random.Random(4)
    sizes = [rng.choice([0, 0, 0, 0, 10, 5000, 40_000]) for _ in range(300)]
    requests = [
        b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (number, size) + b"x" * size
        for number, size in enumerate(sizes)
    ]
    data = b"".join(requests)
    with running(echo) as server, server.connect() as connection:
        sending = threading.Thread(target=send_in_pieces, args=(connection, data, rng))
        sending.start()
        answers = b""
        while answers.count(b";") < len(sizes):
            answers += connection.recv(65536)
        sending.join()
    assert re.findall(rb"/(\d+) (\d+);", answers) == [
        (str(number).encode(), str(size).encode()) for number, size in enumerate(sizes)
    ]


def test_what_was_sent_in_advance_is_read_in_order_whatever_the_application_waits_for() -> None:
    """Waiting for the client to hang up takes reading, too, while more waits to be parsed than a buffer has."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body(MB)
        with exchange.client():
            await asyncio.sleep(0.001)
            await exchange.respond(scope["path"].encode() + b" %d;" % len(body), {})

    num, size = 100, 900
    request = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    data = b"".join(request % (number, size) + b"x" * size for number in range(num))
    with running(echo) as server, server.connect() as connection:
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        answers = b""
        while answers.count(b";") < num and (received := connection.recv(65536)):
            answers += received
        sending.join()
    assert re.findall(rb"/(\d+) (\d+);", answers) == [(b"%d" % number, b"%d" % size) for number in range(num)]


def test_a_client_who_hangs_up_before_the_first_of_several_answers_leaves_none_to_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        messages.append((await receive())["type"])
        messages.append((await receive())["type"])
        await Exchange(scope, receive, send).respond(b"too late", {})

    with running(app) as server:
        with server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(REQUEST + b"\r\n" + REQUEST + b"\r\n")
            until(lambda: len(messages) == 1, "the first is there")
        until(lambda: not server.server.server_state.tasks, "its task is over")
    assert messages == ["http.request", "http.disconnect"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_that_is_not_over_when_the_next_begins_does_not_take_its_client_away() -> None:
    ends: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        with exchange.client() as client:
            gone = asyncio.Event()
            client.when_gone(gone.set)
            if scope["path"] == "/first":
                await exchange.respond(b"over", {})
                await asyncio.wait_for(begun.wait(), TIMEOUT)
                ends.append("first")
            else:
                begun.set()
                await asyncio.wait_for(gone.wait(), TIMEOUT)
                ends.append("second")

    begun = asyncio.Event()
    with running(app) as server:
        with server.connect() as connection:
            connection.sendall(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\nGET /second HTTP/1.1\r\nHost: a\r\n\r\n")
            until(lambda: ends == ["first"], "the first is over")
        until(lambda: ends == ["first", "second"], "the second learns that its client is gone")


def send_in_pieces(connection: socket.socket, data: bytes, rng: random.Random) -> None:
    while data:
        size = rng.choice([1, 50, 1000, 20_000, 100_000])
        connection.sendall(data[:size])
        data = data[size:]


def test_requests_sent_in_advance_wait_outside() -> None:
    """Each answer may let one buffer of requests in only when all of the buffer before are answered."""
    request = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    with running() as server, server.connect() as connection:

        def ask() -> None:
            with suppress(OSError):
                while True:
                    connection.sendall(request * 500)

        asking = threading.Thread(target=ask)
        asking.start()
        worst = 0
        for _ in range(2000):
            protocols = list(server.server.server_state.connections)
            worst = max([worst, *(len(protocol.pipeline) for protocol in protocols)])
            assert connection.recv(1000)
        connection.shutdown(socket.SHUT_RDWR)
        asking.join()
        assert 0 < worst <= HEAD_PIECE // len(request) + 2


# ---- deadlines -------------------------------------------------------------------------------------------------------

SLOW: dict[str, tuple[bytes, list[int]]] = {
    "nothing": (b"", []),
    "an empty line": (b"\r\n", []),
    "half a request line": (b"GET /hea", [408]),
    "half a header": (REQUEST + b"X-Fil", [408]),
    "headers without their end": (REQUEST, [408]),
    "half a body": (b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n" + HOST + b"\r\nxxx", [408]),
    "half a body in chunks": (CHUNKED.replace(b"nowhere", b"generate") + b"5\r\nxxxxx\r\n", [408]),
    "half a body that was refused": (b"POST /nowhere HTTP/1.1\r\nContent-Length: 100\r\n" + HOST + b"\r\nx", [404]),
    "half a second request": (REQUEST + b"\r\nGET /he", [200, 408]),
}


def test_nothing_half_open_stays() -> None:
    """All at once, because each waits for its deadline."""
    with running(app_for(), limits=HASTY) as server:
        connections = {sent: server.connect() for sent in SLOW}
        for sent, (data, _) in SLOW.items():
            connections[sent].sendall(data)
        answered = {sent: statuses(whole(connection)) for sent, connection in connections.items()}
        assert answered == {sent: expected for sent, (_, expected) in SLOW.items()}
        until(lambda: not server.server.server_state.connections, "the connections are forgotten")
        for connection in connections.values():
            connection.close()


def test_an_empty_line_after_an_answer_does_not_keep_the_connection_for_ever() -> None:
    """It ends the time of silence in which a connection is kept alive."""
    with running(app_for(), limits=HASTY) as server, server.connect() as connection:
        connection.sendall(REQUEST + b"\r\n")
        assert statuses(connection.recv(65536)) == [200]
        connection.sendall(b"\r\n")
        assert whole(connection) == b""


@pytest.mark.parametrize(
    "head", [REQUEST + b"X: ", b"POST /generate HTTP/1.1\r\nContent-Length: 100000\r\n" + HOST + b"\r\n"]
)
def test_a_byte_now_and_then_wins_no_time(head: bytes) -> None:
    with running(app_for(), limits=HASTY) as server, server.connect() as connection:
        connection.sendall(head)
        began = time.monotonic()
        connection.setblocking(False)
        answer = b""
        while time.monotonic() < began + 20 and not answer:
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                connection.send(b"x")
            with suppress(BlockingIOError):
                answer = connection.recv(65536)
            time.sleep(0.05)
        assert statuses(answer) == [408]


@pytest.fixture
def descriptors() -> Iterator[int]:
    """As many as there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_who_send_half_a_header_keep_nobody_waiting(descriptors: int) -> None:
    """5,000 if both ends of so many connections may be open here."""
    num, limits = min(5000, descriptors // 2 - 200), replace(LIMITS, header_seconds=2.0)
    with running(app_for(), limits=limits) as server:
        server._listener.listen(num)  # or the kernel would have clients try again, a second later
        slow = []
        for _ in range(num):
            slow.append(server.connect())
            slow[-1].sendall(REQUEST)
        stopwatch = Stopwatch()
        with server.connect() as connection:
            connection.sendall(REQUEST + b"\r\n")
            assert statuses(connection.recv(65536)) == [200]
        assert stopwatch.seconds < 1
        assert [statuses(whole(connection)) for connection in slow] == [[408]] * num
        assert stopwatch.seconds < limits.header_seconds + 5
        for connection in slow:
            connection.close()


def test_a_body_that_comes_steadily_has_all_the_time_it_takes() -> None:
    """Many times the seconds that a silent body has. The first piece comes with the head: only before it the seconds
    are so few that a busy machine could make it late."""
    body = b'{"inputs": "' + b"x" * 900 + b'"}'
    limits = replace(HASTY, body_seconds=0.3, body_rate=100)
    with running(app_for(), limits=limits) as server, server.connect() as connection:
        head = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n" % len(body) + HOST + b"\r\n"
        connection.sendall(head + body[:100])
        for start in range(100, len(body), 100):
            time.sleep(0.15)
            connection.sendall(body[start : start + 100])
        assert statuses(connection.recv(65536)) == [422]  # as long as the model takes is not the point


def test_the_deadline_of_a_body_does_not_run_while_the_server_is_the_slow_one() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)
        size = 0
        while (message := await receive()).get("more_body"):
            size += len(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with running(late, limits=replace(HASTY, body_seconds=0.3)) as server, server.connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n" + HOST + b"\r\n" + b"x" * 200_000)
        assert statuses(connection.recv(65536)) == [200]


def test_an_answer_takes_longer_than_any_deadline_of_a_request() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(2.0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    limits = replace(HASTY, header_seconds=1.0, body_seconds=1.0)
    with running(slow, limits=limits) as server, server.connect() as alone, server.connect() as hurried:
        alone.sendall(REQUEST + b"\r\n")
        hurried.sendall(REQUEST + b"\r\n" + b"GET / HT")  # the beginning of another request does not end it
        assert statuses(alone.recv(65536))[:1] == statuses(hurried.recv(65536))[:1] == [200]


def test_slow_bodies_together_take_no_more_than_their_share_of_memory() -> None:
    """Each is within its limit and in time. Those that began first go, and a body that comes at once gets through."""
    head = b"POST /generate HTTP/1.1\r\nContent-Length: 100000\r\n" + HOST + b"\r\n"
    limits = replace(LIMITS, incomplete_bytes=1_000_000)
    with running(app_for(), limits=limits, payload_limit=100_000) as server:
        slow = [server.connect() for _ in range(40)]
        for connection in slow:
            connection.sendall(head + b"x" * 90_000)
        bodies = server.server.context.bodies
        until(lambda: 0 < bodies.total <= 1_000_000 and len(bodies._held) <= 11, "most are refused")
        with server.connect() as connection:
            body = b'{"inputs": "' + b" " * 50_000 + b'"}'
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nContent-Length: %d\r\n" % len(body) + HOST + b"\r\n" + body)
            assert statuses(connection.recv(1000)) == [200]
        assert [statuses(connection.recv(1000)) for connection in slow[:20]] == [[408]] * 20
        for connection in slow:
            connection.close()
        until(lambda: not bodies.total, "all are forgotten")


# ---- too many connections --------------------------------------------------------------------------------------------


def test_idle_connections_make_room_for_new_ones() -> None:
    """Silent ones, ones that sent half a header, ones that are kept alive: the oldest first, a busy one never."""
    with running(app_for(), limits=replace(LIMITS, max_connections=8)) as server:
        idle = [server.connect() for _ in range(50)]
        for connection in idle:
            with suppress(OSError):
                connection.sendall(REQUEST)
        for _ in range(5):
            with server.connect() as connection:
                connection.sendall(REQUEST + b"\r\n")
                assert statuses(connection.recv(65536)) == [200]
        assert len(server.server.server_state.connections) <= 8
        for connection in idle:
            connection.close()


def test_when_all_are_busy_new_clients_wait_for_one_to_end(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/busy":
            await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with running(busy, limits=replace(LIMITS, max_connections=4)) as server:
        connections = [server.connect() for _ in range(4)]
        for connection in connections:
            connection.sendall(b"GET /busy HTTP/1.1\r\n" + HOST + b"\r\n")
        until(lambda: len(server.server.server_state.tasks) == 4, "all are busy")
        with server.connect() as late:
            late.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            until(lambda: "All connections are in use" in caplog.text, "it is said")
            server.loop.call_soon_threadsafe(go_on.set)
            assert statuses(late.recv(65536)) == [200]
        for connection in connections:
            assert statuses(connection.recv(65536)) == [200]
            connection.close()


class NoDescriptors(socket.socket):
    """A listener whose process has no file descriptors left."""

    num_tried = 0

    def accept(self) -> Any:
        self.num_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_out_of_file_descriptors_the_loop_rests_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "BACK_OFF", 0.05)

    async def run() -> int:
        with NoDescriptors() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            client.connect(listener.getsockname())  # it stays readable all the time
            acceptor = Acceptor(listener, lambda connection: None, lambda: True, lambda: False)
            acceptor.start()
            await asyncio.sleep(0.5)
            acceptor.stop()
            return listener.num_tried

    assert 2 <= asyncio.run(run()) <= 11
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("descriptors", "most"), [(256, 128), (1024, 800), (1 << 20, MAX_CONNECTIONS), (resource.RLIM_INFINITY, 16_384)]
)
def test_connections_are_capped_below_the_descriptors(
    descriptors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))
    limits = ConnectionLimits.of_process()
    assert limits.max_connections == most
    assert descriptors == resource.RLIM_INFINITY or most + limits.max_lingering < descriptors


# ---- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
    ],
)
def test_what_is_not_http_1_costs_a_line_of_log_in_a_while(caplog: pytest.LogCaptureFixture, request_: bytes) -> None:
    with running(app_for()) as server:
        for _ in range(30):
            with server.connect() as connection:
                connection.sendall(request_)
                connection.recv(100)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_what_is_refused_before_a_route_sees_it_costs_a_line_of_log_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(app_for()) as server:
        for _ in range(3):
            with server.connect() as connection:
                connection.sendall(REQUEST + b"X: y\r\n" * (LIMITS.num_headers + 1) + b"\r\n")
                assert statuses(connection.recv(65536)) == [431]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "status 431" in line and f"{LIMITS.num_headers} headers" in line


def test_a_throttled_warning_says_how_many_were_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = ThrottledLog(logging.getLogger("test"), period=60, clock=clock.now)
    for _ in range(100):
        log.warning("again")
    clock.advance(61)
    log.warning("again")
    log.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["again", "again", "another"]
    assert [getattr(record, "fields", None) for record in caplog.records] == [None, {"suppressed": 99}, None]
