"""One model on two machines, two addresses of this one: pipeline stages, a machine that is killed, a stranger.

The same in network namespaces, with slow links and cut ones: `make test-nodes`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.machines import ClusterServer, cluster, loopback
from tests.cluster.test_tls import Authority
from tests.cluster.test_tls import pytestmark as needs_openssl
from tests.integration.client import Client
from tests.integration.processes import run
from tests.integration.test_sharded import greedy_ids

WORDS = ("--dtype=float32", "--pipeline-parallel-size=2", "--max-restarts=50")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ClusterServer]:
    folder = tmp_path_factory.mktemp("machines")
    with cluster(loopback().machines, folder, f"--model-id={model}", *WORDS) as server:
        yield server
    assert [each.name for each in folder.iterdir() if not each.name.endswith(".log")] == []


@pytest.fixture
def remote(machines: ClusterServer) -> Client:
    return Client(urlsplit(machines.url).port or 0)


def test_two_machines_answer_as_one_process_does(remote: Client, client: Client) -> None:
    assert greedy_ids(remote) == greedy_ids(client)


def test_a_stranger_gets_no_further_than_the_challenge(machines: ClusterServer, remote: Client, client: Client) -> None:
    for address, offset in (("127.0.0.1", 0), ("127.0.0.1", 1), ("127.0.0.2", 2)):
        with socket.create_connection((address, machines.master_port + offset), timeout=10) as stranger:
            stranger.sendall(bytes(300))
            received = b""
            try:
                while part := stranger.recv(100):
                    received += part
            except ConnectionResetError:
                pass
            assert len(received) <= 37
    assert greedy_ids(remote) == greedy_ids(client)
    assert "wrong cluster key" in machines.log(0).read_text()


def test_a_machine_is_killed_and_its_streams_go_on(machines: ClusterServer, remote: Client) -> None:
    undisturbed = [event["token"]["id"] for event in remote.stream("a", max_new_tokens=200, ignore_eos=True)]
    events = iter(remote.stream("a", max_new_tokens=200, ignore_eos=True))
    first = next(events)
    machines.kill(1)
    threading.Timer(0.5, machines.start, (1,)).start()
    assert [event["token"]["id"] for event in [first, *events]] == undisturbed


def test_what_a_machine_lacks_is_named(tmp_path: Path, model: Path, machines: ClusterServer) -> None:
    place = (f"--model-id={model}", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--dtype=float32")
    assert "--nnodes needs --cluster-key" in run("text-generation-launcher", *place).stderr
    port = f"--master-port={machines.master_port}"
    wrong = run("text-generation-launcher", *place, port, CLUSTER_KEY="not the key of this cluster")
    assert wrong.code == 1 and "cluster-key" in wrong.stderr


@needs_openssl
def test_machines_with_certificates_answer_as_one_process_does(tmp_path: Path, model: Path, client: Client) -> None:
    """Links of shards, relay and launchers are encrypted, and a machine that is killed comes back."""
    authority = Authority(tmp_path, "cluster")
    cert, key = authority.sign("machine")
    files = (f"--cluster-certfile={cert}", f"--cluster-keyfile={key}", f"--cluster-cafile={authority.file}")
    folder = tmp_path / "machines"
    folder.mkdir()
    with cluster(loopback().machines, folder, f"--model-id={model}", *WORDS, *files) as server:
        remote = Client(urlsplit(server.url).port or 0)
        assert greedy_ids(remote) == greedy_ids(client)
        with socket.create_connection(("127.0.0.2", server.master_port + 2), timeout=10) as stranger:
            stranger.sendall(bytes(300))
            assert b"LGTO" not in stranger.recv(100), "not even the challenge is in the clear"
        undisturbed = [event["token"]["id"] for event in remote.stream("a", max_new_tokens=100, ignore_eos=True)]
        events = iter(remote.stream("a", max_new_tokens=100, ignore_eos=True))
        first = next(events)
        server.kill(1)
        threading.Timer(0.5, server.start, (1,)).start()
        assert [event["token"]["id"] for event in [first, *events]] == undisturbed
