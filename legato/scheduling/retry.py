"""Estimates when a refused request should be retried (`Retry-After`)."""

from __future__ import annotations

import math
from collections import deque

# Seconds over which the rate of finished requests is measured, and the longest Retry-After.
RATE_WINDOW = 10.0
LONGEST_WAIT = 60


class RetryEstimate:
    """Spreads refused clients over time at the rate at which requests finished lately.

    Each refusal gets a time of its own, so that clients do not all come back at once and find the same slot taken. A
    client that does not come back drops out when its time has passed.
    """

    def __init__(self, now: float = 0.0) -> None:
        # When each of the requests that finished within the window did so, all of them after `_since`.
        self._finished: deque[float] = deque()
        self._since = now
        # When the last client that was refused will have its slot.
        self._end = now

    def restart(self, now: float) -> None:
        """The server was empty: how fast requests finished before says nothing about now."""
        self._finished.clear()
        self._since = now

    def finish(self, count: int, now: float) -> None:
        self._forget(now)
        self._finished.extend([now] * count)

    def seconds(self, count: int, now: float) -> int:
        """Whole seconds after which a client that wants `count` slots should try again."""
        return min(max(1, math.ceil(self._wait(count, now))), LONGEST_WAIT)

    def _wait(self, count: int, now: float) -> float:
        self._forget(now)
        if not self._finished:  # the best guess is that it takes as long again
            return now - self._since
        seconds_each = (now - self._since) / len(self._finished)
        self._end = min(max(self._end, now) + count * seconds_each, now + LONGEST_WAIT)
        return self._end - now

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0] < now - RATE_WINDOW:
            self._since = self._finished.popleft()
