"""A server that is full says when to come back, whichever worker is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client import Client
from tests.integration.processes import launched, until

PLACES = 3


@pytest.fixture
def client(tmp_path: Path, model: Path) -> Iterator[Client]:
    words = ("--fake", "--fake-step-ms=20", "--http-workers=2", f"--max-concurrent-requests={PLACES}")
    with launched(tmp_path, model, *words) as server:
        yield server.client


def refusal(client: Client) -> int:
    answer = client.post("/generate", {"inputs": "one too many"})
    assert answer.status == 429
    return int(answer.headers["retry-after"])


def test_the_wait_is_longer_when_nothing_has_come_free_for_longer(client: Client) -> None:
    began = time.monotonic()
    streams = [client.stream(f"a {number}", max_new_tokens=3000, ignore_eos=True) for number in range(PLACES)]
    filled = time.monotonic()

    def check_refusal() -> None:
        """It asks for as long as the server has been full. That began while the streams did."""
        least = max(1, math.ceil(time.monotonic() - filled))
        wait = refusal(client)
        assert least <= wait <= max(1, math.ceil(time.monotonic() - began))

    check_refusal()
    time.sleep(2.1)
    for _ in range(8):
        check_refusal()
    for stream in streams:
        stream.hang_up()
    until(lambda: client.metric("tgi_batch_current_size") == 0, "nobody is there")
    assert client.post("/generate", {"inputs": "welcome", "parameters": {"max_new_tokens": 1}}).status == 200
