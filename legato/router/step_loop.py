"""The loop around the scheduler: requests go in, outputs come back, steps stay in flight in between.

Nothing here waits for a step: a result arrives, is booked, the next step is planned and sent, and only then are the
tokens delivered.

Requests outlive the shards that compute them. If the shards die, or do not finish a step within `--hang-timeout`,
nothing is sent until others take their place (`router/recovery.py`); then every request goes on with the tokens it has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from secrets import token_hex
from typing import Protocol

from legato.common.errors import LegatoError
from legato.grammar.kinds import Grammar
from legato.ipc.messages import ServerLoad
from legato.router.clock import MAX_LATENESS, Clock, LoopClock, Timer
from legato.router.monitoring.kv_events import KvEventLog
from legato.router.monitoring.tracing import StepTraces
from legato.router.sent_step import SentStep
from legato.router.shards import ShardsLost
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, ModelLimits, Output, PromptChunk, StepPlan, StepResult
from legato.telemetry.metrics import StepFigures

# The request that proves that new shards compute: one token, for nobody. The numbers of clients' requests begin at 1.
PROBE = GenerationRequest(0, [0], 1, ignore_eos=True)
# Seconds before a grammar is sent again to shards that failed while they compiled it.
RETRY_SECONDS = 0.1


class Shards(Protocol):
    """Where plans go. Results come back in the order of the plans."""

    def send(self, plan: StepPlan) -> None: ...

    async def run(self, on_result: Callable[[StepResult], None]) -> None: ...

    async def prepare(self, grammar: Grammar) -> None: ...

    async def healthy(self, timeout: float) -> bool: ...

    async def release(self, blocks: list[int]) -> None: ...


class Receiver(Protocol):
    """Gets the outputs of requests, one at a time; the last of a request has a finish reason or an error."""

    def put(self, request_id: int, output: Output) -> None: ...

    def trace(self, request_id: int, chunk: PromptChunk) -> None:
        """Of a traced request, before the output that the chunk led to."""


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        shards: Shards,
        limits: ModelLimits,
        on_step: Callable[[StepFigures], None],
        clock: Clock | None = None,
        hang_timeout: float = math.inf,
        traces: StepTraces | None = None,
    ) -> None:
        """`traces` only if requests are traced."""
        self.limits = limits
        self.scheduler = scheduler
        self.shards = shards
        self._hang_timeout = hang_timeout
        self._on_step = on_step
        self._clock = LoopClock() if clock is None else clock
        self._traces = traces
        # What enters and leaves the prefix tree, if somebody wants to know.
        self.events: KvEventLog | None = None
        # Another one with every prefix tree.
        self._epoch = token_hex(8)
        self._receivers: dict[int, Receiver] = {}
        self._sent: deque[SentStep] = deque()
        self._last_arrival = 0.0
        self._pump_is_due = False
        # One timer for all requests, at the next deadline or earlier.
        self._alarm: Timer | None = None
        self._alarm_at = math.inf
        self._lost: str | None = None
        # Whether there are shards to send steps to, and whether a token has come from them.
        self._connected = asyncio.Event()
        self._connected.set()
        self._proven = True
        self._recovers = False
        # Grammars that the shards are compiling.
        self._preparing: set[asyncio.Future[None]] = set()
        # Since when the oldest step in flight is being computed.
        self._step_began = 0.0
        self._hung: asyncio.Future[None] | None = None
        # Called when shards are lost, replaced or proven.
        self.on_change: Callable[[], None] = lambda: None
        self._watch_timer: Timer | None = None

    @property
    def step_age(self) -> float:
        """Seconds for which the oldest step in flight has been computed; 0 if there is none."""
        return self._clock.now() - self._step_began if self._sent and self._connected.is_set() else 0.0

    @property
    def is_live(self) -> bool:
        """Steps advance. While shards are replaced there are none, and the attempts to replace them are limited."""
        return self._lost is None and self.step_age < self._hang_timeout

    @property
    def is_healthy(self) -> bool:
        """Steps advance, and a token has come since the last failure."""
        return self.is_live and self._proven and self._connected.is_set()

    @property
    def is_restarting(self) -> bool:
        return not self._connected.is_set()

    @property
    def placing(self) -> set[str]:
        """The adapters that steps in flight bring to the device."""
        return {placement.name for sent in self._sent for placement in sent.plan.placements}

    @property
    def is_idle(self) -> bool:
        """No step shows whether the shards are well."""
        return not self._sent and self._connected.is_set()

    @property
    def queue_size(self) -> int:
        return len(self.scheduler.queue)

    def now(self) -> float:
        """The time in which requests are queued."""
        return self._clock.now()

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

    @property
    def load(self) -> ServerLoad:
        scheduler = self.scheduler
        return ServerLoad(
            epoch=self._epoch,
            running=len(scheduler.running),
            queued=len(scheduler.queue),
            max_rows=scheduler.limits.max_rows,
            free_blocks=scheduler.pool.available + scheduler.tree.num_evictable,
            total_blocks=scheduler.pool.total,
            block_size=scheduler.limits.block_size,
        )

    def submit(self, request: GenerationRequest, receiver: Receiver) -> None:
        refused = self.scheduler.submit(request, self._clock.now()) if self._lost is None else _lost(self._lost)
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

    def end(self, request_id: int, output: Output) -> None:
        """The last that its client sees."""
        self.scheduler.cancel(request_id)
        self._deliver(request_id, output)

    async def prepare(self, grammar: Grammar) -> None:
        """Have a grammar compiled. If the shards are lost, by those that take their place."""
        while True:
            await self._connected.wait()
            if self._lost is not None:
                raise ShardsLost(self._lost)
            attempt = asyncio.ensure_future(self.shards.prepare(grammar))
            self._preparing.add(attempt)
            attempt.add_done_callback(self._preparing.discard)
            try:
                return await attempt
            except ShardsLost:
                if not self._recovers:
                    raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._lost is None or task is None or task.cancelling():  # whoever asked is gone
                    raise
                continue
            await asyncio.sleep(RETRY_SECONDS)

    async def run(self, recover: Callable[[ShardsLost], Awaitable[None]] | None = None) -> None:
        """Until the shards are lost and `recover` does not `resume` with others. However it ends, no request is left
        waiting for a token that never comes."""
        reason = "the server is shutting down"
        self._recovers = recover is not None
        try:
            while True:
                try:
                    await self._drive()
                except ShardsLost as error:
                    if recover is None:
                        raise
                    self._connected.clear()
                    self._proven = False
                    self.on_change()
                    await recover(error)
        except Exception as error:
            reason = str(error) if isinstance(error, LegatoError) else "the scheduler failed"
            raise
        finally:
            self._lose(reason)

    def resume(self, shards: Shards, scheduler_limits: SchedulerLimits, limits: ModelLimits) -> None:
        """Other shards take the place of those that were lost. Their stream opens when `run` goes on."""
        self.shards, self.limits = shards, limits
        self._epoch = token_hex(8)
        self._sent.clear()
        if self._traces is not None:
            self._traces.clear()
        for request_id, output in self.scheduler.restart(scheduler_limits):
            self._deliver(request_id, output)

    async def _drive(self) -> None:
        """Until the shards are lost."""
        hung = self._hung = asyncio.get_running_loop().create_future()
        stream = asyncio.ensure_future(self.shards.run(self._on_result))
        self._watch()
        try:
            if not self._connected.is_set():
                await asyncio.sleep(0)  # a step that is sent before the stream is open is lost
                self._connected.set()
                self.prove()
            await asyncio.wait([stream, hung], return_when=asyncio.FIRST_COMPLETED)
            (hung if hung.done() else stream).result()
        finally:
            if self._watch_timer is not None:
                self._watch_timer.cancel()
            hung.cancel()
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    def lose_shards(self, reason: str) -> None:
        """They are not well, although no step shows it."""
        if self._hung is not None and not self._hung.done():
            self._hung.set_exception(ShardsLost(reason))

    def prove(self) -> None:
        """Have a token computed if none has come since the last failure and no request is here that will get one."""
        if not self._proven and self._connected.is_set():
            if not (self.running or self.queue_size):
                self.scheduler.submit(PROBE, self._clock.now())
            self._pump()

    def _watch(self, lateness: float = 0.0) -> None:
        """Look again when the oldest step in flight would be hung. If we were late, results that came meanwhile have as
        long to be read."""
        if math.isinf(self._hang_timeout):
            return
        now = self._clock.now()
        due = max((self._step_began if self._sent else now) + self._hang_timeout, now + lateness)
        self._watch_timer = self._clock.call_later(due - now, lambda: self._on_watch(due))

    def _on_watch(self, due: float) -> None:
        lateness = self._clock.now() - due
        if lateness > MAX_LATENESS:  # our own event loop stood still: results may be waiting for us
            self._step_began, lateness = self._clock.now(), 0.0
        elif self._sent and self._step_began + self._hang_timeout <= due:
            self.lose_shards(f"the shards have not finished a step for {self._hang_timeout:g} s (--hang-timeout)")
            return
        self._watch(lateness)

    def _pump(self) -> None:
        """Plan and send while there is room in flight and something to compute."""
        self._pump_is_due = False
        self._expire()
        if not self._connected.is_set():
            return
        while self.scheduler.num_in_flight < self.scheduler.limits.max_in_flight:
            started, before = time.perf_counter(), replace(self.scheduler.stats)
            now = self._clock.now()
            plan = self.scheduler.plan(now)
            if plan is None:
                return
            if not self._sent:
                self._step_began = now
            if self._traces is not None:
                self._traces.planned(plan)
            self.shards.send(plan)
            sent_at, stats = time.perf_counter(), self.scheduler.stats
            self._sent.append(
                SentStep(
                    plan,
                    sent_at,
                    sent_at - started,
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
        outputs = self.scheduler.complete(result, self._clock.now())
        booked = time.perf_counter()
        self._step_began = self._clock.now()
        if self._proven is not (result.error is None):
            self._judge(result)
        self._pump()
        delivering = time.perf_counter()
        if self._traces is not None:
            self._deliver_chunks(self._traces.completed(result))
        for request_id, output in outputs:
            self._deliver(request_id, output)
        filter_time = booked - arrived + time.perf_counter() - delivering
        gap, self._last_arrival = arrived - self._last_arrival, arrived
        self._on_step(self._sent.popleft().figures(result, arrived, gap, filter_time, outputs))

    def _judge(self, result: StepResult) -> None:
        """A failed step leaves the shards in doubt until a token comes."""
        was_proven, self._proven = self._proven, bool(result.token_ids)
        if was_proven or self._proven:
            asyncio.get_running_loop().call_soon(self.prove)
            self.on_change()

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._connected.set()  # nobody waits for others any more
        for attempt in self._preparing:
            attempt.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        receivers, self._receivers = self._receivers, {}
        for request_id, receiver in receivers.items():
            receiver.put(request_id, _lost(reason))


def _lost(reason: str) -> Output:
    return Output(error=reason, is_lost=True)
