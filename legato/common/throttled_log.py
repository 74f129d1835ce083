"""Rate-limited warnings, for events that clients can trigger at will."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# Seconds after a warning in which the same one is only counted.
PERIOD = 60.0


class ThrottledLog:
    """Logs each message at most once per period, with the number of times that it was suppressed before.

    Messages are constants of the program: nothing that a client sent may be part of one.
    """

    def __init__(self, logger: logging.Logger, period: float = PERIOD, clock: Callable[[], float] = time.monotonic):
        self._logger = logger
        self._period = period
        self._clock = clock
        self._quiet_until: dict[str, float] = {}
        self._num_suppressed: dict[str, int] = {}

    def warning(self, message: str) -> None:
        now = self._clock()
        if now < self._quiet_until.get(message, now):
            self._num_suppressed[message] = self._num_suppressed.get(message, 0) + 1
            return
        self._quiet_until[message] = now + self._period
        suppressed = self._num_suppressed.pop(message, 0)
        self._logger.warning(message, extra={"fields": {"suppressed": suppressed}} if suppressed else None)
