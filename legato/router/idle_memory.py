"""Returns the memory of unused KV blocks to the system while no request is running.

Only where shards ask for it by a limit of unused blocks, which those on a CPU do: their memory is everybody's.
"""

from __future__ import annotations

import asyncio
import logging

from legato.router.shards import ShardsLost
from legato.router.step_loop import StepLoop

logger = logging.getLogger(__name__)

# Memory is given back after this many looks in a row at which nothing ran and nothing had been admitted since the last.
LOOK_SECONDS, QUIET_LOOKS = 1.0, 3


class IdleMemory:
    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._num_quiet = 0
        self._num_admitted = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.look() and self._steps.scheduler.limits.max_unused_blocks is not None:
                await self.release()

    def look(self) -> bool:
        """Whether nothing has run for long enough."""
        admitted = self._steps.scheduler.stats.prompt_tokens
        is_quiet = self._steps.is_idle and admitted == self._num_admitted
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        self._num_admitted = admitted
        return self._num_quiet >= QUIET_LOOKS

    async def release(self) -> None:
        """Blocks are out of the pool until the shards have answered, so that no step uses them meanwhile. If the shards
        are lost they stay out: the next ones have a new pool."""
        steps = self._steps
        pool, shards = steps.scheduler.pool, steps.shards
        blocks = pool.take_used()
        if not blocks:
            return
        try:
            await shards.release(blocks)
        except ShardsLost as error:
            logger.warning("The memory of %d KV blocks was not returned to the system: %s", len(blocks), error)
        else:
            pool.free(blocks)
