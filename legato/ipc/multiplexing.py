"""Many requests on one connection from a balancer to an HTTP worker.

A connection for each stream costs a system call for each stream and step at both ends. Here all that a step brings is
one write of the server and one read of the balancer. The connection begins as HTTP: GET `STREAMS_PATH` with the route
key and `Upgrade: legato-streams`; after the answer 101 there are frames only:

    balancer   REQUEST  LinkedRequest as MessagePack, its length before it; then the body
               CANCEL   nobody waits for the answer any more
               TAKEN    so many bytes more of the answer have reached the client; as number `CONNECTION`: so many bytes
                        more of the connection were read
    server     HEAD     LinkedHead as MessagePack
               DATA     what one write of the answer has, mark included (`ipc/routed.py`)
               END      the answer is complete
               BROKEN   the server broke it off

A server sends up to `WINDOW` bytes of an answer that are not taken yet: a client that reads slowly stops its own stream
and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout
from struct import error as LayoutError

import msgspec
from msgspec import Struct

STREAMS_PATH = "/replica/streams"
UPGRADE = b"legato-streams"
# In the answer 101: which worker it is.
WORKER_HEADER = b"x-legato-route-worker"

# Number of the stream, kind, length of the payload.
_HEADER = Layout("<IBI")
_COUNT = Layout("<I")
HEADER_SIZE = _HEADER.size
# Longer bodies have a connection of their own, so that no other request waits for them.
LONGEST_BODY = 1 << 20
# A body and its headers, of which there are 64 KB at most.
LONGEST_REQUEST = LONGEST_BODY + (1 << 18)
# One write of an answer: as long as the answer, if it is not a stream.
LONGEST_ANSWER = 1 << 31
# Seconds without a sign of life of the other machine, after which the connection is lost. It may be idle for hours: a
# firewall that forgot it would otherwise let the next request wait for a quarter of an hour.
SILENCE_SECONDS = 20.0
# Bytes of one answer that the client has not taken, and after how many that were taken the server is told.
WINDOW, TAKEN_STEP = 256 << 10, 64 << 10

REQUEST, CANCEL, TAKEN, HEAD, DATA, END, BROKEN = range(1, 8)
# Number that no stream has.
CONNECTION = 0


class LinkedRequest(Struct, array_like=True):
    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]


class LinkedHead(Struct, array_like=True):
    status: int
    headers: list[tuple[bytes, bytes]]


class BrokenFrames(Exception):
    """What arrived is no frame, or too long a one."""


_encode = msgspec.msgpack.Encoder().encode
_request_decoder = msgspec.msgpack.Decoder(LinkedRequest)
_head_decoder = msgspec.msgpack.Decoder(LinkedHead)

frame_header = _HEADER.pack


def request_frame(number: int, request: LinkedRequest, body: bytes) -> bytes:
    head = _encode(request)
    return frame_header(number, REQUEST, _COUNT.size + len(head) + len(body)) + _COUNT.pack(len(head)) + head + body


def read_request(payload: bytes) -> tuple[LinkedRequest, bytes]:
    """BrokenFrames"""
    try:
        end = _COUNT.size + _COUNT.unpack_from(payload)[0]
        return _request_decoder.decode(memoryview(payload)[_COUNT.size : end]), payload[end:]
    except (ValueError, LayoutError) as error:  # msgspec's errors are ValueErrors
        raise BrokenFrames(f"a request cannot be read: {error}") from None


def head_frame(number: int, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    head = _encode(LinkedHead(status, headers))
    return frame_header(number, HEAD, len(head)) + head


def read_head(payload: bytes) -> LinkedHead:
    try:
        return _head_decoder.decode(payload)
    except ValueError as error:
        raise BrokenFrames(f"the head of an answer cannot be read: {error}") from None


def taken_frame(number: int, num_bytes: int) -> bytes:
    return frame_header(number, TAKEN, _COUNT.size) + _COUNT.pack(num_bytes)


def read_taken(payload: bytes) -> int:
    if len(payload) != _COUNT.size:
        raise BrokenFrames("a count of bytes has four bytes")
    found: int = _COUNT.unpack(payload)[0]
    return found


class FrameReader:
    """Frames from the pieces in which they arrive."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        # Bytes without which no frame is complete.
        self._num_needed = HEADER_SIZE

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Number, kind and payload of every frame that is complete now. BrokenFrames."""
        if self._num_waiting + len(data) < self._num_needed:
            self._waiting.append(data)
            self._num_waiting += len(data)
            return
        if self._waiting:
            data = b"".join([*self._waiting, data])
        position, size = 0, len(data)
        while size - position >= HEADER_SIZE:
            number, kind, length = _HEADER.unpack_from(data, position)
            if length > self._longest or not REQUEST <= kind <= BROKEN:
                raise BrokenFrames(f"a frame of kind {kind} with {length} bytes arrived")
            end = position + HEADER_SIZE + length
            if end > size:
                self._num_needed = HEADER_SIZE + length
                break
            yield number, kind, data[position + HEADER_SIZE : end]
            position = end
        else:
            self._num_needed = HEADER_SIZE
        self._waiting = [data[position:]] if position < size else []
        self._num_waiting = size - position
