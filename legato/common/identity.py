"""Random ids and seeds of requests, and their creation time.

A balancer may send one request to two servers in turn, the second of which goes on where the first has stopped. Both
must then draw the same ids and seeds, which clients have seen already. So they draw from the number that the balancer
gave the request, in the same order. Requests without one draw from the system.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextvars import ContextVar
from itertools import count

_current: ContextVar[RequestIdentity | None] = ContextVar("identity", default=None)


class RequestIdentity:
    """Of the request that the current task answers, once it is `enter`ed."""

    def __init__(self, number: str, created: int) -> None:
        """`number` is unique, and as long as nobody can guess it, nobody can guess what is drawn."""
        self.created = created
        self._number = number.encode()
        self._draws = count()

    def enter(self) -> None:
        _current.set(self)

    def draw(self, num_bytes: int) -> bytes:
        return hashlib.blake2b(b"%b %d" % (self._number, next(self._draws)), digest_size=num_bytes).digest()


def _draw(num_bytes: int) -> bytes:
    identity = _current.get()
    return secrets.token_bytes(num_bytes) if identity is None else identity.draw(num_bytes)


def new_hex(length: int = 32) -> str:
    """The random part of an id; `length` is even."""
    return _draw(length // 2).hex()


def random_seed() -> int:
    return int.from_bytes(_draw(8))


def creation_time() -> int:
    """Of the answer, in seconds since 1970."""
    identity = _current.get()
    return int(time.time()) if identity is None else identity.created
