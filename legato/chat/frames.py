"""What the router and its template processes say to each other: frames of a kind, a length and that many bytes.

    router  ──SETUP──►    the templates, the special tokens and the limits, once
            ◄──FACTS──    what the templates make of messages, once
            ──RENDER──►   one conversation
            ◄──TEXT───    the prompt, or MISSING or ERROR with a sentence

Towards the process bodies are marshalled Python, which is fast and exact and can hold nothing but plain data. Back come
only text and JSON: a process that ran somebody else's template is not to be trusted with more.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    SETUP = 1
    FACTS = 2
    RENDER = 3
    TEXT = 4
    # The template used something that is not there.
    MISSING = 5
    ERROR = 6


class FrameError(Exception):
    """The other side has hung up, or says something that it never should."""


def send(connection: socket.socket, kind: Kind, body: bytes) -> None:
    try:
        connection.sendall(_HEADER.pack(kind, len(body)) + body)
    except OSError as error:
        raise FrameError(str(error)) from None


def receive(connection: socket.socket, most: int) -> tuple[Kind, bytes]:
    """The next frame, of at most `most` bytes."""
    number, length = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if length > most or number not in Kind.__members__.values():
        raise FrameError(f"a frame of kind {number} with {length} bytes")
    return Kind(number), _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        try:
            chunk = connection.recv(min(length - len(body), 1 << 20))
        except OSError as error:
            raise FrameError(str(error)) from None
        if not chunk:
            raise FrameError("the connection was closed")
        body += chunk
    return bytes(body)
