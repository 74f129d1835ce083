"""Ports and sockets: checked before anything starts, polled until they respond, removed at the end."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from legato.common.errors import EndpointInUse, OptionError
from legato.common.sockets import MAX_SOCKET_PATH, claim_socket, in_use, reachable_address, remove_socket

FLAG = "--shard-uds-path"
PRIVATE_NAME = "shard"
# In the names of files by which shards find each other (`server/rendezvous.py`).
STORE = "store"
# Bytes of the folder of all launchers, which has one for each, and the sockets in that.
MAX_PARENT = MAX_SOCKET_PATH - len("/01234567/shard-999")
# What a lock file has once it was locked: nobody takes it for that of a launcher that was killed before.
LOCKED = b"locked\n"


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
def socket_path(given: str | None) -> Iterator[str]:
    """The prefix of the socket paths: as given, or in a new folder that only this user can enter."""
    if given is not None:
        yield given
        return
    try:
        folder = _new_folder()
    except OSError as error:
        raise OptionError(
            f"cannot create a folder for the sockets of the shards: {error.strerror or error}; set TMPDIR to a folder"
            f" that this user can write to, or choose a path with {FLAG}"
        ) from None
    try:
        yield str(folder / PRIVATE_NAME)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path:
    """In the folder of all launchers of this user. If somebody else was there first, with a random name beside it."""
    runtime, temporary = os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()
    for parent in (*([Path(runtime, "legato")] if runtime else []), Path(temporary, f"legato-{os.geteuid()}")):
        if _is_private(parent):
            _sweep(parent)
            folder = parent / secrets.token_hex(4)
            folder.mkdir(mode=0o700)
            return folder
    return Path(tempfile.mkdtemp(prefix="legato-"))


def _is_private(wanted: Path) -> bool:
    """Whether the folder is there now, and only this user can enter and write to it."""
    if len(os.fsencode(wanted)) > MAX_PARENT:
        return False
    try:
        wanted.mkdir(mode=0o700, exist_ok=True)
        found = wanted.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return is_own and os.access(wanted, os.W_OK)
    except OSError:
        return False


def _sweep(parent: Path) -> None:
    """Remove what launchers that were killed have left behind."""
    for folder in parent.iterdir():
        lock = folder / f"{PRIVATE_NAME}.lock"
        try:
            descriptor = _open_lock(str(lock), create=False)
        except OSError:  # another launcher is starting: it has no lock yet
            continue
        try:
            if os.fstat(descriptor).st_size == 0:  # another launcher is about to lock it
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it runs
            pass
        finally:
            os.close(descriptor)


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
    """And the files by which the shards of a pipeline stage found each other."""
    for name in sockets:
        remove_socket(name, FLAG)
    if sockets:
        prefix = sockets[0].rpartition("-")[0]
        for name in glob.glob(f"{glob.escape(prefix)}.{STORE}.*"):
            remove_socket(name, FLAG)


def _lock(path: str) -> int:
    """A lock that the kernel releases when we exit. It excludes a second launcher before any socket exists."""
    name = f"{path}.lock"
    try:
        lock = _open_lock(name, create=True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, LOCKED)
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


def _open_lock(name: str, *, create: bool) -> int:
    """Never through a link: it may name a file that this user must not touch, and another user made it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(name, flags | os.O_CREAT if create else flags, 0o600)


async def is_healthy(address: str, port: int, timeout: float = 5.0, *, tls: bool = False) -> bool:
    """Whether the router answers GET /health with 200. It is ours, so that its certificate may name any host."""
    context = ssl._create_unverified_context() if tls else None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(reachable_address(address), port, ssl=context)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
