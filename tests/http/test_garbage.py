"""Connections and requests that have ended leave nothing for the garbage collector: it holds up all streams while it
looks, for longer the more there is."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket

import pytest
import uvloop

from legato.http.server import HttpServer
from tests.http.asgi import FakeBackend, app_for, until

NUM = 20


def request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


async def read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 ")
    length = re.search(rb"content-length: (\d+)", head)
    await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(int(length[1])))


GOOD, STREAMED = request("/generate", {"inputs": "hello"}), request("/generate_stream", {"inputs": "hello"})
CASES = {
    "an answer": (GOOD, GOOD),
    "a stream": (STREAMED, STREAMED),
    "a refusal": (request("/generate", {"inputs": 1}), request("/nowhere", {})),
    "nothing": (b"",),
    "half a head": (b"POST /generate HTTP/1.1\r\nHo",),
}


@pytest.mark.parametrize("sent", CASES.values(), ids=CASES)
@pytest.mark.parametrize("pause_after", [None, 1], ids=["to the end", "broken off"])
def test_nothing_is_left_of_a_connection(sent: tuple[bytes, ...], pause_after: int | None) -> None:
    async def converse(port: int, backend: FakeBackend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for data in sent:
            num_before = len(backend.requests)
            writer.write(data)
            if data in (GOOD, STREAMED) and pause_after is not None:
                await until(lambda: len(backend.requests) > num_before)  # noqa: B023
                writer.transport.abort()
                break
            if data.endswith(b"}"):
                await read_answer(reader)
        writer.close()

    async def main() -> int:
        backend = FakeBackend(pause_after=pause_after)
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(app_for(backend), grace=5, payload_limit=10_000)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        for _ in range(2):  # what is made once is there then
            await converse(listener.getsockname()[1], backend)
        await asyncio.sleep(0.1)
        gc.collect()
        for _ in range(NUM):
            await converse(listener.getsockname()[1], backend)
        await asyncio.sleep(0.1)
        num_found = gc.collect()
        server.should_exit = True
        await task
        return num_found

    gc.disable()
    try:
        assert uvloop.run(main()) < NUM
    finally:
        gc.enable()
