"""The loop around the scheduler: requests go in, outputs come back, steps stay in flight in between.

Nothing here waits for a step: a result arrives, is booked, the next step is planned and sent, and only then are the
tokens delivered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from legato.common.errors import LegatoError
from legato.grammar.kinds import Grammar
from legato.router.tracing import StepTraces
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, ModelLimits, Output, PromptChunk, StepPlan, StepResult
from legato.telemetry.metrics import StepFigures

# One step computes, the next waits at the shard: the device never waits for the router.
STEPS_IN_FLIGHT = 2


class Shards(Protocol):
    """Where plans go. Results come back in the order of the plans."""

    def send(self, plan: StepPlan) -> None: ...

    async def run(self, on_result: Callable[[StepResult], None]) -> None: ...

    async def prepare(self, grammar: Grammar) -> None: ...

    async def healthy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SentStep:
    """What must be remembered of a step until its result is here."""

    plan: StepPlan
    sent_at: float
    planning_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preempted: int


class Receiver(Protocol):
    """Gets the outputs of requests, one at a time; the last of a request has a finish reason or an error."""

    def put(self, request_id: int, output: Output) -> None: ...

    def trace(self, request_id: int, chunk: PromptChunk) -> None:
        """Of a traced request, before the output that the chunk led to."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time, so that tests can do without the real one."""

    def now(self) -> float: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer: ...


class LoopClock:
    def now(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        shards: Shards,
        limits: ModelLimits,
        on_step: Callable[[StepFigures], None],
        clock: Clock | None = None,
        traces: StepTraces | None = None,
    ) -> None:
        """`traces` only if requests are traced."""
        self.limits = limits
        self.scheduler = scheduler
        self._shards = shards
        self._on_step = on_step
        self._clock = LoopClock() if clock is None else clock
        self._traces = traces
        self._receivers: dict[int, Receiver] = {}
        self._sent: deque[SentStep] = deque()
        self._last_arrival = 0.0
        self._pump_is_due = False
        # One timer for all requests, at the next deadline or earlier.
        self._alarm: Timer | None = None
        self._alarm_at = math.inf
        self._lost: str | None = None

    @property
    def queue_size(self) -> int:
        return len(self.scheduler.queue)

    @property
    def queue_age(self) -> float:
        now = self._clock.now()
        return max((now - entry.queued_at for entry in self.scheduler.waiting()), default=0.0)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def max_running_tokens(self) -> int:
        return self.scheduler.max_running_tokens

    @property
    def kv_usage(self) -> float:
        return self.scheduler.kv_usage

    def submit(self, request: GenerationRequest, receiver: Receiver) -> None:
        refused = self.scheduler.submit(request, self._clock.now()) if self._lost is None else Output(error=self._lost)
        if refused is not None:
            receiver.put(request.id, refused)
            return
        self._receivers[request.id] = receiver
        self._set_alarm()
        if not self._pump_is_due:
            # Requests that arrive together enter the same step.
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def cancel(self, request_id: int) -> None:
        self._receivers.pop(request_id, None)
        self.scheduler.cancel(request_id)

    async def prepare(self, grammar: Grammar) -> None:
        await self._shards.prepare(grammar)

    async def healthy(self) -> bool:
        return self._lost is None and await self._shards.healthy()

    async def run(self) -> None:
        """Until a shard is lost. However it ends, no request is left waiting for a token that never comes."""
        reason = "the server is shutting down"
        try:
            await self._shards.run(self._on_result)
        except Exception as error:
            reason = str(error) if isinstance(error, LegatoError) else "the scheduler failed"
            raise
        finally:
            self._lose(reason)

    def _pump(self) -> None:
        """Plan and send while there is room in flight and something to compute."""
        self._pump_is_due = False
        self._expire()
        while self.scheduler.num_in_flight < STEPS_IN_FLIGHT:
            started, before = time.perf_counter(), replace(self.scheduler.stats)
            plan = self.scheduler.plan(self._clock.now())
            if plan is None:
                return
            if self._traces is not None:
                self._traces.planned(plan)
            self._shards.send(plan)
            now, stats = time.perf_counter(), self.scheduler.stats
            self._sent.append(
                SentStep(
                    plan,
                    now,
                    now - started,
                    stats.prompt_tokens - before.prompt_tokens,
                    stats.cached_tokens - before.cached_tokens,
                    stats.preemptions - before.preemptions,
                )
            )

    def _expire(self) -> None:
        for request_id, output in self.scheduler.expire(self._clock.now()):
            self._deliver(request_id, output)

    def _deliver(self, request_id: int, output: Output) -> None:
        ended = output.finish_reason is not None or output.error is not None
        receiver = self._receivers.pop(request_id, None) if ended else self._receivers.get(request_id)
        if receiver is not None:  # None: cancelled meanwhile
            receiver.put(request_id, output)

    def _deliver_chunks(self, chunks: list[tuple[int, PromptChunk]]) -> None:
        for request_id, chunk in chunks:
            receiver = self._receivers.get(request_id)
            if receiver is not None:
                receiver.trace(request_id, chunk)

    def _set_alarm(self) -> None:
        """Unless it fires in time anyway. It may fire for a deadline that is obsolete by then."""
        deadline = self.scheduler.next_deadline()
        if deadline is None or deadline >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = deadline
        self._alarm = self._clock.call_later(max(deadline - self._clock.now(), 0), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self._pump()  # requests that ended leave room for others
        self._set_alarm()

    def _on_result(self, result: StepResult) -> None:
        arrived = time.perf_counter()
        outputs = self.scheduler.complete(result)
        booked = time.perf_counter()
        self._pump()
        delivering = time.perf_counter()
        if self._traces is not None:
            self._deliver_chunks(self._traces.completed(result))
        for request_id, output in outputs:
            self._deliver(request_id, output)
        filter_time = booked - arrived + time.perf_counter() - delivering
        self._record(self._sent.popleft(), result, arrived, filter_time, len(outputs))

    def _record(self, sent: SentStep, result: StepResult, arrived: float, filter_time: float, num_tokens: int) -> None:
        plan = sent.plan
        gap, self._last_arrival = arrived - self._last_arrival, arrived
        self._on_step(
            StepFigures(
                method="prefill" if plan.admitted or max(plan.num_tokens) > 1 else "decode",
                batch_size=len(plan.rows),
                num_admitted=len(plan.admitted),
                inference_time=arrived - sent.sent_at,
                forward_time=result.forward_ns / 1e9,
                decode_time=max(result.total_ns - result.forward_ns, 0) / 1e9,
                filter_time=filter_time,
                planning_time=sent.planning_time,
                num_tokens=num_tokens,
                num_gaps=min(_num_decodes(plan), num_tokens),
                gap=gap,
                num_prompt_tokens=sent.num_prompt_tokens,
                num_cached_tokens=sent.num_cached_tokens,
                num_preempted=sent.num_preempted,
                failed=result.error is not None,
            )
        )

    def _lose(self, reason: str) -> None:
        self._lost = reason
        if self._alarm is not None:
            self._alarm.cancel()
        receivers, self._receivers = self._receivers, {}
        for request_id, receiver in receivers.items():
            receiver.put(request_id, Output(error=reason))


def _num_decodes(plan: StepPlan) -> int:
    """Rows that go on with a token of the step before."""
    count = plan.num_tokens.count(1)
    if plan.admitted and count:
        admitted = {admission.row for admission in plan.admitted}
        count -= sum(row in admitted for row, num in zip(plan.rows, plan.num_tokens, strict=True) if num == 1)
    return count
