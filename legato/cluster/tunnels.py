"""Bytes from one connection to another, both ways, until one of them ends: the router's calls to remote shards."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

CHUNK = 1 << 16


async def pipe(one: socket.socket, other: socket.socket) -> None:
    """Closes both."""
    ways = [asyncio.ensure_future(_copy(one, other)), asyncio.ensure_future(_copy(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        one.close()
        other.close()


async def wait_until_closed(connection: socket.socket) -> None:
    """Of a connection on which nothing is sent."""
    with suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(connection, CHUNK):
            pass


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), bytearray(CHUNK)
    view = memoryview(buffer)
    with suppress(OSError):
        while count := await loop.sock_recv_into(source, view):
            await loop.sock_sendall(target, view[:count])
