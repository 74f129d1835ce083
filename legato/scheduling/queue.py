"""The queue: requests that wait for a row, and their order.

Priority first. A level of priority is worth `AGING_SECONDS` of waiting, so whatever has waited long enough comes before
newcomers of any priority. Among equals the tenant who was served the fewest tokens, and of a tenant who came first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

AGING_SECONDS = 30.0

# Smaller is better: when a request came, later by what its priority lacks, and a number that no other has.
Rank = tuple[float, int]
LAST: Rank = (math.inf, 0)


def rank(now: float, priority: int, arrival: int) -> Rank:
    return now + priority * AGING_SECONDS, arrival


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant: usually one API key."""

    name: str
    # Tokens, or what it would have had by now if it had come earlier. Never falls.
    served: int = 0
    num_requests: int = 0


class LeastServed:
    """Tenants by what they were served. Numbers only grow, so what the heap remembers of a tenant is too small if it
    is wrong, and is put right when it comes to the top."""

    def __init__(self, is_present: Callable[[Tenant], bool]) -> None:
        """`is_present` says whether a tenant still counts."""
        self._is_present = is_present
        self._heap: list[tuple[int, int, Tenant]] = []
        self._members: set[Tenant] = set()
        # Among tenants who were served alike, the one whose turn was longest ago.
        self._turns = itertools.count()

    def add(self, tenant: Tenant) -> None:
        if tenant not in self._members:
            self._members.add(tenant)
            heapq.heappush(self._heap, (tenant.served, next(self._turns), tenant))

    def first(self) -> Tenant | None:
        while self._heap:
            served, _, tenant = self._heap[0]
            if not self._is_present(tenant):
                heapq.heappop(self._heap)
                self._members.remove(tenant)
            elif served != tenant.served:
                heapq.heapreplace(self._heap, (tenant.served, next(self._turns), tenant))
            else:
                return tenant
        return None


class Tenants:
    """Tenants with requests, waiting or running. There are as many as API keys, so none is ever forgotten."""

    def __init__(self) -> None:
        self.num_present = 0
        self._known: dict[str, Tenant] = {}
        self._present = LeastServed(lambda tenant: tenant.num_requests > 0)
        self._floor = 0

    def enter(self, name: str) -> Tenant:
        """One more request. Who had none starts level with the least served of the others: idling earns no credit."""
        tenant = self._known.get(name)
        if tenant is None:
            tenant = self._known[name] = Tenant(name)
        if tenant.num_requests == 0:
            self._raise_floor()
            tenant.served = max(tenant.served, self._floor)
            self._present.add(tenant)
            self.num_present += 1
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One request less."""
        if tenant.num_requests == 1:
            self._raise_floor()
            self.num_present -= 1
        tenant.num_requests -= 1

    def _raise_floor(self) -> None:
        least = self._present.first()
        if least is not None:
            self._floor = max(self._floor, least.served)


class Waiting(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def rank(self) -> Rank: ...

    @property
    def tenant(self) -> Tenant: ...


T = TypeVar("T", bound=Waiting)


class Level(Generic[T]):
    """Requests of equal priority: one line for each tenant."""

    def __init__(self) -> None:
        # All requests, oldest first, also those that were called.
        self.waiting: OrderedDict[int, T] = OrderedDict()
        self._lines: dict[Tenant, OrderedDict[int, T]] = {}
        self._shares = LeastServed(self._lines.__contains__)

    @property
    def has_line(self) -> bool:
        return bool(self._lines)

    @property
    def rank(self) -> Rank:
        """That of its oldest request: it gets the whole level served."""
        return next(iter(self.waiting.values())).rank

    def line_up(self, entry: T, *, in_front: bool) -> None:
        line = self._lines.get(entry.tenant)
        if line is None:
            line = self._lines[entry.tenant] = OrderedDict()
            self._shares.add(entry.tenant)
        line[entry.id] = entry
        if in_front:
            line.move_to_end(entry.id, last=False)

    def call(self) -> T:
        tenant = self._shares.first()
        assert tenant is not None, "no request is waiting"
        line = self._lines[tenant]
        _, entry = line.popitem(last=False)
        if not line:
            del self._lines[tenant]
        return entry

    def remove(self, entry: T) -> None:
        del self.waiting[entry.id]
        line = self._lines.get(entry.tenant)
        if line is not None and line.pop(entry.id, None) is not None and not line:
            del self._lines[entry.tenant]


class Queue(Generic[T]):
    """Every operation takes a time that does not grow with the requests, and hardly with the tenants."""

    def __init__(self) -> None:
        self._levels: dict[int, Level[T]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[int]:
        """The ids of all, in no order that means anything."""
        return itertools.chain.from_iterable(level.waiting for level in self._levels.values())

    def push(self, entry: T) -> None:
        level = self._level(entry)
        level.waiting[entry.id] = entry
        level.line_up(entry, in_front=False)
        self._num_waiting += 1

    def push_front(self, entry: T) -> None:
        """A preempted request has waited longest already."""
        level = self._level(entry)
        level.waiting[entry.id] = entry
        level.waiting.move_to_end(entry.id, last=False)
        level.line_up(entry, in_front=True)
        self._num_waiting += 1

    def call(self) -> T | None:
        """The next in line. It still counts as waiting, until it is removed or sent back."""
        level = min((level for level in self._levels.values() if level.has_line), key=_rank, default=None)
        return None if level is None else level.call()

    def send_back(self, called: Sequence[T]) -> None:
        """Those who were called, in that order, and are not served yet: to where they stood."""
        for entry in reversed(called):
            self._levels[entry.priority].line_up(entry, in_front=True)

    def remove(self, entry: T) -> None:
        level = self._levels[entry.priority]
        level.remove(entry)
        if not level.waiting:
            del self._levels[entry.priority]
        self._num_waiting -= 1

    def _level(self, entry: T) -> Level[T]:
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = Level()
        return level


def _rank(level: Level[T]) -> Rank:
    return level.rank
