"""The servers behind the balancer: the load of each, and whether it gets requests.

    joining ──state or health answers──► up ──draining──► draining
       ▲                                 │ connection lost, no answer to a probe, errors in a row
       └──────── probe answers ──────────┴──► down, for longer after every failure

A replica is probed once per interval. Requests never wait for a probe.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from legato.balancer.choosing import DEFAULT_ROWS, Load
from legato.balancer.shared import SharedConnections
from legato.balancer.upstream import ConnectionPool
from legato.common.errors import OptionError
from legato.ipc.routed import ReplicaState

logger = logging.getLogger(__name__)

# Answers 500 and above in a row after which a replica gets nothing for a while.
MAX_ERRORS = 5
# Seconds of that, doubled with every time.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class ReplicaUrl:
    host: str
    port: int
    is_encrypted: bool = False

    @classmethod
    def parse(cls, url: str) -> ReplicaUrl:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        has_more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or has_more:
            raise OptionError(f"--replica {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        return cls(parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_encrypted else 'http'}://{host}:{self.port}"


class Replica:
    def __init__(self, url: ReplicaUrl, number: int, tls: ssl.SSLContext | None) -> None:
        self.url = url
        self.number = number
        self.pool = ConnectionPool(url.host, url.port, tls if url.is_encrypted else None)
        # For the streams of all clients, if it is a Legato that has our key.
        self.shared = SharedConnections(url.host, url.port, tls if url.is_encrypted else None)
        # None: another kind of server, of which only its health is known.
        self.state: ReplicaState | None = None
        self.is_up = False
        self.is_draining = False
        # Our own requests there, and prompt tokens of those that wait for their first token.
        self.num_active = 0
        self.pending_tokens = 0
        # Requests of others, as of the last probe.
        self._num_foreign = 0
        self._num_errors = 0
        self._pause = 0.0
        self._paused_until = 0.0
        # Set to have it probed at once.
        self.probe_now = asyncio.Event()
        # For metrics.
        self.num_requests = 0
        self.num_losses = 0

    def is_available(self, now: float) -> bool:
        return self.is_up and not self.is_draining and now >= self._paused_until

    @property
    def model(self) -> tuple[str, str | None] | None:
        """Of which its tokens are."""
        return None if self.state is None else (self.state.model_id, self.state.model_sha)

    @property
    def load(self) -> Load:
        state = self.state
        return Load(
            num_requests=self.num_active + self._num_foreign,
            pending_tokens=self.pending_tokens,
            max_rows=DEFAULT_ROWS if state is None else state.max_rows,
            free_share=1.0 if state is None else state.free_blocks / max(1, state.total_blocks),
        )

    # ---- what probes find ------------------------------------------------------------------------------------------

    def found(self, state: ReplicaState | None, *, healthy: bool) -> bool:
        """Returns whether its cache was emptied since the last probe."""
        was_emptied = state is not None and self.state is not None and state.epoch != self.state.epoch
        self.state = state
        if state is not None and healthy:
            self._num_foreign = max(0, state.running + state.queued - self.num_active)
            healthy, self.is_draining = state.ready or state.draining, state.draining
        if healthy and not self.is_up:
            logger.info("Replica is up", extra={"fields": {"replica": str(self.url)}})
            self._num_errors = 0
        elif self.is_up and not healthy:
            logger.warning("Replica is not ready", extra={"fields": {"replica": str(self.url)}})
        self.is_up = healthy
        return was_emptied

    def lost(self, cause: str) -> None:
        """A connection broke or could not be made. A probe says when it is back."""
        self.num_losses += 1
        if self.is_up:
            fields = {"replica": str(self.url), "cause": cause, "active": self.num_active}
            logger.warning("Replica is lost", extra={"fields": fields})
        self.is_up = False
        self.probe_now.set()

    def hung(self, cause: str) -> None:
        """It answers no probe: nobody should wait for it."""
        self.lost(cause)
        self.pool.abort_all(cause)
        self.shared.abort_all(cause)

    # ---- what answers say ------------------------------------------------------------------------------------------

    def answered(self, status: int, now: float) -> None:
        """Opens the circuit after errors in a row; an answer closes it."""
        if status not in (500, 502, 504):
            self._num_errors, self._pause = 0, 0.0
            return
        self._num_errors += 1
        if self._num_errors >= MAX_ERRORS:
            self._num_errors = 0
            self._pause = min(LONGEST_PAUSE, self._pause * 2 or FIRST_PAUSE)
            self._paused_until = now + self._pause
            fields = {"replica": str(self.url), "seconds": self._pause}
            logger.warning("Replica responds with errors and gets no requests for a while", extra={"fields": fields})

    def begin(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_active += 1
        self.pending_tokens += num_tokens

    def first_token(self, num_tokens: int) -> None:
        self.pending_tokens -= num_tokens

    def end(self) -> None:
        self.num_active -= 1


class ReplicaSet:
    """The known replicas. Their numbers are reused, so there are never more numbers than replicas."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._replicas: dict[ReplicaUrl, Replica] = {}
        # Called with a replica that joined, and with one that left.
        self.on_join: Callable[[Replica], None] = lambda replica: None
        self.on_leave: Callable[[Replica], None] = lambda replica: None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica: Replica | None) -> bool:
        return replica is not None and self._replicas.get(replica.url) is replica

    @property
    def all(self) -> list[Replica]:
        return list(self._replicas.values())

    def available(self, now: float) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.is_available(now)]

    def update(self, urls: Iterable[ReplicaUrl]) -> None:
        """These, and no others."""
        wanted = dict.fromkeys(urls)
        for url in [url for url in self._replicas if url not in wanted]:
            logger.info("Replica removed", extra={"fields": {"replica": str(url)}})
            self.on_leave(self._replicas.pop(url))
        for url in wanted:
            if url not in self._replicas:
                used = {replica.number for replica in self._replicas.values()}
                number = next(n for n in range(len(used) + 1) if n not in used)
                replica = self._replicas[url] = Replica(url, number, self._tls)
                self.on_join(replica)

    def changed(self) -> None:
        """One of them may be available now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
