"""The seam between text and scheduling: requests go in, outputs come back, steps stay in flight in between.

Nothing here waits for a step: a result arrives, is booked, the next step is planned and sent, and only then do the
requests hear of their tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from legato.common.errors import LegatoError
from legato.router.scheduler import Scheduler
from legato.router.seam import Limits, Sink
from legato.router.state import GenerationRequest, Output, StepPlan, StepResult

# One step computes, the next waits at the shard: the device never waits for the router.
STEPS_IN_FLIGHT = 2


class Shards(Protocol):
    """Where plans go. Results come back in the order of the plans."""

    def send(self, plan: StepPlan) -> None: ...

    async def run(self, on_result: Callable[[StepResult], None]) -> None: ...

    async def healthy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What metrics want to know of one step."""

    num_rows: int
    num_tokens: int
    num_admitted: int
    duration: float  # seconds from send to result
    forward: float  # seconds on the device
    failed: bool


class Backend:
    def __init__(
        self, scheduler: Scheduler, shards: Shards, limits: Limits, on_step: Callable[[StepReport], None]
    ) -> None:
        self.limits = limits
        self.scheduler = scheduler
        self._shards = shards
        self._on_step = on_step
        self._sinks: dict[int, Sink] = {}
        self._sent: deque[tuple[StepPlan, float]] = deque()
        self._pump_is_due = False
        self._lost: str | None = None

    @property
    def queue_size(self) -> int:
        return len(self.scheduler.queue)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        if self._lost is not None:
            sink([Output(error=self._lost)])
            return
        self._sinks[request.id] = sink
        self.scheduler.submit(request)
        if not self._pump_is_due:
            # Requests that arrive together enter the same step.
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def cancel(self, request_id: int) -> None:
        self._sinks.pop(request_id, None)
        self.scheduler.cancel(request_id)

    async def healthy(self) -> bool:
        return self._lost is None and await self._shards.healthy()

    async def run(self) -> None:
        """Until a shard is lost; then every request ends with an error."""
        try:
            await self._shards.run(self._on_result)
        except* LegatoError as errors:
            self._lose(str(errors.exceptions[0]))
            raise
        except* asyncio.CancelledError:
            self._lose("the server is shutting down")
            raise

    def _pump(self) -> None:
        """Plan and send while there is room in flight and something to compute."""
        self._pump_is_due = False
        while self.scheduler.num_in_flight < STEPS_IN_FLIGHT:
            plan = self.scheduler.plan()
            if plan is None:
                return
            self._sent.append((plan, time.perf_counter()))
            self._shards.send(plan)
            for admission in plan.admitted:
                self._sinks[admission.request.id].admitted()

    def _on_result(self, result: StepResult) -> None:
        outputs = self.scheduler.complete(result)
        self._pump()
        for request_id, output in outputs:
            ended = output.finish_reason is not None or output.error is not None
            sink = self._sinks.pop(request_id, None) if ended else self._sinks.get(request_id)
            if sink is not None:
                sink([output])
        plan, sent = self._sent.popleft()
        self._on_step(
            StepReport(
                len(plan.rows),
                sum(plan.num_tokens),
                len(plan.admitted),
                time.perf_counter() - sent,
                result.forward_ns / 1e9,
                result.error is not None,
            )
        )

    def _lose(self, reason: str) -> None:
        self._lost = reason
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink([Output(error=reason)])
