"""The addresses of a server: the port of its API, and that of its metrics."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest

from legato.common.sockets import free_port
from tests.integration.processes import launched

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


def status(host: str, port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request(method, path)
    found = connection.getresponse().status
    connection.close()
    return found


def test_all_addresses_of_ipv6_are_those_of_ipv4_too(tmp_path: Path, model: Path) -> None:
    metrics = free_port()
    words = ("--fake", "--http-workers=2", "--hostname=::", f"--prometheus-port={metrics}")
    with launched(tmp_path, model, *words) as server:
        assert f"Listening on http://[::1]:{server.port}" in server.log
        for host in ("127.0.0.1", "::1"):
            assert status(host, server.port, "GET", "/health") == 200
            assert status(host, metrics, "GET", "/metrics") == 200
        # Programs of this machine, whichever way they come.
        assert [status(host, server.port, "POST", "/drain") for host in ("127.0.0.1", "::1")] == [200, 200]
