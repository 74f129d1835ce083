"""An asyncio event loop without sockets, whose time passes when nothing else is left to do."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

Callback = Callable[..., object]
# Seconds that a turn of the event loop takes.
TURN = 1e-6
# More than any seed needs: callbacks that call each other for ever are a bug, too.
MOST_EVENTS = 2_000_000


class Timer:
    """What asyncio calls a handle."""

    __slots__ = ("args", "callback", "due")

    def __init__(self, callback: Callback, args: tuple[Any, ...], due: float) -> None:
        self.callback: Callback | None = callback
        self.args = args
        self.due = due

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.due


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in asyncio's order: a turn runs what was ready when it began. Also a `router.step_loop.Clock`."""

    def __init__(self, start: float = 1000.0) -> None:
        self.num_events = 0
        self._now = start
        self._ready: deque[Timer] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._failure: BaseException | None = None
        self.paused_at = 0.0

    # ---- what asyncio and the router call --------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    now = time

    def call_soon(self, callback: Callback, *args: Any, context: Context | None = None) -> Timer:  # type: ignore[override]
        timer = Timer(callback, args, self._now)
        self._ready.append(timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callback, *args: Any, context: Context | None = None
    ) -> Timer:
        timer = Timer(callback, args, when)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callback, *args: Any, context: Context | None = None
    ) -> Timer:
        return self.call_at(self._now + delay, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self)
        task.add_done_callback(self._on_task_done)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task failed and nobody looked. Its exception ends the simulation."""
        self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        """Whoever waits for the task, a broken promise ends the simulation."""
        if not task.cancelled() and isinstance(task.exception(), AssertionError):
            self._fail(task.exception())

    def _fail(self, problem: BaseException | None) -> None:
        if self._failure is None:
            self._failure = problem

    # ---- what the simulation calls ---------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """The process is stopped for so long: everything that is due meanwhile is late."""
        self._now += seconds
        self.paused_at = self._now

    def run_while(self, condition: Callable[[], bool]) -> None:
        """A turn at a time, until `condition` is false."""
        asyncio._set_running_loop(self)
        try:
            while condition():
                self._turn()
                if self._failure is not None:
                    raise self._failure
        finally:
            asyncio._set_running_loop(None)

    def drop(self) -> None:
        """Let go of everything that has not happened."""
        self._ready.clear()
        self._timers.clear()

    def _turn(self) -> None:
        assert self.num_events < MOST_EVENTS, "the event loop spins"
        ready, timers = self._ready, self._timers
        self._now += TURN
        if not ready:
            assert timers, "nothing will ever happen again"
            if timers[0][0] > self._now:
                self._now = timers[0][0]
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            timer = ready.popleft()
            if timer.callback is not None:
                self.num_events += 1
                timer.callback(*timer.args)
