"""The port: bound before anything slow, listened on once the model is ready, left when everybody has been served."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from legato.common.errors import EndpointInUse
from legato.router.backend import Backend

# Connections that wait to be accepted; uvicorn's own figure.
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Bound but not listening: clients are refused until the model is ready."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _naming_the_flags(host, port):
        listener.bind((host, port))
    return listener


def listen(listener: socket.socket) -> None:
    """Two programs may bind a port that neither listens on. The second one to listen learns of it here."""
    with _naming_the_flags(*listener.getsockname()[:2]):
        listener.listen(BACKLOG)


async def serve_http(app: ASGIApp, backend: Backend, listener: socket.socket, grace: float) -> None:
    """Until a signal, and then for up to `grace` seconds until every request is answered. Raises if a shard is lost."""
    steps = asyncio.create_task(backend.run())
    server = HttpServer(app, grace, on_deadline=steps.cancel)
    # uvicorn takes these signals while it serves and raises them once more when it is done: they must not kill us then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait([steps, http], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True  # if the steps ended first, all requests have been told: let them say so and leave
    await http
    steps.cancel()
    with suppress(asyncio.CancelledError):
        await steps


class HttpServer(uvicorn.Server):
    """uvicorn cuts off what has not finished in time. A second before that we end it in words: with an error."""

    def __init__(self, app: ASGIApp, grace: float, on_deadline: Callable[[], object]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                # Typed as whole seconds, used as a number.
                timeout_graceful_shutdown=max(0.5, grace - 0.5),  # type: ignore[arg-type]
                timeout_keep_alive=75,
                server_header=False,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )
        self._loop = asyncio.get_running_loop()
        self._patience = max(0.0, grace - 1.5)
        self._on_deadline = on_deadline

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._patience, self._on_deadline)


@contextmanager
def _naming_the_flags(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EndpointInUse(f"cannot listen on {host}:{port} (--hostname, --port): {error.strerror}") from None
