"""Legato's programs as a person starts them: real processes on a free port, a socket path of their own, a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer

import psutil

from legato.common.sockets import free_port
from tests.integration.client import Client
from tests.stopwatch import Stopwatch

SCRIPTS = Path(sys.executable).parent
# Longer than anything here takes on a busy machine; a test that waits this long has failed.
PATIENCE = 120.0


def until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has waited for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was waited for between the two questions
        return True


def environment(**changes: str) -> dict[str, str]:
    """Ours without variables that are options of some program. Tiny models gain nothing from a second thread."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    return inherited | {"OMP_NUM_THREADS": "1"} | changes


def mentioning(words: str) -> list[psutil.Process]:
    """Living processes with `words` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(words in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class Outcome:
    """How a program that was expected to end by itself did so."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def run(program: str, *arguments: str, **environ: str) -> Outcome:
    stopwatch, words = Stopwatch(), [str(SCRIPTS / program), *arguments]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, env=environment(**environ))
        guard = Timer(PATIENCE, process.kill)
        guard.start()
        _, status, usage = os.wait4(process.pid, 0)
        guard.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = stopwatch.seconds_of(usage.ru_utime + usage.ru_stime)
        out.seek(0)
        err.seek(0)
        return Outcome(process.returncode, out.read(), err.read(), seconds)


class Program:
    """A running program. Its log and what it says on stderr go to files in `folder`, where it also works."""

    def __init__(self, folder: Path, name: str, *arguments: str, **environ: str) -> None:
        self.folder = folder
        self._log, self._stderr = folder / f"{name}.log", folder / f"{name}.stderr"
        words = [str(SCRIPTS / name), *arguments]
        with self._log.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder, env=environment(**environ))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def until_logged(self, words: str) -> None:
        until(lambda: words in self.log or self.process.poll() is not None, f"{words!r} in {self._log.name}")
        assert words in self.log, self.stderr

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Launched(Program):
    """A running `text-generation-launcher`, with a client for it. If it is `exact`, its tokens are transformers'."""

    def __init__(self, folder: Path, model: Path, *arguments: str, exact: bool = True) -> None:
        self.port = free_port()
        self.uds_path = folder / "shard"
        words = [f"--model-id={model}", "--hostname=127.0.0.1", f"--port={self.port}"]
        words += [f"--shard-uds-path={self.uds_path}", *arguments]
        if exact and not any(word.startswith("--dtype") for word in arguments):
            words.append("--dtype=float32")
        super().__init__(folder, "text-generation-launcher", *words)
        self.client = Client(self.port)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def shard(self) -> psutil.Process:
        return next(child for child in self.children() if "serve" in child.cmdline())

    def leftovers(self) -> list[str]:
        """Sockets and processes: there should be none after the end."""
        files = [path.name for path in self.folder.glob("shard*")]
        return files + [" ".join(process.cmdline()) for process in mentioning(str(self.uds_path))]


@contextmanager
def launched(folder: Path, model: Path, *arguments: str, exact: bool = True) -> Iterator[Launched]:
    """A launcher that answers, and is stopped at the end if the test has not done so."""
    server = Launched(folder, model, *arguments, exact=exact)
    try:
        server.until_logged("Listening on")
        yield server
    finally:
        server.end()
