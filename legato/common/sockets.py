"""Unix socket paths (free, stale or in use), who is at the other end, whether it is still there, and the addresses and
free ports of servers."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from legato.common.errors import EndpointInUse, OptionError

# Size of sun_path in sockaddr_un, without the terminating null byte.
MAX_SOCKET_PATH = 107

LOOPBACK = "127.0.0.1"

# The kernel gives outgoing connections their ports from this range, whose usual lower end is 32768.
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _HIGHEST_PORT = 16384, 29000
_PORT_TRIES = 100


def reachable_address(address: str) -> str:
    """The loopback address if the server listens on all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def browser_url(address: str, port: int, *, tls: bool = False) -> str:
    host, scheme = reachable_address(address), "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def free_port(address: str = LOOPBACK, count: int = 1) -> int:
    """The first of `count` ports in a row on which nobody listens at `address`.

    Whoever is to listen on them does so later: that is why they are none that the kernel could give to an outgoing
    connection meanwhile, and random ones, so that two callers at a time hardly get the same. OSError if there are none.
    """
    end = min(_HIGHEST_PORT, _first_outgoing_port()) - count
    for _ in range(_PORT_TRIES if end > _LOWEST_PORT else 0):
        if _are_free(address, first := _LOWEST_PORT + secrets.randbelow(end - _LOWEST_PORT), count):
            return first
    # There are no others, or they are all in use.
    for _ in range(_PORT_TRIES):
        with _tcp_socket(address) as probe:
            probe.bind((address, 0))
            first = int(probe.getsockname()[1])
        if _are_free(address, first, count):
            return first
    raise OSError(f"there are no {count} free ports in a row at {address}")


def _first_outgoing_port() -> int:
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: the range that is registered for that
        return 49152


def _are_free(address: str, first: int, count: int) -> bool:
    if first + count > 65536:
        return False
    with ExitStack() as probes:
        try:
            for port in range(first, first + count):
                probes.enter_context(_tcp_socket(address)).bind((address, port))
        except OSError:
            return False
    return True


def _tcp_socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)


def watch_peer(connection: socket.socket, silence: float) -> None:
    """Has the kernel end a connection whose other machine has given no sign of life for `silence` seconds. It asks for
    one while nothing is sent, which also keeps firewalls from forgetting the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, int(silence / 5))
    options = {"TCP_KEEPIDLE": interval, "TCP_KEEPINTVL": interval, "TCP_USER_TIMEOUT": int(silence * 1000)}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def claim_socket(path: str, flag: str) -> None:
    """Make sure that a server can listen on `path`, the value of `flag`. Removes a stale socket."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OptionError(f"{flag}: {path!r} is too long for a socket: the limit is {MAX_SOCKET_PATH} bytes")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionError(f"{flag}: cannot create {path}: {folder} is not a writable folder")
    try:
        mode = os.lstat(path).st_mode  # a link would lead us to a file that somebody else chose
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OptionError(f"{flag}: {path} exists and is not a socket")
    if is_answered(path):
        raise in_use(path, flag)
    remove_socket(path, flag)


def remove_socket(path: str, flag: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except PermissionError:
        raise EndpointInUse(f"{path} belongs to another user: choose another path with {flag}") from None


def in_use(path: str, flag: str) -> EndpointInUse:
    return EndpointInUse(f"{path} is in use by a running server: stop it or choose another path with {flag}")


def is_answered(path: str) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # Full backlog or no permission: a server is listening.
            pass
    return True


def is_own_socket(path: str) -> bool:
    """Whether a socket of this user is there."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def check_peer(path: str, flag: str) -> None:
    """EndpointInUse unless the socket at `path`, and whatever this process is connected to there, is of this user.
    FileNotFoundError if it is gone.

    In a folder where everybody may create files, another user may have been there first. Root can read our memory
    anyway.
    """
    trusted = {os.geteuid(), 0}
    try:
        uids = {os.lstat(path).st_uid}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EndpointInUse(f"{path} cannot be checked: {error.strerror}") from None
    uids.update(_connected_uids(os.path.abspath(path)))
    if strangers := uids - trusted:
        raise EndpointInUse(
            f"{path} is served by another user (uid {min(strangers)}): stop that server or choose another path with"
            f" {flag}, in a folder that only you can write to"
        )


def _connected_uids(path: str) -> Iterator[int]:
    """The users behind this process's connections to `path`: those who made the sockets at the other end listen."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    credentials = struct.Struct("3i")  # process, user, group
    for name in list(Path("/proc/self/fd").iterdir()):
        try:
            if not os.readlink(name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name.name))) as connection:
                if connection.family == socket.AF_UNIX and connection.getpeername() == path:
                    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
                    yield credentials.unpack(found)[1]
        except OSError:  # closed since, or not connected
            continue
