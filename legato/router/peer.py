"""Identifies the process at the other end of a unix socket, to kill it if it hangs.

Its number comes from the kernel, not from the process, and is turned into a handle at once, so that no other process
that gets the same number later is hit.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
CONNECT_SECONDS = 1.0


class PeerProcess:
    """The process that listens on `path`. On systems other than Linux it is unknown, and `kill` does nothing."""

    def __init__(self, path: str) -> None:
        self.pid = _listener(path)
        self._handle: int | None = None
        if self.pid is not None and self.pid != os.getpid():
            try:
                self._handle = os.pidfd_open(self.pid)
            except OSError as error:  # it has ended, or runs in another container
                logger.debug("Cannot identify the process that listens on %s: %s", path, error.strerror)

    def kill(self) -> None:
        if self._handle is not None:
            try:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            except ProcessLookupError:
                return
            except PermissionError:
                logger.error("Process %s, which serves a shard, belongs to another user: it is not killed", self.pid)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _listener(path: str) -> int | None:
    if not hasattr(socket, "SO_PEERCRED") or not hasattr(os, "pidfd_open"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid or None
