"""How many replicas there should be, and who is in the directory. Ray itself is in `make test-ray`."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from legato.balancer.discovery import RayDiscovery, discovery_of
from legato.balancer.replicas import ReplicaUrl
from legato.common.errors import OptionError
from legato.ipc.routed import ReplicaState
from legato.ray import directory
from legato.ray.cli import COMMAND, check_launcher, launcher_environment, launcher_words
from legato.ray.directory import ReplicaDirectory
from legato.ray.options import RayOptions
from legato.ray.scaling import QUEUE, USE, QueueAndUsePolicy, measured, wanted
from legato.ray.server import ServerProcess


def state(**changes: object) -> ReplicaState:
    load = dict(running=0, queued=0, max_rows=8, max_requests=100, free_blocks=100, total_blocks=100, block_size=16)
    who = dict(ready=True, draining=False, model_id="m", model_sha=None, version="1", epoch="e")
    return ReplicaState(**who | load | changes)  # type: ignore[arg-type]


def test_use_is_what_is_scarcer_of_memory_and_rows() -> None:
    assert measured(state()) == {QUEUE: 0.0, USE: 0.0}
    assert measured(state(free_blocks=30, running=1)) == {QUEUE: 0.0, USE: pytest.approx(0.7)}
    assert measured(state(free_blocks=90, running=8, queued=5)) == {QUEUE: 5.0, USE: 1.0}


@pytest.mark.parametrize(
    ("queues", "uses", "expected"),
    [
        ([0], [0.0], 1),
        ([0], [0.8], 1),
        ([0], [0.9], 2),
        ([4], [0.5], 1),
        ([9], [0.5], 3),
        ([0, 0], [0.5, 0.5], 2),
        ([0, 0], [0.4, 0.4], 1),
        ([0, 0, 0], [0.0, 0.0, 0.0], 1),
    ],
)
def test_the_number_of_replicas_follows_queues_and_use(queues: list[float], uses: list[float], expected: int) -> None:
    assert wanted(queues, uses, target_queue=4, target_use=0.8) == expected


def test_nothing_changes_before_every_replica_has_said_how_it_is() -> None:
    policy = QueueAndUsePolicy(target_queue=4, target_use=0.8)
    context = SimpleNamespace(aggregated_metrics={}, current_num_replicas=1, target_num_replicas=2)
    assert policy(context)[0] == 2
    context.aggregated_metrics = {QUEUE: {"a": 0.0}, USE: {"a": 0.0}}
    assert policy(context)[0] == 1
    context.current_num_replicas = 2
    assert policy(context)[0] == 2


def test_a_replica_that_is_not_announced_again_leaves_the_directory() -> None:
    now = 0.0
    found = ReplicaDirectory(lambda: now)
    found.announce("http://a:1")
    now = directory.EXPIRY_SECONDS / 2
    found.announce("http://b:1")
    assert found.urls() == ["http://a:1", "http://b:1"]
    now = directory.EXPIRY_SECONDS + 1
    assert found.urls() == ["http://b:1"]
    found.withdraw("http://b:1")
    assert found.urls() == []


@pytest.mark.parametrize("given", ["", "0:2", "3:2", "a", "1:", "1:2:3"])
def test_bounds_of_replicas_must_make_sense(given: str) -> None:
    with pytest.raises(OptionError, match="expected MIN:MAX"):
        RayOptions(replicas=given)


def test_bounds_are_two_numbers_or_one() -> None:
    assert RayOptions(replicas="1:4").bounds == (1, 4) and RayOptions(replicas="3").bounds == (3, 3)


def test_the_launchers_arguments_are_checked_before_anything_is_started() -> None:
    check_launcher(["--quantize=fp8", "--max-total-tokens", "4096"])
    with pytest.raises(OptionError, match="--port after -- : replicas get it from"):
        check_launcher(["--port=80"])
    with pytest.raises(OptionError, match="a replica on one machine"):
        check_launcher(["--nnodes=2"])
    answer = CliRunner().invoke(COMMAND, ["--", "--no-such-flag"], standalone_mode=False)
    assert "--no-such-flag" in str(answer.exception)


def test_replicas_get_the_launchers_variables_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTIZE", "fp8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv("SSL_CERTFILE", "/cert.pem")
    found = launcher_environment()
    assert found["QUANTIZE"] == "fp8" and found["HF_TOKEN"] == "secret"
    assert not found.keys() & {"PORT", "SSL_CERTFILE"}


def test_a_replica_has_as_many_shards_as_were_asked_for() -> None:
    words = launcher_words(RayOptions(model_id="m", tensor_parallel=4), ["--quantize=fp8"])
    assert words[:2] == ["--model-id=m", "--num-shard=4"] and words[-1] == "--quantize=fp8"


def test_without_ray_there_is_a_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    discovery = discovery_of("ray:legato")
    assert isinstance(discovery, RayDiscovery)
    with pytest.raises(OptionError, match=r"pip install 'legato\[ray\]'"):
        discovery.connect()
    with pytest.raises(OptionError, match="expected ray:NAME"):
        discovery_of("ray:")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"no HTTP\r\n\r\n", b""])
def test_half_an_answer_of_a_server_is_none(answer: bytes) -> None:
    """A replica announces itself as long as its server runs, also while a worker that died is being replaced."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        server = object.__new__(ServerProcess)
        server.url, server._key = ReplicaUrl("127.0.0.1", listener.getsockname()[1]), "k"
        with pytest.raises(OSError):
            server.state()
        serving.join()
