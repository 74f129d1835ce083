"""Both ends of a connection between machines: accepting with authentication, and connecting."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from legato.cluster.frames import (
    BrokenLink,
    FrameKind,
    LinkRefused,
    prove_to_caller,
    prove_to_listener,
    receive_message,
    send_message,
)
from legato.cluster.secret import ForeignProtocol, WrongKey
from legato.cluster.tls import LinkTls, UntrustedPeer
from legato.common.errors import EndpointInUse, LegatoError, OptionError
from legato.common.sockets import watch_peer
from legato.common.throttled_log import ThrottledLog

logger = logging.getLogger(__name__)

# Connections that have not proven that they know the key; one more and the oldest of them is closed.
MAX_STRANGERS = 64
# Seconds for that proof.
PROOF_SECONDS = 5.0
# Seconds in which a connection to another machine must be there, and between two attempts.
CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.2
# After this many seconds in which the other machine acknowledges nothing, the kernel closes a link.
SILENCE_SECONDS = 10.0

# Gets the connection, the kind of its first message and the message. The connection is its own from then on.
Handle = Callable[[socket.socket, FrameKind, dict[str, Any]], Awaitable[None]]


class GuardedListener:
    """Listens on one address, and hands over connections whose other end knows the key."""

    def __init__(self, address: str, port: int, key: bytes, handle: Handle, tls: LinkTls | None = None) -> None:
        """EndpointInUse, OptionError."""
        self._key = key
        self._tls = tls
        self._handle = handle
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._known: set[asyncio.Task[None]] = set()
        self._log = ThrottledLog(logger)
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setblocking(False)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise EndpointInUse(f"--master-port: another process listens on {address} port {port}") from None
            raise OptionError(f"cannot listen on {address} port {port} (--master-addr, --node-addr): {error}") from None
        self._socket.listen(256)

    @property
    def port(self) -> int:
        number: int = self._socket.getsockname()[1]
        return number

    async def serve(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._socket)
                except OSError as error:  # no descriptors left: those of strangers are free in a moment
                    self._log.warning("A connection to the cluster's port could not be accepted")
                    await asyncio.sleep(0.1 if error.errno in (errno.EMFILE, errno.ENFILE) else 0)
                    continue
                if len(self._strangers) >= MAX_STRANGERS:
                    next(iter(self._strangers)).cancel()
                    await asyncio.sleep(0)
                task = asyncio.ensure_future(self._admit(connection))
                self._strangers[task] = None
                task.add_done_callback(lambda done: self._strangers.pop(done, None))
        finally:
            for task in list(self._strangers):
                task.cancel()
            self._socket.close()

    async def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                if self._tls is not None:
                    tune(connection)
                    connection = await self._tls.wrap(connection, is_listener=True)
                await prove_to_caller(connection, self._key)
        except UntrustedPeer as error:
            self._log.warning(f"A connection to the cluster's port was refused: {error}")
            connection.close()
        except (WrongKey, ForeignProtocol):
            self._log.warning("A connection to the cluster's port was refused: wrong cluster key")
            connection.close()
        except (BrokenLink, OSError, TimeoutError):
            hint = "" if self._tls is None else "; --cluster-certfile must be given on all machines or on none"
            self._log.warning(f"A connection to the cluster's port ended before it was authenticated{hint}")
            connection.close()
        except asyncio.CancelledError:
            self._log.warning("Too many unauthenticated connections to the cluster's port")
            connection.close()
        else:
            await self._welcome(connection)

    async def _welcome(self, connection: socket.socket) -> None:
        """Of somebody who knows the key."""
        if (task := asyncio.current_task()) is not None:
            self._strangers.pop(task, None)
            self._known.add(task)
            task.add_done_callback(self._known.discard)
        try:
            if self._tls is None:
                tune(connection)
            async with asyncio.timeout(PROOF_SECONDS):
                kind, fields = await receive_message(connection)
            await self._handle(connection, kind, fields)
        except (BrokenLink, OSError, TimeoutError) as error:
            logger.debug("A connection between machines ended: %s", describe(error))
            connection.close()


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """Where to connect to, and what both ends need for it."""

    address: str
    port: int
    key: bytes
    source: str | None = None  # address of this machine to connect from
    tls: LinkTls | None = None


async def connect(target: LinkTarget) -> socket.socket:
    """A connection whose ends have proven that they know the key. OSError, TimeoutError, BrokenLink while the other end
    is not there; WrongKey, ForeignProtocol and UntrustedPeer if it is and will not do."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)
    family, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        if target.source is not None:
            connection.bind((target.source, 0))
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.sock_connect(connection, place)
        tune(connection)
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                if target.tls is not None:
                    connection = await target.tls.wrap(connection, is_listener=False)
                await prove_to_listener(connection, target.key)
        except TimeoutError:
            hint = "" if target.tls is not None else "; perhaps it expects TLS (--cluster-certfile)"
            raise TimeoutError(f"the other end sent nothing for {PROOF_SECONDS:g} s{hint}") from None
        return connection
    except BaseException:
        connection.close()
        raise


async def call(target: LinkTarget, fields: dict[str, Any]) -> socket.socket:
    """Connect to a shard and say who we are. LinkRefused if it never wants the link, BrokenLink if not now."""
    connection = await connect(target)
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            await send_message(connection, FrameKind.HELLO, **fields)
            kind, answer = await receive_message(connection)
        if kind != FrameKind.WELCOME:
            reason = str(answer.get("reason", "refused"))
            raise BrokenLink(reason) if answer.get("again") else LinkRefused(reason)
        return connection
    except BaseException:
        connection.close()
        raise


async def call_until_there(target: LinkTarget, fields: dict[str, Any]) -> socket.socket:
    """The same, for as long as it takes the other end to be there. WrongKey, ForeignProtocol, LinkRefused."""
    while True:
        with suppress(OSError, TimeoutError, BrokenLink):
            return await call(target, fields)
        await asyncio.sleep(RETRY_SECONDS)


def tune(connection: socket.socket) -> None:
    """Small messages go at once, and a machine that is gone is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_peer(connection, SILENCE_SECONDS)


def describe(error: BaseException) -> str:
    if isinstance(error, LegatoError):
        return str(error)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
