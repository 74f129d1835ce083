"""Runs the scheduler process after start-up: steps and HTTP workers, until a signal or a failure."""

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
from legato.router.adapters import AdapterRegistry
from legato.router.idle_memory import IdleMemory
from legato.router.listening import Listeners
from legato.router.monitoring.dashboard import Dashboard, StepHistory
from legato.router.monitoring.health import HealthMonitor
from legato.router.monitoring.shared_answer import SharedAnswer
from legato.router.port import Port
from legato.router.recovery import Recovery
from legato.router.shards import ShardsLost
from legato.router.step_loop import StepLoop
from legato.router.workers import WorkerProcess, Workers
from legato.telemetry.loop_lag import LoopLag
from legato.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Requests that one worker may number: more than it will ever have.
IDS_PER_WORKER = 1 << 40
# Seconds after the grace period that workers get to write the errors of requests that it ended.
LAST_WORDS = 1.5
SAME_SIGNAL_SECONDS = 1.0


class RouterProcess:
    def __init__(
        self,
        steps: StepLoop,
        recovery: Recovery,
        metrics: Metrics,
        workers: Workers,
        settings: RouterSettings,
        hang_timeout: float,
        history: StepHistory,
        adapters: AdapterRegistry,
    ) -> None:
        self._steps = steps
        self._adapters = adapters
        adapters.on_change = lambda: workers.tell_adapters(adapters.adapters)
        self._health = HealthMonitor(steps, workers, hang_timeout)
        self._recovery = recovery
        self._metrics = metrics
        self._workers = workers
        self._settings = settings
        self._stopping = asyncio.Event()
        self._signalled_at = 0.0
        self._end_requests: Callable[[], object] = lambda: None
        # The metrics of all processes, as text, and the data of the dashboard.
        self.scrape = SharedAnswer(self._render)
        self._observe = SharedAnswer(Dashboard(steps, metrics, workers.figures, history, settings.model_id).render)
        metrics.watch(steps)
        metrics.watch_adapters(adapters.labels, lambda: len(adapters.adapters))

    async def run(self, listeners: Listeners, grace: float) -> None:
        """Until a signal, and then for up to `grace` seconds until every request is answered; then those that are left
        end with an error. Raises if a shard is lost, or workers are again and again."""
        freeze_gc()
        listeners.listen()
        lag = LoopLag(lambda seconds: self._metrics.loop_lag("scheduler", seconds))
        # First of all: a worker that is ready lets clients in while others still get ready, and a step that is planned
        # before the stream to the shards is open is lost, and with it all that follow.
        steps = asyncio.create_task(self._steps.run(self._recover))
        self._end_requests = steps.cancel
        # And this: a worker that hangs while others serve would keep the server from ever being ready.
        health = asyncio.create_task(self._health.run())
        await self._workers.serve(lambda worker, number: self._attach(worker, number, grace))
        url = browser_url(listeners.host, listeners.port, tls=self._settings.ssl_certfile is not None)
        fields = {"model": self._settings.model_id, "address": url, "docs": f"{url}/docs"}
        logger.info(LISTENING, extra={"fields": fields})
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        watch = asyncio.create_task(self._workers.watch())
        trimming = asyncio.create_task(IdleMemory(self._steps).run())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([steps, watch, health, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        trimming.cancel()
        watch.cancel()
        listeners.close()
        lag.stop()
        self._health.drain()
        loop.call_later(grace, steps.cancel)
        await self._workers.drain(grace + LAST_WORDS)
        steps.cancel()
        health.cancel()
        with suppress(asyncio.CancelledError):
            await health
        with suppress(asyncio.CancelledError):
            await watch
        with suppress(asyncio.CancelledError):
            await steps

    async def _recover(self, error: ShardsLost) -> None:
        if self._stopping.is_set():  # the shards are being stopped, too, and nobody starts others
            raise error
        num_requests = self._steps.running + self._steps.queue_size
        await self._recovery(error)
        self._metrics.restarted("shard")
        self._metrics.replayed(num_requests)

    def _on_signal(self, number: signal.Signals) -> None:
        """The second ends all requests now, with an error. Two at once are one: a service manager signals all
        processes of a service, and the launcher passes on what it gets."""
        now = asyncio.get_running_loop().time()
        if not self._stopping.is_set():
            self._signalled_at = now
        elif now - self._signalled_at > SAME_SIGNAL_SECONDS:
            logger.warning("Second %s: ending all requests", number.name)
            self._end_requests()
            asyncio.get_running_loop().call_later(LAST_WORDS, self._workers.kill)
        self._stopping.set()

    def _attach(self, worker: WorkerProcess, number: int, grace: float) -> None:
        def port(send: Callable[[msgspec.Struct], None]) -> Port:
            return Port(self._steps, self.scrape, self._observe, self._drain, send, self._adapters)

        if number >= self._workers.count:  # the first ones have the first numbers
            self._metrics.restarted("http_worker")
        first_id = number * IDS_PER_WORKER + 1
        state, adapters = self._health.state, self._adapters.adapters
        worker.serve(port, msg.Serve(self._steps.limits, self._settings, first_id, grace, state, adapters))

    def _drain(self) -> bytes:
        self._health.drain()
        return msgspec.json.encode({"draining": True, "running": self._steps.running, "queued": self._steps.queue_size})

    async def _render(self) -> bytes:
        return self._metrics.render(await self._workers.figures())
