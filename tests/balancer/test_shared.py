"""Many requests on one connection to a replica: over real sockets, with applications that do as they are told."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from legato.balancer.answers import ReplicaLost
from legato.balancer.app import Balancer
from legato.balancer.calls import ClientCall
from legato.balancer.forwarding import MAX_LOSSES, Forwarding
from legato.balancer.options import RouteOptions
from legato.balancer.replicas import ReplicaSet, ReplicaUrl
from legato.balancer.replies import Reply
from legato.balancer.shared import LinkedAnswer, SharedConnections
from legato.http.exchange import PACE, ROUTED, WRITE
from legato.http.routed import RouteKey
from legato.http.routes.replica import ReplicaStreams
from legato.http.server import HttpServer
from legato.ipc.multiplexing import (
    DATA,
    LONGEST_ANSWER,
    LONGEST_REQUEST,
    SILENCE_SECONDS,
    STREAMS_PATH,
    WINDOW,
    BrokenFrames,
    FrameReader,
    LinkedRequest,
    frame_header,
)
from legato.ipc.routed import HEAD_HEADER, MARKED
from tests.balancer.test_choice import state
from tests.http.asgi import post

KEY = "a-key-of-the-cluster"
SECONDS = 20.0
# Bytes of an answer that would delay all others if it were one frame.
LONG = 32 * WINDOW + 1
EVENTS = [(b"content-type", b"text/event-stream"), (HEAD_HEADER.encode(), MARKED.encode())]


class FakeServer:
    """A server that speaks HTTP as ours does. Its application answers by path."""

    def __init__(self) -> None:
        self.streams, self.key = ReplicaStreams(), RouteKey(KEY)
        self.num_gone = self.num_upgrades = 0
        self.num_written = self.num_at_once = 0
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.http = HttpServer(self, grace=10, payload_limit=1000)
        self.task = asyncio.create_task(self.http.serve(sockets=[self.listener]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTED] = self.key.read(scope)
        if scope["path"] == STREAMS_PATH:
            self.num_upgrades += 1
            await self.streams(scope, receive, send)
            return
        body = (await receive())["body"]
        self.bodies.append(body)
        self.write_at_once, self.waits = scope[WRITE], scope[PACE]  # of the latest request
        try:
            await getattr(self, scope["path"].strip("/"))(body, receive, send)
        except ConnectionError:
            self.num_gone += 1

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self.num_written += len(data)

    async def echo(self, body: bytes, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"A", b"b")]})
        for number in range(3):
            await asyncio.sleep(0)
            await self._write(send, b"%b%d" % (body, number))
        await self._write(send, b"", more=False)

    async def endless(self, body: bytes, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        raise ConnectionError

    async def long(self, body: bytes, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await self._write(send, bytes(WINDOW // 16))
        await self._write(send, b"", more=False)

    async def long_at_once(self, body: bytes, receive: Receive, send: Send) -> None:
        write = self.write_at_once
        piece = bytes(WINDOW // 16)
        assert not write(piece), "the answer has not begun"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(32):
            if write(piece + piece):
                self.num_at_once += 2 * len(piece)
            else:
                await self._write(send, piece)
                await self._write(send, piece)
        self.num_written += self.num_at_once
        await self._write(send, b"", more=False)

    async def whole(self, body: bytes, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LONG)]})
        await self._write(send, bytes(LONG), more=False)

    async def silent(self, body: bytes, receive: Receive, send: Send) -> None:
        await self.go_on.wait()
        await self.echo(body, receive, send)

    async def wrong(self, body: bytes, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a bug")

    generate = wrong

    async def mute(self, body: bytes, receive: Receive, send: Send) -> None:
        raise RuntimeError("a bug")

    async def generate_stream(self, body: bytes, receive: Receive, send: Send) -> None:
        """Many pieces, and then the server is lost."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for number in range(10):
            await asyncio.sleep(0.001)
            await self._write(send, b":+0=%d\ndata: %d\n\n" % (number, number))
        await self.go_on.wait()
        await self._write(send, b":.0=10\ndata: 10\n\n", more=False)


def serving(test: Callable[[FakeServer, SharedConnections], Awaitable[None]], key: str = KEY) -> None:
    async def main() -> None:
        server = FakeServer()
        shared = SharedConnections("127.0.0.1", server.port, None)
        await until(lambda: server.http.started)
        await shared.open(1, key)
        async with asyncio.timeout(SECONDS):
            await test(server, shared)
        shared.abort_all("the test ends")
        server.http.should_exit = True
        await server.task

    uvloop.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def begin(shared: SharedConnections, path: str, body: bytes = b"") -> LinkedAnswer:
    answer = shared.begin()
    assert answer is not None
    await answer.send(LinkedRequest("POST", path.encode(), [(b"host", b"h")]), body)
    return answer


def test_frames_are_found_however_they_arrive() -> None:
    rng = random.Random(1)
    sent = [(number, DATA, rng.randbytes(rng.choice([0, 1, 9, 300, 5000]))) for number in range(200)]
    stream = b"".join(frame_header(number, kind, len(data)) + data for number, kind, data in sent)
    for longest in (1, 7, 100, 4000, len(stream)):
        found: list[tuple[int, int, bytes]] = []
        reader, position = FrameReader(LONGEST_ANSWER), 0
        while position < len(stream):
            size = rng.randint(1, longest)
            found += reader.feed(stream[position : position + size])
            position += size
        assert found == sent


@pytest.mark.parametrize("frame", [frame_header(1, 99, 1), frame_header(1, DATA, LONGEST_REQUEST + 1)])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(BrokenFrames):
        list(FrameReader(LONGEST_REQUEST).feed(frame))


def test_many_requests_share_a_connection() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        names = [b"request%d-" % number for number in range(50)]
        answers = await asyncio.gather(*(begin(shared, "/echo", name) for name in names))
        assert [(answer.status, answer.header(b"a")) for answer in answers] == [(200, b"b")] * 50
        for answer, name in zip(answers, names, strict=True):
            assert await answer.read_all() == name + b"0" + name + b"1" + name + b"2"
            answer.release()
        assert len(server.http.server_state.connections) == 1

    serving(test)


def test_a_machine_that_is_gone_without_a_word_is_noticed_at_both_ends() -> None:
    """The connection may be idle for hours, and firewalls forget."""

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        (protocol,), (connection,) = server.http.server_state.connections, shared._by_worker.values()
        assert connection._transport is not None
        for transport in (protocol.transport, connection._transport):
            end = transport.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < SILENCE_SECONDS
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE_SECONDS

    serving(test)


def test_who_does_not_know_the_key_gets_no_such_connection() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        assert shared.begin() is None

    serving(test, key="another-key-of-a-cluster")


def test_without_a_connection_to_every_worker_none_is_used() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        assert shared.begin() is not None
        await shared.open(2, KEY)  # of which it has one
        assert shared.begin() is None
        await until(lambda: len(server.http.server_state.connections) == 1)  # those that came in vain are closed

    serving(test)


def test_connections_that_come_in_vain_are_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may send all of them to one worker. With every probe there would be four times as many as workers."""
    monkeypatch.setattr("legato.balancer.shared.FIRST_PAUSE", 30.0)

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        for _ in range(5):
            await shared.open(2, KEY)
        assert server.num_upgrades == 1 + 8
        await shared.open(1, KEY)
        assert shared.begin() is not None

    serving(test)


def test_the_application_learns_that_nobody_waits() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        answer = await begin(shared, "/endless")
        answer.release()
        await until(lambda: server.num_gone == 1)
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"

    serving(test)


def test_a_client_that_reads_slowly_stops_its_own_stream_only() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        slow = await begin(shared, "/long")
        await until(lambda: server.num_written >= WINDOW)
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"
        await asyncio.sleep(0.05)
        assert server.num_written < 2 * WINDOW
        assert len(await slow.read_all()) == 4 * WINDOW

    serving(test)


def test_a_long_answer_leaves_room_for_others() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        long = await begin(shared, "/whole")
        await until(lambda: long._pieces)
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"
        assert sum(map(len, long._pieces)) < 2 * WINDOW
        assert await long.read_all() == bytes(LONG)

    serving(test)


def test_pieces_are_written_at_once_until_the_client_has_to_be_waited_for() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        slow = await begin(shared, "/long_at_once")
        await until(lambda: server.num_at_once > WINDOW)
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"
        assert server.num_at_once < 2 * WINDOW
        assert len(await slow.read_all()) == 4 * WINDOW

    serving(test)


@pytest.mark.parametrize("many", [1, 8])
def test_a_server_is_told_what_was_read_of_streams_that_go_on(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens wait for those before them no longer than until then."""
    monkeypatch.setattr("legato.balancer.shared.MANY_STREAMS", many)

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        woken: list[int] = []
        streaming = asyncio.create_task(begin(shared, "/generate_stream"))
        await until(lambda: server.num_written > 100)
        await until(lambda: not server.waits(partial(woken.append, 1)))
        (connection,) = shared._by_worker.values()
        assert connection._transport is not None
        connection._transport.pause_reading()
        assert server.write_at_once(bytes(100))
        assert server.waits(partial(woken.append, 2))
        await until(lambda: 2 in woken)
        connection._transport.resume_reading()
        await until(lambda: not server.waits(partial(woken.append, 3)))
        server.go_on.set()
        (await streaming).release()

    serving(test)


def test_a_server_that_has_no_streams_is_told_what_was_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count has four bytes."""
    monkeypatch.setattr("legato.balancer.shared.WINDOW", 200)

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        (connection,) = shared._by_worker.values()
        found = []
        for _ in range(10):
            answer = await begin(shared, "/mute")
            answer.release()
            found.append(connection._num_read)
        assert 0 < max(found) < 200

    serving(test)


def test_a_request_of_which_nothing_came_back_may_be_sent_again() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        waiting = asyncio.create_task(begin(shared, "/silent"))
        streaming = await begin(shared, "/endless")
        await until(lambda: len(server.bodies) == 2)
        for connection in list(server.http.server_state.connections):
            connection.transport.abort()
        for answer, is_stale in ((waiting, True), (asyncio.create_task(streaming.read()), False)):
            with pytest.raises(ReplicaLost) as lost:
                await answer
            assert lost.value.is_stale == is_stale
        assert shared.begin() is None
        server.go_on.set()

    serving(test)


def test_streams_of_a_replica_that_hangs_are_not_sent_to_it_again() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        waiting = asyncio.create_task(begin(shared, "/silent"))
        await until(lambda: server.bodies)
        shared.abort_all("no answer to a probe")
        with pytest.raises(ReplicaLost, match="no answer to a probe") as lost:
            await waiting
        assert not lost.value.is_stale
        server.go_on.set()

    serving(test)


def test_a_stream_that_the_server_broke_off_is_lost_and_no_other() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        broken = await begin(shared, "/wrong")
        with pytest.raises(ReplicaLost, match="broke the stream off"):
            await broken.read()
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"

    serving(test)


def test_a_request_that_the_server_fails_at_is_answered_so() -> None:
    """As on a connection of its own. Without an answer the replica would count as lost, and so would all those that the
    request is sent to next."""

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        failed = await begin(shared, "/mute")
        assert (failed.status, await failed.read_all()) == (500, b"Internal Server Error")
        assert await (await begin(shared, "/echo", b"x")).read_all() == b"x0x1x2"

    serving(test)


def test_a_server_that_stops_answers_first() -> None:
    async def test(server: FakeServer, shared: SharedConnections) -> None:
        waiting = asyncio.create_task(begin(shared, "/silent", b"x"))
        await until(lambda: server.bodies)
        server.http.should_exit = True
        await asyncio.sleep(0.2)
        server.go_on.set()
        assert await (await waiting).read_all() == b"x0x1x2"
        await server.task
        assert shared.begin() is None

    serving(test)


def test_a_piece_without_a_mark_ends_its_own_stream_only() -> None:
    """Pieces of all streams arrive at one place, where an exception would close the connection."""
    call = ClientCall.of("POST", "/generate_stream", b"/generate_stream", [], "", b"{}")
    written: list[bytes] = []

    def write(data: bytes) -> bool:
        written.append(data)
        return True

    forwarding = object.__new__(Forwarding)
    forwarding._call = call
    forwarding._reply = cast(Reply, SimpleNamespace(write_at_once=write))
    take = forwarding._sink(is_marked=True)
    assert take is not None
    for wrong in (b"x", b":+no end", b"", b":.0=1\ndata"):
        assert not take([b":+0=1\ndata: 1\n\n", wrong])
    assert (written, call.marks) == ([], [])
    assert take([b":+0=1\ndata: 1\n\n"])
    assert (written, call.marks) == ([b"data: 1\n\n"], [b":+0=1"])


def test_a_replica_that_breaks_a_stream_off_is_not_lost() -> None:
    """It does so when a client does not read: one such client would keep requests from all replicas."""

    async def test(server: FakeServer, shared: SharedConnections) -> None:
        replicas = ReplicaSet(None)
        options = RouteOptions(replica=("http://h:1",), route_key=KEY, probe_interval=60.0, move_timeout=0.1)
        balancer = Balancer(options, replicas)
        replicas.on_join = lambda replica: None
        replicas.update([ReplicaUrl("127.0.0.1", server.port)])
        (replica,) = replicas.all
        replica.found(state(resumes=True), healthy=True)
        await replica.shared.open(1, KEY)
        answer = await post(balancer, "/generate", {})
        assert answer.status == 424 and 1 < len(server.bodies) <= 1 + MAX_LOSSES
        assert replica.is_up and replica.num_losses == 0 and replica.probe_now.is_set()
        replica.shared.abort_all("the test ends")

    serving(test)


def test_a_stream_goes_on_elsewhere_after_what_was_passed_on_without_waking_a_task() -> None:
    """Through a balancer that has a connection of its own to the client: pieces are passed on where they arrive."""

    async def main() -> None:
        servers = [FakeServer(), FakeServer()]
        replicas = ReplicaSet(None)
        options = RouteOptions(replica=("http://h:1",), route_key=KEY, policy="round-robin", probe_interval=60.0)
        balancer = Balancer(options, replicas)
        for server in servers:
            await until(partial(getattr, server.http, "started"))
        replicas.on_join = lambda replica: None
        replicas.update([ReplicaUrl("127.0.0.1", server.port) for server in servers])
        for replica in replicas.all:
            replica.found(state(resumes=True), healthy=True)
            await replica.shared.open(1, KEY)
        listener = socket.create_server(("127.0.0.1", 0))
        front = HttpServer(balancer, grace=10, payload_limit=1000)
        running = asyncio.create_task(front.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"POST /generate_stream HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}")
        received = await asyncio.wait_for(reader.readuntil(b"data: 9\n\n"), SECONDS)
        first = next(server for server in servers if server.bodies)
        second = next(server for server in servers if server is not first)
        second.go_on.set()
        for connection in list(first.http.server_state.connections):
            connection.transport.abort()
        received += await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), SECONDS)
        assert [received.count(b"data: %d\n" % number) for number in range(11)] == [2] * 10 + [1]
        assert b":+" not in received and b":." not in received
        assert second.bodies[0].endswith(b"{}") and len(second.bodies[0]) > 12, "it is told which tokens were sent"
        first.go_on.set()
        writer.close()
        for each in (front, *(server.http for server in servers)):
            each.should_exit = True
        await asyncio.gather(running, *(server.task for server in servers))

    uvloop.run(main())
