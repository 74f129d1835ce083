"""The launchers of several machines: the others join machine 0, and all start their shards together.

    other machine ──JOIN: rank, version, options, address──► first machine, once all are there
                  ◄──START: name of the group, addresses────
                  ◄──────────────BEAT, every second─────────►

A link lives as long as one start of the shards. When a shard ends on either side, the link is closed with the reason;
so is one that is silent. Then the other machines kill their shards and join again, and the first one starts the next
group when all have. No shard of an old group can serve in a new one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from legato import __version__
from legato.cluster.connecting import RETRY_SECONDS, SILENCE_SECONDS, GuardedListener, LinkTarget, connect, describe
from legato.cluster.frames import BrokenLink, FrameKind, LinkRefused, receive_message, send_message
from legato.cluster.identity import comparable_words, difference
from legato.cluster.layout import RankLayout
from legato.cluster.secret import ForeignProtocol, WrongKey
from legato.cluster.tls import LinkTls
from legato.common.errors import LegatoError, OptionError
from legato.common.heartbeat import BEAT_SECONDS
from legato.common.options import LauncherOptions
from legato.common.throttled_log import ThrottledLog

logger = logging.getLogger(__name__)

WAITING_LOG_INTERVAL = 10.0
STOPPED = "the first machine stops the server"


class NodeRefused(OptionError):
    """The first machine does not want this one."""


class ServerStopped(LegatoError):
    """The first machine ended the server before it started a group."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """One start of the shards on all machines."""

    group: str
    addresses: tuple[str, ...]


def about(options: LauncherOptions, layout: RankLayout) -> dict[str, str]:
    """What all machines must be started with."""
    words = comparable_words(options)
    sizes = f"--nnodes={layout.num_nodes} --num-shard={layout.num_local}"
    return {"version": __version__, "options": f"{sizes} {' '.join(words)}".strip()}


def alone() -> Assembly:
    """Of a server on one machine."""
    return Assembly(secrets.token_hex(8), ("127.0.0.1",))


class NodeLink:
    """A connection between the first machine's launcher and another one's. `ended` gets the reason."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.ended: asyncio.Future[str] = loop.create_future()
        self.started: asyncio.Future[Assembly] = loop.create_future()
        self._connection = connection
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._beat())]

    async def send(self, kind: FrameKind, **fields: Any) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SILENCE_SECONDS):
                await send_message(self._connection, kind, **fields)

    async def close(self, reason: str, kind: FrameKind = FrameKind.GONE) -> None:
        """Tell the other end why."""
        if not self.ended.done():
            self._tasks[1].cancel()
            await self.send(kind, reason=reason)
        self._end(reason)

    async def _read(self) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    kind, fields = await receive_message(self._connection)
                if kind == FrameKind.START and not self.started.done():
                    self.started.set_result(Assembly(str(fields["group"]), tuple(map(str, fields["addresses"]))))
                elif kind in (FrameKind.GONE, FrameKind.STOP, FrameKind.REFUSED):
                    return self._end(str(fields.get("reason")), kind)
        except TimeoutError:
            self._end(f"no sign of life for {SILENCE_SECONDS:g} s")
        except (BrokenLink, OSError, KeyError, TypeError) as error:
            self._end(describe(error))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self.send(FrameKind.BEAT)

    def _end(self, reason: str, kind: FrameKind = FrameKind.GONE) -> None:
        if self.ended.done():
            return
        self.ended.set_result(STOPPED if kind == FrameKind.STOP else reason)
        if not self.started.done():
            errors = {FrameKind.REFUSED: NodeRefused, FrameKind.STOP: ServerStopped}
            self.started.set_exception(errors.get(kind, BrokenLink)(reason))
            self.started.exception()  # need not be asked for
        for task in self._tasks:
            task.cancel()
        self._connection.close()


class NodeHub:
    """On the first machine. Links that have not been started wait in `_joined`."""

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        num_nodes: int,
        about: dict[str, str],
        tls: LinkTls | None = None,
    ) -> None:
        """`about` must be the same on all machines. EndpointInUse, OptionError."""
        self.on_lost: Callable[[str], None] = lambda _: None
        # Why the group that was started last has to end, if a machine of it was lost.
        self.loss: str | None = None
        self._address = address
        self._about = about
        self._num_nodes = num_nodes
        self._joined: dict[int, NodeLink] = {}
        self._started: dict[int, NodeLink] = {}
        self._changed = asyncio.Event()
        self._log = ThrottledLog(logger)
        self._listener = GuardedListener(address, port, key, self._receive, tls)
        self._serving = asyncio.ensure_future(self._listener.serve())

    async def assemble(self) -> Assembly:
        """Wait until all machines are there, and have them start their shards. What ran before has ended."""
        await self._close_started("the shards are started again")
        told_at = 0.0
        while missing := [rank for rank in range(1, self._num_nodes) if rank not in self._joined]:
            now = asyncio.get_running_loop().time()
            if now - told_at > WAITING_LOG_INTERVAL:
                told_at = now
                logger.info("Waiting for machines", extra={"fields": {"missing": ",".join(map(str, missing))}})
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), WAITING_LOG_INTERVAL)
        addresses = [self._address, *(self._joined[rank].address for rank in range(1, self._num_nodes))]
        assembly = Assembly(secrets.token_hex(8), tuple(addresses))
        self._started, self._joined, self.loss = self._joined, {}, None
        for link in self._started.values():
            await link.send(FrameKind.START, group=assembly.group, addresses=addresses)
        logger.info("All machines have joined", extra={"fields": {"machines": ",".join(addresses)}})
        return assembly

    async def stop(self) -> None:
        self._serving.cancel()
        links = [*self._joined.values(), *self._started.values()]
        self._joined, self._started = {}, {}
        await asyncio.gather(*(link.close(STOPPED, FrameKind.STOP) for link in links))

    async def _close_started(self, reason: str) -> None:
        links, self._started = list(self._started.values()), {}
        await asyncio.gather(*(link.close(reason) for link in links))

    async def _receive(self, connection: socket.socket, kind: FrameKind, fields: dict[str, Any]) -> None:
        rank = fields.get("rank")
        reason = difference(self._about, fields.get("about"))
        if kind != FrameKind.JOIN or not isinstance(rank, int) or not 0 < rank < self._num_nodes:
            reason = f"there is no machine {rank} among {self._num_nodes}"
        if reason is not None:
            logger.error("Machine %s is refused: %s", rank, reason)
            await send_message(connection, FrameKind.REFUSED, reason=reason)
            connection.close()
            return
        assert isinstance(rank, int)
        address = str(fields.get("address"))
        for links in (self._joined, self._started):
            if (old := links.get(rank)) is None:
                continue
            if old.address != address:  # if the old one is gone, its link ends soon, and this one asks again
                reason = f"machine {rank} is {old.address} already (--node-rank)"
                self._log.warning(f"{address} has to wait: {reason}")
                await send_message(connection, FrameKind.GONE, reason=reason)
                connection.close()
                return
            # it was started again before we noticed that it had ended
            await old.close("this machine has joined again")
        link = self._joined[rank] = NodeLink(connection, address)
        link.ended.add_done_callback(lambda ended: self._lose(rank, link, ended.result()))
        logger.info("Machine %d has joined", rank, extra={"fields": {"address": link.address}})
        self._changed.set()

    def _lose(self, rank: int, link: NodeLink, reason: str) -> None:
        if self._joined.get(rank) is link:
            del self._joined[rank]
        if self._started.get(rank) is link:
            del self._started[rank]
            self.loss = f"lost machine {rank} at {link.address}: {reason}"
            self.on_lost(self.loss)


async def join(target: LinkTarget, rank: int, about: dict[str, str]) -> tuple[NodeLink, Assembly]:
    """To the first machine, for as long as it takes, and until it starts a group. NodeRefused, ServerStopped."""
    told_at, place = -WAITING_LOG_INTERVAL, f"{target.address}:{target.port}"
    while True:
        problem = ""
        try:
            connection = await connect(target)
            own = target.source or str(connection.getsockname()[0])
            await send_message(connection, FrameKind.JOIN, rank=rank, about=about, address=own)
            link = NodeLink(connection, own)
            logger.info("Joined machine 0", extra={"fields": {"address": target.address, "own": own}})
            return link, await link.started
        except (WrongKey, ForeignProtocol, LinkRefused) as error:
            raise NodeRefused(f"machine 0 at {place}: {error}") from None
        except (OSError, TimeoutError, BrokenLink) as error:
            problem = describe(error)
        now = asyncio.get_running_loop().time()
        if now - told_at > WAITING_LOG_INTERVAL:
            told_at = now
            logger.info("Waiting for machine 0", extra={"fields": {"address": place, "problem": problem}})
        await asyncio.sleep(RETRY_SECONDS)


async def resolve_own(host: str, port: int) -> str:
    """The address of this machine that `--master-addr` names, once the name is known: Kubernetes takes a moment."""
    loop = asyncio.get_running_loop()
    for _ in range(100):
        with suppress(OSError):
            found: Sequence[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
        await asyncio.sleep(RETRY_SECONDS)
    raise OptionError(f"--master-addr: {host} has no address")
