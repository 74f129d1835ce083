"""How a server ends: asked to, killed, or with its shard gone. Each test has a server of its own."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from legato.launcher.processes import SAME_SIGNAL_SECONDS
from tests.integration.client import text_of
from tests.integration.processes import PATIENCE, Launched, launched, until

Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(launched(tmp_path, model, *arguments))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_stream_finish_and_leaves_nothing(start: Start, number: signal.Signals) -> None:
    server = start()
    events = iter(server.client.stream("a", max_new_tokens=400, ignore_eos=True))
    first = next(events)
    server.send(number)
    received = [first, *events]
    assert len(received) == 400
    assert text_of(received) == received[-1]["generated_text"]
    assert server.wait() == 0
    assert server.stderr == ""
    assert server.leftovers() == []


def test_a_signal_to_all_processes_at_once_is_as_gentle_and_nobody_new_is_let_in(start: Start) -> None:
    """As systemd sends it: the shard hears it while the router still needs it."""
    server = start()
    events = iter(server.client.stream("a", max_new_tokens=1000, ignore_eos=True))
    next(events)
    for child in server.children():
        child.terminate()
    server.send(signal.SIGTERM)
    until(lambda: is_refused(server), "new connections are refused")
    assert len(list(events)) == 999
    assert server.wait() == 0
    assert server.stderr == ""
    assert server.leftovers() == []


def test_what_outlasts_the_grace_ends_with_an_error_instead_of_breaking_off(start: Start) -> None:
    server = start("--graceful-termination-timeout=2")
    events = iter(server.client.stream("a", max_new_tokens=4000, ignore_eos=True))
    next(events)
    signalled = time.monotonic()
    server.send(signal.SIGTERM)
    *_, last = events
    assert time.monotonic() - signalled > 2, "the request did not get all of its grace"
    assert last == {
        "error": "Request failed during generation: the server is shutting down",
        "error_type": "generation",
    }
    assert server.wait() == 0
    assert server.stderr == ""


def test_a_signal_between_two_attempts_to_start_the_shard_ends_requests_with_an_error(
    model: Path, tmp_path: Path
) -> None:
    """Nobody starts another one: the grace would be spent waiting."""
    copy = shutil.copytree(model, tmp_path / "copy")
    with launched(tmp_path, copy) as server:
        events = iter(server.client.stream("a", max_new_tokens=4000, ignore_eos=True))
        next(events)
        (copy / "config.json").unlink()
        server.shard().kill()
        server.until_logged("restarting the shards in 2 s")
        signalled = time.monotonic()
        server.send(signal.SIGTERM)
        *_, last = events
        assert last["error_type"] == "generation"
        assert server.wait() == 0
        assert time.monotonic() - signalled < 20
        assert server.leftovers() == []


def is_refused(server: Launched) -> bool:
    try:
        server.client.get("/health")
    except OSError:
        return True
    return False


@pytest.mark.parametrize("hangs", [False, True])
def test_a_killed_launcher_leaves_no_process_behind(start: Start, *, hangs: bool) -> None:
    """Not even an HTTP worker that hangs: it would keep the port."""
    server = start()
    children = server.children()
    workers = [child for child in children if "legato.http.worker" in child.cmdline()]
    assert workers
    if hangs:
        workers[0].suspend()
    server.send(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []


def test_without_restarts_a_dead_shard_ends_the_streams_with_an_error_and_the_launcher_with_its_name(
    start: Start,
) -> None:
    server = start("--max-restarts=0")
    events = iter(server.client.stream("a", max_new_tokens=4000, ignore_eos=True))
    next(events)
    server.shard().kill()
    *_, last = events
    assert last["error_type"] == "generation"
    assert server.wait() == 1
    assert server.stderr.startswith("error: shard-0 was killed by SIGKILL")
    assert server.stderr.count("\n") == 1
    assert server.leftovers() == []


def test_files_that_are_deleted_while_it_runs_are_missed_by_a_restart_alone(tmp_path: Path, model: Path) -> None:
    copied, folder = tmp_path / "copied", tmp_path / "server"
    folder.mkdir()
    shutil.copytree(model, copied)
    with launched(folder, copied, "--fake", "--max-restarts=1") as server:
        shutil.rmtree(copied)
        assert server.client.generate("a", max_new_tokens=3)["generated_text"]
        server.shard().kill()
        assert server.wait() == 1
        assert server.stderr.startswith("error: shard-0 exited with code 1:") and str(copied) in server.stderr
        assert server.leftovers() == []


def test_a_second_signal_ends_everything_now(start: Start) -> None:
    server = start()
    events = iter(server.client.stream("a", max_new_tokens=4000, ignore_eos=True))
    next(events)
    server.send(signal.SIGTERM)
    until(lambda: is_refused(server), "new connections are refused")
    time.sleep(SAME_SIGNAL_SECONDS + 0.1)
    server.send(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert server.leftovers() == []


def test_a_drained_server_finishes_what_runs_and_stays_up(start: Start) -> None:
    server = start()
    events = iter(server.client.stream("a", max_new_tokens=400, ignore_eos=True))
    next(events)
    assert server.client.post("/drain", b"").json() == {"draining": True, "running": 1, "queued": 0}
    until(lambda: server.client.get("/readyz").status == 503, "the server is not ready")
    refused = server.client.post("/generate", {"inputs": "b"})
    assert (refused.status, refused.json()["error_type"]) == (503, "draining")
    assert len(list(events)) == 399
    assert server.client.post("/drain", b"").json()["running"] == 0
    assert server.client.get("/health").status == 200
    server.send(signal.SIGTERM)
    assert server.wait() == 0
