"""Time as the scheduler's process sees it: the event loop's, or a test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

# Seconds that the event loop may be late before a step counts as hung: we were stopped, not the shards.
MAX_LATENESS = 1.0


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
