"""One answer for all who ask at about the same time.

Metrics are collected from every process and written by the scheduler's, which has steps to plan: however many clients
ask, and however often, it is done a few times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Seconds between two answers.
INTERVAL = 0.1


class SharedAnswer:
    """An answer is never older than the question."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._may_begin_at = 0.0
        # The answer that those wait for who ask now; it has not begun.
        self._next: asyncio.Future[bytes] | None = None

    async def __call__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._next)  # others wait for it, too

    async def _run(self) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(self._may_begin_at - loop.time(), 0))
        self._next, self._may_begin_at = None, loop.time() + INTERVAL
        return await self._make()
