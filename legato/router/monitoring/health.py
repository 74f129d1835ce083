"""Sends the server's health to the HTTP workers every second; their replies serve as heartbeats.

step loop: steps advance ──┐
idle shards: Health ───────┴─► HealthMonitor ──ServerState──► workers: /health, /livez, /readyz without a question
                                             ◄────Alive────── no answer within --hang-timeout: killed and replaced
"""

from __future__ import annotations

import asyncio
import logging

from legato.ipc.messages import ServerState
from legato.router.clock import MAX_LATENESS, Clock, LoopClock
from legato.router.step_loop import StepLoop
from legato.router.workers import Workers

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# How often shards without work are asked how they are: their streams tell of death, but not of a hang.
IDLE_CHECK_SECONDS = 5.0


class HealthMonitor:
    def __init__(self, steps: StepLoop, workers: Workers, hang_timeout: float, clock: Clock | None = None) -> None:
        self._steps = steps
        self._workers = workers
        self._hang_timeout = hang_timeout
        self._clock = LoopClock() if clock is None else clock
        self._is_draining = False
        steps.on_change = self.tell

    @property
    def state(self) -> ServerState:
        steps = self._steps
        return ServerState(
            healthy=steps.is_healthy,
            live=steps.is_live,
            ready=steps.is_healthy and not self._is_draining,
            restarting=steps.is_restarting,
            draining=self._is_draining,
            step_age=steps.step_age,
        )

    def drain(self) -> None:
        """From now on no request is admitted."""
        if not self._is_draining:
            logger.info("Draining: no more requests are admitted", extra={"fields": {"running": self._steps.running}})
        self._is_draining = True
        self.tell()

    def tell(self) -> None:
        self._workers.tell(self.state, self._clock.now())

    async def run(self) -> None:
        """For ever."""
        shards = asyncio.create_task(self._check_idle_shards())
        try:
            while True:
                self.beat()
                due = self._clock.now() + BEAT_SECONDS
                await asyncio.sleep(BEAT_SECONDS)
                if self._clock.now() - due > MAX_LATENESS:  # we were stopped: their answers may be waiting for us
                    self._workers.excuse()
        finally:
            shards.cancel()

    def beat(self) -> None:
        self._workers.kill_hung(self._clock.now(), self._hang_timeout)
        self._steps.prove()
        self.tell()

    async def _check_idle_shards(self) -> None:
        while True:
            await asyncio.sleep(min(IDLE_CHECK_SECONDS, self._hang_timeout))
            shards = self._steps.shards
            if not self._steps.is_idle or await shards.healthy(self._hang_timeout):
                continue
            if self._steps.is_idle and shards is self._steps.shards:
                self._steps.lose_shards("the shards have no work, and do not answer or cannot use their device")
