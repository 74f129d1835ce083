"""Resource-limited processes for work on untrusted input: chat templates and grammars.

A thread cannot be stopped, a process can: the kernel ends it when it takes more processor time or memory than it may
have, the request is answered with an error, and the next one gets a new process. A process inherits no file, no secret
of the environment and no interrupt, and ends when the program that started it is gone.

    ConfinedPool ──setup──►    once                         python -m legato.ipc.confined MODULE SECONDS
                 ◄──answer──   that it is ready                 MODULE.start(setup) -> answer, respond
                 ──request──►  as often as one is asked         respond(request) -> answer, within SECONDS
                 ◄──answer──

Frames are a kind, whose meaning is the module's own, a length, and that many bytes.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Final

Answer = tuple[int, bytes]
Respond = Callable[[bytes], Answer]

# What a process needs of our environment: how to find Python's libraries, and the time zone.
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
_HEADER: Final = struct.Struct("<BQ")
_REQUEST: Final = 0


class ProcessEnded(Exception):
    """It broke a limit, or its answer did not come; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(f"{cause} (exit code {exit_code})")
        self.exit_code = exit_code


class _ConnectionLost(Exception):
    """The other side is gone, or says something that it never should."""


# ---- the side that asks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Confinement:
    module: str
    # Of processor time for each request.
    seconds: float
    # After which a process that neither answers nor ends is killed. The limit on its processor time comes first.
    patience: float
    # Bytes of an answer.
    max_answer: int


class ConfinedProcess:
    """One process, for one thread at a time."""

    def __init__(self, confinement: Confinement, setup: bytes) -> None:
        self._max_answer = confinement.max_answer
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(confinement.patience)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # -P: the folder that we were started in has no say in what is imported.
        command = [sys.executable, "-P", "-m", __name__, confinement.module, str(confinement.seconds)]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        self.ready = self.ask(setup)

    def ask(self, request: bytes) -> Answer:
        """ProcessEnded, after which there is no process any more."""
        try:
            _send(self._connection, (_REQUEST, request))
            return _receive(self._connection, self._max_answer)
        except _ConnectionLost as error:
            self.close()
            raise ProcessEnded(self.process.returncode, str(error)) from None

    def close(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


class ConfinedPool:
    """A few processes with the same setup. Threads may ask at once; one more than there are processes waits."""

    def __init__(self, confinement: Confinement, make_setup: Callable[[], bytes], num_processes: int = 2) -> None:
        self._confinement, self._make_setup = confinement, make_setup
        self._free = threading.BoundedSemaphore(num_processes)
        self.idle: deque[ConfinedProcess] = deque()

    def start(self) -> Answer:
        """Starts a process before it is needed. What it said when it was ready; ProcessEnded."""
        process = ConfinedProcess(self._confinement, self._make_setup())
        self.idle.append(process)
        return process.ready

    def ask(self, request: bytes) -> Answer:
        with self._free:
            process = self._idle_process() or ConfinedProcess(self._confinement, self._make_setup())
            answer = process.ask(request)
            self.idle.append(process)
            return answer

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def _idle_process(self) -> ConfinedProcess | None:
        while self.idle:
            process = self.idle.pop()
            if process.process.poll() is None:
                return process
            process.close()
        return None


# ---- the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for our parent, which may still have requests to finish
    start: Callable[[bytes], tuple[Answer, Respond]] = import_module(sys.argv[1]).start
    parent, seconds = socket.socket(fileno=sys.stdin.fileno()), float(sys.argv[2])
    with suppress(_ConnectionLost):  # the parent is gone
        ready, respond = start(_receive(parent)[1])
        _send(parent, ready)
        while True:
            request = _receive(parent)[1]
            with cpu_limit(seconds):
                answer = respond(request)
            _send(parent, answer)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Processor time, so that a busy machine does not matter. Nothing handles the signal: it ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---- frames ---------------------------------------------------------------------------------------------------------


def _send(connection: socket.socket, frame: Answer) -> None:
    kind, body = frame
    try:
        connection.sendall(_HEADER.pack(kind, len(body)) + body)
    except OSError as error:
        raise _ConnectionLost(str(error)) from None


def _receive(connection: socket.socket, most: int = sys.maxsize) -> Answer:
    kind, length = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if length > most:
        raise _ConnectionLost(f"a frame of {length} bytes")
    return kind, _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        try:
            chunk = connection.recv(min(length - len(body), 1 << 20))
        except OSError as error:
            raise _ConnectionLost(str(error)) from None
        if not chunk:
            raise _ConnectionLost("the connection was closed")
        body += chunk
    return bytes(body)


if __name__ == "__main__":
    main()
