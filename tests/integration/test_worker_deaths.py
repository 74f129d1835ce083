"""HTTP workers that die again and again: the others serve on, until it has happened too often."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client import Client, EventStream, at_once
from tests.integration.processes import Launched, launched, until
from tests.integration.test_workers import workers

MAX_RESTARTS = 4


def read(stream: EventStream) -> int:
    """How many tokens came before the end, whichever end that was."""
    num_tokens = 0
    try:
        for _ in stream:
            num_tokens += 1
    except (OSError, AssertionError):
        pass
    return num_tokens


def open_stream(client: Client, number: int) -> EventStream:
    stream = client.stream(f"stream {number}", max_new_tokens=200, ignore_eos=True)
    next(iter(stream))
    return stream


def kill_one(server: Launched) -> None:
    before = workers(server)
    before[0].kill()
    until(lambda: before[0] not in workers(server), "the worker is dead")


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[Launched]:
    with launched(
        tmp_path, model, "--fake", "--fake-step-ms=5", "--http-workers=2", f"--max-restarts={MAX_RESTARTS}"
    ) as server:
        yield server


def test_one_death_after_the_other_ends_the_server_in_words_and_until_then_others_serve(server: Launched) -> None:
    streams = [open_stream(server.client, number) for number in range(16)]
    kill_one(server)
    lengths = at_once([partial(read, stream) for stream in streams])
    assert 0 < lengths.count(199) < 16, f"those of the other worker are complete, and no others\n{server.log}"
    for _ in range(MAX_RESTARTS - 1):
        until(lambda: len(workers(server)) == 2, "there are two workers again")
        kill_one(server)
        assert server.client.get("/health").status == 200
    until(lambda: len(workers(server)) == 2, "there are two workers again")
    assert server.client.metric('legato_restarts{process="http_worker"}') == MAX_RESTARTS
    assert server.process.poll() is None
    until(lambda: len(workers(server)) == 2, "there are two workers again")
    kill_one(server)
    assert server.wait() == 1
    why = rf"HTTP worker \d was killed by SIGKILL; it is not replaced, because --max-restarts is {MAX_RESTARTS} within"
    assert re.fullmatch(rf"error: router exited with code 3: {why} 600 s\n", server.stderr)
    assert server.leftovers() == []
