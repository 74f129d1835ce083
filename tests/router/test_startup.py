"""What clients hear on the port before the model is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop

from legato.common.exposure import tls_context
from legato.router.listening import Listeners
from legato.router.startup import StartupResponder
from tests.http.test_tls import certificate, pytestmark

__all__ = ["certificate", "pytestmark"]


async def get(port: int, path: str = "/startupz", tls: ssl.SSLContext | None = None) -> tuple[int, dict[str, object]]:
    host = None if tls is None else "localhost"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=host)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


def starting(test: Callable[[StartupResponder, Listeners], Awaitable[None]], tls: ssl.SSLContext | None = None) -> None:
    async def main() -> None:
        listeners, responder = Listeners("127.0.0.1", 0, 2), StartupResponder(tls)
        await responder.open(listeners)
        try:
            await asyncio.wait_for(test(responder, listeners), 30)
        finally:
            responder.close()
            listeners.close()

    uvloop.run(main())


def test_every_path_is_answered_with_the_stage_and_its_progress() -> None:
    async def test(responder: StartupResponder, listeners: Listeners) -> None:
        assert (await get(listeners.port))[1]["stage"] == "starting"
        responder.enter("Loading weights", 0.4242)
        for path in ("/startupz", "/health", "/generate"):
            status, body = await get(listeners.port, path)
            assert status == 503
            assert (body["stage"], body["progress"], body["error_type"]) == ("Loading weights", 0.424, "healthcheck")

    starting(test)


def test_what_is_not_accepted_before_the_handover_waits_for_a_worker() -> None:
    async def test(responder: StartupResponder, listeners: Listeners) -> None:
        await get(listeners.port)
        responder.close()
        listeners.listen()
        _, writer = await asyncio.open_connection("127.0.0.1", listeners.port)
        writer.write(b"hello")
        loop = asyncio.get_running_loop()
        accepted = [asyncio.ensure_future(loop.sock_accept(listener)) for listener in listeners.sockets]
        for listener in listeners.sockets:
            listener.setblocking(False)
        done, pending = await asyncio.wait(accepted, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()
        connection, _ = done.pop().result()
        assert await loop.sock_recv(connection, 5) == b"hello"
        connection.close()
        writer.close()

    starting(test)


def test_silent_and_endless_clients_are_dropped() -> None:
    async def test(responder: StartupResponder, listeners: Listeners) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners.port)
        writer.write(b"GET /" + b"x" * 200_000)
        with suppress(ConnectionError):  # it was reset
            assert await reader.read() == b""
        writer.close()
        assert (await get(listeners.port))[0] == 503

    starting(test)


def test_with_a_certificate_it_speaks_tls_and_whoever_does_not_is_left(
    certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(responder: StartupResponder, listeners: Listeners) -> None:
        responder.enter("Loading weights", 0.5)
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners.port)
        writer.write(b"GET /startupz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not (await reader.read()).startswith(b"HTTP/")
        writer.close()
        context = ssl.create_default_context(cafile=certificate[0])
        status, body = await get(listeners.port, "/startupz", context)
        assert (status, body["progress"]) == (503, 0.5)
        await asyncio.sleep(0.1)

    starting(test, tls_context(*certificate))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
