"""How many sequences one HTTP worker takes at once, so that parsing and tokenizing are bounded, too.

The scheduler bounds the total of all workers when requests are submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from legato.api.errors import Overloaded
from legato.scheduling.retry import RetryEstimate


class ConcurrencyLimit:
    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.free = total
        self._total = total
        self._clock = clock
        self._retry = RetryEstimate(clock())

    @contextmanager
    def held(self, count: int) -> Iterator[None]:
        """Overloaded unless there is room for `count` sequences."""
        self.take(count)
        try:
            yield
        finally:
            self.release(count)

    def take(self, count: int) -> None:
        now = self._clock()
        if count > self.free:
            raise Overloaded(self._retry.seconds(count, now))
        if self.free == self._total:
            self._retry.restart(now)
        self.free -= count

    def release(self, count: int) -> None:
        self.free += count
        self._retry.finish(count, self._clock())
