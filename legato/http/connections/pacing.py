"""Tokens wait while a balancer has not read those before.

A balancer that is busy reads what several steps bring at once. Then each of them costs the worker a wake-up and a piece
for nothing: one piece with all of their tokens says the same. So a stream has one piece on the way, and what comes
meanwhile is the next. Where the balancer keeps up, nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Seconds after which tokens go out in any case: the balancer may be far away.
LONGEST_WAIT = 0.006
# Streams that are woken in one turn of the event loop. Nothing is written for each of them: that takes half as long as
# where every stream has a connection (`scheduler.DELIVERIES_PER_TURN`).
WOKEN_PER_TURN = 64

GoOn = Callable[[], None]


class Pacing:
    """Of one connection. Positions count the bytes that are sent on it."""

    def __init__(self) -> None:
        self.position = 0
        # Up to where the balancer has read; None if it does not say.
        self._read: int | None = None
        # Streams that wait, by the positions of their last pieces. Each is what lets its stream go on.
        self._waiting: dict[GoOn, int] = {}
        self._due: list[GoOn] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def waits(self, position: int, go_on: GoOn) -> bool:
        """Whether a stream with a piece up to `position` has to wait. Then `go_on` is called."""
        if self._read is None or position <= self._read:
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(LONGEST_WAIT, self._time_out)
        self._waiting[go_on] = position
        return True

    def has_read(self, num_bytes: int) -> None:
        """The balancer says so; the number is added to those before."""
        read = self._read = (self._read or 0) + num_bytes
        self._release([go_on for go_on, position in self._waiting.items() if position <= read])

    def close(self) -> None:
        self._waiting.clear()
        self._due.clear()
        self._stop_timer()

    def _time_out(self) -> None:
        self._release(list(self._waiting))

    def _release(self, streams: list[GoOn]) -> None:
        if len(streams) == len(self._waiting):
            self._stop_timer()
        if not streams:
            return
        for go_on in streams:
            del self._waiting[go_on]
        if self._due:
            self._due += streams
        else:
            self._due = streams
            self._wake()

    def _wake(self) -> None:
        woken, self._due = self._due[:WOKEN_PER_TURN], self._due[WOKEN_PER_TURN:]
        for go_on in woken:
            go_on()
        if self._due:
            self._loop.call_soon(self._wake)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
