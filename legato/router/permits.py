"""How many sequences may run or wait in the whole router. Taken before anything is computed, never waited for."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from legato.api.errors import Overloaded

# Seconds that count as lately, and the most that anybody is told to stay away.
LATELY = 10.0
LONGEST_WAIT = 60


class Permits(Protocol):
    """What a route takes them from. Asking may take a moment, because all workers draw on one pool."""

    async def take(self, num: int) -> None:
        """Overloaded if there are not so many."""
        ...

    def give_back(self, num: int) -> None: ...


class PermitPool:
    """The permits themselves. Whoever is in the same process takes them directly."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.free = total
        self._total = total
        self._line = Line(clock)

    def try_take(self, num: int) -> bool:
        if num > self.free:
            return False
        if self.free == self._total:
            self._line.begin()
        self.free -= num
        return True

    async def take(self, num: int) -> None:
        if not self.try_take(num):
            raise Overloaded(self.refuse(num))

    def give_back(self, num: int) -> None:
        self.free += num
        self._line.move_up(num)

    def refuse(self, num: int) -> int:
        """After how many whole seconds it is worth asking for so many again."""
        return min(max(1, math.ceil(self._line.join(num))), LONGEST_WAIT)


class Line:
    """Those who were told to come back, as if in a line that moves as fast as permits were given back lately.

    Each is told a time of their own, so that they do not all come at once and find the same place taken. Nobody has to
    come: whoever does not is out of the line when their time has passed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When each of those permits was given back, all of them after `_since`.
        self._given: deque[float] = deque()
        self._since = clock()
        # When the last in line will have its permits.
        self._end = self._since

    def begin(self) -> None:
        """Somebody comes to an empty house. How fast it emptied before says nothing about now."""
        self._given.clear()
        self._since = self._clock()

    def move_up(self, num: int) -> None:
        now = self._clock()
        self._forget(now)
        self._given.extend([now] * num)

    def join(self, num: int) -> float:
        """Seconds for one more who wants `num` permits."""
        now = self._clock()
        self._forget(now)
        if not self._given:  # the best guess is that it takes as long again
            return now - self._since
        seconds_each = (now - self._since) / len(self._given)
        self._end = min(max(self._end, now) + num * seconds_each, now + LONGEST_WAIT)
        return self._end - now

    def _forget(self, now: float) -> None:
        while self._given and self._given[0] < now - LATELY:
            self._since = self._given.popleft()
