"""`legato ray` on this machine, with the default model: Ray is started by the command itself.

`make test-ray`: in an environment of its own that begins empty, with Ray from the package index.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from legato.common.sockets import free_port

HOST = "127.0.0.1"
# Two replicas on a machine that may have two cores.
PATIENCE = 240.0
QUESTION = [{"role": "user", "content": "Write a story about a lighthouse."}]
TOKENS = 96
# In the environment of all that a server starts.
MARK = "LEGATO_CHECK_RAY"


class RayServer:
    def __init__(self, folder: Path, *words: str) -> None:
        self.port = free_port()
        command = [str(Path(sys.executable).with_name("legato")), "ray", f"--hostname={HOST}", f"--port={self.port}"]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            env = {**os.environ, MARK: str(self.port)}
            self.process = subprocess.Popen([*command, *words], stdout=log, stderr=log, cwd=folder, env=env)
        self.client = OpenAI(base_url=f"http://{HOST}:{self.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    @property
    def replicas(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/replicas", timeout=30) as answer:
            return [each for each in json.load(answer) if each["available"]]

    def actors(self) -> list[psutil.Process]:
        """Of Ray Serve, one for each replica."""
        named = psutil.process_iter(["cmdline", "ppid"])
        return [each for each in named if "".join(each.info["cmdline"] or ()).startswith("ray::ServeReplica:legato")]

    def left(self) -> list[str]:
        """What still runs of all that was started."""
        return [each.name() for each in psutil.process_iter() if _environ(each).get(MARK) == str(self.port)]

    def ask(self, _: int = 0) -> str:
        """A story, as it was streamed."""
        stream = self.client.chat.completions.create(
            model="m",
            messages=QUESTION,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def until(self, is_so: Callable[[], bool], what: str) -> float:
        """Returns the seconds that it took."""
        start = time.monotonic()
        while time.monotonic() < start + PATIENCE:
            assert self.process.poll() is None, f"legato ray ended:\n{self.log.read_text()[-4000:]}"
            try:
                if is_so():
                    return time.monotonic() - start
            except OSError:  # it does not listen yet
                pass
            time.sleep(0.25)
        raise AssertionError(f"{what}: not within {PATIENCE:g} s\n{self.log.read_text()[-4000:]}")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A Ray cluster of one machine, which is not the command's own. Its address."""
    address = f"{HOST}:{free_port()}"
    words = ["start", "--head", "--block", f"--node-ip-address={HOST}", f"--port={address.split(':')[1]}"]
    words += ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    with (folder / "ray").open("wb") as log:
        head = subprocess.Popen([str(Path(sys.executable).with_name("ray")), *words], stdout=log, stderr=log)
    try:
        yield address
    finally:
        head.terminate()  # and it ends the processes that it started
        head.wait(PATIENCE)


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[RayServer]:
    server = RayServer(folder, *words)
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0, server.log.read_text()[-4000:]
        deadline = time.monotonic() + 10
        while (left := server.left()) and time.monotonic() < deadline:
            time.sleep(0.25)
        assert not left
    finally:
        if server.process.poll() is None:
            server.process.kill()  # Ray's processes die with it
            server.process.wait()


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # somebody else's, or gone
        return {}


def test_two_replicas_answer_openais_client_and_streams_survive_the_death_of_one(tmp_path: Path) -> None:
    with serving(tmp_path, "--replicas=2", "-g", "5") as server:
        seconds = server.until(lambda: len(server.replicas) == 2, "two replicas")
        expected = server.ask()
        assert len(expected) > 100
        (victim, _), urls = server.actors(), {each["url"] for each in server.replicas}
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(server.ask, number) for number in range(4)]
            server.until(lambda: all(each["active"] for each in server.replicas), "streams at both")
            time.sleep(0.5)
            os.kill(victim.pid, signal.SIGKILL)
            answers = [stream.result() for stream in streams]
        assert answers == [expected] * 4
        again = server.until(lambda: len({each["url"] for each in server.replicas} - urls) == 1, "a new replica")
        server.until(lambda: len(server.replicas) == 2, "two replicas")
        assert server.ask() == expected
        print(f"two replicas after {seconds:.0f} s; a new one {again:.0f} s after the streams of the killed one")


def test_the_number_of_replicas_follows_the_load(tmp_path: Path) -> None:
    delays = ("--scale-up-delay=2", "--scale-down-delay=5", "--target-queue=2")
    with serving(tmp_path, "--replicas=1:2", *delays, "-g", "5", "--", "--max-batch-size=1") as server:
        server.until(lambda: len(server.replicas) == 1, "one replica")
        is_over = False

        def client(number: int) -> int:
            count = 0
            while not is_over:
                assert server.ask(number)
                count += 1
            return count

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client, number) for number in range(8)]
            try:
                up = server.until(lambda: len(server.replicas) == 2, "a second replica under load")
                server.until(lambda: all(each["requests"] for each in server.replicas), "requests at both")
            finally:
                is_over = True
            assert sum(each.result() for each in clients) >= 8
        down = server.until(lambda: len(server.replicas) == 1, "one replica without load")
        assert server.ask()
        print(f"1 to 2 replicas in {up:.0f} s, back in {down:.0f} s")


def test_a_cluster_that_runs_is_used_and_left_and_other_balancers_find_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster
    with cluster(tmp_path) as address:
        words = (f"--ray-address={address}", "--replicas=1", "--name=mine", "-g", "5", "--", "--fake")
        deadline = time.monotonic() + PATIENCE
        while b"Ray runtime started" not in (tmp_path / "ray").read_bytes():
            assert time.monotonic() < deadline, (tmp_path / "ray").read_text()
            time.sleep(0.25)
        with serving(tmp_path, *words) as server:
            server.until(lambda: len(server.replicas) == 1, "a replica")
            other = elsewhere(tmp_path, address, server)
            assert other == [each["url"] for each in server.replicas]
        with serving(tmp_path, *words) as again:
            again.until(lambda: len(again.replicas) == 1, "a replica, the second time")
            assert again.ask()


def elsewhere(folder: Path, address: str, server: RayServer) -> list[str]:
    """The replicas that `legato route --discover ray:mine` finds."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("legato")), "route", "--discover=ray:mine", f"--port={port}"]
    env = {**os.environ, "RAY_ADDRESS": address}
    with (folder / "route").open("wb") as log:
        route = subprocess.Popen([*command, f"--hostname={HOST}"], stdout=log, stderr=log, env=env)
    found: list[str] = []

    def has_replicas() -> bool:
        with urllib.request.urlopen(f"http://{HOST}:{port}/replicas", timeout=30) as answer:
            found[:] = [each["url"] for each in json.load(answer) if each["available"]]
        return bool(found)

    try:
        server.until(has_replicas, "a replica of the other balancer")
    finally:
        route.terminate()
        route.wait(PATIENCE)
    return found
