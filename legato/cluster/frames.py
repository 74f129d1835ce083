"""Messages on an authenticated connection: a header of fixed size, then the payload.

Payloads are JSON objects or the bytes of a tensor whose shape the receiver knows. Nothing is unpickled. A message of
another version, out of order, or longer than what is expected ends the link.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from enum import IntEnum
from typing import Any

from legato.cluster import secret
from legato.common.errors import LegatoError

VERSION = 1
_HEADER = struct.Struct("<2sBBIQ")
_MAGIC = b"LF"
HEADER_SIZE = _HEADER.size
# Of messages between launchers, and of the first ones on every link.
MAX_MESSAGE = 1 << 16


class FrameKind(IntEnum):
    JOIN = 1  # a machine, to the first one
    START = 2  # the first one, to all: start the shards of a new group
    BEAT = 3  # both ways, every second
    GONE = 4  # why this end closes the link
    STOP = 5  # the first one, to all: the server ends
    HELLO = 6  # a shard or a relay, to a shard
    WELCOME = 7
    REFUSED = 8
    TENSOR = 9


class BrokenLink(LegatoError):
    """The other end closed the link, fell silent, or sent what is no message."""


class LinkRefused(LegatoError):
    """The other end knows the key and does not want this link; the message says why."""


def header(kind: FrameKind, sequence: int, length: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, sequence & 0xFFFFFFFF, length)


def parse_header(received: bytes | bytearray | memoryview, sequence: int | None, longest: int) -> tuple[FrameKind, int]:
    """Kind and length of the payload."""
    magic, version, kind, found, length = _HEADER.unpack(received)
    if magic != _MAGIC or version != VERSION:
        raise BrokenLink("received data on a connection between machines that is not a message of this version")
    if sequence is not None and found != sequence & 0xFFFFFFFF:
        raise BrokenLink(f"message {found} arrived on a connection between machines, {sequence} was expected")
    if length > longest or kind not in FrameKind._value2member_map_:
        raise BrokenLink(f"a message of kind {kind} with {length} bytes arrived on a connection between machines")
    return FrameKind(kind), length


def message(kind: FrameKind, **fields: Any) -> bytes:
    payload = json.dumps(fields).encode()
    return header(kind, 0, len(payload)) + payload


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    buffer, view = bytearray(count), None
    view = memoryview(buffer)
    loop, filled = asyncio.get_running_loop(), 0
    while filled < count:
        num = await loop.sock_recv_into(sock, view[filled:])
        if num == 0:
            raise BrokenLink("the other end closed the link")
        filled += num
    return bytes(buffer)


async def receive_message(sock: socket.socket) -> tuple[FrameKind, dict[str, Any]]:
    kind, length = parse_header(await receive_exactly(sock, HEADER_SIZE), None, MAX_MESSAGE)
    try:
        fields = json.loads(await receive_exactly(sock, length))
    except ValueError:
        raise BrokenLink("a message on a connection between machines is not JSON") from None
    if not isinstance(fields, dict):
        raise BrokenLink("a message on a connection between machines is not a JSON object")
    return kind, fields


async def send_message(sock: socket.socket, kind: FrameKind, **fields: Any) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, message(kind, **fields))


async def prove_to_caller(sock: socket.socket, key: bytes) -> None:
    """The listener's side. Nothing of the connection is read but the caller's proof. WrongKey, ForeignProtocol."""
    loop, sent = asyncio.get_running_loop(), secret.challenge()
    await loop.sock_sendall(sock, sent)
    reply = await receive_exactly(sock, secret.REPLY_SIZE)
    await loop.sock_sendall(sock, secret.prove_to(key, sent, reply))


async def prove_to_listener(sock: socket.socket, key: bytes) -> None:
    """The caller's side. WrongKey, ForeignProtocol."""
    loop = asyncio.get_running_loop()
    reply, expected = secret.reply_to(key, await receive_exactly(sock, secret.CHALLENGE_SIZE))
    await loop.sock_sendall(sock, reply)
    try:
        received = await receive_exactly(sock, secret.PROOF_SIZE)
    except BrokenLink:
        raise secret.WrongKey("the other end refused the authentication: is --cluster-key the same there?") from None
    secret.check_proof(expected, received)
