"""The data of the dashboard: who has which blocks, and why the others wait."""

from __future__ import annotations

import asyncio

import msgspec

from legato.api.dashboard import DashboardData
from legato.router.monitoring.dashboard import Dashboard, StepHistory, waiting_reason
from legato.telemetry.metrics import Figures, Metrics
from tests.http.asgi import LIMITS
from tests.router.test_step_loop import Bench, bench, request


async def observed(bench: Bench, metrics: Metrics | None = None, workers: Figures | None = None) -> DashboardData:
    async def figures() -> Figures:
        return workers or {}

    history = StepHistory()
    for step in bench.steps:
        history.add(step)
    dashboard = Dashboard(bench.loop, metrics or Metrics(LIMITS), figures, history, "tiny")
    return msgspec.json.decode(await dashboard.render(), type=DashboardData)


def test_rows_blocks_and_queue_are_those_of_the_scheduler() -> None:
    async def test(bench: Bench) -> None:
        for number in range(6):
            bench.submit(request(number, length=10, max_new_tokens=6))
        await asyncio.sleep(0)
        bench.clock.sleep_through(3.0)
        data = await observed(bench)
        assert (data.num_running, data.max_rows, data.num_waiting) == (4, 4, 2)
        assert sum(row.blocks for row in data.running) == data.blocks.running == 12
        assert data.blocks.running + data.blocks.cached + data.blocks.free == data.blocks.total == 64
        assert {row.state for row in data.running} == {"prompt"}
        assert data.oldest_waiting == 3.0 and all(row.age == 3.0 for row in (*data.running, *data.waiting))
        bench.shards.answer()
        data = await observed(bench)
        assert {row.state for row in data.running} == {"prompt", "decode"}
        assert all(row.reason.startswith("all 4 rows") for row in data.waiting)
        bench.shards.answer_all()
        data = await observed(bench)
        assert (data.num_running, data.num_waiting, data.blocks.running) == (0, 0, 0)
        assert data.steps[0].prompt_tokens == 32 and data.steps[0].decodes == 0
        assert any(step.decodes for step in data.steps)

    bench(test)


def test_a_request_says_why_it_waits() -> None:
    async def test(bench: Bench) -> None:
        for number in range(3):
            bench.submit(request(number, length=5))
        await asyncio.sleep(0)
        bench.shards.answer()
        (waiting,) = bench.scheduler.waiting()
        assert "all 2 rows are in use" in waiting_reason(waiting, bench.scheduler, restarting=False)
        assert "restarted" in waiting_reason(waiting, bench.scheduler, restarting=True)

    bench(test, max_rows=2)


def test_a_request_that_needs_memory_says_how_much() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(request(1, length=20, max_new_tokens=6))
        bench.submit(request(2, length=20, max_new_tokens=6))
        await asyncio.sleep(0)
        (waiting,) = bench.scheduler.waiting()
        assert "needs up to 6 KV blocks, 2 are available" in waiting_reason(waiting, bench.scheduler, restarting=False)

    bench(test, num_blocks=9)


def test_counters_and_distributions_are_those_of_all_processes() -> None:
    async def test(bench: Bench) -> None:
        metrics, worker = Metrics(LIMITS), Metrics(LIMITS)
        metrics.restarted("shard")
        metrics.replayed(4)
        worker.request_arrived()
        worker.request_failed("validation")
        worker._histograms["legato_time_to_first_token_seconds"].observe(0.01, times=3)
        data = await observed(bench, metrics, worker.figures())
        assert data.restarts["shard"] == 1 and data.replayed_requests == 4
        assert (data.requests, data.failures["validation"]) == (1, 1)
        assert sum(data.time_to_first_token.counts) == 3
        bound = data.time_to_first_token.bounds[data.time_to_first_token.counts.index(3)]
        assert 0.01 <= bound < 0.015
        assert len(data.inter_token.counts) == len(data.inter_token.bounds) + 1

    bench(test)


def test_the_lists_are_bounded() -> None:
    async def test(bench: Bench) -> None:
        for number in range(400):
            bench.submit(request(number))
        data = await observed(bench)
        assert data.num_waiting == 400 and len(data.waiting) == 256

    bench(test)
