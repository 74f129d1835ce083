"""Limits and delays of process restarts.

failed after it was ready         at once: it worked, so it will probably work again
failed before it was ready        after 1, 2, 4 … 30 seconds: it will probably fail again
failed more than `max_restarts`   not at all
times within `WINDOW` seconds
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from legato.common.errors import LegatoError

# Of a program that has restarted its own processes too often: starting it anew would only prolong that.
EXIT_NO_RESTART = 3
# Of a shard whose device failed. Only a new process can use the device again.
EXIT_DEVICE_FAILED = 4

WINDOW = 600.0
FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0


class TooManyRestarts(LegatoError):
    """Processes of ours end again and again."""

    exit_code: ClassVar = EXIT_NO_RESTART


class RestartBudget:
    """`--max-restarts` for one process, or for several that are restarted together."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        self._num_failed_starts = 0

    def spend(self, now: float, *, was_ready: bool) -> float | None:
        """The process failed at `now`. Returns seconds to wait before the restart; None if there must be none."""
        while self._restarts and self._restarts[0] <= now - WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        self._restarts.append(now)
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        return min(FIRST_DELAY * 2 ** (self._num_failed_starts - 1), LONGEST_DELAY) if self._num_failed_starts else 0.0

    @property
    def described(self) -> str:
        return f"--max-restarts is {self._max_restarts} within {WINDOW:.0f} s"
