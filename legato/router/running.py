"""The scheduler's process once the model is ready: steps and workers side by side, until a signal or a loss."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress

import msgspec

from legato.common.garbage import freeze_gc
from legato.ipc import messages as say
from legato.ipc.settings import RouterSettings
from legato.router.backend import Backend
from legato.router.listening import Listeners
from legato.router.permits import PermitPool
from legato.router.port import Port
from legato.router.workers import Worker, Workers
from legato.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Requests that one worker may number: more than it will ever have.
IDS_PER_WORKER = 1 << 40
# Seconds before the end of the grace at which running requests are ended, and at which workers are.
FAREWELL, KILL = 1.5, 0.25


class Router:
    def __init__(self, backend: Backend, metrics: Metrics, workers: Workers, settings: RouterSettings) -> None:
        self._backend = backend
        self._metrics = metrics
        self._workers = workers
        self._settings = settings
        self._permits = PermitPool(settings.max_concurrent_requests)
        self._stopping = asyncio.Event()
        metrics.watch(backend)

    async def run(self, listeners: Listeners, grace: float) -> None:
        """Until a signal, and then for up to `grace` seconds until every request is answered. Raises if a shard is
        lost, or workers are again and again."""
        freeze_gc()
        listeners.listen()
        # First of all: a worker that is ready lets clients in while others still get ready, and a step that is planned
        # before somebody takes it to the shards is lost, and with it all that follow.
        steps = asyncio.create_task(self._backend.run())
        await self._workers.serve(lambda worker, number: self._employ(worker, number, grace))
        logger.info("Listening", extra={"fields": {"address": f"http://{listeners.host}:{listeners.port}"}})
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        watch = asyncio.create_task(self._workers.watch())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([steps, watch, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watch.cancel()
        listeners.close()
        loop.call_later(max(0.0, grace - FAREWELL), steps.cancel)
        await self._workers.drain(max(0.5, grace - KILL))
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        with suppress(asyncio.CancelledError):
            await steps

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set() and number == signal.SIGINT:
            self._workers.kill()
        self._stopping.set()

    def _employ(self, worker: Worker, number: int, grace: float) -> None:
        def port(send: Callable[[msgspec.Struct], None]) -> Port:
            return Port(self._backend, self._permits, self._scrape, send)

        first_id = number * IDS_PER_WORKER + 1
        worker.serve(port, say.Serve(self._backend.limits, self._settings, first_id, grace))

    async def _scrape(self) -> bytes:
        return self._metrics.render(await self._workers.figures())
