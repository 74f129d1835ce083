"""Requests that wait or run for too long: who is ended when, what is left of them, and what the client sees."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from legato.http.app import create_app
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from tests.fakes import Simulation, check_blocks
from tests.http.asgi import SETTINGS, FakeBackend, post, tokenizer
from tests.router.test_step_loop import Bench, bench
from tests.router.test_step_loop import request as bench_request

LIMITS = SchedulerLimits(
    num_blocks=65, block_size=4, max_rows=1, max_step_tokens=32, queue_timeout=2, request_timeout=5
)


def request(request_id: int, max_new_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(request_id, [request_id, 2, 3], max_new_tokens)


def errors(expired: list[tuple[int, Output]]) -> dict[int, str | None]:
    assert all(output.timed_out and output.finish_reason is None for _, output in expired)
    return {request_id: output.error for request_id, output in expired}


def test_without_timeouts_there_is_no_deadline() -> None:
    scheduler = Scheduler(SchedulerLimits(65, 4, 1, 32))
    scheduler.submit(request(1), now=10.0)
    assert scheduler.next_deadline() is None
    assert scheduler.expire(1e9) == []


def test_whoever_waits_too_long_is_ended_and_never_computed() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1), now=10.0)
    scheduler.plan()
    scheduler.submit(request(2), now=11.0)
    assert scheduler.next_deadline() == 13.0
    assert scheduler.expire(12.99) == []
    problem = "The request waited longer than 2 seconds for its turn (--queue-timeout)"
    assert errors(scheduler.expire(13.0)) == {2: problem}
    scheduler.cancel(1)
    assert scheduler.plan() is None


def test_a_row_ends_the_waiting_for_good() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1), now=10.0)
    assert scheduler.next_deadline() == 12.0
    scheduler.plan()
    assert scheduler.next_deadline() == 15.0
    scheduler._preempt(scheduler.running[0])
    assert scheduler.expire(14.9) == []


def test_a_request_that_runs_too_long_gives_everything_back() -> None:
    simulation = Simulation(LIMITS)
    simulation.outputs[1] = []
    simulation.scheduler.submit(request(1, 50), now=10.0)
    for _ in range(5):
        simulation.launch()
        simulation.land()
    simulation.launch()
    assert errors(simulation.scheduler.expire(15.0)) == {
        1: "The request took longer than 5 seconds (--request-timeout)"
    }
    assert not simulation.scheduler.running
    num_tokens = len(simulation.outputs[1])
    simulation.run()
    assert len(simulation.outputs[1]) == num_tokens, "what is still in flight for it goes nowhere"
    check_blocks(simulation.scheduler)


def test_whoever_is_done_has_no_deadline_left() -> None:
    simulation = Simulation(LIMITS)
    for number in (1, 2):
        simulation.outputs[number] = []
        simulation.scheduler.submit(request(number, 2), now=10.0)
    simulation.scheduler.cancel(2)
    simulation.run()
    assert simulation.scheduler.next_deadline() is None


def test_a_request_is_ended_once_when_both_times_are_up() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1), now=10.0)
    assert len(scheduler.expire(99.0)) == 1
    assert scheduler.next_deadline() is None


# ---- the timer of the step loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"queue_timeout": 10}, {"request_timeout": 10}])
def test_requests_end_when_their_time_is_up(limits: dict[str, float]) -> None:
    async def test(bench: Bench) -> None:
        running = bench.submit(bench_request(1))
        await asyncio.sleep(0)
        bench.clock.advance(2)
        waiting = bench.submit(bench_request(2))
        bench.clock.advance(9.9)
        assert waiting.outputs == []
        bench.clock.advance(0.2)
        assert [output.timed_out for output in waiting.outputs] == [True]
        assert [output.timed_out for output in running.outputs] == ([True] if "request_timeout" in limits else [])
        assert bench.loop.queue_size == 0

    bench(test, max_rows=1, **limits)


def test_an_earlier_deadline_is_not_missed_because_of_a_later_one() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(bench_request(1))
        await asyncio.sleep(0)
        bench.clock.advance(10)  # its own time in the queue is long over
        waiting = bench.submit(bench_request(2))
        bench.clock.advance(6)
        assert [output.timed_out for output in waiting.outputs] == [True]

    bench(test, max_rows=1, queue_timeout=5, request_timeout=6000)


def test_the_row_of_a_request_that_ran_too_long_is_used_at_once() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(bench_request(1))
        await asyncio.sleep(0)
        bench.shards.answer()
        bench.clock.advance(3)
        bench.submit(bench_request(2))
        bench.clock.advance(4)
        bench.shards.answer_all()
        assert bench.shards.admitted == [1, 2]

    bench(test, max_rows=1, request_timeout=5)


def test_a_late_timer_admits_no_request_whose_time_is_up() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(bench_request(1, max_new_tokens=1))
        await asyncio.sleep(0)
        late = bench.submit(bench_request(2))
        bench.clock.sleep_through(5)
        bench.shards.answer_all()
        assert bench.shards.admitted == [1]
        assert [output.timed_out for output in late.outputs] == [True]

    bench(test, max_rows=1, queue_timeout=3)


def test_the_time_in_the_queue_comes_with_the_first_token() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(bench_request(1, max_new_tokens=1))
        await asyncio.sleep(0)
        bench.clock.advance(2)
        waiting = bench.submit(bench_request(2))
        bench.clock.advance(7)
        bench.shards.answer_all()
        assert [output.queue_time for output in waiting.outputs[:2]] == [7, 0]

    bench(test, max_rows=1)


# ---- what clients see ------------------------------------------------------------------------------------------------

PROBLEM = "The request took longer than 5 seconds (--request-timeout)"
LATE = [Output(5, -1.0), Output(error=PROBLEM, timed_out=True)]


def answer(path: str, body: dict[str, Any]) -> Any:
    async def run() -> Any:
        backend = FakeBackend()
        backend.script = lambda request: list(LATE)
        return await post(create_app(backend, tokenizer(), SETTINGS), path, body)

    return asyncio.run(run())


def test_the_native_api_says_504_and_timeout() -> None:
    got = answer("/generate", {"inputs": "hi"})
    assert (got.status, json.loads(got.body)) == (504, {"error": PROBLEM, "error_type": "timeout"})


def test_a_native_stream_ends_with_the_same_error() -> None:
    got = answer("/generate_stream", {"inputs": "hi"})
    *tokens, last = [line for line in got.body.decode().splitlines() if line]
    assert len(tokens) == 1
    assert json.loads(last.removeprefix("data:")) == {"error": PROBLEM, "error_type": "timeout"}


def test_openais_api_says_it_in_openais_words() -> None:
    got = answer("/v1/completions", {"prompt": "hi"})
    error = json.loads(got.body)
    assert got.status == 504
    assert (error["error"]["message"], error["error"]["type"], error["error_type"]) == (
        PROBLEM,
        "server_error",
        "timeout",
    )


def test_a_stream_of_openais_api_ends_with_the_error_and_never_says_length() -> None:
    body = answer("/v1/completions", {"prompt": "hi", "stream": True}).body.decode()
    assert '"length"' not in body and "[DONE]" not in body
    assert json.loads(body.splitlines()[-2].removeprefix("data: "))["error_type"] == "timeout"
