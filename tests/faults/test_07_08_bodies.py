"""Rows 7 and 8 of the fault table: bodies that are too large or compressed, and what becomes of their connection."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from starlette.types import ASGIApp, Message

from tests.faults.house import AUTHORIZED, PAYLOAD_LIMIT, TIMEOUT, House
from tests.http.asgi import app_for, call

LIMIT = 10_000
SLACK = 64 * 1024
BODY_ROUTES = [
    "/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize", "/chat_tokenize",
    "/invocations", "/vertex", "/v2/models/m/versions/1/infer",
]  # fmt: skip
SMUGGLED = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Endless:
    """A client that never stops sending, in chunks of one size."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk = b"[" * chunk_size
        self.num_read = 0

    async def receive(self) -> Message:
        self.num_read += len(self._chunk)
        return {"type": "http.request", "body": self._chunk, "more_body": True}


async def status_of(app: ASGIApp, path: str, client: Endless, **headers: str) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "http_version": "1.1", "scheme": "http", "headers": encoded, "server": ("test", 80),
    }  # fmt: skip
    await app(scope, client.receive, send)
    return int(sent[0]["status"])


# ---- row 7 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODY_ROUTES)
def test_a_length_over_the_limit_is_refused_unread(path: str) -> None:
    client = Endless(chunk_size=1)
    assert asyncio.run(status_of(app_for(payload_limit=LIMIT), path, client, content_length=str(LIMIT + 1))) == 413
    assert client.num_read == 0


@pytest.mark.parametrize("chunk_size", [1, 1000, SLACK])
@pytest.mark.parametrize("path", BODY_ROUTES)
def test_a_body_without_a_length_is_read_to_the_limit_and_no_further(path: str, chunk_size: int) -> None:
    client = Endless(chunk_size)
    assert asyncio.run(status_of(app_for(payload_limit=LIMIT), path, client)) == 413
    assert LIMIT < client.num_read <= LIMIT + chunk_size


def with_length() -> tuple[bytes, Iterator[bytes]]:
    return b"POST /generate HTTP/1.1\r\nContent-Length: 5000000\r\n", (b"x" * 5000 for _ in range(1000))


def by_single_bytes() -> tuple[bytes, Iterator[bytes]]:
    return b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", (b"1\r\nx\r\n" * 1000 for _ in range(1000))


def by_large_chunks() -> tuple[bytes, Iterator[bytes]]:
    chunk = b"%x\r\n%b\r\n" % (500_000, b"x" * 500_000)
    return b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", (chunk for _ in range(10))


@pytest.mark.parametrize("request_", [with_length, by_single_bytes, by_large_chunks])
def test_the_process_reads_no_more_than_the_limit_64_kilobytes_and_what_was_under_way(
    house: House, request_: Any
) -> None:
    head, pieces = request_()
    before = house.bytes_read()
    answer = house.ask(head, *pieces)
    read = house.bytes_read() - before
    # On the wire a chunk of one byte has six.
    wire = 6 if request_ is by_single_bytes else 1
    assert read <= wire * (PAYLOAD_LIMIT + SLACK)
    assert answer.closed and answer.statuses in ([413], [])  # none if the reset overtook it


@pytest.mark.parametrize("key", [True, False], ids=["413", "401"])
def test_the_refusal_arrives_where_the_client_waits_for_it(house: House, key: bool) -> None:
    answer = house.ask(b"POST /generate HTTP/1.1\r\nContent-Length: 5000000\r\n", key=key)
    assert answer.statuses == [413 if key else 401]
    assert answer.closed == key


@pytest.mark.parametrize(
    ("head", "key"),
    [
        (b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n", True),
        (b"POST /generate HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n", True),
        (b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n", False),
        (b"POST /nowhere HTTP/1.1\r\nContent-Length: %d\r\n", True),
        (b"POST /health HTTP/1.1\r\nContent-Length: %d\r\n", True),
    ],
    ids=["413", "415", "401", "404", "405"],
)
def test_a_body_that_nobody_read_is_not_taken_for_requests(house: House, head: bytes, key: bool) -> None:
    """Of what is in a refused body nothing is answered, whether the connection is closed or kept."""
    size = (PAYLOAD_LIMIT + 50_000) // len(SMUGGLED) * len(SMUGGLED)
    with house.connect() as connection:
        authorized = b"X-Api-Key: canary-api-key-5f1c\r\n" if key else b""
        connection.sendall(head % size + authorized + b"Host: localhost\r\n\r\n")
        time.sleep(0.1)  # the refusal is written before the body comes
        try:
            connection.sendall(SMUGGLED * (size // len(SMUGGLED)))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        except OSError:
            pass
        answers = house.rest_of(connection).statuses
    expected = {"closed": answers[:1], "kept": [*answers[:1], 200]}
    assert answers in expected.values()
    assert answers[:1] in ([413], [415], [401], [404], [405], [])


@pytest.mark.parametrize("status", [401, 413])
def test_the_refusal_arrives_where_the_client_is_still_sending(house: House, status: int) -> None:
    """With a clean end behind it: a reset would destroy it on its way, or in the client's hands."""
    head = b"POST /generate HTTP/1.1\r\nContent-Length: 5000000\r\nHost: localhost\r\n"
    head += b"Connection: close\r\n" if status == 401 else AUTHORIZED
    for number in range(50):
        with house.connect() as connection:
            connection.sendall(head + b"\r\n")
            connection.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(number):
                    connection.send(b"x" * 10_000)
            connection.settimeout(TIMEOUT)
            data = b""
            while chunk := connection.recv(65536):
                data += chunk
        assert data.startswith(b"HTTP/1.1 %d " % status) and data.endswith(b"}")


@pytest.mark.parametrize("size", [1000, 60_000, 190_000])
def test_the_next_request_is_answered_after_a_body_that_nobody_read(house: House, size: int) -> None:
    body = b"x" * size + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = house.ask(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n" % size, body, key=False)
    assert answer.statuses == [401, 200] and answer.closed


# ---- row 8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODY_ROUTES)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "x"])
def test_a_compressed_body_is_refused_unread(path: str, encoding: str) -> None:
    client = Endless(chunk_size=1)
    assert asyncio.run(status_of(app_for(), path, client, content_encoding=encoding)) == 415
    assert client.num_read == 0


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_a_body_that_says_it_is_not_compressed_is_read(encoding: str) -> None:
    body = [b'{"inputs": "hi"}']
    answer = asyncio.run(call(app_for(), "POST", "/generate", body=body, headers={"content-encoding": encoding}))
    assert answer.status == 200


@pytest.mark.parametrize("named", [True, False])
def test_a_bomb_is_never_inflated(named: bool) -> None:
    """A hundred megabytes in a hundred kilobytes, with and without a word of warning."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(100)) + packer.flush()
    assert len(bomb) < 200_000 and gzip.decompress(bomb[:0]) == b""
    process = psutil.Process()
    before = process.memory_info().rss
    headers = {"content-encoding": "gzip"} if named else {}
    answer = asyncio.run(call(app_for(), "POST", "/generate", body=[bomb], headers=headers))
    assert answer.status == (415 if named else 400)
    assert process.memory_info().rss - before < 5_000_000
