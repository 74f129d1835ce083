"""A stranger on the cluster's port: refused, logged once, and nothing is handed on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from legato.cluster import secret
from legato.cluster.connecting import MAX_STRANGERS, GuardedListener, LinkTarget, call, connect
from legato.cluster.frames import BrokenLink, FrameKind, LinkRefused, message, send_message

KEY = b"0123456789abcdef"


class Guarded:
    """A listener, and what it has handed over."""

    def __init__(self) -> None:
        self.received: list[tuple[FrameKind, dict[str, Any]]] = []
        self.listener = GuardedListener("127.0.0.1", 0, KEY, self._take)

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def target(self) -> LinkTarget:
        return LinkTarget("127.0.0.1", self.port, KEY)

    async def _take(self, connection: socket.socket, kind: FrameKind, fields: dict[str, Any]) -> None:
        self.received.append((kind, fields))
        if fields.get("rank") == 9:
            await send_message(connection, FrameKind.REFUSED, reason="nine is too many")
        else:
            await send_message(connection, FrameKind.WELCOME)


async def served(listener: GuardedListener, test: Awaitable[None]) -> None:
    serving = asyncio.ensure_future(listener.serve())
    try:
        async with asyncio.timeout(30):
            await test
    finally:
        serving.cancel()


def guarded(test: Callable[[Guarded], Awaitable[None]]) -> Guarded:
    async def run() -> Guarded:
        there = Guarded()
        await served(there.listener, test(there))
        return there

    return asyncio.run(run())


async def say(port: int, data: bytes) -> bytes:
    """What the port answers, until it closes the connection, besides its challenge."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.readexactly(secret.CHALLENGE_SIZE)
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    except ConnectionResetError:  # it was closed with some of our bytes unread
        return b""
    finally:
        writer.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "cluster's port" in record.getMessage()]


def test_who_knows_the_key_gets_in() -> None:
    async def test(there: Guarded) -> None:
        connection = await call(there.target, {"rank": 1})
        connection.close()

    assert guarded(test).received == [(FrameKind.HELLO, {"rank": 1})]


def test_a_refusal_comes_with_its_reason() -> None:
    async def test(there: Guarded) -> None:
        with pytest.raises(LinkRefused, match="nine is too many"):
            await call(there.target, {"rank": 9})

    guarded(test)


def test_a_caller_with_another_key_learns_nothing_and_neither_does_it_accept_such_a_listener() -> None:
    async def test(there: Guarded) -> None:
        with pytest.raises(secret.WrongKey):
            await connect(LinkTarget("127.0.0.1", there.port, b"another key, just as long"))

    assert guarded(test).received == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(range(256)) * 4,
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        message(FrameKind.HELLO, rank=1, group="x", purpose="tunnel"),  # right framing, no key
        secret.challenge() + bytes(32),  # right hello, no proof
        secret.challenge()[:20],  # half a message
    ],
)
def test_a_stranger_gets_no_answer_and_one_line_in_the_log(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(there: Guarded) -> None:
        for _ in range(5):
            assert await say(there.port, data) == b""

    with caplog.at_level(logging.WARNING):
        assert guarded(test).received == []
    assert len(refusals(caplog)) == 1


def test_a_recorded_proof_is_worth_nothing() -> None:
    async def test(there: Guarded) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        reply, expected = secret.reply_to(KEY, await reader.readexactly(secret.CHALLENGE_SIZE))
        writer.write(reply)
        assert await reader.readexactly(secret.PROOF_SIZE) == expected
        writer.close()
        assert await say(there.port, reply) == b""

    guarded(test)


def test_many_silent_connections_do_not_keep_others_out(caplog: pytest.LogCaptureFixture) -> None:
    async def test(there: Guarded) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", there.port) for _ in range(3 * MAX_STRANGERS)]
        (await call(there.target, {"rank": 1})).close()
        ends = [reader.at_eof() or await _is_closed(reader) for reader, _ in silent[: 2 * MAX_STRANGERS]]
        assert all(ends)
        for _, writer in silent:
            writer.close()

    with caplog.at_level(logging.WARNING):
        assert len(guarded(test).received) == 1
    assert len(refusals(caplog)) <= 2


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    await reader.readexactly(secret.CHALLENGE_SIZE)
    return await reader.read(1) == b""


def test_another_version_is_named() -> None:
    challenge = bytearray(secret.challenge())
    challenge[4] += 1
    with pytest.raises(secret.ForeignProtocol, match=r"uses version 2 .* this machine 1"):
        secret.reply_to(KEY, bytes(challenge))


def test_a_message_that_is_too_long_ends_the_link() -> None:
    async def test(there: Guarded) -> None:
        connection = await connect(there.target)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, message(FrameKind.HELLO)[:8] + (1 << 40).to_bytes(8, "little"))
        assert await loop.sock_recv(connection, 1) == b""
        connection.close()

    assert guarded(test).received == []


def test_a_listener_that_closes_at_once_is_not_there() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        with pytest.raises((BrokenLink, OSError)):
            await connect(LinkTarget("127.0.0.1", server.sockets[0].getsockname()[1], KEY))
        server.close()

    asyncio.run(run())
