"""A launcher whose shards and router are small scripts, so that a test can make them do anything."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from legato.common.sockets import free_port

PRELUDE = """\
#!{python}
import json, os, signal, socket, sys, time

journal = open(os.environ["JOURNAL"], "a", buffering=1)

def flag(name, default=None):
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(name + "=")), default)

def say(level, message, **fields):
    entry = {{"timestamp": "2026-01-31T12:00:00.000000Z", "level": level, "message": message}}
    print(json.dumps(entry | {{"target": "fake", "program": "fake", "fields": fields}}), flush=True)

def on_stop(name, behaviour):
    def stop(number, frame):
        journal.write(name + " asked to stop\\n")
        if behaviour == "stubborn":
            return
        if behaviour == "slow":
            time.sleep(0.2)
        if behaviour == "finishes after 1.5 s":
            time.sleep(1.5)
        journal.write(name + " stopped\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, stop)
"""

# What hangs does so for longer than any test waits: its end must be the launcher's doing.
SERVER = """
if sys.argv[1] == "download-weights":
    journal.write("download " + " ".join(sys.argv[2:]) + "\\n")
    say("INFO", "downloading")
    if os.environ.get("FAKE_DOWNLOAD") == "fail":
        sys.exit("error: no such model")
    if os.environ.get("FAKE_DOWNLOAD") == "slow":
        time.sleep(600)
    sys.exit(0)

name = "shard-" + os.environ["RANK"]
behaviour = os.environ.get("FAKE_SHARD")
started_before = name + " started" in open(journal.name).read()
journal.write(f"{name} started {os.getpid()}\\n")
on_stop(name, behaviour)
if behaviour == "die once" and started_before:
    sys.exit("error: no memory")
if behaviour == "hang while it loads" and not started_before:
    os.write(int(os.environ["LEGATO_HEARTBEAT_FD"]), b"\\n")
    time.sleep(600)
if behaviour == "load slowly":
    for _ in range(8):
        os.write(int(os.environ["LEGATO_HEARTBEAT_FD"]), b"\\n")
        time.sleep(0.5)
if behaviour == "crash":
    print("Traceback (most recent call last):", "  in load", "ValueError: bad weights", sep="\\n", file=sys.stderr)
    sys.exit(3)
if behaviour in ("progress", "crash while loading"):
    for percent in range(2, 101, 2):
        say("INFO", "Loading weights", percent=percent)
        time.sleep(0.005)
        if behaviour == "crash while loading" and percent == 50:
            sys.exit("error: bad weights")
    say("INFO", "Weights loaded, " + 30 * "and then some ")
    say("INFO", "Warming up")
    time.sleep(0.3)
    say("INFO", "Warm-up done", kv_blocks=7)
listener = socket.socket(socket.AF_UNIX)
listener.bind(flag("--uds-path") + "-" + os.environ["RANK"])
listener.listen()
say("WARN", "loaded", rank=0)
print("plain words", flush=True)
os.write(int(os.environ["LEGATO_HEARTBEAT_FD"]), b"done\\n")
if behaviour in ("die", "die once"):
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(60)
"""

ROUTER = """
behaviour = os.environ.get("FAKE_ROUTER")
started_before = "router started" in open(journal.name).read()
journal.write(f"router started {os.getpid()}\\n")
on_stop("router", behaviour)
if behaviour == "hang at its start" and not started_before:
    time.sleep(600)
os.write(int(os.environ["LEGATO_HEARTBEAT_FD"]), b"\\n")
while not os.path.exists(flag("--master-shard-uds-path")):
    time.sleep(0.02)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(flag("--port"))))
listener.listen()
say("INFO", "Listening", address="http://0.0.0.0:" + flag("--port"))
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    connection.close()
    if behaviour == "exit":
        sys.exit(0)
"""

# The launcher looks for its programs beside its interpreter.
RUN = "import sys; sys.executable = sys.argv.pop(1); from legato.launcher.cli import main; main()"


class Launched:
    """A running launcher: its log, and what its children wrote down."""

    def __init__(self, process: subprocess.Popen[str], log: Path, journal: Path, socket_path: Path, port: int) -> None:
        self.process = process
        self._log = log
        self._journal = journal
        self.socket_path = socket_path
        self.port = port

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines()

    def pid_of(self, name: str) -> int:
        return next(int(line.split()[-1]) for line in self.journal if line.startswith(f"{name} started"))

    def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened; log so far:\n{self.log}"
            time.sleep(0.01)

    def until_logged(self, words: str) -> None:
        self.until(lambda: words in self.log)

    def until_journal(self, words: str) -> None:
        self.until(lambda: words in "\n".join(self.journal))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    """As it is for tests that somebody starts with nohup; the launcher would inherit that, and heed it."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    return free_port()


@pytest.fixture
def launch(tmp_path: Path, free_port: int) -> Iterator[Callable[..., Launched]]:
    """Start a launcher with the given arguments and environment."""
    for name, body in {"text-generation-server": SERVER, "text-generation-router": ROUTER}.items():
        script = tmp_path / name
        script.write_text(PRELUDE.format(python=sys.executable) + body)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    started: list[Launched] = []

    def start(*args: str, model: str = ".", terminal: bool = False, **environ: str) -> Launched:
        log, journal, socket_path = (tmp_path / name for name in (f"log-{len(started)}", "journal", "shard"))
        journal.touch()
        words = [sys.executable, "-c", RUN, str(tmp_path / "python"), f"--port={free_port}", "--hostname=127.0.0.1"]
        words += [f"--shard-uds-path={socket_path}", f"--model-id={model}", *args]
        environ = {"PATH": os.environ["PATH"], "JOURNAL": str(journal)} | environ
        if terminal:
            process = _on_terminal(words, log, environ)
        else:
            with log.open("w") as out:
                process = subprocess.Popen(words, stdout=out, stderr=subprocess.PIPE, text=True, env=environ)
        started.append(Launched(process, log, journal, socket_path, free_port))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.communicate()


def _on_terminal(words: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Both outputs are a terminal, and what it is sent goes to the log."""
    reader, writer = os.openpty()
    log.touch()
    process = subprocess.Popen(words, stdout=writer, stderr=writer, text=True, env=environ)
    os.close(writer)

    def copy() -> None:
        with log.open("ab", buffering=0) as out, suppress(OSError):  # the end of a terminal is an error
            while chunk := os.read(reader, 1 << 16):
                out.write(chunk)
        os.close(reader)

    threading.Thread(target=copy, daemon=True).start()
    return process
