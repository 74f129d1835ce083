"""The backend between requests and shards: what is sent when, who hears of it, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from legato.grammar.kinds import Grammar, GrammarKind
from legato.router.shards import ShardsLost
from legato.router.step_loop import StepLoop
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import (
    FinishReason,
    GenerationRequest,
    ModelLimits,
    Output,
    PromptChunk,
    StepPlan,
    StepResult,
)
from legato.telemetry.metrics import StepFigures
from tests.clock import FakeClock
from tests.fakes import FakeShard, expected_tokens

VOCAB = 50
STEPS_IN_FLIGHT = 2  # of shards that are no pipeline
HANG_TIMEOUT = 30.0


class HeldShards:
    """A shard that computes when the test says so, and is lost when the test says so."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.admitted: list[int] = []
        self.is_healthy = True
        self.prepared: list[Grammar] = []
        self.prepare_error: ShardsLost | None = None
        self._shard = FakeShard(block_size=4, vocab=VOCAB)
        self._on_result: Callable[[StepResult], None] | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.admitted += [admission.request.id for admission in plan.admitted]

    async def run(self, on_result: Callable[[StepResult], None]) -> None:
        self._on_result = on_result
        await self._lost

    async def release(self, blocks: list[int]) -> None:
        raise NotImplementedError

    async def healthy(self, timeout: float) -> bool:
        return self.is_healthy

    async def prepare(self, grammar: Grammar) -> None:
        if self.prepare_error is not None:
            raise self.prepare_error
        self.prepared.append(grammar)

    def answer(self, error: str | None = None) -> None:
        """Compute the oldest plan and report it, or that it failed."""
        assert self._on_result is not None
        result = self._shard.run(self.plans.pop(0))
        self._on_result(result if error is None else StepResult(result.id, [], [], error=error))

    def answer_all(self) -> None:
        while self.plans:
            self.answer()

    def lose(self, error: Exception) -> None:
        self._lost.set_exception(error)


class Receiver:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.chunks: list[PromptChunk] = []

    def trace(self, request_id: int, chunk: PromptChunk) -> None:
        self.chunks.append(chunk)

    def put(self, request_id: int, output: Output) -> None:
        self.outputs.append(output)

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs]


class Bench:
    def __init__(self, recovers: bool = False, **limits: Any) -> None:
        self.shards = HeldShards()
        self.steps: list[StepFigures] = []
        settings: dict[str, Any] = {"num_blocks": 65, "block_size": 4, "max_rows": 4, "max_step_tokens": 32}
        self.scheduler = Scheduler(SchedulerLimits(**{**settings, **limits}))
        self.clock = FakeClock()
        self.limits = ModelLimits(63, 64, 256, VOCAB)
        self.loop = StepLoop(
            self.scheduler, self.shards, self.limits, self.steps.append, self.clock, hang_timeout=HANG_TIMEOUT
        )
        self.lost: list[str] = []
        self.is_back = asyncio.Event()
        self.task = asyncio.create_task(self.loop.run(self.recover if recovers else None))

    async def recover(self, error: ShardsLost) -> None:
        """Others take the place of the lost shards when the test says so."""
        self.lost.append(str(error))
        await self.is_back.wait()
        self.is_back.clear()
        self.shards = HeldShards()
        self.loop.resume(self.shards, self.scheduler.limits, self.limits)

    def submit(self, request: GenerationRequest) -> Receiver:
        receiver = Receiver()
        self.loop.submit(request, receiver)
        return receiver


def bench(test: Callable[[Bench], Coroutine[None, None, None]], recovers: bool = False, **limits: Any) -> None:
    async def run() -> None:
        made = Bench(recovers, **limits)
        await asyncio.sleep(0)
        await test(made)
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)

    asyncio.run(run())


def request(number: int, length: int = 5, max_new_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(number, [(number * 7 + i) % VOCAB for i in range(length)], max_new_tokens)


def test_requests_that_arrive_together_enter_one_step() -> None:
    async def test(bench: Bench) -> None:
        for number in range(3):
            bench.submit(request(number))
        assert bench.shards.plans == []
        await asyncio.sleep(0)
        assert [admission.request.id for admission in bench.shards.plans[0].admitted] == [0, 1, 2]

    bench(test)


def test_two_steps_are_in_flight_and_every_answer_sends_the_next() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        assert len(bench.shards.plans) == STEPS_IN_FLIGHT
        bench.shards.answer()
        assert len(bench.shards.plans) == STEPS_IN_FLIGHT
        assert len(receiver.outputs) == 1
        bench.shards.answer_all()
        assert receiver.tokens == expected_tokens(request(1), VOCAB)
        assert receiver.outputs[-1].finish_reason is FinishReason.LENGTH

    bench(test)


def test_the_next_step_is_sent_before_anybody_hears_of_the_last() -> None:
    async def test(bench: Bench) -> None:
        on_their_way: list[int] = []

        class Listener(Receiver):
            def put(self, request_id: int, output: Output) -> None:
                on_their_way.append(bench.scheduler.num_in_flight)

        bench.loop.submit(request(1), Listener())
        await asyncio.sleep(0)
        bench.shards.answer()
        assert on_their_way == [STEPS_IN_FLIGHT]

    bench(test)


def test_a_request_leaves_the_queue_when_a_row_is_free() -> None:
    async def test(bench: Bench) -> None:
        _, second = bench.submit(request(1)), bench.submit(request(2))
        await asyncio.sleep(0)
        assert bench.shards.admitted == [1]
        assert (bench.loop.running, bench.loop.queue_size) == (1, 1)
        bench.shards.answer_all()
        assert bench.shards.admitted == [1, 2]
        assert second.tokens == expected_tokens(request(2), VOCAB)
        assert (bench.loop.running, bench.loop.queue_size) == (0, 0)

    bench(test, max_rows=1)


def test_a_cancelled_request_hears_nothing_more_and_its_row_is_free_at_once() -> None:
    async def test(bench: Bench) -> None:
        cancelled, waiting = bench.submit(request(1)), bench.submit(request(2))
        await asyncio.sleep(0)
        bench.shards.answer()
        bench.loop.cancel(1)
        bench.loop.cancel(1)
        bench.shards.answer_all()
        assert len(cancelled.outputs) == 1
        assert waiting.tokens == expected_tokens(request(2), VOCAB)
        assert bench.scheduler.kv_usage == 0

    bench(test, max_rows=1)


def test_a_request_may_be_cancelled_before_it_was_ever_planned() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        bench.loop.cancel(1)
        await asyncio.sleep(0)
        assert bench.shards.plans == []
        assert receiver.outputs == []

    bench(test)


def test_a_receiver_may_cancel_its_request_while_it_is_told() -> None:
    """A stop string is found there."""

    async def test(bench: Bench) -> None:
        class Satisfied(Receiver):
            def put(self, request_id: int, output: Output) -> None:
                super().put(request_id, output)
                bench.loop.cancel(1)

        receiver = Satisfied()
        bench.loop.submit(request(1), receiver)
        other = bench.submit(request(2))
        await asyncio.sleep(0)
        bench.shards.answer_all()
        assert len(receiver.outputs) == 1
        assert other.tokens == expected_tokens(request(2), VOCAB)

    bench(test)


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    async def test(bench: Bench) -> None:
        failed, waiting = bench.submit(request(1)), bench.submit(request(2))
        await asyncio.sleep(0)
        bench.shards.answer(error="a bad day")
        bench.shards.answer_all()
        assert [output.error for output in failed.outputs] == ["a bad day"]
        assert waiting.tokens == expected_tokens(request(2), VOCAB)
        assert [step.failed for step in bench.steps][:2] == [True, False]

    bench(test, max_rows=1)


def test_a_lost_shard_ends_every_request_those_that_wait_and_those_to_come() -> None:
    async def test(bench: Bench) -> None:
        running, waiting = bench.submit(request(1)), bench.submit(request(2))
        await asyncio.sleep(0)
        assert bench.loop.is_healthy
        bench.shards.lose(ShardsLost("shard 0 ended its stream"))
        with pytest.raises(ShardsLost):
            await bench.task
        late = bench.submit(request(3))
        for receiver in (running, waiting, late):
            assert [output.error for output in receiver.outputs] == ["shard 0 ended its stream"]
        assert not bench.loop.is_healthy

    bench(test, max_rows=1)


def test_a_bug_ends_every_request_too_and_is_not_swallowed() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.shards.lose(AssertionError("result of step 7, expected 3"))
        with pytest.raises(AssertionError):
            await bench.task
        assert [output.error for output in receiver.outputs] == ["the scheduler failed"]

    bench(test)


def test_at_the_end_of_the_server_running_requests_are_told() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bench.task
        assert [output.error for output in receiver.outputs] == ["the server is shutting down"]

    bench(test)


def test_a_failed_step_leaves_the_shards_in_doubt_until_a_token_comes() -> None:
    async def test(bench: Bench) -> None:
        changes: list[bool] = []
        bench.loop.on_change = lambda: changes.append(bench.loop.is_healthy)
        bench.submit(request(1))
        await asyncio.sleep(0)
        bench.shards.answer(error="a bad day")
        assert not bench.loop.is_healthy and bench.loop.is_live
        await turns()
        bench.shards.answer_all()
        assert bench.loop.is_healthy
        assert changes == [False, True]

    bench(test)


def test_every_step_is_described() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(request(1, length=10, max_new_tokens=3))
        await asyncio.sleep(0)
        assert (bench.loop.kv_usage, bench.loop.max_running_tokens) == (3 / 64, 13)
        bench.shards.answer_all()
        prompt, *decodes = bench.steps
        assert (prompt.method, prompt.batch_size, prompt.num_admitted, prompt.num_prompt_tokens) == (
            "prefill",
            1,
            1,
            10,
        )
        assert [step.method for step in decodes] == ["decode"] * 2
        assert [(step.num_tokens, step.num_gaps) for step in bench.steps] == [(1, 0), (1, 1), (1, 1)]
        assert (bench.loop.kv_usage, bench.loop.max_running_tokens) == (0, 0)
        again = bench.submit(request(1, length=10, max_new_tokens=1))
        await asyncio.sleep(0)
        bench.shards.answer_all()
        assert bench.steps[-1].num_cached_tokens == 8
        assert again.tokens == expected_tokens(request(1, length=10, max_new_tokens=1), VOCAB)

    bench(test)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_requests_go_on_with_new_shards_and_newcomers_wait_for_them() -> None:
    async def test(bench: Bench) -> None:
        running = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.shards.answer()
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        assert bench.lost == ["lost shard 0"]
        newcomer = bench.submit(request(2))
        await turns()
        assert not bench.loop.is_healthy
        bench.is_back.set()
        await turns()
        assert not bench.loop.is_healthy, "no token has come from the new shards"
        bench.shards.answer_all()
        assert bench.loop.is_healthy
        assert running.tokens == expected_tokens(request(1), VOCAB)
        assert newcomer.tokens == expected_tokens(request(2), VOCAB)

    bench(test, recovers=True)


def test_new_shards_prove_themselves_without_requests() -> None:
    async def test(bench: Bench) -> None:
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        bench.is_back.set()
        await turns()
        assert not bench.loop.is_healthy
        bench.shards.answer_all()
        assert bench.loop.is_healthy
        assert (bench.loop.running, bench.loop.queue_size) == (0, 0)

    bench(test, recovers=True)


def test_deadlines_pass_while_there_are_no_shards() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        bench.clock.advance(5)
        assert [output.timed_out for output in receiver.outputs] == [True]

    bench(test, recovers=True, request_timeout=4)


def test_a_cancelled_request_does_not_come_back() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        bench.loop.cancel(1)
        bench.is_back.set()
        await turns()
        bench.shards.answer_all()
        assert receiver.outputs == []
        assert 1 not in bench.shards.admitted

    bench(test, recovers=True)


def test_shards_that_finish_no_step_in_time_are_lost() -> None:
    async def test(bench: Bench) -> None:
        receiver = bench.submit(request(1))
        await asyncio.sleep(0)
        bench.clock.advance(HANG_TIMEOUT - 1)
        await turns()
        assert bench.loop.step_age == HANG_TIMEOUT - 1
        bench.shards.answer()
        assert bench.loop.step_age == 0
        bench.clock.advance(HANG_TIMEOUT - 1)
        await turns()
        assert bench.lost == [], "every step was finished in time"
        bench.clock.advance(1)
        await turns()
        assert bench.lost == ["the shards have not finished a step for 30 s (--hang-timeout)"]
        bench.is_back.set()
        await turns()
        bench.shards.answer_all()
        assert receiver.tokens == expected_tokens(request(1), VOCAB)

    bench(test, recovers=True)


def test_idle_shards_do_not_hang_and_a_step_after_a_long_pause_gets_its_whole_time() -> None:
    async def test(bench: Bench) -> None:
        bench.clock.advance(10 * HANG_TIMEOUT - 1)
        bench.submit(request(1))
        await asyncio.sleep(0)
        bench.clock.advance(HANG_TIMEOUT - 0.1)
        await turns()
        assert bench.lost == []
        bench.clock.advance(0.1)
        await turns()
        assert len(bench.lost) == 1

    bench(test, recovers=True)


def test_a_router_that_was_stopped_itself_does_not_blame_the_shards() -> None:
    async def test(bench: Bench) -> None:
        bench.submit(request(1))
        await asyncio.sleep(0)
        bench.clock.sleep_through(10 * HANG_TIMEOUT)
        bench.clock.advance(0)
        await turns()
        assert bench.lost == []
        bench.clock.advance(HANG_TIMEOUT)
        await turns()
        assert len(bench.lost) == 1

    bench(test, recovers=True)


def test_a_short_stop_of_the_router_does_not_count_against_the_shards() -> None:
    """Found by the simulation: the step was finished in time, while the router was stopped."""

    async def test(bench: Bench) -> None:
        bench.submit(request(1))
        await asyncio.sleep(0)
        bench.clock.advance(0.5)
        bench.shards.answer()
        bench.clock.advance(HANG_TIMEOUT - 0.6)
        bench.clock.sleep_through(0.9)
        bench.clock.advance(0)
        await turns()
        assert bench.lost == []
        bench.clock.advance(1)
        await turns()
        assert len(bench.lost) == 1

    bench(test, recovers=True)


def test_a_grammar_waits_for_new_shards() -> None:
    async def test(bench: Bench) -> None:
        grammar = Grammar(GrammarKind.REGEX, "a+")
        bench.shards.prepare_error = ShardsLost("lost shard 0")
        waiting = asyncio.create_task(bench.loop.prepare(grammar))
        await turns()
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        bench.is_back.set()
        await asyncio.wait_for(waiting, 5)
        assert bench.shards.prepared == [grammar]

    bench(test, recovers=True)


def test_a_grammar_fails_when_no_shards_come_back() -> None:
    async def test(bench: Bench) -> None:
        bench.shards.lose(ShardsLost("lost shard 0"))
        await turns()
        with pytest.raises(ShardsLost):
            await bench.loop.prepare(Grammar(GrammarKind.REGEX, "a+"))

    bench(test)


def test_a_grammar_does_not_outlast_the_server() -> None:
    """Found by the simulation: hung shards never answer, and workers are killed soon after the requests end."""

    async def test(bench: Bench) -> None:
        async def hang(grammar: Grammar) -> None:
            await asyncio.Event().wait()

        bench.shards.prepare = hang  # type: ignore[method-assign]
        waiting, gone = (asyncio.create_task(bench.loop.prepare(Grammar(GrammarKind.REGEX, "a+"))) for _ in range(2))
        await turns()
        bench.task.cancel()
        await turns(1)
        gone.cancel()
        await turns()
        assert waiting.done() and isinstance(waiting.exception(), ShardsLost)
        assert str(waiting.exception()) == "the server is shutting down"
        assert gone.cancelled()

    bench(test, recovers=True)
