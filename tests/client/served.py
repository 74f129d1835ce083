"""Servers for clients to talk to: the router over a real socket, and one that says what it was told to say."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from tests.http.asgi import FakeBackend
from tests.http.routes.openai.fakes import Server as Application


@dataclass
class Served:
    url: str
    backend: FakeBackend
    _loop: asyncio.AbstractEventLoop

    def go_on(self) -> None:
        """Ends the backend's pause."""
        self._loop.call_soon_threadsafe(self.backend.go_on.set)

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)


@contextmanager
def served(backend: FakeBackend | None = None, **settings: Any) -> Iterator[Served]:
    """The router with a fake backend, in a thread."""
    backend = backend or FakeBackend()
    app = Application(backend, settings=settings).app
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    listener = _listener()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[server.serve(sockets=[listener])], daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", backend, loop)
    finally:
        server.should_exit = True
        thread.join(30)
        loop.close()
        listener.close()


@contextmanager
def canned(answer: bytes, *, hold: bool = False) -> Iterator[tuple[str, list[bytes]]]:
    """Answers one request with these bytes, and hangs up unless it is to `hold`. Shows what it was sent."""
    seen: list[bytes] = []
    release = threading.Event()
    listener = _listener()

    def serve() -> None:
        connection, _ = listener.accept()
        with closing(connection):
            seen.append(connection.recv(65536))
            connection.sendall(answer)
            if hold:
                release.wait(30)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        release.set()
        thread.join(30)
        listener.close()


def unused_url() -> str:
    with closing(_listener()) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
