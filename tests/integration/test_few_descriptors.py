"""A server that may open 256 files, and thousands of clients that keep their connections."""

from __future__ import annotations

import resource
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Launched, launched

DESCRIPTORS = 256
CLIENTS = 10_000
# Connections that the clients keep at once: several times as many as the server can have.
KEPT = 500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))  # inherited
    try:
        running = launched(tmp_path_factory.mktemp("few"), model, "--fake", "--http-workers=1")
        server = running.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * KEPT)), hard))
    try:
        yield server
    finally:
        running.__exit__(None, None, None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_clients_that_keep_their_connections_are_all_answered(server: Launched) -> None:
    """Those that are idle longest make room, and running streams go on."""
    stream = server.client.stream("a", max_new_tokens=4000, ignore_eos=True)
    events = iter(stream)
    next(events)
    num_lines = server.log.count("\n")
    kept: deque[socket.socket] = deque()
    for _ in range(CLIENTS):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        kept.append(client)
        if len(kept) > KEPT:
            kept.popleft().close()
    (worker,) = [child for child in server.children() if "legato.http.worker" in child.cmdline()]
    assert worker.num_fds() < DESCRIPTORS
    assert server.client.generate("b", max_new_tokens=3)["generated_text"]
    assert sum(1 for _ in events) == 3999
    for client in kept:
        client.close()
    assert server.log.count("\n") - num_lines < 10
    assert server.client.get("/readyz").status == 200
