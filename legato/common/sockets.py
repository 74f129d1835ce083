"""Unix sockets: a path is free, was left behind by a server that is gone, or belongs to one that runs."""

from __future__ import annotations

import os
import socket
import stat

from legato.common.errors import EndpointInUse, OptionError

# Room for the path in sockaddr_un, without the closing zero.
LONGEST_SOCKET_PATH = 107


def claim_socket(path: str, flag: str) -> None:
    """See to it that a server can listen on `path`, which came from `flag`. A socket that nobody answers on goes."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise OptionError(f"{flag}: {path!r} is too long for a socket, {LONGEST_SOCKET_PATH} bytes at most")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionError(f"{flag}: cannot create {path}: {folder} is no folder that this user may write to")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OptionError(f"{flag}: {path} exists and is not a socket")
    if _is_answered(path):
        raise in_use(path, flag)
    remove_socket(path, flag)


def remove_socket(path: str, flag: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except PermissionError:
        raise EndpointInUse(f"{path} belongs to another user: choose another place with {flag}") from None


def in_use(path: str, flag: str) -> EndpointInUse:
    return EndpointInUse(f"{path} belongs to a running server: stop it or choose another place with {flag}")


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            # Full backlog or no permission: somebody is there.
            pass
    return True
