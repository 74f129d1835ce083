"""When requests have waited or run long enough."""

from __future__ import annotations

from collections import OrderedDict

from legato.scheduling.limits import Refusal, SchedulerLimits


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
    """Of all requests: until when each must have a row, and until when it must have ended."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._of_queue = Deadlines(limits.queue_timeout, Refusal.WAITED_TOO_LONG)
        self._of_run = Deadlines(limits.request_timeout, Refusal.RAN_TOO_LONG)

    def start(self, request_id: int, now: float) -> None:
        self._of_queue.start(request_id, now)
        self._of_run.start(request_id, now)

    def leave_queue(self, request_id: int) -> None:
        self._of_queue.stop(request_id)

    def stop(self, request_id: int) -> None:
        self._of_queue.stop(request_id)
        self._of_run.stop(request_id)

    @property
    def next(self) -> float | None:
        found = (self._of_queue.next, self._of_run.next)
        return min((deadline for deadline in found if deadline is not None), default=None)

    def take_passed(self, now: float) -> list[tuple[int, str]]:
        """Requests whose time is up, each once, and what is said of them."""
        passed: dict[int, str] = {}
        for deadlines in (self._of_queue, self._of_run):
            for request_id in deadlines.take_passed(now):
                self.stop(request_id)
                passed[request_id] = deadlines.problem
        return list(passed.items())
