"""A shard's side of the cluster: it listens on its machine's address, has links to its peers, and lets the router's
calls through to its own unix socket.

    HELLO of a peer's shard    same group, version, options and model → a `TensorLink`
    HELLO of a relay           same group → bytes from and to the shard's gRPC socket, or a connection that shows by its
                               end that the shard has ended

All of it runs on one thread with an event loop of its own: the shard's engine never waits for a stranger.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from legato.cluster.connecting import GuardedListener, LinkTarget, call_until_there
from legato.cluster.frames import FrameKind, LinkRefused, send_message
from legato.cluster.identity import difference
from legato.cluster.layout import RankLayout, link_port
from legato.cluster.links import TensorLink
from legato.cluster.tls import LinkTls
from legato.cluster.tunnels import pipe, wait_until_closed

LINK, TUNNEL, WATCH = "link", "tunnel", "watch"


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard is among all."""

    layout: RankLayout
    rank: int
    addresses: Sequence[str]  # of the machines
    master_port: int
    group: str  # another one with every start of the shards
    key: bytes
    tls: LinkTls | None = None

    @property
    def address(self) -> str:
        return self.addresses[self.layout.node(self.rank)]

    def endpoint(self, rank: int) -> tuple[str, int]:
        return self.addresses[self.layout.node(rank)], link_port(self.master_port, rank)


class ShardNetwork:
    def __init__(self, place: ShardPlace, identity: dict[str, str], socket_path: str) -> None:
        """Listens at once. EndpointInUse, OptionError."""
        self._place = place
        self._identity = identity
        self._socket_path = socket_path
        self._accepted: dict[int, Future[socket.socket]] = {
            rank: Future() for rank in place.layout.peers(place.rank) if rank > place.rank
        }
        self._loop = asyncio.new_event_loop()
        _, port = place.endpoint(place.rank)
        self._listener = GuardedListener(place.address, port, place.key, self._receive, place.tls)
        self._served = asyncio.run_coroutine_threadsafe(self._listener.serve(), self._loop)
        threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True).start()

    def link(self, on_lost: Callable[[str], None]) -> dict[int, TensorLink]:
        """Links to all peers, once they are there. `on_lost` as that of `TensorLink`. LinkRefused, WrongKey."""
        place, found = self._place, {}
        for rank in place.layout.peers(place.rank):
            if rank < place.rank:
                hello = {"purpose": LINK, "group": place.group, "rank": place.rank, "identity": self._identity}
                target = LinkTarget(*place.endpoint(rank), place.key, place.address, place.tls)
                calling = call_until_there(target, hello)
                connection = asyncio.run_coroutine_threadsafe(calling, self._loop).result()
            else:
                connection = self._accepted[rank].result()
            found[rank] = TensorLink(connection, rank, on_lost)
        return found

    def close(self) -> None:
        self._served.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _receive(self, connection: socket.socket, kind: FrameKind, fields: dict[str, Any]) -> None:
        if kind != FrameKind.HELLO or fields.get("group") != self._place.group:
            await _refuse(connection, "this shard belongs to another group", again=True)
        elif fields.get("purpose") == LINK:
            await self._link(connection, fields)
        elif fields.get("purpose") == WATCH:
            await send_message(connection, FrameKind.WELCOME)
            await wait_until_closed(connection)
            connection.close()
        else:
            await self._tunnel(connection)

    async def _link(self, connection: socket.socket, fields: dict[str, Any]) -> None:
        expected = self._accepted.get(rank) if isinstance(rank := fields.get("rank"), int) else None
        if expected is None or expected.done():
            await _refuse(connection, f"rank {self._place.rank} expects no link from rank {fields.get('rank')}")
            return
        if (reason := difference(self._identity, fields.get("identity"))) is not None:
            reason = f"rank {self._place.rank} refuses rank {rank}: {reason}"
            await _refuse(connection, reason)
            expected.set_exception(LinkRefused(reason))
            return
        await send_message(connection, FrameKind.WELCOME)
        expected.set_result(connection)

    async def _tunnel(self, connection: socket.socket) -> None:
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(inner, self._socket_path)
        except OSError:
            inner.close()
            await _refuse(connection, "the shard does not serve yet", again=True)
            return
        await send_message(connection, FrameKind.WELCOME)
        await pipe(connection, inner)


async def _refuse(connection: socket.socket, reason: str, *, again: bool = False) -> None:
    """`again`: a later attempt may succeed."""
    await send_message(connection, FrameKind.REFUSED, reason=reason, again=again)
    connection.close()
