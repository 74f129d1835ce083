"""A client who asks for much and does not read: cut off when enough waits for it, and nobody else suffers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.integration.client import Client
from tests.integration.processes import Launched, launched, until
from tests.tiny_models import tiny_llama

# More than the buffers of a connection hold, and then more than the router keeps for anybody.
MUCH = 60_000
DROPPED = 'tgi_request_failure{err="dropped"}'
WORDS = "A client reads too slowly"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=2**16)
    with launched(tmp_path_factory.mktemp("slow"), model, "--fake", "--http-workers=1") as server:
        yield server


def ask_for_much(port: int) -> socket.socket:
    """With long events and a small buffer, so that it is over soon."""
    parameters = {"max_new_tokens": MUCH, "ignore_eos": True, "top_n_tokens": 5}
    body = json.dumps({"inputs": "slow", "parameters": parameters}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    head = b"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    chunks = []
    try:
        while chunk := connection.recv(1 << 20):
            chunks.append(chunk)
    except ConnectionError:
        pass
    return b"".join(chunks)


@dataclass(frozen=True)
class Evidence:
    """What came of one client who does not read, beside one who does."""

    read_by_the_slow_one: bytes
    longest_gap: float
    num_tokens_of_the_other: int
    num_dropped: float


@pytest.fixture(scope="module")
def evidence(server: Launched) -> Iterator[Evidence]:
    client = server.client
    dropped = client.metric(DROPPED)
    slow = ask_for_much(server.port)
    until(lambda: client.metric("tgi_batch_current_size") == 1, "the slow one has a row")
    heard = [time.monotonic()]
    while WORDS not in server.log:
        assert heard[-1] - heard[0] < 60, "not cut off within a minute"
        heard += [time.monotonic() for _ in client.stream("quick", max_new_tokens=200, ignore_eos=True)]
    yield Evidence(
        read_by_the_slow_one=rest_of(slow),
        longest_gap=max(later - earlier for earlier, later in pairwise(heard)),
        num_tokens_of_the_other=len(heard) - 1,
        num_dropped=client.metric(DROPPED) - dropped,
    )
    slow.close()


def test_its_answer_breaks_off(evidence: Evidence) -> None:
    assert evidence.read_by_the_slow_one.startswith(b"HTTP/1.1 200")
    assert not evidence.read_by_the_slow_one.endswith(b"0\r\n\r\n")
    assert evidence.read_by_the_slow_one.count(b"data:") < MUCH / 2


def test_others_have_their_tokens_meanwhile(evidence: Evidence) -> None:
    assert evidence.num_tokens_of_the_other % 200 == 0
    assert evidence.longest_gap < 1


def test_log_and_metrics_say_so_once(evidence: Evidence, server: Launched) -> None:
    assert server.log.count(WORDS) == 1
    assert evidence.num_dropped == 1


def test_its_row_and_its_blocks_are_free(evidence: Evidence, server: Launched) -> None:
    client: Client = server.client
    until(lambda: client.metric("tgi_batch_current_size") == 0, "no row is taken")
    assert client.metric("legato_kv_usage") == 0
