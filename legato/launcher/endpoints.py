"""Ports and sockets: checked before anything starts, polled until they answer, removed at the end."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from legato.common.errors import EndpointInUse, OptionError
from legato.common.sockets import claim_socket, in_use, reachable_address, remove_socket

FLAG = "--shard-uds-path"


def check_port(address: str, port: int) -> None:
    """Refuse a port that the router cannot listen on before the model is loaded, which may take minutes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections in TIME_WAIT from an earlier run do not matter; a listening process does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointInUse(
                    f"port {port} is in use by another process: stop it or choose another port with --port"
                ) from None
            flag = "--port" if error.errno == errno.EACCES else "--hostname"
            raise OptionError(f"{flag}: cannot listen on {address} port {port}: {error.strerror}") from None


@contextmanager
def claim_sockets(path: str, count: int) -> Iterator[list[str]]:
    """The socket paths of `count` shards, reserved until the end. Stale sockets are removed."""
    sockets = [f"{path}-{rank}" for rank in range(count)]
    lock = _lock(path)
    try:
        for name in sockets:
            claim_socket(name, FLAG)
        try:
            yield sockets
        finally:
            remove_sockets(sockets)
    finally:
        remove_socket(f"{path}.lock", FLAG)
        os.close(lock)


def remove_sockets(sockets: list[str]) -> None:
    for name in sockets:
        remove_socket(name, FLAG)


def _lock(path: str) -> int:
    """A lock that the kernel releases when we exit. It excludes a second launcher before any socket exists."""
    name = f"{path}.lock"
    try:
        lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(name).st_ino == os.fstat(lock).st_ino:
                return lock
        except OSError:
            # Held by another launcher, or removed by one that is exiting.
            pass
        os.close(lock)
    except PermissionError:
        raise EndpointInUse(f"{name} belongs to another user: choose another path with {FLAG}") from None
    except OSError as error:
        raise OptionError(f"{FLAG}: cannot create {name}: {error.strerror}") from None
    raise in_use(path, FLAG)


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


async def is_healthy(address: str, port: int, timeout: float = 5.0) -> bool:
    """Whether the router answers GET /health with 200."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(reachable_address(address), port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
