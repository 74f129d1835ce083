"""Probes the state of every replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from legato.balancer.answers import Headers, ReplicaLost
from legato.balancer.replicas import Replica, ReplicaSet, ReplicaUrl
from legato.balancer.upstream import request_head
from legato.ipc.routed import KEY_HEADER, STATE_PATH, ReplicaState

logger = logging.getLogger(__name__)

# What servers of other kinds answer when they are well.
HEALTH_PATH = b"/health"

_decoder = msgspec.json.Decoder(ReplicaState)


class Probes:
    """One task per replica."""

    def __init__(
        self,
        replicas: ReplicaSet,
        route_key: str | None,
        interval: float,
        timeout: float,
        on_state: Callable[[Replica, bool], None],
    ) -> None:
        """`on_state` is told of every answer, and whether the replica's cache was emptied since the last."""
        self._replicas = replicas
        self._key = route_key
        self._interval = interval
        self._timeout = timeout
        self._on_state = on_state
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._warned: set[ReplicaUrl] = set()

    def start(self, replica: Replica) -> None:
        self._tasks[replica] = asyncio.create_task(self._watch(replica))

    def stop(self, replica: Replica) -> None:
        self._tasks.pop(replica).cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self, replica: Replica) -> None:
        # A task of its own: a worker that does not answer it must not delay the probes.
        opening: asyncio.Task[None] | None = None
        try:
            while True:
                replica.probe_now.clear()
                await self._probe(replica)
                if opening is None or opening.done():
                    opening = self._open_shared(replica)
                try:
                    async with asyncio.timeout(self._interval):
                        await replica.probe_now.wait()
                    await asyncio.sleep(self._interval / 10)  # it was lost this moment
                except TimeoutError:
                    pass
        finally:
            if opening is not None:
                opening.cancel()

    def _open_shared(self, replica: Replica) -> asyncio.Task[None] | None:
        """Connections for the streams of all clients, if the replica supports them."""
        state = replica.state
        if self._key is None or not replica.is_up or state is None or not state.resumes:
            return None
        return asyncio.create_task(replica.shared.open(state.http_workers, self._key))

    async def _probe(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                status, body = await self._get(replica, STATE_PATH.encode())
                if status in (401, 404):
                    status, body = await self._get(replica, HEALTH_PATH)
                    was_emptied = replica.found(None, healthy=status == 200)
                elif status == 200:
                    was_emptied = replica.found(_decoder.decode(body), healthy=True)
                else:  # it is starting, or its workers are being replaced
                    was_emptied = replica.found(replica.state, healthy=False)
        except TimeoutError:
            replica.hung(f"no answer to a probe within {self._timeout:g} s")
        except (ReplicaLost, msgspec.DecodeError) as error:
            replica.lost(str(error))
        else:
            self._warn(replica)
            self._on_state(replica, was_emptied)

    async def _get(self, replica: Replica, path: bytes) -> tuple[int, bytes]:
        """On a connection of its own: a probe should find whether new ones can be made."""
        headers: Headers = [(b"host", replica.url.host.encode()), (b"connection", b"close")]
        if self._key is not None:
            headers.append((KEY_HEADER.encode(), self._key.encode()))
        status, _, body = await replica.pool.exchange(request_head("GET", path, headers, 0), b"")
        return status, body

    def _warn(self, replica: Replica) -> None:
        if not replica.is_up or replica.url in self._warned or (replica.state is not None and replica.state.resumes):
            return
        self._warned.add(replica.url)
        cause = "this balancer has no --route-key" if self._key is None else "it has another --route-key or none"
        logger.warning(
            "Streams of this replica end with an error if it is lost: %s",
            cause,
            extra={"fields": {"replica": str(replica.url)}},
        )
