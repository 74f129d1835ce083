"""One model over two shards, as a person starts them: it answers as over one, and neither shard outlives the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client
from tests.integration.processes import Launched, launched


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("sharded")
    with launched(folder, model, "--num-shard=2", f"--master-port={free_port()}") as running:
        yield running


def greedy_ids(client: Client) -> list[int]:
    events = client.stream("Once upon a time", max_new_tokens=32, ignore_eos=True)
    return [event["token"]["id"] for event in events]


def shard_of(server: Launched, rank: int) -> psutil.Process:
    return next(child for child in server.children() if child.environ().get("RANK") == str(rank))


def test_two_shards_answer_as_one_does(sharded: Launched, client: Client) -> None:
    assert shard_of(sharded, 0) != shard_of(sharded, 1)
    assert greedy_ids(sharded.client) == greedy_ids(client)


def test_shards_restart_together_when_one_dies_and_the_stream_goes_on(sharded: Launched) -> None:
    undisturbed = [event["token"]["id"] for event in sharded.client.stream("a", max_new_tokens=300, ignore_eos=True)]
    before = [shard_of(sharded, rank) for rank in (0, 1)]
    events = iter(sharded.client.stream("a", max_new_tokens=300, ignore_eos=True))
    first = next(events)
    before[1].kill()
    assert [event["token"]["id"] for event in [first, *events]] == undisturbed
    assert not any(shard.is_running() for shard in before)
    assert greedy_ids(sharded.client)


def test_two_servers_that_start_at_once_do_not_meet(tmp_path: Path, model: Path, client: Client) -> None:
    """As they are started without a thought: with the same port for their shards."""
    with ExitStack() as stack:
        servers = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            servers.append(Launched(tmp_path / name, model, "--num-shard=2", "--prometheus-port=0"))
            stack.callback(servers[-1].end)
        for server in servers:
            server.until_logged("Listening on")
        for server in servers:
            assert greedy_ids(server.client) == greedy_ids(client)


def test_a_shard_that_dies_for_good_ends_everything_and_is_named(tmp_path: Path, model: Path) -> None:
    with launched(tmp_path, model, "--num-shard=2", f"--master-port={free_port()}", "--max-restarts=0") as sharded:
        events = iter(sharded.client.stream("a", max_new_tokens=4000, ignore_eos=True))
        next(events)
        shard_of(sharded, 1).kill()
        *_, last = events
        assert last["error_type"] == "generation"
        assert sharded.wait() == 1
        assert sharded.stderr.startswith("error: shard-1 was killed by SIGKILL")
        assert sharded.stderr.count("\n") == 1
        assert sharded.leftovers() == []
