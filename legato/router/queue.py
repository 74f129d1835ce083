"""Requests that wait for a row, first come first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol, TypeVar


class Waiting(Protocol):
    @property
    def id(self) -> int: ...


T = TypeVar("T", bound=Waiting)


class Queue(OrderedDict[int, T]):
    """Keyed by request id, so that a client that leaves is dropped without a search."""

    def push(self, entry: T) -> None:
        self[entry.id] = entry

    def push_front(self, entry: T) -> None:
        """A preempted request has waited longest already."""
        self[entry.id] = entry
        self.move_to_end(entry.id, last=False)

    def first(self) -> T | None:
        return next(iter(self.values()), None)

    def entries(self) -> Iterator[T]:
        return iter(self.values())
