"""Several HTTP workers behind one port: they share limits and metrics, and nobody misses one that died."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.integration.client import Client, at_once
from tests.integration.processes import Launched, launched, until

# `make chaos` has more.
NUM_DISCONNECTS = int(os.environ.get("LEGATO_DISCONNECTS", "300"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("workers")
    with launched(folder, model, "--fake", "--fake-step-ms=1", "--http-workers=2") as server:
        yield server


def workers(server: Launched) -> list[psutil.Process]:
    return [child for child in server.children() if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "legato.http.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def num_fds(server: Launched) -> int:
    return sum(child.num_fds() for child in server.children())


def ask(client: Client, number: int) -> str:
    return str(client.generate(f"number {number}", max_new_tokens=8, ignore_eos=True)["generated_text"])


def test_whichever_worker_answers_metrics_are_those_of_all(server: Launched) -> None:
    client = server.client
    before = client.metric("tgi_request_success")
    at_once([partial(ask, client, number) for number in range(20)])
    assert {client.metric("tgi_request_success") for _ in range(10)} == {before + 20}


def test_a_killed_worker_is_replaced_and_gives_everything_back(server: Launched) -> None:
    client = server.client
    answered = client.metric("tgi_request_success")
    streams = [client.stream(f"a {number}", max_new_tokens=3000, ignore_eos=True) for number in range(16)]
    for stream in streams:
        next(iter(stream))
    killed, kept = workers(server)
    killed.kill()
    until(lambda: len(workers(server)) == 2 and killed not in workers(server), "there are two workers again")
    assert kept.is_running()
    for stream in streams:
        stream.hang_up()
    assert [ask(client, 1) for _ in range(8)] == [ask(client, 1)] * 8
    until(lambda: client.metric("tgi_batch_current_size") == 0, "all rows are free")
    assert client.metric("legato_kv_usage") == 0
    assert client.metric("tgi_request_success") >= answered + 9


def test_disconnects_at_random_times_leave_nothing_behind(server: Launched) -> None:
    client, rng = server.client, random.Random(5)
    expected = ask(client, 7)
    until(lambda: client.metric("tgi_batch_current_size") == 0, "the server is idle")
    before = num_fds(server)

    def leave(number: int) -> None:
        path = ("/generate", "/generate_stream")[number % 2]
        body = "prompt " * rng.choice([1, 40, 200])
        connection = client.send(path, body, cut=rng.choice([0] * 9 + [5]), max_new_tokens=500, ignore_eos=True)
        time.sleep(rng.random() * 0.05)
        connection.close()

    for first in range(0, NUM_DISCONNECTS, 50):
        at_once([partial(leave, number) for number in range(first, min(first + 50, NUM_DISCONNECTS))])
    until(lambda: client.metric("tgi_batch_current_size") == client.metric("tgi_queue_size") == 0, "nothing runs")
    until(lambda: client.metric("legato_kv_usage") == 0, "all blocks are free")
    until(lambda: num_fds(server) <= before + 4, "all connections are closed")
    assert ask(client, 7) == expected
