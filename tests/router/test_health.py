"""What the health monitor makes of the step loop and the workers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from legato.ipc.messages import ServerState
from legato.router.monitoring import health
from legato.router.monitoring.health import HealthMonitor
from legato.router.shards import ShardsLost
from tests.router.test_step_loop import HANG_TIMEOUT, Bench, bench, request, turns


class FakeWorkers:
    def __init__(self) -> None:
        self.told: list[ServerState] = []
        self.killed_at: list[float] = []

    def tell(self, state: ServerState, now: float) -> None:
        self.told.append(state)

    def kill_hung(self, now: float, timeout: float) -> None:
        assert timeout == HANG_TIMEOUT
        self.killed_at.append(now)

    def excuse(self) -> None: ...


def monitored(made: Bench) -> tuple[HealthMonitor, FakeWorkers]:
    workers = FakeWorkers()
    return HealthMonitor(made.loop, cast(Any, workers), HANG_TIMEOUT, made.clock), workers


def test_workers_hear_at_once_of_lost_and_of_proven_shards() -> None:
    async def test(bench: Bench) -> None:
        monitor, workers = monitored(bench)
        assert monitor.state == ServerState(healthy=True, live=True, ready=True)
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        assert workers.told == [ServerState(live=True, restarting=True)]
        bench.is_back.set()
        await turns()
        assert not monitor.state.healthy
        bench.shards.answer_all()
        assert workers.told[-1] == ServerState(healthy=True, live=True, ready=True)

    bench(test, recovers=True)


def test_a_step_that_takes_long_is_alive_until_the_limit() -> None:
    async def test(bench: Bench) -> None:
        monitor, _ = monitored(bench)
        bench.submit(request(1))
        await turns()
        bench.clock.advance(HANG_TIMEOUT - 1)
        assert monitor.state == ServerState(healthy=True, live=True, ready=True, step_age=HANG_TIMEOUT - 1)
        bench.clock.sleep_through(1)
        assert monitor.state == ServerState(step_age=HANG_TIMEOUT)

    bench(test)


def test_a_draining_server_is_healthy_and_not_ready() -> None:
    async def test(bench: Bench) -> None:
        monitor, workers = monitored(bench)
        monitor.drain()
        assert workers.told == [ServerState(healthy=True, live=True, draining=True)]

    bench(test)


def test_every_beat_looks_for_hung_workers_and_tells_the_others() -> None:
    async def test(bench: Bench) -> None:
        monitor, workers = monitored(bench)
        monitor.beat()
        assert workers.killed_at == [bench.clock.now()]
        assert len(workers.told) == 1

    bench(test)


def test_idle_shards_that_are_not_well_are_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(health, "IDLE_CHECK_SECONDS", 0.001)

    async def test(bench: Bench) -> None:
        monitor, _ = monitored(bench)
        bench.shards.is_healthy = False
        running = asyncio.create_task(monitor.run())
        for _ in range(1000):
            if bench.lost:
                break
            await asyncio.sleep(0.005)
        running.cancel()
        assert bench.lost == ["the shards have no work, and do not answer or cannot use their device"]

    bench(test, recovers=True)


def test_busy_shards_are_not_asked(monkeypatch: Any) -> None:
    monkeypatch.setattr(health, "IDLE_CHECK_SECONDS", 0.001)

    async def test(bench: Bench) -> None:
        monitor, _ = monitored(bench)
        bench.submit(request(1))
        await turns()
        bench.shards.is_healthy = False
        running = asyncio.create_task(monitor.run())
        await asyncio.sleep(0.05)
        running.cancel()
        assert bench.lost == []

    bench(test, recovers=True)
