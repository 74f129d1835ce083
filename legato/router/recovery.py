"""Recovery after the loss of shards: they are killed, new ones are started by their launcher, and requests continue.

step loop   ShardsLost ──► Recovery: kill what is left, wait, warm up, load adapters, compile grammars ──► resume
launcher    sees the shards end ──► starts the group anew (`launcher/supervision.py`)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from legato.common.restarts import RestartBudget
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.grammar.wire import from_pb
from legato.pb import generate_pb2 as pb
from legato.router.adapters import AdapterRegistry
from legato.router.shards import GrpcShards, ShardsLost
from legato.router.step_loop import StepLoop
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import GenerationRequest, ModelLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectedShards:
    """Shards that are warm."""

    shards: GrpcShards
    scheduler_limits: SchedulerLimits
    limits: ModelLimits


class Recovery:
    """Called by the step loop with what was lost; raises it again when `budget` is spent."""

    def __init__(
        self,
        steps: StepLoop,
        current: GrpcShards,
        connect: Callable[[], Awaitable[ConnectedShards]],
        budget: RestartBudget,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._steps = steps
        self._adapters = adapters
        self._current = current
        self._connect = connect
        self._budget = budget

    async def __call__(self, error: ShardsLost) -> None:
        started, was_ready = asyncio.get_running_loop().time(), True
        while True:
            self._current.kill()
            await self._current.close()
            delay = self._budget.spend(asyncio.get_running_loop().time(), was_ready=was_ready)
            if delay is None:
                raise error
            num_requests = self._steps.running + self._steps.queue_size
            logger.error("%s: waiting for new shards", error, extra={"fields": {"requests": num_requests}})
            await asyncio.sleep(delay)
            try:
                connected = await self._connect()
                self._current = connected.shards
                if self._adapters is not None:
                    await self._adapters.restore(connected.shards)
                await self._prepare_grammars(connected.shards)
            except ShardsLost as again:
                error, was_ready = again, False
                continue
            self._steps.resume(connected.shards, connected.scheduler_limits, connected.limits)
            seconds = asyncio.get_running_loop().time() - started
            logger.info("Connected to new shards after %.1f s: requests continue", seconds)
            return

    async def close(self) -> None:
        await self._current.close()

    async def _prepare_grammars(self, shards: GrpcShards) -> None:
        """Those of all requests, also of those that come meanwhile, before a step needs them. One that fails ends its
        own requests, in their steps."""
        tried: set[Grammar] = set()
        while missing := [each for each in grammars_of(self._steps.scheduler.requests) if each not in tried]:
            tried.add(missing[0])
            try:
                await shards.prepare(missing[0])
            except GrammarError as error:
                logger.warning("A grammar cannot be compiled by the new shards: %s", error)


def grammars_of(requests: list[GenerationRequest]) -> list[Grammar]:
    found = (from_pb(pb.Admission.FromString(request.payload).parameters) for request in requests)
    return list(dict.fromkeys(grammar for grammar in found if grammar is not None))
