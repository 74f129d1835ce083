"""Processes that die under load are replaced, and streams go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client import JSON, Client, at_once
from tests.integration.processes import Launched, launched, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    """Shared by tests that leave it as they found it, but for the age of its processes."""
    folder = tmp_path_factory.mktemp("recovery")
    with launched(folder, model, "--max-restarts=100", "--http-workers=1") as running:
        yield running


LONG = {"max_new_tokens": 600, "ignore_eos": True}
REQUESTS: dict[str, JSON] = {
    "greedy": {**LONG},
    "seed and penalties": {
        **LONG,
        "do_sample": True,
        "seed": 7,
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
    },
    "top tokens": {**LONG, "top_n_tokens": 3},
    "regex": {**LONG, "grammar": {"type": "regex", "value": "[a-z ]{900,}"}, "ignore_eos": False},
    "stop": {**LONG, "stop": ["never to be found"]},
}


def collect(client: Client, name: str) -> list[JSON]:
    return list(client.stream(f"Once upon a time, {name}", **REQUESTS[name]))


def assert_same(events: list[JSON], expected: list[JSON], name: str) -> None:
    """Tokens and text are equal; logprobs up to what sums in another order make of them."""
    assert "error" not in events[-1], (name, events[-1])
    assert [event["token"]["id"] for event in events] == [event["token"]["id"] for event in expected], name
    assert events[-1]["generated_text"] == expected[-1]["generated_text"], name
    for event, other in zip(events, expected, strict=True):
        assert event["token"]["logprob"] == pytest.approx(other["token"]["logprob"], abs=1e-3), name
        assert [each["id"] for each in event.get("top_tokens", [])] == [
            each["id"] for each in other.get("top_tokens", [])
        ]


def test_streams_go_on_after_their_shard_was_killed_as_if_it_had_not(server: Launched) -> None:
    expected = [collect(server.client, name) for name in REQUESTS]
    pid = server.shard().pid
    streams = [server.client.stream(f"Once upon a time, {name}", **REQUESTS[name]) for name in REQUESTS]
    begun = [[next(events) for _ in range(5)] for events in map(iter, streams)]
    server.shard().kill()
    rest = at_once([partial(list, stream) for stream in streams])
    for name, first, more, undisturbed in zip(REQUESTS, begun, rest, expected, strict=True):
        assert_same([*first, *more], undisturbed, name)
    until(lambda: server.client.get("/health").status == 200, "the server is healthy")
    assert server.shard().pid != pid
