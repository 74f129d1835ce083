"""Unusual and malformed HTTP/1: the answer of the RFC, never an error of ours, never one request taken for two."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.http.asgi import app_for
from tests.http.test_server import Running, running

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /generate HTTP/1.1\r\n" + HOST
# Whoever misreads the length of the body before it takes this for a request.
SMUGGLED = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
NO_BODY = b"0\r\n\r\n" + SMUGGLED
# Ends every connection that is still open.
LAST = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(app_for()) as server:
        yield server


def statuses(connection: socket.socket) -> list[int]:
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:  # an answer to a malformed request does not wait for the rest
        pass
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def answered(server: Running, request: bytes) -> list[int]:
    """The statuses of all answers to these bytes, and to one request behind them."""
    with server.connect() as connection:
        connection.sendall(request + LAST)
        return statuses(connection)


UNUSUAL: dict[str, tuple[bytes, list[int]]] = {
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", [200]),
    "three in advance": (HEALTH * 3, [200, 200, 200, 200]),
    "HEAD has no body": (b"HEAD /info HTTP/1.1\r\n" + HOST + b"\r\n", [200, 200]),
    "OPTIONS": (b"OPTIONS /generate HTTP/1.1\r\n" + HOST + b"\r\n", [204, 200]),
    "a method that the route has not": (b"PUT /generate HTTP/1.1\r\n" + HOST + b"\r\n", [405, 200]),
    "TRACE": (b"TRACE /generate HTTP/1.1\r\n" + HOST + b"\r\n", [405, 200]),
    "two slashes": (b"GET //health HTTP/1.1\r\n" + HOST + b"\r\n", [404, 200]),
    "dots": (b"GET /../health HTTP/1.1\r\n" + HOST + b"\r\n", [404, 200]),
    "escaped dots": (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", [404, 200]),
    "a NUL in the path": (b"GET /health%00 HTTP/1.1\r\n" + HOST + b"\r\n", [404, 200]),
    "no UTF-8 in the path": (b"GET /%ff%fe HTTP/1.1\r\n" + HOST + b"\r\n", [404, 200]),
    "an absolute URI": (b"GET http://localhost/health HTTP/1.1\r\n" + HOST + b"\r\n", [200, 200]),
    "a body for GET": (HEALTH[:-2] + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, [200, 200]),
}


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
BODY = b'{"inputs": "hi"}'
WITH_LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
# Java's HTTP client asks for HTTP/2 with every request.
UNUSUAL |= {
    "an upgrade": (HEALTH[:-2] + H2C + b"\r\n", [200, 200]),
    "an upgrade and a body": (POST + H2C + WITH_LENGTH, [200, 200]),
    "upgrades in advance": ((POST + H2C + WITH_LENGTH + HEALTH) * 3, [200] * 7),
    "an upgrade and a body in chunks": (
        POST + H2C + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY),
        [200, 200],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_has_the_answer_of_the_rfc(server: Running, name: str) -> None:
    request, expected = UNUSUAL[name]
    assert answered(server, request) == expected


MALFORMED = {
    "an unknown method": b"BREW /generate HTTP/1.1\r\n" + HOST + b"\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + b"Host: other\r\n\r\n",
    "two equal hosts": b"GET /health HTTP/1.1\r\n" + HOST + b"host: localhost\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + NO_BODY,
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + NO_BODY,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx" + SMUGGLED,
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nxxxxx" + SMUGGLED,
    "a negative length": POST + b"Content-Length: -5\r\n\r\n" + SMUGGLED,
    "a length with a sign": POST + b"Content-Length: +5\r\n\r\nxxxxx" + SMUGGLED,
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n" + SMUGGLED,
    "an unknown encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + NO_BODY,
    "an encoding after chunks": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + NO_BODY,
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + NO_BODY,
    "a size that is no number": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n" + SMUGGLED,
    "lines of a chunk without CR": POST + b"Transfer-Encoding: chunked\r\n\r\n0\n\n" + SMUGGLED,
    "a folded header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: a\r\n b\r\n\r\n",
    "CR in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: a\rb\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: a\0b\r\n\r\n",
    "lines without CR": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "bytes beyond ASCII in the path": "GET /hälth HTTP/1.1\r\n".encode() + HOST + b"\r\n",
}

MALFORMED |= {
    f"{name}, and an upgrade": request.replace(POST, POST + H2C)
    for name, request in MALFORMED.items()
    if POST in request
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_refused_and_nothing_behind_it_is_read(server: Running, name: str) -> None:
    assert answered(server, MALFORMED[name]) == [400]
