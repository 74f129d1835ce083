"""The metrics on a port of their own."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from legato.router.monitoring.metrics_listener import MAX_CONNECTIONS, MAX_HEAD_BYTES, metrics_listener
from tests.integration.processes import free_port


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
