"""When steps brought tokens, noted once for all requests of a process, so that no token pays for traces."""

from __future__ import annotations

import time
from bisect import bisect_right
from operator import sub
from typing import NamedTuple

# Steps to remember: minutes of them.
MAX_STEPS = 1 << 15
# Groups of steps in an answer: events of a span.
MAX_GROUPS = 4


class StepGroup(NamedTuple):
    """Consecutive steps: when the last of them came, their number, and the longest time before one of them."""

    at: float
    num: int
    longest_gap: float


class StepTimes:
    def __init__(self) -> None:
        self._times: list[float] = []

    def add(self) -> None:
        self._times.append(time.monotonic())
        if len(self._times) == 2 * MAX_STEPS:
            del self._times[:MAX_STEPS]

    def after(self, moment: float, num: int) -> list[StepGroup]:
        """The `num` steps after `moment`, which itself is that of a step. Few enough have a group of their own."""
        begin = max(bisect_right(self._times, moment), 1)
        times = self._times[begin - 1 : begin + num]  # from the one before
        gaps = list(map(sub, times[1:], times))
        size = -(-len(gaps) // MAX_GROUPS) or 1
        return [
            StepGroup(
                times[min(first + size, len(gaps))], len(gaps[first : first + size]), max(gaps[first : first + size])
            )
            for first in range(0, len(gaps), size)
        ]
