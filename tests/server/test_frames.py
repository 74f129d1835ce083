"""Bytes that are not gRPC, messages that are not ours: refused, and the shard serves its router as before."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from legato.pb import generate_pb2 as pb
from legato.telemetry.tracing import SERVICE
from tests.server.fake.test_service import answers, decodes, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# Fields that no version of the contract has: a number and 40 MB of bytes.
UNKNOWN = b"\xf8\xff\xff\xff\x0f\x01"
LARGE = b"\xfa\xff\xff\xff\x0f" + b"\x80\xb4\x89\x13" + b"x" * 40_000_000


async def raw(path: Path, data: bytes) -> None:
    """Sent as they are, and left without a word."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(data)
    await asyncio.sleep(0.05)
    connection.close()


async def call(path: Path, method: str, message: bytes) -> grpc.StatusCode:
    """A unary call of any bytes."""
    async with grpc.aio.insecure_channel(f"unix://{path}", options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            await channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=10)  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def stream(path: Path, message: bytes) -> grpc.StatusCode:
    """A stream of steps whose first message is these bytes."""
    async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
        tokens = channel.stream_stream(f"/{SERVICE}/Tokens")([message], timeout=10)  # type: ignore[misc]
        try:
            async for _ in tokens:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def refused(answer: Awaitable[grpc.StatusCode]) -> None:
    assert await answer not in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED)


async def taken(answer: Awaitable[grpc.StatusCode]) -> None:
    assert await answer is grpc.StatusCode.OK


CASES: dict[str, Callable[[Path], Awaitable[None]]] = {
    "noise": lambda path: raw(path, os.urandom(4096)),
    "half a preface": lambda path: raw(path, PREFACE[:10]),
    "half a frame": lambda path: raw(path, PREFACE + SETTINGS + b"\x00\x40\x00\x00\x00\x00\x00\x00\x01half"),
    "a frame of 16 MB": lambda path: raw(path, PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"),
    "no message": lambda path: refused(call(path, "Info", b"\xff\xff\xff\xff")),
    "no message in a stream": lambda path: refused(stream(path, b"\xff\xff\xff\xff")),
    "half a message": lambda path: refused(
        call(path, "PrepareGrammar", pb.PrepareGrammarRequest(grammar="a" * 100).SerializeToString()[:50])
    ),
    "an unknown field": lambda path: taken(call(path, "Health", UNKNOWN)),
    "an unknown field of 40 MB": lambda path: taken(call(path, "Health", LARGE)),
    "an unknown method": lambda path: refused(call(path, "Nothing", b"")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shard_outlives_it(tmp_path: Path, name: str) -> None:
    async def run() -> None:
        path = tmp_path / "shard-0"
        async with serving(path) as shards:
            await CASES[name](path)
            assert await shards.healthy()
            assert [result.error for _, result in await answers(shards, decodes(2, 3))] == [None] * 3

    asyncio.run(run())
