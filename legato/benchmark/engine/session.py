"""Runs workloads through the router's scheduler and the shard's gRPC service, without HTTP and text."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from legato.benchmark.engine.workloads import Workload
from legato.benchmark.report import Summary
from legato.benchmark.shard import ShardFailed, ShardProcess
from legato.common.gc import freeze_gc, unfreeze_gc
from legato.common.options import RouterOptions
from legato.grammar.kinds import Grammar
from legato.pb import generate_pb2 as pb
from legato.router.cli import warm_up
from legato.router.shards import GrpcShards
from legato.router.step_loop import StepLoop
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, ModelLimits, Output, PromptChunk, StepPlan, StepResult
from legato.telemetry.metrics import StepFigures

Shown: TypeAlias = Callable[[StepFigures], None]


def _ignore(step: StepFigures) -> None:
    pass


@dataclass(frozen=True)
class RunFigures:
    """One run of one workload."""

    seconds: float
    num_in: int
    num_out: int
    num_steps: int
    # Milliseconds from submission to the first token, over the requests.
    ttft: Summary
    # Milliseconds from one result to the next, over the steps: what a client sees as the gap between two tokens.
    step: Summary
    # Milliseconds from sending a step to its result. More than `step`, because the next is sent before.
    round_trip: Summary
    num_preempted: int
    num_cached: int  # prompt tokens that came from the prefix cache
    blocks_held: int  # KV blocks that were never freed

    @property
    def in_per_second(self) -> float:
        return self.num_in / self.seconds

    @property
    def out_per_second(self) -> float:
        return self.num_out / self.seconds

    @property
    def ms_per_step(self) -> float:
        return self.seconds * 1e3 / self.num_steps


class _Stream:
    """One Tokens stream for all schedulers in turn. A new stream for each would race with the shard, which refuses a
    second one until it has noticed that the first was closed."""

    def __init__(self, shards: GrpcShards) -> None:
        self._shards = shards
        self._on_result: Callable[[StepResult], None] | None = None
        self._reading = asyncio.ensure_future(shards.run(self._deliver))

    def send(self, plan: StepPlan) -> None:
        self._shards.send(plan)

    async def run(self, on_result: Callable[[StepResult], None]) -> None:
        self._on_result = on_result
        await asyncio.shield(self._reading)

    async def prepare(self, grammar: Grammar) -> None:
        await self._shards.prepare(grammar)

    async def release(self, blocks: list[int]) -> None:
        await self._shards.release(blocks)

    async def healthy(self, timeout: float = 5.0) -> bool:
        return await self._shards.healthy(timeout)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _deliver(self, result: StepResult) -> None:
        assert self._on_result is not None, f"nobody reads the result of step {result.id}"
        self._on_result(result)


class _Receiver:
    """Counts the tokens of one request."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._is_first = True

    def put(self, request_id: int, output: Output) -> None:
        if self._is_first:
            self._is_first = False
            self._run.first_tokens.append(time.perf_counter())
        self._run.num_tokens += 1
        if output.error is not None:
            self._run.fail(output.error)
        elif output.finish_reason is not None:
            self._run.end_one()

    def trace(self, request_id: int, chunk: PromptChunk) -> None:
        raise AssertionError("nothing is traced here")


class _Run:
    """Timestamps of a running workload: as few as possible, because the scheduler shares our thread."""

    def __init__(self, num_requests: int, shown: Shown) -> None:
        self._shown = shown
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_tokens: list[float] = []
        self.num_tokens = 0
        self.results: list[float] = []
        self.round_trips: list[float] = []
        self._num_left = num_requests

    def note_step(self, step: StepFigures) -> None:
        self.results.append(time.perf_counter())
        self.round_trips.append(step.inference_time)
        self._shown(step)

    def end_one(self) -> None:
        self._num_left -= 1
        if self._num_left == 0 and not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(ShardFailed(error))

    def figures(self, workload: Workload, started: float, scheduler: Scheduler) -> RunFigures:
        ended = self.results[-1]
        assert self.num_tokens == workload.num_out, f"{self.num_tokens} tokens instead of {workload.num_out}"
        gaps = [after - before for before, after in itertools.pairwise([started, *self.results])]
        return RunFigures(
            seconds=ended - started,
            num_in=workload.num_in,
            num_out=workload.num_out,
            num_steps=len(self.results),
            ttft=_in_ms([moment - started for moment in self.first_tokens]),
            step=_in_ms(gaps),
            round_trip=_in_ms(self.round_trips),
            num_preempted=scheduler.stats.preemptions,
            num_cached=scheduler.stats.cached_tokens,
            blocks_held=scheduler.pool.total - scheduler.pool.available - scheduler.tree.num_evictable,
        )


class Session:
    """A shard after warm-up, with an open stream."""

    def __init__(self, stream: _Stream, scheduler: Scheduler, limits: ModelLimits) -> None:
        self.limits = limits
        self.step_limits = scheduler.limits
        self._stream = stream
        self._ids = itertools.count(1)

    def scheduler(self, prefix_caching: bool) -> Scheduler:
        """With the shard's limits. Its prefix cache is empty."""
        return Scheduler(replace(self.step_limits, prefix_caching=prefix_caching, max_requests=None))

    async def run(self, workload: Workload, scheduler: Scheduler | None = None, shown: Shown = _ignore) -> RunFigures:
        """Submit all requests at once and wait for their last token. Every run has its own scheduler, and so an empty
        prefix cache, unless one is given. Each step is also `shown`."""
        scheduler = scheduler or self.scheduler(workload.prefix_caching)
        notes = _Run(len(workload.prompts), shown)
        loop = StepLoop(scheduler, self._stream, self.limits, notes.note_step)
        steps = asyncio.ensure_future(loop.run())
        try:
            started = time.perf_counter()
            for request in self._requests(workload):
                loop.submit(request, _Receiver(notes))
            await notes.finished
        finally:
            steps.cancel()
            await asyncio.gather(steps, return_exceptions=True)
        assert scheduler.num_in_flight == 0, "every request ended by length, so no step is left"
        return notes.figures(workload, started, scheduler)

    def _requests(self, workload: Workload) -> Iterator[GenerationRequest]:
        for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True):
            yield GenerationRequest(next(self._ids), prompt, new, ignore_eos=True)


async def connect(shard: ShardProcess) -> tuple[GrpcShards, pb.InfoResponse]:
    shards = await shard.connected(GrpcShards.connect(shard.socket, shard.connect_timeout))
    return shards, await shards.info()


@asynccontextmanager
async def opened(shards: GrpcShards, info: pb.InfoResponse, options: RouterOptions) -> AsyncIterator[Session]:
    """Warm the shards up as the router does, with its defaults, and open the stream."""
    scheduler, limits = await warm_up(shards, info, options)
    stream = _Stream(shards)
    freeze_gc()
    try:
        yield Session(stream, scheduler, limits)
    finally:
        unfreeze_gc()
        await stream.close()


def _in_ms(seconds: Sequence[float]) -> Summary:
    summary = Summary.in_ms(seconds)
    assert summary is not None, "nothing was measured"
    return summary
