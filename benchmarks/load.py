"""A load of streams that costs little CPU: raw sockets, one epoll, events counted and not parsed. On a small machine it
shares the server's cores."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

READ_SIZE = 1 << 18
# In the text of a token a line break is escaped, so this is always the beginning of an event.
EVENT = b"\ndata:"
# Chunks of events end in empty lines, so this is always the end of an answer.
END = b"\r\n0\r\n\r\n"


def generate_stream(prompt: str, new_tokens: int, *, close: bool = False, **parameters: Any) -> bytes:
    """A request that never ends early."""
    parameters |= {"max_new_tokens": new_tokens, "ignore_eos": True}
    body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    connection = "close" if close else "keep-alive"
    head = f"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Stream:
    """One connection and the answer that it is reading."""

    connection: socket.socket
    rest: bytes = b""
    # When its last events came; 0 before the first of an answer.
    heard_at: float = 0.0


@dataclass
class Counted:
    num_events: int = 0
    num_answers: int = 0
    seconds: float = 0.0
    # Seconds between two deliveries of one stream.
    gaps: list[float] = field(default_factory=list)
    # Streams that have had an event.
    num_begun: int = 0

    @property
    def events_per_second(self) -> float:
        return self.num_events / self.seconds


class Load:
    """Connections that ask again whenever they are answered, or only `once`."""

    def __init__(self, port: int, num_streams: int, requests: Callable[[int], bytes], *, once: bool = False) -> None:
        self._epoll = select.epoll()
        self._requests = (requests(number) for number in count())
        self._once = once
        self._streams: dict[int, Stream] = {}
        for _ in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(next(self._requests))
            self._streams[connection.fileno()] = Stream(connection)
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def run(self, seconds: float, *, gaps: bool = False) -> Counted:
        """Read for so long, or until everything is answered."""
        counted = Counted()
        started = now = time.perf_counter()
        while self._streams and now < started + seconds:
            ready = self._epoll.poll(0.1)
            now = time.perf_counter()
            for number, _ in ready:
                self._read(self._streams[number], now, counted, gaps)
        counted.seconds = now - started
        return counted

    def close(self) -> None:
        for stream in self._streams.values():
            stream.connection.close()
        self._streams.clear()
        self._epoll.close()

    def _read(self, stream: Stream, now: float, counted: Counted, gaps: bool) -> None:
        chunk = stream.connection.recv(READ_SIZE)
        if not chunk:
            raise SystemExit(f"the server hung up after {stream.rest!r}")
        data = stream.rest + chunk
        events = data.count(EVENT)
        if events:
            counted.num_events += events
            if not stream.heard_at:
                counted.num_begun += 1
            elif gaps:
                counted.gaps.append(now - stream.heard_at)
            stream.heard_at = now
        if not data.endswith(END):
            stream.rest = data[1 - len(EVENT) :] if events else data[-64:]
            return
        counted.num_answers += 1
        stream.rest, stream.heard_at = b"", 0.0
        if self._once:
            self._epoll.unregister(stream.connection.fileno())
            del self._streams[stream.connection.fileno()]
            stream.connection.close()
        else:
            stream.connection.sendall(next(self._requests))


def health(port: int) -> Iterator[float]:
    """Seconds that /health takes, each time on a connection of its own."""
    while True:
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=90) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = connection.recv(READ_SIZE)
        if b" 200 " not in answer:
            raise SystemExit(f"/health says {answer!r}")
        yield time.perf_counter() - started
