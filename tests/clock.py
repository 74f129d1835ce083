"""Time that passes when a test says so."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """A `router.step_loop.Clock`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._now + seconds, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Time passes and timers that are due fire, in their order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)  # late after `sleep_through`
            if timer.callback is not None:
                timer.callback()
        self._now = end

    def sleep_through(self, seconds: float) -> None:
        """Time passes and nothing fires: the event loop was busy."""
        self._now += seconds
