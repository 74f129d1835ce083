"""Servers whose log nobody reads, or whose standard streams are closed, serve on."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client
from tests.integration.processes import PATIENCE, SCRIPTS, environment, until

F_SETPIPE_SZ = 1031


class Logging:
    """A launcher that writes its log to `out`."""

    def __init__(self, folder: Path, model: Path, out: int | None, redirect: str = "") -> None:
        self.client = Client(free_port())
        words = f"--model-id={model} --hostname=127.0.0.1 --port={self.client.port} --prometheus-port=0"
        words += f" --http-workers=1 --shard-uds-path={folder}/shard"
        command = f'exec "{SCRIPTS}/text-generation-launcher" {words} {redirect}'
        self.process = subprocess.Popen(["sh", "-c", command], stdout=out, stderr=out, env=environment())
        until(lambda: self.is_healthy or self.process.poll() is not None, "the server is healthy")
        assert self.process.poll() is None

    @property
    def is_healthy(self) -> bool:
        try:
            return self.client.get("/health").status == 200
        except OSError:
            return False

    def kill_shard(self, last_words: str) -> None:
        children = psutil.Process(self.process.pid).children()
        shard = next(child for child in children if "serve" in child.cmdline())
        Path(f"/proc/{shard.pid}/fd/2").write_text(last_words)
        shard.kill()
        until(lambda: not self.is_healthy, "the shard is missed")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Logging]]:
    started: list[Logging] = []

    def begin(out: int | None, redirect: str = "") -> Logging:
        started.append(Logging(tmp_path, model, out, redirect))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@contextmanager
def pipe(*, read: bool) -> Iterator[int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    if not read:
        os.close(reading)
    yield writing
    os.close(writing)
    if read:
        os.close(reading)


def serve_many(server: Logging) -> None:
    for number in range(250):
        assert server.client.generate("a", max_new_tokens=1)["generated_text"] is not None, number


@pytest.mark.parametrize("stopped", ["the reader of the log", "the launcher"])
def test_a_log_that_is_not_read_stops_no_request(start: Callable[..., Logging], stopped: str) -> None:
    """More lines than the pipes between worker, launcher and reader hold."""
    with pipe(read=True) as out:
        server = start(out)
        if stopped == "the launcher":
            server.process.send_signal(signal.SIGSTOP)
        serve_many(server)
        server.process.send_signal(signal.SIGCONT)
        assert server.is_healthy
        assert server.stop() == 0


def test_a_shard_is_replaced_although_nobody_reads_of_its_end(start: Callable[..., Logging]) -> None:
    """`text-generation-launcher … 2>&1 | head -1`"""
    with pipe(read=False) as out:
        server = start(out)
        server.kill_shard("several lines\nof a traceback\n")
        until(lambda: server.is_healthy, "the server is healthy again")
        assert server.stop() == 0


def test_a_server_without_standard_streams_serves_and_replaces_its_shard(start: Callable[..., Logging]) -> None:
    server = start(None, "<&- >&- 2>&-")
    server.kill_shard("")
    until(lambda: server.is_healthy, "the server is healthy again")
    assert server.stop() == 0
