"""A client that hangs up gives everything back, wherever its request is, and nobody else notices."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.integration.client import Client, at_once
from tests.integration.processes import Launched, until

# Takes three quarters of the KV cache, and about a hundred steps to compute.
LONG = 3000
RUNNING, WAITING, KV_USAGE = "tgi_batch_current_size", "tgi_queue_size", "legato_kv_usage"
DECODES = 'tgi_batch_inference_count{method="decode"}'
DROPPED = 'tgi_request_failure{err="dropped"}'


@pytest.fixture(autouse=True)
def everything_is_given_back(client: Client) -> Iterator[None]:
    """Before and after each test: nothing runs, nothing waits, no block is used, and a request is answered as ever."""
    until(lambda: client.metric(RUNNING) == 0, "the server is idle")
    expected = client.generate("as ever", max_new_tokens=20, ignore_eos=True)
    usage = client.metric(KV_USAGE)
    assert usage == 0
    yield
    until(lambda: client.metric(RUNNING) == client.metric(WAITING) == 0, "nothing runs or waits")
    until(lambda: client.metric(KV_USAGE) == usage, "all blocks are given back")
    assert client.generate("as ever", max_new_tokens=20, ignore_eos=True) == expected


def prompt(letter: str, length: int = LONG) -> str:
    return letter * length


def test_while_its_tokens_come(client: Client) -> None:
    dropped = client.metric(DROPPED)
    stream = client.stream("a", max_new_tokens=3000, ignore_eos=True)
    next(iter(stream))
    stream.hang_up()
    until(lambda: client.metric(DROPPED) == dropped + 1, "the request is counted as dropped")


def test_while_its_prompt_is_computed(server: Launched) -> None:
    """The shard stands still until the router knows: otherwise it might compute the whole prompt before."""
    client, shard = server.client, server.shard()
    decodes, dropped = client.metric(DECODES), client.metric(DROPPED)
    shard.suspend()
    try:
        connection = client.send("/generate_stream", prompt("p"), max_new_tokens=500, ignore_eos=True)
        until(lambda: client.metric(RUNNING) == 1, "the request has a row")
        connection.close()
        until(lambda: client.metric(DROPPED) == dropped + 1, "the request is counted as dropped")
    finally:
        shard.resume()
    until(lambda: client.metric(RUNNING) == 0, "the row is free")
    assert client.metric(DECODES) == decodes


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_while_it_waits_behind_a_request_that_goes_on(client: Client, path: str) -> None:
    running = client.stream(prompt("r"), max_new_tokens=1000, ignore_eos=True)
    connection = client.send(path, prompt("w"), max_new_tokens=500, ignore_eos=True)
    until(lambda: client.metric(WAITING) == 1, "the request waits")
    connection.close()
    until(lambda: client.metric(WAITING) == 0, "the request is forgotten")
    assert client.metric(RUNNING) == 1
    assert len(list(running)) == 1000


def test_while_one_whole_answer_is_made(client: Client) -> None:
    decodes = client.metric(DECODES)
    connection = client.send("/generate", "a", max_new_tokens=3000, ignore_eos=True)
    until(lambda: client.metric(DECODES) > decodes + 5, "tokens are generated")
    connection.close()
    until(lambda: client.metric(RUNNING) == 0, "the row is free")
    assert client.metric(DECODES) < decodes + 2900


def test_before_its_body_has_arrived(client: Client) -> None:
    client.send("/generate", "a", cut=5, max_new_tokens=3000).close()


def test_many_at_random_times_while_others_stay(client: Client) -> None:
    rng = random.Random(11)

    def stay(number: int) -> list[int]:
        events = client.stream(f"stay {number}", max_new_tokens=60, ignore_eos=True, do_sample=True, seed=number)
        return [event["token"]["id"] for event in events]

    def leave(number: int, delay: float) -> None:
        path = ("/generate", "/generate_stream")[number % 2]
        connection = client.send(path, prompt("lmnop"[number % 5], 400), max_new_tokens=500, ignore_eos=True)
        time.sleep(delay)
        connection.close()

    alone = [stay(number) for number in range(4)]
    leaving = [partial(leave, number, rng.random() * 0.5) for number in range(16)]
    together = at_once([partial(stay, number) for number in range(4)] + leaving)
    assert together[:4] == alone
