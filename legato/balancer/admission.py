"""Limits the balancer's requests in flight, in total and per API key.

Replicas are fair to the keys among the requests that each of them has. Here the same shares are kept over all of them:
a key that sends more than its share is refused, although some replica would still take it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from legato.api.errors import Overloaded
from legato.scheduling.shares import EVERYBODY, Shares

# Keys that a replica has accepted. Others share one tenant, so that made-up keys take no shares from real ones.
MAX_KNOWN_KEYS = 4096
UNKNOWN = "unknown"


class KeyShares:
    def __init__(self, limit: int | None) -> None:
        """None: as many as the replicas take together."""
        self._limit = limit
        self._shares = Shares(limit)
        self._known: dict[bytes, str] = {}

    def set_capacity(self, total: int) -> None:
        """What the replicas take together."""
        shares = self._shares
        if self._limit is None and total and total != shares.total:
            in_use = 0 if shares.free == shares.total else shares.total - shares.free
            shares.total, shares.free = total, total - in_use

    def accepted(self, key: bytes) -> None:
        """A replica has answered a request with this key."""
        if key and key not in self._known:
            if len(self._known) >= MAX_KNOWN_KEYS:
                del self._known[next(iter(self._known))]
            self._known[key] = hashlib.sha256(key).hexdigest()[:12]

    @contextmanager
    def held(self, key: bytes) -> Iterator[None]:
        tenant = self._known.get(key, UNKNOWN) if key else EVERYBODY
        if self._shares.free < 1 or not self._shares.take(tenant, 1):
            raise Overloaded
        try:
            yield
        finally:
            self._shares.give_back(tenant, 1)
