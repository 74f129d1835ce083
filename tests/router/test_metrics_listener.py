"""The metrics on a port of their own."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from typing import Any

import pytest
import uvloop

from legato.common.exposure import tls_context
from legato.common.sockets import free_port
from legato.router import small_server
from legato.router.monitoring.metrics_listener import MAX_CONNECTIONS, MAX_HEAD_BYTES, metrics_listener
from tests.http.test_tls import certificate, pytestmark

__all__ = ["certificate", "pytestmark"]


async def scrape() -> bytes:
    return b"tgi_queue_size 3.0\n"


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        answer = await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:  # closed before all of the request was read
        answer = b""
    writer.close()
    return answer


def get(path: str = "/metrics", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def test_prometheus_gets_the_metrics_and_nothing_else() -> None:
    async def main() -> None:
        port = free_port()
        async with metrics_listener("127.0.0.1", port, scrape):
            answer = await ask(port, get())
            assert answer.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4")
            assert answer.endswith(b"\r\n\r\ntgi_queue_size 3.0\n")
            assert (await ask(port, get("/generate"))).startswith(b"HTTP/1.1 404 ")
            assert (await ask(port, get().replace(b"GET", b"POST"))).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionRefusedError):
            await ask(port, get())

    asyncio.run(main())


def test_it_needs_a_key_where_the_api_does() -> None:
    async def main() -> None:
        port = free_port()
        async with metrics_listener("127.0.0.1", port, scrape, ("one", "two")):
            assert (await ask(port, get())).startswith(b"HTTP/1.1 401 ")
            assert (await ask(port, get("/metrics", "Authorization: Bearer three"))).startswith(b"HTTP/1.1 401 ")
            assert (await ask(port, get("/metrics", "authorization: bearer two"))).startswith(b"HTTP/1.1 200 ")

    asyncio.run(main())


def test_it_is_encrypted_where_the_api_is(certificate: tuple[str, str]) -> None:
    """Or the key that it needs would be sent in clear text."""

    async def main() -> None:
        port, context = free_port(), ssl.create_default_context(cafile=certificate[0])
        async with metrics_listener("127.0.0.1", port, scrape, ("one",), tls_context(*certificate)):
            request = get("/metrics", "Authorization: Bearer one")
            assert b"HTTP" not in await ask(port, request)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
            writer.write(request)
            assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"tgi_queue_size 3.0\n")
            writer.close()

    uvloop.run(main())


def test_handshakes_are_limited_in_number_and_time(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.router.monitoring.metrics_listener.SECONDS", 0.3)

    async def main() -> None:
        port = free_port()
        async with metrics_listener("127.0.0.1", port, scrape, (), tls_context(*certificate)):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
            assert await asyncio.wait_for(ask(port, b""), 10) == b""  # one too many
            for reader, writer in silent:
                assert await asyncio.wait_for(reader.read(), 10) == b""
                writer.close()
            assert b"HTTP" not in await ask(port, get())

    uvloop.run(main())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    """As they are on the main port."""

    async def main() -> None:
        port = free_port()
        async with metrics_listener("::", port, scrape):
            assert (await ask(port, get())).startswith(b"HTTP/1.1 200 ")

    uvloop.run(main())


def test_without_file_descriptors_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_server, "BACK_OFF", 0.05)
    tries: list[int] = []

    class NoDescriptors(socket.socket):
        def accept(self) -> Any:
            tries.append(1)
            if len(tries) < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def main() -> None:
        async def answer(head: bytes) -> bytes:
            return b"answer"

        listener = NoDescriptors()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = small_server.SmallServer(listener, answer, most=2, max_head=100, seconds=5)
        assert await ask(listener.getsockname()[1], get()) == b"answer"
        server.close()

    uvloop.run(main())
    assert len(tries) <= 8


def test_a_port_in_use_is_a_warning_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            async with metrics_listener("127.0.0.1", port, scrape) as server:
                assert server is None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"127.0.0.1:{port} (--prometheus-port)" in record.message

    asyncio.run(main())


def test_port_zero_means_none() -> None:
    async def main() -> None:
        async with metrics_listener("127.0.0.1", 0, scrape) as server:
            assert server is None

    asyncio.run(main())


def test_long_heads_and_many_connections_are_closed() -> None:
    async def main() -> None:
        port = free_port()
        async with metrics_listener("127.0.0.1", port, scrape):
            assert await ask(port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES)) == b""
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
            assert await ask(port, get()) == b""
            for _, writer in idle:
                writer.close()

    asyncio.run(main())
