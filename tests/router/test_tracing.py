"""What is noted of traced prompts: their chunks, and nothing of decodes or of requests that are not traced."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from legato.router.monitoring.tracing import StepTraces
from legato.router.shards import _to_pb
from legato.scheduling.state import GenerationRequest
from legato.telemetry.tracing import TraceContext
from tests.router.test_step_loop import Bench, Receiver, bench, request

CONTEXT = TraceContext(0xABC, 0xDEF)


def traced(number: int, **kwargs: Any) -> GenerationRequest:
    return msgspec.structs.replace(request(number, **kwargs), traceparent=CONTEXT.header)


def traced_bench(bench: Bench) -> StepTraces:
    ticks = iter(range(1, 1000))
    traces = StepTraces(lambda: next(ticks))
    bench.loop._traces = traces
    return traces


def test_each_chunk_of_a_traced_prompt_is_delivered_before_the_first_token() -> None:
    async def test(bench: Bench) -> None:
        traces = traced_bench(bench)
        await asyncio.sleep(0)
        order: list[str] = []

        class Ordered(Receiver):
            def trace(self, request_id: int, chunk: Any) -> None:
                order.append("chunk")
                super().trace(request_id, chunk)

            def put(self, request_id: int, output: Any) -> None:
                order.append("token")
                super().put(request_id, output)

        answer, other = Ordered(), bench.submit(request(2))
        bench.loop.submit(traced(1, length=40, max_new_tokens=3), answer)
        await asyncio.sleep(0)
        bench.shards.answer_all()
        assert order == ["chunk", "chunk", "token", "token", "token"]
        assert [chunk.num_tokens for chunk in answer.chunks] == [27, 13]
        assert [chunk.batch_size for chunk in answer.chunks] == [2, 2]
        assert all(chunk.start_ns < chunk.end_ns for chunk in answer.chunks)
        assert len({chunk.span_id for chunk in answer.chunks}) == 2
        assert other.chunks == []
        assert not traces._prompts and not traces._steps, "nothing is left"

    bench(test)


def test_a_prompt_that_is_computed_again_elsewhere_has_its_chunks_of_both() -> None:
    async def test(bench: Bench) -> None:
        traces = traced_bench(bench)
        answer = bench.submit(traced(1, length=40, max_new_tokens=3))
        await asyncio.sleep(0)
        bench.shards.answer()
        assert len(answer.chunks) == 1 and traces._steps
        lost = bench.shards
        bench.shards = type(lost)()
        bench.loop.resume(bench.shards, bench.scheduler.limits, bench.loop.limits)
        assert not traces._steps and not traces._prompts
        bench.loop._pump()
        bench.shards._on_result = bench.loop._on_result
        bench.shards.answer_all()
        assert sum(chunk.num_tokens for chunk in answer.chunks) == 32 + 40
        assert len(answer.tokens) == 3

    bench(test)


def test_the_shards_are_told_of_traced_rows_only() -> None:
    async def test(bench: Bench) -> None:
        traced_bench(bench)
        await asyncio.sleep(0)
        bench.submit(request(2))
        bench.submit(traced(1))
        await asyncio.sleep(0)
        plans = list(bench.shards.plans)
        messages = [_to_pb(plan) for plan in plans]
        (told,) = messages[0].traces
        context = TraceContext.parse(told.traceparent)
        assert context is not None and context.trace_id == CONTEXT.trace_id and context.span_id != CONTEXT.span_id
        assert [admission.request.id for admission in plans[0].admitted if admission.row == told.row] == [1]
        assert not [message for message in messages[1:] if message.traces], "decodes are not traced"

    bench(test)
