"""How long the event loop kept everybody waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
# Between two looks at the clock.
_PAUSE = 0.001


class Lag:
    """The longest time by which the loop was late, in seconds, while something else ran on it."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def during(self, work: Awaitable[T]) -> T:
        watching = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        try:
            return await work
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            started, used = time.monotonic(), time.process_time()
            await asyncio.sleep(_PAUSE)
            late = time.monotonic() - started - _PAUSE
            # On a busy machine the whole process waits for its turn, which is not the loop's fault: what the loop did
            # meanwhile has taken processor time.
            self.worst = max(self.worst, min(late, time.process_time() - used))
