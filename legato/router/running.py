"""The scheduler's process once the model is ready: steps and workers side by side, until a signal or a loss."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress

import msgspec

from legato.common.gc import freeze_gc
from legato.common.progress import LISTENING
from legato.common.sockets import browser_url
from legato.ipc import messages as msg
from legato.ipc.settings import RouterSettings
from legato.router.listening import Listeners
from legato.router.port import Port
from legato.router.step_loop import StepLoop
from legato.router.workers import WorkerProcess, Workers
from legato.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Requests that one worker may number: more than it will ever have.
IDS_PER_WORKER = 1 << 40
# Seconds after the grace period that workers get to write the errors of requests that it ended.
LAST_WORDS = 1.5


class RouterProcess:
    def __init__(self, steps: StepLoop, metrics: Metrics, workers: Workers, settings: RouterSettings) -> None:
        self._steps = steps
        self._metrics = metrics
        self._workers = workers
        self._settings = settings
        self._stopping = asyncio.Event()
        metrics.watch(steps)

    async def run(self, listeners: Listeners, grace: float) -> None:
        """Until a signal, and then for up to `grace` seconds until every request is answered; then those that are left
        end with an error. Raises if a shard is lost, or workers are again and again."""
        freeze_gc()
        listeners.listen()
        # First of all: a worker that is ready lets clients in while others still get ready, and a step that is planned
        # before the stream to the shards is open is lost, and with it all that follow.
        steps = asyncio.create_task(self._steps.run())
        await self._workers.serve(lambda worker, number: self._attach(worker, number, grace))
        url = browser_url(listeners.host, listeners.port, tls=self._settings.ssl_certfile is not None)
        fields = {"model": self._settings.model_id, "address": url, "docs": f"{url}/docs"}
        logger.info(LISTENING, extra={"fields": fields})
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        watch = asyncio.create_task(self._workers.watch())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([steps, watch, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        watch.cancel()
        listeners.close()
        loop.call_later(grace, steps.cancel)
        await self._workers.drain(grace + LAST_WORDS)
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        with suppress(asyncio.CancelledError):
            await steps

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set() and number == signal.SIGINT:
            self._workers.kill()
        self._stopping.set()

    def _attach(self, worker: WorkerProcess, number: int, grace: float) -> None:
        def port(send: Callable[[msgspec.Struct], None]) -> Port:
            return Port(self._steps, self._scrape, send)

        first_id = number * IDS_PER_WORKER + 1
        worker.serve(port, msg.Serve(self._steps.limits, self._settings, first_id, grace))

    async def _scrape(self) -> bytes:
        return self._metrics.render(await self._workers.figures())
