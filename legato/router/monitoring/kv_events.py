"""The prefix cache's events (`--kv-events`): kept for `GET /replica/events`, and published over ZeroMQ."""

from __future__ import annotations

import time
from collections import deque
from secrets import randbits
from typing import Any

import msgspec

from legato.common.errors import OptionError
from legato.ipc.kv_events import KvEvent, KvEventPage, readable, vllm_batch
from legato.scheduling.journal import BlockJournal, JournalEntry, contents
from legato.scheduling.prefix_tree import PrefixTree
from legato.scheduling.scheduler import Scheduler

# Events kept for those who ask; who has missed more gets what the cache holds.
MAX_EVENTS = 10_000
# Messages that wait for a slow listener; then it misses some, and the numbers tell it so.
MAX_WAITING = 100_000

_encode = msgspec.json.Encoder().encode


class KvEventLog:
    def __init__(self, scheduler: Scheduler, publisher: KvEventPublisher | None = None) -> None:
        self._scheduler = scheduler
        self._publisher = publisher
        self._journal = BlockJournal()
        self._tree: PrefixTree | None = None
        # From anywhere on, so that numbers from before a restart are not taken for ours.
        self._last = randbits(48)
        self._kept: deque[KvEvent] = deque(maxlen=MAX_EVENTS)
        self.flush()

    def flush(self) -> None:
        """After a step: what it changed."""
        tree = self._scheduler.tree
        if tree is self._tree:
            entries = self._journal.take()
        else:  # that of other shards
            self._tree, self._journal = tree, BlockJournal()
            tree.listener = self._journal
            entries = contents(tree)
        if not entries:
            return
        self._kept += map(readable, entries)
        self._last += len(entries)
        if self._publisher is not None:
            self._publisher.publish(entries, tree.block_size)

    def page(self, after: int | None) -> bytes:
        """`KvEventPage`, as JSON."""
        self.flush()
        tree, kept = self._scheduler.tree, self._kept
        num_new = len(kept) + 1 if after is None else self._last - after
        is_known = 0 <= num_new <= len(kept)
        events = list(kept)[len(kept) - num_new :] if is_known else [readable(entry) for entry in contents(tree)]
        return _encode(KvEventPage(self._last, not is_known, tree.block_size, events))


class KvEventPublisher:
    """A PUB socket with vLLM's messages."""

    def __init__(self, endpoint: str) -> None:
        try:
            import zmq
        except ImportError:
            raise OptionError(
                "--kv-events-endpoint needs the package pyzmq: install it with pip install 'legato[kv-events]'"
            ) from None
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(MAX_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OptionError(f"--kv-events-endpoint {endpoint}: {error}") from None
        self._number = 0

    @property
    def endpoint(self) -> str:
        """With the port that was found for `*`."""
        import zmq

        found: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return found.rstrip(b"\0").decode()

    def publish(self, entries: list[JournalEntry], block_size: int) -> None:
        """Never waits."""
        payload = vllm_batch(entries, block_size, time.time())
        self._socket.send_multipart((b"", self._number.to_bytes(8, "big"), payload))
        self._number += 1

    def close(self) -> None:
        self._socket.close()
