"""How many sequences one HTTP worker takes at once, and how many bytes of prompts, so that parsing and tokenizing are
bounded, too.

The scheduler bounds the total of all workers when requests are submitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from legato.api.errors import Overloaded
from legato.scheduling.retry import RetryEstimate
from legato.scheduling.shares import EVERYBODY, Shares

# Bytes of bodies whose prompts are being tokenized or wait for it. Python keeps them in several times as many.
VALIDATED_BYTES = 16 << 20
# Longer ones are validated one at a time: tokenizing takes a hundred bytes of memory for each byte of a body, and
# short prompts should find a tokenizer that is free.
LONG_BODY = 128 << 10


class ConcurrencyLimit:
    """Each tenant gets its share (`scheduling/shares.py`)."""

    def __init__(
        self, total: int, clock: Callable[[], float] = time.monotonic, validated_bytes: int = VALIDATED_BYTES
    ) -> None:
        self._sequences = Shares(total)
        self._bytes = Shares(validated_bytes)
        self._long_body = asyncio.Lock()
        self._clock = clock
        self._retry = RetryEstimate(clock())

    @property
    def free(self) -> int:
        return int(self._sequences.free)

    @contextmanager
    def held(self, count: int, tenant: str = EVERYBODY) -> Iterator[None]:
        """Overloaded unless there is room for `count` sequences."""
        self.take(count, tenant)
        try:
            yield
        finally:
            self.release(count, tenant)

    def take(self, count: int, tenant: str = EVERYBODY) -> None:
        now = self._clock()
        is_empty = self._sequences.free == self._sequences.total
        if count > self._sequences.free or not self._sequences.take(tenant, count):
            raise Overloaded(self._retry.seconds(count, now))
        if is_empty:
            self._retry.restart(now)

    def release(self, count: int, tenant: str = EVERYBODY) -> None:
        self._sequences.give_back(tenant, count)
        self._retry.finish(count, self._clock())

    @asynccontextmanager
    async def validating(self, num_bytes: int, tenant: str = EVERYBODY) -> AsyncIterator[None]:
        """Overloaded while too many long bodies wait for a tokenizer."""
        if not self._bytes.take(tenant, num_bytes):
            raise Overloaded(self._retry.seconds(1, self._clock()))
        try:
            if num_bytes < LONG_BODY:
                yield
            else:
                async with self._long_body:
                    yield
        finally:
            self._bytes.give_back(tenant, num_bytes)
