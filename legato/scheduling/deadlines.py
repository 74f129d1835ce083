"""Deadlines of queued and running requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Deadlines:
    """One timeout for all requests, so deadlines come in the order in which they were set: a queue, no heap.

    Of those that are stopped nothing is left: a million requests may end before the first deadline comes.
    """

    def __init__(self, timeout: float, problem: str) -> None:
        """A timeout of 0: there is none. `problem` has a place for it."""
        self.problem = problem.format(timeout)
        self._timeout = timeout
        self._ends: OrderedDict[int, float] = OrderedDict()

    def start(self, request_id: int, now: float) -> None:
        if self._timeout:
            self._ends[request_id] = now + self._timeout

    def stop(self, request_id: int) -> None:
        self._ends.pop(request_id, None)

    @property
    def next(self) -> float | None:
        return next(iter(self._ends.values()), None)

    def take_passed(self, now: float) -> list[int]:
        passed = []
        while (end := self.next) is not None and end <= now:
            passed.append(self._ends.popitem(last=False)[0])
        return passed


class RequestDeadlines:
    """Of requests: to have a row, and to have ended."""

    def __init__(self, queue: Deadlines, run: Deadlines) -> None:
        self._queue, self._run = queue, run

    @property
    def next(self) -> float | None:
        return min((end for end in (self._queue.next, self._run.next) if end is not None), default=None)

    def start(self, request_id: int, now: float) -> None:
        self._queue.start(request_id, now)
        self._run.start(request_id, now)

    def leave_queue(self, request_id: int) -> None:
        self._queue.stop(request_id)

    def stop(self, request_id: int) -> None:
        self._queue.stop(request_id)
        self._run.stop(request_id)

    def take_passed(self, now: float) -> Iterator[tuple[int, str]]:
        """Requests and what is wrong with them. They are to be stopped one by one: some have passed both."""
        for deadlines in (self._queue, self._run):
            for request_id in deadlines.take_passed(now):
                yield request_id, deadlines.problem
