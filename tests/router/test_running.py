from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from legato.ipc.messages import ServerState
from legato.router.adapters import AdapterRegistry
from legato.router.listening import Listeners
from legato.router.monitoring.dashboard import StepHistory
from legato.router.running import RouterProcess
from legato.router.workers import WorkerProcess
from legato.telemetry.metrics import Figures, Metrics
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend


@dataclass
class Steps(FakeBackend):
    """A backend that knows whether anybody takes its steps to the shards."""

    are_taken: bool = False
    is_healthy: bool = True
    is_live: bool = True
    is_idle: bool = False
    is_restarting: bool = False
    step_age: float = 0.0

    def prove(self) -> None: ...

    async def run(self, recover: object = None) -> None:
        self.are_taken = True
        await asyncio.Event().wait()


class EarlyClient:
    """Workers of which one has a client long before all of them are ready."""

    def __init__(self, backend: Steps) -> None:
        self._backend = backend
        self.was_served = False
        self.num_collected = self.num_checks = 0
        self.was_watched = False
        self.all_serve = asyncio.Event()

    async def serve(self, employ: Callable[[WorkerProcess, int], None]) -> None:
        await asyncio.sleep(0)  # there is no client before a worker has had its message
        self.was_served = self._backend.are_taken
        await asyncio.sleep(0.01)
        self.was_watched = self.num_checks > 0
        self.all_serve.set()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def drain(self, grace: float) -> None:
        pass

    async def figures(self) -> Figures:
        self.num_collected += 1
        return {}

    def tell(self, state: ServerState, now: float) -> None: ...

    def kill_hung(self, now: float, timeout: float) -> None:
        self.num_checks += 1


def router_of(backend: Steps, workers: EarlyClient) -> RouterProcess:
    adapters = AdapterRegistry(cast(Any, backend), (), None)
    return RouterProcess(
        cast(Any, backend), cast(Any, None), Metrics(LIMITS), cast(Any, workers), SETTINGS, 30, StepHistory(), adapters
    )


def test_metrics_are_collected_once_for_all_who_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "render", lambda self, figures: b"all metrics")

    async def main() -> None:
        backend = Steps()
        workers = EarlyClient(backend)
        router = router_of(backend, workers)
        assert await asyncio.gather(*(router.scrape() for _ in range(20))) == [b"all metrics"] * 20
        assert workers.num_collected == 1

    asyncio.run(main())


def test_steps_go_to_the_shards_and_workers_are_watched_before_the_first_client_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("legato.router.running.freeze_gc", lambda: None)  # this process goes on

    async def main() -> None:
        backend = Steps()
        workers, listeners = EarlyClient(backend), Listeners("127.0.0.1", 0, 2)
        router = router_of(backend, workers)
        running = asyncio.create_task(router.run(listeners, grace=1))
        await workers.all_serve.wait()
        router._stopping.set()
        await asyncio.wait_for(running, 5)
        assert workers.was_served
        assert workers.was_watched, "one that hangs while others get ready is not noticed"

    asyncio.run(main())
