"""Connections that are encrypted, and those that only look like it."""

from __future__ import annotations

import http.client
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from legato.common.errors import OptionError
from legato.common.exposure import tls_context
from legato.http.connections.limits import ConnectionLimits
from tests.http.asgi import app_for
from tests.http.test_server import LENGTH, Running, running, until

TIMEOUT = 20.0
BODY = b'{"inputs": "hi", "prompt": "hi"}'
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Signed by itself, for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days=2",
    ]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def server(certificate: tuple[str, str]) -> Iterator[Running]:
    with running(app_for(api_keys=("key",), payload_limit=100_000), payload_limit=100_000, tls=certificate) as server:
        yield server


@pytest.fixture
def client(server: Running, certificate: tuple[str, str]) -> Iterator[http.client.HTTPSConnection]:
    context = ssl.create_default_context(cafile=certificate[0])
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=TIMEOUT, context=context)
    yield connection
    connection.close()


HEADERS = {"Authorization": "Bearer key"}


def test_requests_are_answered_over_one_verified_connection(client: http.client.HTTPSConnection) -> None:
    for path in ("/generate", "/v1/completions", "/generate_stream"):
        client.request("POST", path, BODY, HEADERS)
        response = client.getresponse()
        assert response.status == 200 and response.read()
    assert client.sock is not None
    assert client.sock.version() in ("TLSv1.2", "TLSv1.3")


def test_a_refusal_arrives_although_the_client_is_still_sending(client: http.client.HTTPSConnection) -> None:
    client.request("POST", "/generate", b"x" * 130_000, HEADERS)
    response = client.getresponse()
    assert response.status == 413 and response.read()


def test_an_answer_without_a_length_ends_with_its_connection(server: Running, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    with context.wrap_socket(server.connect(), server_hostname="localhost") as connection:
        head = f"POST /generate_stream HTTP/1.0\r\nAuthorization: Bearer key\r\nContent-Length: {len(BODY)}\r\n\r\n"
        connection.sendall(head.encode() + BODY)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 200 OK" in answer and answer.endswith(b"\n\n")
    until(lambda: not len(server.server.context.lingering), "nothing lingers")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_are_refused(certificate: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """The client may be gone before the server accepts: the warning is what tells that the server is through."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with running(app_for(), tls=certificate) as server:
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(server.connect())
        until(lambda: bool(_warnings(caplog)), "the server warns")
    assert len(_warnings(caplog)) == 1 and "handshake" in _warnings(caplog)[0]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Only what servers say: other tests of this process may have left something that warns when it is collected."""
    ours = [record for record in caplog.records if record.name.startswith("legato.") or "SSL" in record.getMessage()]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def test_whoever_does_not_speak_tls_is_left_and_costs_one_line_of_log(
    certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Plain HTTP, noise, and silence, which has as long as headers have."""
    limits = replace(ConnectionLimits(), header_seconds=0.5)
    with running(app_for(), tls=certificate, limits=limits) as server:
        for said in (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01nonsense" * 9, b""):
            with server.connect() as connection:
                connection.sendall(said)
                assert b"HTTP" not in _rest(connection)
        until(lambda: not server.server._arriving, "nobody is on the way")
    assert len(_warnings(caplog)) == 1 and "handshake" in _warnings(caplog)[0], _warnings(caplog)


def test_silent_clients_make_room_for_others_although_they_are_still_expected_to_speak_tls(
    certificate: tuple[str, str],
) -> None:
    """They have ten seconds for their handshake. Nobody else waits for that, however many they are."""
    context = ssl.create_default_context(cafile=certificate[0])
    limits = replace(ConnectionLimits(), max_connections=4)
    with running(app_for(), tls=certificate, limits=limits) as server:
        silent = [server.connect() for _ in range(20)]
        for _ in range(3):
            connection = server.connect()
            connection.settimeout(5)
            with context.wrap_socket(connection, server_hostname="localhost") as client:
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(65536).startswith(b"HTTP/1.1 ")
        assert len(server.server.context.open) <= 4
        for connection in silent:
            connection.close()
        until(lambda: not server.server._arriving, "nobody is on the way")
        until(lambda: not server.server.context.open and not len(server.server.context.idle), "all are forgotten")


def _rest(connection: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def test_files_that_are_no_certificate_are_named(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "noise").write_text("noise")
    encrypted = tmp_path / "encrypted"
    words = ["openssl", "ec", "-in", key, "-out", str(encrypted), "-aes128", "-passout", "pass:secret"]
    subprocess.run(words, check=True, capture_output=True)
    assert tls_context(None, None) is None
    assert tls_context(cert, key) is not None
    for wrong in [
        (None, key),
        (cert, None),
        (cert, str(tmp_path / "noise")),
        (cert, str(encrypted)),
        (cert, "/nowhere"),
    ]:
        with pytest.raises(OptionError, match="--ssl-certfile"):
            tls_context(*wrong)


def test_a_body_over_tls_is_limited_like_any_other(certificate: tuple[str, str]) -> None:
    limits = replace(ConnectionLimits(), body_seconds=0.5)
    context = ssl.create_default_context(cafile=certificate[0])
    with (
        running(app_for(), tls=certificate, limits=limits) as server,
        context.wrap_socket(server.connect(), server_hostname="localhost") as connection,
    ):
        connection.sendall(LENGTH % 1000 + b"Host: localhost\r\n\r\nxxx")
        assert b" 408 " in connection.recv(65536)
