"""Starts a few requests in each turn of the event loop.

Starting a request costs a hundred times as much as delivering a token. A thousand of them in one turn would delay
running streams and health checks by a second.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A few milliseconds of work.
PER_TURN = 8


class AcceptThrottle:
    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._turning = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """In order of arrival."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        self._left = self._per_turn
        self._turning = bool(self._waiting)
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # or its task was cancelled
                turn.set_result(None)
                self._left -= 1
