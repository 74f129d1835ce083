"""How many sequences may run or wait in the whole router. Taken before anything is computed, never waited for."""

from __future__ import annotations

from typing import Protocol

from legato.router.errors import Overloaded


class Permits(Protocol):
    """What a route takes them from. Asking may take a moment, because all workers draw on one pool."""

    async def take(self, num: int) -> None:
        """Overloaded if there are not so many."""
        ...

    def give_back(self, num: int) -> None: ...


class PermitPool:
    """The permits themselves. Whoever is in the same process takes them directly."""

    def __init__(self, total: int) -> None:
        self.free = total

    def try_take(self, num: int) -> bool:
        if num > self.free:
            return False
        self.free -= num
        return True

    async def take(self, num: int) -> None:
        if not self.try_take(num):
            raise Overloaded

    def give_back(self, num: int) -> None:
        self.free += num
