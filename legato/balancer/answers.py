"""A replica's response to one request, over either kind of connection: its head, then the parts of its body."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

Headers = list[tuple[bytes, bytes]]


class ReplicaLost(Exception):
    """The connection broke, or could not be made. `is_stale`: it had been idle, and nothing of an answer came.
    `is_alive`: the replica said so itself, on a connection that other streams go on using."""

    def __init__(self, cause: str, *, is_stale: bool = False, is_alive: bool = False) -> None:
        super().__init__(cause)
        self.is_stale = is_stale
        self.is_alive = is_alive


class ReplicaAnswer(ABC):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: str | None = None
        self._is_alive = False
        self.reset()

    def reset(self) -> None:
        """For the next request."""
        self.headers: Headers = []
        self.status = 0
        self._has_headers = False
        self._pieces: list[bytes] = []
        self.is_complete = False
        # Takes pieces at once and returns True, or leaves all of them to `read`. Only asked while `read` waits: then
        # everything before them has been passed on. Waking a task for every piece costs more than passing it on.
        self.sink: Callable[[list[bytes]], bool] | None = None

    # ---- who sent the request --------------------------------------------------------------------------------------

    async def read(self) -> list[bytes]:
        """What has come since the last call; waits if nothing has. Empty at the end. ReplicaLost."""
        while not self._pieces:
            if self.is_complete:
                return []
            await self._wait()
        pieces, self._pieces = self._pieces, []
        return pieces

    async def read_all(self) -> bytes:
        pieces: list[bytes] = []
        while more := await self.read():
            pieces += more
        return b"".join(pieces)

    def header(self, name: bytes) -> bytes | None:
        for each, value in self.headers:
            if each == name:
                return value
        return None

    @abstractmethod
    def abort(self, cause: str = "the connection was aborted") -> None:
        """Whoever waits gets ReplicaLost."""

    @abstractmethod
    def release(self) -> None:
        """Nobody reads any more."""

    # ---- where it arrives ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _is_stale(self) -> bool: ...

    def _add(self, pieces: list[bytes]) -> bool:
        """Whether they were passed on already."""
        waiter = self._waiter
        if self.sink is not None and waiter is not None and not waiter.done() and self.sink(pieces):
            return True
        self._pieces += pieces
        self._wake()
        return False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_for_head(self) -> None:
        while not self._has_headers:
            await self._wait()

    async def _wait(self) -> None:
        if self._error is not None:
            is_stale = self._is_stale and not self._has_headers
            raise ReplicaLost(self._error, is_stale=is_stale, is_alive=self._is_alive)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
