"""Measures the lag of an event loop with a timer that is due ten times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL = 0.1


class LoopLag:
    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe` gets the seconds of lag, every time."""
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + INTERVAL
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        now = self._loop.time()
        self._observe(max(now - self._due, 0.0))
        self._due = now + INTERVAL
        self._timer = self._loop.call_at(self._due, self._fire)

    def stop(self) -> None:
        self._timer.cancel()
