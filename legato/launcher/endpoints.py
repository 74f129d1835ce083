"""Ports and sockets: free before anything starts, answering once it runs, gone at the end."""

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
from legato.common.sockets import claim_socket, in_use, remove_socket

FLAG = "--shard-uds-path"


def check_port(address: str, port: int) -> None:
    """Refuse a port that the router could not listen on, before minutes go into loading a model."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run that linger in TIME_WAIT are no obstacle; a listening process still is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointInUse(
                    f"port {port} belongs to another process: stop it or choose another with --port"
                ) from None
            flag = "--port" if error.errno == errno.EACCES else "--hostname"
            raise OptionError(f"{flag}: cannot listen on {address} port {port}: {error.strerror}") from None


@contextmanager
def claim_sockets(path: str, count: int) -> Iterator[list[str]]:
    """The socket paths of `count` shards, ours until the end. What a dead server left behind is removed."""
    sockets = [f"{path}-{rank}" for rank in range(count)]
    lock = _lock(path)
    try:
        for name in sockets:
            claim_socket(name, FLAG)
        try:
            yield sockets
        finally:
            for name in sockets:
                remove_socket(name, FLAG)
    finally:
        remove_socket(f"{path}.lock", FLAG)
        os.close(lock)


def _lock(path: str) -> int:
    """A lock that dies with us. It tells two launchers apart while neither has a socket yet."""
    name = f"{path}.lock"
    try:
        lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(name).st_ino == os.fstat(lock).st_ino:
                return lock
        except OSError:
            # Held by another launcher, or removed by one that was just ending.
            pass
        os.close(lock)
    except PermissionError:
        raise EndpointInUse(f"{name} belongs to another user: choose another place with {FLAG}") from None
    except OSError as error:
        raise OptionError(f"{FLAG}: cannot create {name}: {error.strerror}") from None
    raise in_use(path, FLAG)


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


async def is_healthy(address: str, port: int, timeout: float = 5.0) -> bool:
    """Whether the router answers GET /health with 200."""
    # "Any address" is where it listens; it is reached through the loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
